"""Requests that are asked of every server right after a push, so that the trainer can compare the answers with its own.

A request is one that the run itself plays, at the path that it is played through. What the answers prove is `online`'s
to say.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracegrad.errors import ArgumentError
from tracegrad.weight_sync.push import SyncError

if TYPE_CHECKING:
    from tracegrad.rollout.client import Servers

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
TOKENS = 256
"""Sampled tokens that every server is asked for."""
AT_ONCE, MOST_AT_ONCE = 16, 64
"""Requests of the first round to one server, if it is not known how long answers are, and of any round."""
ROUNDS = 8
"""After which no more is asked of a server whose answers are short."""
_ALWAYS = {
    CHAT: {"logprobs": True, "top_logprobs": 0, "return_token_ids": True},
    COMPLETIONS: {"logprobs": 0, "return_token_ids": True},
    GENERATE: {},
}


@dataclass(frozen=True)
class Probe:
    """One request, without the model's name.

    Args:
        path: of the server: `CHAT`, `COMPLETIONS` or `GENERATE`.
        body: as it is sent.
        temperature: of the sampling that it asks for.
    """

    path: str
    body: Mapping[str, Any]
    temperature: float = 1.0


@dataclass(frozen=True)
class Said:
    """What a server sampled after `prompt_ids`: [n] ids and their logprobs, nats, for the request of that number.

    `id` is what the server calls its answer; None where it gives none.
    """

    url: str
    number: int
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    id: str | None = None


async def ask(
    servers: Servers,
    probes: Sequence[Probe],
    *,
    tokens: int | None = None,
    length: float | None = None,
    again: bool = True,
    salt: str | None = None,
    timeout_s: float = 60.0,
    wait_s: float = 600.0,
) -> list[Said]:
    """Ask every server for at least so many tokens; those that are gone get the weights when they are back.

    Args:
        probes: requests in turn.
        tokens: sampled tokens of each server, default `TOKENS`; fewer where `ROUNDS` rounds give fewer.
        length: sampled tokens of an answer, as far as known: the first round asks for a tenth more than that takes.
        again: in the end, send the first request once more: a server samples another answer, a cache gives the same.
        salt: sent as `cache_salt`: a new one finds no keys and values in a cache.
        wait_s: how long to wait for a server where none is there, s.

    Raises:
        SyncError: for a server that does not answer as it should, or where none is back in time.
    """
    if not probes:
        raise ArgumentError("There is no request to ask the servers. What they serve cannot be compared. Pass some.")
    deadline = time.monotonic() + wait_s
    while True:
        wanted = TOKENS if tokens is None else tokens
        first = min(MOST_AT_ONCE, math.ceil(1.1 * wanted / length)) if length else AT_ONCE
        each = (_rounds(servers, url, probes, wanted, first, again, salt, timeout_s) for url in servers.ready)
        asked = await asyncio.gather(*each)
        said = [one for answers in asked for one in answers]
        if said:
            return said
        if not await servers.usable(deadline - time.monotonic()):
            raise SyncError(
                f"No server was there to be asked after a push, within {wait_s:g} s: {', '.join(servers.urls)}. "
                "Nobody knows what they serve. Start them again, and the run from its folder."
            )


async def _rounds(
    servers: Servers,
    url: str,
    probes: Sequence[Probe],
    tokens: int,
    first: int,
    again: bool,
    salt: str | None,
    timeout_s: float,
) -> list[Said]:
    """What one server says; nothing where it is gone."""
    said: list[Said] = []
    count = first
    for _ in range(ROUNDS):
        numbers = [number % len(probes) for number in range(len(said), len(said) + count)]
        answers = await asyncio.gather(*(ask_one(servers, url, probes[n], n, salt, timeout_s) for n in numbers))
        if None in answers:
            return []
        said += [one for one in answers if one is not None]
        sampled = sum(len(one.ids) for one in said)
        if sampled >= tokens:
            break
        count = min(MOST_AT_ONCE, math.ceil((tokens - sampled) * len(said) / max(sampled, 1)))
    if not again:
        return said
    last = await ask_one(servers, url, probes[0], 0, salt, timeout_s)
    return [] if last is None else [*said, last]


async def ask_one(
    servers: Servers, url: str, probe: Probe, number: int = 0, salt: str | None = None, timeout_s: float = 60.0
) -> Said | None:
    """Ask one server one request; None for a server that is gone, which is left out.

    Raises:
        SyncError: for an answer that cannot be compared.
    """
    body: dict[str, Any] = {**probe.body, **_ALWAYS[probe.path], "model": servers.model}
    if salt is not None:
        body["cache_salt"] = salt
    answer = await servers.ask(url, probe.path, body, timeout_s=timeout_s)
    if answer.status == 0 and not answer.silent:
        servers.leave_out(url, f"gone when it was asked after a push: {answer.words}")
        return None
    if not answer.ok:
        raise SyncError(
            f"{url}{probe.path} did not answer a request of the run after a push: {answer.words}. Nobody knows what "
            "it serves. Look into its log."
        )
    try:
        choice = answer.body["choices"][0]
        ids, logprobs = list(choice["token_ids"]), _logprobs(choice["logprobs"])
        prompt = body.get("token_ids") or choice.get("prompt_token_ids") or answer.body["prompt_token_ids"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SyncError(
            f"{url}{probe.path} answered without token ids or logprobs ({type(error).__name__}: {error}). What it "
            "serves cannot be compared with the trainer. Serve with vLLM from 0.10.2 on."
        ) from error
    if len(ids) != len(logprobs) or not prompt or not all(map(math.isfinite, logprobs)):
        raise SyncError(
            f"{url}{probe.path} answered with {len(ids)} ids and {len(logprobs)} logprobs after {len(prompt)} ids of a "
            "prompt. What it serves cannot be compared with the trainer. Look at its log."
        )
    name = answer.body.get("id")
    return Said(url, number, list(prompt), ids, logprobs, name if isinstance(name, str) else None)


def repeated(said: Sequence[Said]) -> Said | None:
    """Return an answer whose id another one has too, None where there is none: a server gives each its own.

    >>> one, two = (Said("http://a", 0, [1], [2], [-0.5], name) for name in ("chat-1", "chat-2"))
    >>> repeated([one, two]), repeated([one, two, one]) is one
    (None, True)
    """
    counts = Counter((one.url, one.id) for one in said if one.id is not None)
    return next((one for one in said if one.id is not None and counts[one.url, one.id] > 1), None)


def _logprobs(told: Mapping[str, Any]) -> list[float]:
    """As completions, or as chat completions and /generate list them."""
    if "token_logprobs" in told:
        return [float(each) for each in told["token_logprobs"]]
    return [float(each["logprob"]) for each in told["content"]]
