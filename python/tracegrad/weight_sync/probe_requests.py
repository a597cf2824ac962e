"""Send probe requests to every server right after a weight sync, so that the trainer can compare the answers.

A probe is a request of the run itself, at the path that the run uses. `online` draws the conclusions.
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
"""Sampled tokens requested from every server."""
AT_ONCE, MOST_AT_ONCE = 16, 64
"""Concurrent requests to one server: in the first round if the length of answers is unknown, and the maximum of any
round."""
ROUNDS = 8
"""Maximum number of rounds for a server with short answers."""
_ALWAYS = {
    CHAT: {"logprobs": True, "top_logprobs": 0, "return_token_ids": True},
    COMPLETIONS: {"logprobs": 0, "return_token_ids": True},
    GENERATE: {},
}


@dataclass(frozen=True)
class Probe:
    """One request, without the model name.

    Args:
        path: path at the server: `CHAT`, `COMPLETIONS` or `GENERATE`.
        body: request body.
        temperature: sampling temperature of the request.
    """

    path: str
    body: Mapping[str, Any]
    temperature: float = 1.0


@dataclass(frozen=True)
class ProbeAnswer:
    """Answer of a server to the probe with this number: prompt ids, [n] sampled ids and their logprobs in nats.

    `id` is the server's id of the answer; None if it has none.
    """

    url: str
    number: int
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    id: str | None = None


async def send_probes(
    servers: Servers,
    probes: Sequence[Probe],
    *,
    tokens: int | None = None,
    length: float | None = None,
    repeat_first: bool = True,
    salt: str | None = None,
    timeout_s: float = 60.0,
    wait_s: float = 600.0,
) -> list[ProbeAnswer]:
    """Send probes to every server until each has sampled enough tokens.

    Servers that are gone are not probed; they get the weights when they are back.

    Args:
        servers: the servers.
        probes: requests, sent in turn.
        tokens: sampled tokens per server, default `TOKENS`; fewer if `ROUNDS` rounds sample fewer.
        length: expected sampled tokens per answer, if known: the first round requests a tenth more than needed.
        repeat_first: send the first request again at the end: a server samples a new answer, a cache repeats the old.
        salt: sent as `cache_salt`; with a new one, no keys and values are cached.
        timeout_s: time limit of one request, in seconds.
        wait_s: seconds to wait for a server if none is reachable.

    Raises:
        SyncError: for a server with an invalid answer, or if none is back in time.
    """
    if not probes:
        raise ArgumentError(
            "TG-SYNC-013: probes is empty, so the servers' weights cannot be checked. Pass at least one probe."
        )
    deadline = time.monotonic() + wait_s
    while True:
        target = TOKENS if tokens is None else tokens
        first = min(MOST_AT_ONCE, math.ceil(1.1 * target / length)) if length else AT_ONCE
        pending = (_rounds(servers, url, probes, target, first, repeat_first, salt, timeout_s) for url in servers.ready)
        answers_by_server = await asyncio.gather(*pending)
        answers = [answer for server_answers in answers_by_server for answer in server_answers]
        if answers:
            return answers
        if not await servers.usable(deadline - time.monotonic()):
            raise SyncError(
                f"TG-SYNC-014: no server answered within {wait_s:g} s after a weight sync: {', '.join(servers.urls)}. "
                "Their weights cannot be checked. Restart them and resume the run."
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
) -> list[ProbeAnswer]:
    """Return the answers of one server; nothing if it is gone."""
    results: list[ProbeAnswer] = []
    count = first
    for _ in range(ROUNDS):
        numbers = [number % len(probes) for number in range(len(results), len(results) + count)]
        answers = await asyncio.gather(
            *(send_probe(servers, url, probes[number], number, salt, timeout_s) for number in numbers)
        )
        if None in answers:
            return []
        results += [answer for answer in answers if answer is not None]
        sampled = sum(len(answer.ids) for answer in results)
        if sampled >= tokens:
            break
        count = min(MOST_AT_ONCE, math.ceil((tokens - sampled) * len(results) / max(sampled, 1)))
    if not again:
        return results
    last = await send_probe(servers, url, probes[0], 0, salt, timeout_s)
    return [] if last is None else [*results, last]


async def send_probe(
    servers: Servers, url: str, probe: Probe, number: int = 0, salt: str | None = None, timeout_s: float = 60.0
) -> ProbeAnswer | None:
    """Send one probe to one server; None if it is gone, and it is then no longer used.

    Raises:
        SyncError: for an answer that cannot be compared.
    """
    body: dict[str, Any] = {**probe.body, **_ALWAYS[probe.path], "model": servers.model}
    if salt is not None:
        body["cache_salt"] = salt
    answer = await servers.request(url, probe.path, body, timeout_s=timeout_s)
    if answer.status == 0 and not answer.silent:
        servers.suspend(url, f"no answer to a probe after a weight sync: {answer.words}")
        return None
    if not answer.ok:
        raise SyncError(
            f"TG-SYNC-015: {url}{probe.path} did not answer a probe after a weight sync: {answer.words}. Its weights "
            "cannot be checked. Read its log."
        )
    try:
        choice = answer.body["choices"][0]
        ids, logprobs = list(choice["token_ids"]), _logprobs(choice["logprobs"])
        prompt = body.get("token_ids") or choice.get("prompt_token_ids") or answer.body["prompt_token_ids"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SyncError(
            f"TG-SYNC-016: {url}{probe.path} answered without token ids or logprobs ({type(error).__name__}: {error}). "
            "Its weights cannot be checked. Use vLLM 0.10.2 or newer."
        ) from error
    if len(ids) != len(logprobs) or not prompt or not all(map(math.isfinite, logprobs)):
        raise SyncError(
            f"TG-SYNC-017: {url}{probe.path} answered with {len(ids)} ids and {len(logprobs)} logprobs after "
            f"{len(prompt)} prompt ids. Its weights cannot be checked. Read its log."
        )
    name = answer.body.get("id")
    return ProbeAnswer(url, number, list(prompt), ids, logprobs, name if isinstance(name, str) else None)


def find_repeated_id(answers: Sequence[ProbeAnswer]) -> ProbeAnswer | None:
    """Return an answer whose id another answer has too, None if there is none: servers use each id once.

    >>> one, two = (ProbeAnswer("http://a", 0, [1], [2], [-0.5], name) for name in ("chat-1", "chat-2"))
    >>> find_repeated_id([one, two]), find_repeated_id([one, two, one]) is one
    (None, True)
    """
    counts = Counter((answer.url, answer.id) for answer in answers if answer.id is not None)
    return next((answer for answer in answers if answer.id is not None and counts[answer.url, answer.id] > 1), None)


def _logprobs(listed: Mapping[str, Any]) -> list[float]:
    """Return the logprobs in the format of completions, or of chat completions and /generate."""
    if "token_logprobs" in listed:
        return [float(entry) for entry in listed["token_logprobs"]]
    return [float(entry["logprob"]) for entry in listed["content"]]
