"""Shared parts of the weight-sync backends: the result, a second try, and the eviction of servers.

The backends are `file`, `lora_adapter` and `nccl`.
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
    """Failure of a weight sync on every server; the message has the servers, their answers and the fix.

    ```python
    from tracegrad.weight_sync import SyncError


    async def send(sync, model, version):
        try:
            await sync.push(model.state_dict(), version)
        except SyncError as error:  # no server has the new weights
            print(error.code, error)
    ```
    """


@dataclass(frozen=True)
class Eviction:
    """A server that gets no more requests, and why.

    >>> print(Eviction("http://10.0.0.5:8000", "it did not answer"))
    http://10.0.0.5:8000 is evicted for the rest of the run: it did not answer
    """

    url: str
    why: str

    def __str__(self) -> str:
        return f"{self.url} is evicted for the rest of the run: {self.why}"


@dataclass(frozen=True)
class SyncResult:
    """Result of a weight sync.

    `seconds` is the longest pause of a server, `write_s` the time before. Servers in `updated` have the new weights.
    Servers in `evicted` get no more requests. Servers in `unreachable` did not answer; when they do, they get the
    weights before any other request.

    >>> evicted = (Eviction("http://10.0.0.5:8000", "it did not answer"),)
    >>> result = SyncResult(3, seconds=0.8, write_s=0.2, updated=("http://10.0.0.4:8000",), evicted=evicted)
    >>> result.version, result.updated
    (3, ('http://10.0.0.4:8000',))
    >>> result.lines()
    ['http://10.0.0.5:8000 is evicted for the rest of the run: it did not answer']
    """

    version: int
    seconds: float
    write_s: float
    updated: tuple[str, ...]
    evicted: tuple[Eviction, ...] = ()
    unreachable: tuple[str, ...] = ()
    repeated: int = 0

    def lines(self) -> list[str]:
        """Return one line for the user per server that did not load the weights; empty if all did."""
        waiting = [
            f"{url} was not reachable during the sync of version {self.version}; it is used again once it answers"
            for url in self.unreachable
        ]
        return [*map(str, self.evicted), *waiting]


class Sync(Protocol):
    """Weight-sync backend.

    ```python
    from tracegrad.rollout.client import Servers
    from tracegrad.weight_sync import File, Sync


    def backend(servers: Servers) -> Sync:
        return File(servers, "/dev/shm/weights")


    async def send(sync: Sync, model, version):
        result = await sync.push(model.state_dict(), version)
        print(result.updated)
    ```
    """

    async def push(self, weights: Mapping[str, Any] | str | Path, version: int) -> SyncResult:
        """Send the weights to every server; raises SyncError if none loaded them."""
        ...


class RequestRefused(Exception):
    """Request of a weight sync that a server did not execute. `gone` is true if the server did not answer."""

    def __init__(self, path: str, answer: Answer):
        super().__init__(f"{path.split('?')[0]} {answer.words}")
        self.gone = answer.status == 0 and not answer.silent


async def send_control_request(
    servers: Servers, url: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
) -> None:
    """Send one control request to one server; raises Refused unless it succeeds."""
    answer = await servers.request(url, path, body, timeout_s=timeout_s)
    if not answer.ok:
        raise RequestRefused(path, answer)


def check_version(version: int) -> int:
    """Return a valid version; raises ArgumentError for any other value."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ArgumentError(
            f"TG-SYNC-018: version is {version!r}. It must be an integer from 0, the number of updates of the trainer."
        )
    return version


class SyncRunner:
    """Syncs one version at a time to all servers with `steps(url, repeat)`, at most twice each.

    A server must pass `admit` after an outage, since it may have older or initial weights.
    """

    def __init__(self, servers: Servers, steps: Callable[[str, bool], Awaitable[float]], timeout_s: float):
        self.servers, self.steps, self.timeout_s = servers, steps, timeout_s
        self._busy: dict[str, asyncio.Lock] = {}

    async def push(self, version: int, write_s: float) -> SyncResult:
        """Sync to all servers at once and return the result."""
        urls = list(self.servers.urls)
        results = await asyncio.gather(*map(self._push_to, urls))
        evicted, away = [], []
        for url, result in zip(urls, results, strict=True):
            if isinstance(result[1], RequestRefused) and result[1].gone:
                away.append(url)
                self.servers.suspend(url, f"not reachable during the sync of version {version}: {result[1]}")
            elif isinstance(result[1], RequestRefused):
                evicted.append(Eviction(url, f"version {version} did not reach it in two tries: {result[1]}"))
                self.servers.evict(url, evicted[-1].why)
        ok = tuple(url for url, result in zip(urls, results, strict=True) if result[1] is None)
        if not ok and not await self.servers.usable(self.timeout_s):
            reasons = "; ".join(
                [*(f"{server.url}: {server.why}" for server in evicted), *(f"{url}: gone" for url in away)]
            )
            raise SyncError(
                f"TG-SYNC-019: version {version} reached no server: {reasons or 'none is available'}. Their weights "
                "are unknown. Read their logs, restart them and resume the run."
            )
        seconds = max((result[0] for result in results if result[1] is None), default=0.0)
        repeated = sum(result[2] for result in results)
        return SyncResult(version, seconds, write_s, ok, tuple(evicted), tuple(away), repeated)

    async def _push_to(self, url: str) -> tuple[float, RequestRefused | None, bool]:
        """Return the seconds that a server was paused, the final error or None, and whether it was sent twice."""
        async with self._busy.setdefault(url, asyncio.Lock()):
            try:
                return await self.steps(url, False), None, False
            except RequestRefused:
                await asyncio.sleep(0.05)
            try:
                return await self.steps(url, True), None, True
            except RequestRefused as error:
                return 0.0, error, True

    async def admit(self, url: str) -> bool:
        """Send the newest version to a server after an outage; return whether it was loaded."""
        return (await self._push_to(url))[1] is None
