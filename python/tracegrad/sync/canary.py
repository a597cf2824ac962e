"""A few tokens asked of every server right after a push, so that the trainer can compare them with its own.

What is asked: one prompt whose keys and values may be cached from before the push, and one that is new. What the
answers prove is `online`'s to say.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracegrad.errors import ArgumentError
from tracegrad.sync.push import SyncError

if TYPE_CHECKING:
    from tracegrad.rollout.server import Servers


@dataclass(frozen=True)
class Said:
    """What a server sampled after `prompt_ids`: ids and their logprobs; `cached` where the prompt was asked before."""

    url: str
    cached: bool
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]


def drawn(ids: Sequence[int], version: int, length: int = 192) -> list[int]:
    """A prompt that no server has seen: ids out of `ids`, others for each version.

    >>> drawn([5, 6, 7], 1, 4) == drawn([5, 6, 7], 1, 4), len(drawn([5, 6, 7], 2))
    (True, 192)
    """
    if not ids or length < 1:
        raise ArgumentError(f"A prompt of {length} ids out of {len(ids)} is none. Give ids of the vocabulary.")
    return random.Random(version).choices(list(ids), k=length)


async def ask(
    servers: Servers,
    cached: Sequence[int],
    new: Sequence[int],
    *,
    tokens: int = 8,
    sampling: Mapping[str, Any] | None = None,
    salt: str | None = None,
    timeout_s: float = 60.0,
    wait_s: float = 600.0,
) -> list[Said]:
    """Ask every server both prompts at once, but for those that are gone: they get the weights when they are back.

    Args:
        cached: the ids of a prompt that is the same at each push; longer than a block of the cache (16 on GPU, 128 on
            CPU), or nothing of it is cached.
        new: the ids of one that differs at each, see `drawn`.
        sampling: what the run's own requests say, such as {"temperature": 0.7}: a canary that says something else
            proves something else.
        salt: as the run's requests have it.
        wait_s: how long to wait for a server where none is there.

    Raises: SyncError for a server that does not answer as it should, or where none is back in time.
    """
    told = {**(sampling or {}), "model": servers.model, "max_tokens": tokens, "logprobs": 0, "return_token_ids": True}
    if salt is not None:
        told["cache_salt"] = salt
    prompts = [(True, list(cached)), (False, list(new))]
    deadline = time.monotonic() + wait_s
    while True:
        asked = [_one(servers, url, known, ids, told, timeout_s) for url in servers.ready for known, ids in prompts]
        answers = await asyncio.gather(*asked)
        gone = {one for one in answers if isinstance(one, str)}
        said = [one for one in answers if not isinstance(one, str) and one.url not in gone]
        if said:
            return said
        if not await servers.usable(deadline - time.monotonic()):
            raise SyncError(
                f"No server was there for the canary after a push, within {wait_s:g} s: {', '.join(servers.urls)}. "
                "Nobody knows what they serve. Start them again, and the run from its folder."
            )


async def _one(
    servers: Servers, url: str, known: bool, prompt: list[int], told: Mapping[str, Any], timeout_s: float
) -> Said | str:
    """What a server says, or the URL of one that is gone, which is left out."""
    answer = await servers.ask(url, "/v1/completions", {**told, "prompt": prompt}, timeout_s=timeout_s)
    if answer.status == 0 and not answer.silent:
        servers.leave_out(url, f"gone when the canary was asked: {answer.words}")
        return url
    if not answer.ok:
        raise SyncError(
            f"{url} did not answer the canary after a push: {answer.words}. Nobody knows what it serves. Look into its "
            "log."
        )
    try:
        choice = answer.body["choices"][0]
        ids, logprobs = list(choice["token_ids"]), [float(each) for each in choice["logprobs"]["token_logprobs"]]
        seen = choice.get("prompt_token_ids") or prompt
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SyncError(
            f"{url} answered the canary without token ids or logprobs ({type(error).__name__}: {error}). What it "
            "serves cannot be compared with the trainer. Serve with vLLM from 0.10.2 on, or turn the canary off."
        ) from error
    if seen != prompt or len(ids) != len(logprobs) or not ids or not all(map(math.isfinite, logprobs)):
        raise SyncError(
            f"{url} answered the canary with {len(ids)} ids and {len(logprobs)} logprobs after {len(seen)} ids of "
            f"{len(prompt)} that were sent. What it serves cannot be compared with the trainer. Look at its log."
        )
    return Said(url, known, prompt, ids, logprobs)
