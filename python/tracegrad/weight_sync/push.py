"""What every way of pushing has in common: its result, its servers, a second try, and who is left out.

The ways themselves are `file`, `lora_adapter` and `nccl`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tracegrad.errors import ArgumentError, TracegradError

if TYPE_CHECKING:
    from tracegrad.rollout.client import Answer, Servers


class SyncError(TracegradError):
    """New weights reached no server: which servers, what they said, and what to do."""


@dataclass(frozen=True)
class Evicted:
    """A server that is not asked again, and why."""

    url: str
    why: str

    def __str__(self) -> str:
        return f"{self.url} is left out for the rest of the run: {self.why}"


@dataclass(frozen=True)
class Pushed:
    """What came of a push.

    `seconds` is the longest that a server was paused, `write_s` what came before. `ok` has the new weights; `evicted`
    is never asked again; `away` was gone, and gets them when it is back, before it is asked anything else.
    """

    version: int
    seconds: float
    write_s: float
    ok: tuple[str, ...]
    evicted: tuple[Evicted, ...] = ()
    away: tuple[str, ...] = ()
    repeated: int = 0

    def lines(self) -> list[str]:
        """What a user must be told: one line for each server that did not take the weights, none where all did."""
        waiting = [
            f"{url} was gone when version {self.version} was pushed; it is asked again once back" for url in self.away
        ]
        return [*map(str, self.evicted), *waiting]


class Sync(Protocol):
    """A way to bring weights to the servers."""

    async def push(self, weights: Mapping[str, Any] | str | Path, version: int) -> Pushed:
        """Bring the weights to every server; raises SyncError where none took them."""
        ...


class Refused(Exception):
    """One request of a push that a server did not do. `gone` is true where nothing answered at all."""

    def __init__(self, path: str, answer: Answer):
        super().__init__(f"{path.split('?')[0]} {answer.words}")
        self.gone = answer.status == 0 and not answer.silent


async def do(servers: Servers, url: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> None:
    """Ask one server to do something; raises Refused unless it said that it did."""
    answer = await servers.ask(url, path, body, timeout_s=timeout_s)
    if not answer.ok:
        raise Refused(path, answer)


def checked_version(version: int) -> int:
    """A version that may be pushed; raises ArgumentError for any other."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ArgumentError(f"version is {version!r}. Versions count the trainer's updates. Give an integer from 0.")
    return version


class Pusher:
    """Brings one version at a time to all servers, each by `steps(url, repeat)`, twice at most.

    A server that comes back after it was gone passes through `admit` first: it may hold older weights, or the first.
    """

    def __init__(self, servers: Servers, steps: Callable[[str, bool], Awaitable[float]], timeout_s: float):
        self.servers, self.steps, self.timeout_s = servers, steps, timeout_s
        self._busy: dict[str, asyncio.Lock] = {}

    async def push(self, version: int, write_s: float) -> Pushed:
        """Push to all servers at once; what became of each."""
        urls = list(self.servers.urls)
        done = await asyncio.gather(*map(self._one, urls))
        evicted, away = [], []
        for url, found in zip(urls, done, strict=True):
            if isinstance(found[1], Refused) and found[1].gone:
                away.append(url)
                self.servers.leave_out(url, f"gone when version {version} was pushed: {found[1]}")
            elif isinstance(found[1], Refused):
                evicted.append(Evicted(url, f"version {version} did not reach it in two tries: {found[1]}"))
                self.servers.evict(url, evicted[-1].why)
        ok = tuple(url for url, found in zip(urls, done, strict=True) if found[1] is None)
        if not ok and not await self.servers.usable(self.timeout_s):
            told = "; ".join([*(f"{one.url}: {one.why}" for one in evicted), *(f"{url}: gone" for url in away)])
            raise SyncError(
                f"Version {version} reached no server: {told or 'none was left'}. They cannot be asked with weights "
                "that are unknown. Look at their logs, start them again, and the run from its folder."
            )
        seconds = max((found[0] for found in done if found[1] is None), default=0.0)
        repeated = sum(found[2] for found in done)
        return Pushed(version, seconds, write_s, ok, tuple(evicted), tuple(away), repeated)

    async def _one(self, url: str) -> tuple[float, Refused | None, bool]:
        """Seconds that it was paused, what went wrong in the end if anything did, and whether it was sent twice."""
        async with self._busy.setdefault(url, asyncio.Lock()):
            try:
                return await self.steps(url, False), None, False
            except Refused:
                await asyncio.sleep(0.05)
            try:
                return await self.steps(url, True), None, True
            except Refused as refused:
                return 0.0, refused, True

    async def admit(self, url: str) -> bool:
        """Bring the newest version to a server that is back; whether it took it."""
        return (await self._one(url))[1] is None
