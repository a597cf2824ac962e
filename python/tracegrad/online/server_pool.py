"""Ask the servers of a run from a thread with its own event loop, beside the trainer: `Link`.

Weights are pushed and checks are asked through it, and rollouts of this process run in its event loop.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent import futures
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from tracegrad.errors import ArgumentError, ServerError, TracegradError
from tracegrad.rollout.progress import Progress

T = TypeVar("T")
PATIENCE_S = 10
"""Seconds without an answer, and without a server that could give it, after which that is said."""


class Interrupted(Exception):
    """What was asked of the servers was given up, as a signal came."""


class Link:
    """A thread that holds the pool of servers open; a context manager.

    `version` is that of the weights that every server has, `coming` the one that a push is bringing, or the same.

    Args:
        servers: makes the pool; an async context manager.
        sync: makes what pushes weights to it.
        version: of the policy that the servers are given first.
        told: called when `version` or `coming` has changed, with what came of a push or None.
        ended: why the servers cannot come back, where that is known, as for one that was started here; else None.
        say: takes a line where nothing can be asked and an answer is waited for, and from who plays here.
    """

    def __init__(
        self,
        servers: Callable[[], Any],
        sync: Callable[[Any], Any] = lambda servers: None,
        version: int = 0,
        told: "Callable[[Link, Any], None]" = lambda link, pushed: None,
        ended: Callable[[], str | None] = lambda: None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.version = self.coming = version
        self.told = told
        self.servers: Any = None
        self.sync: Any = None
        self.news = threading.Event()
        """Set by who plays here when a group has finished or tasks have ended, and when the thread ends."""
        self.stack = AsyncExitStack()
        self.error: BaseException | None = None
        self.interrupted: Callable[[], bool] = lambda: False
        """Whether a signal has come: no server that is gone is waited for then."""
        self.asked_s = self.gone_s = 0.0
        """Seconds in which the trainer waited for answers; of these in which no server could be asked."""
        self._make_servers, self._make_sync = servers, sync
        self._ended, self.say = ended, say
        self._loop = asyncio.new_event_loop()
        self._open = threading.Event()
        self._stopping, self._wanted = asyncio.Event(), asyncio.Event()
        self._work: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._thread = threading.Thread(target=self._run, name="tracegrad-servers", daemon=True)

    def __enter__(self) -> "Link":
        """Returns when the servers can be asked; raises what opening them raised."""
        self._thread.start()
        self._open.wait()
        self.check()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends: what is under way is let go."""
        self.soon(self._stopping.set)
        self._thread.join(30)

    def check(self) -> None:
        """Raises what ended the thread, or that the servers have ended for good."""
        if self.error is not None:
            raise self.error
        if (why := self._ended()) is not None:
            raise ServerError(why)

    def wait(self, seconds: float) -> None:
        """Returns once there has been news since the last call, at the latest after so long."""
        self.news.wait(seconds)
        self.news.clear()

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Has the loop work until the link ends; what that raises ends the link, and `check` raises it."""
        self._work = work
        self.soon(self._wanted.set)

    def run(
        self,
        work: Callable[[Any, Any], Coroutine[Any, Any, T]],
        progress: Callable[[float], str] | None = None,
    ) -> T:
        """Runs `work(servers, sync)` in the loop, and waits for what it gives.

        Args:
            progress: gives a line by the seconds, which is said now and then. What has one is given up at a signal,
                anything else only while no server can be asked.

        Raises:
            Interrupted: if it was given up.
        """
        coroutine = work(self.servers, self.sync)
        if not self._thread.is_alive():
            coroutine.close()
            self.check()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        began = last = time.monotonic()
        lines, said = Progress(self.say), False
        try:
            while not futures.wait([future], timeout=1.0).done:
                gone, now = self._gone(), time.monotonic()
                self.gone_s += now - last if gone else 0.0
                last = now
                if self.interrupted() and (gone or progress is not None):
                    raise Interrupted
                if gone and not said and now - began >= PATIENCE_S:
                    said = True
                    self.say(f"server   none can be asked, and one that comes back is waited for: {gone}")
                if progress is not None:
                    lines.tick(progress)
                self.check()
                if not self._thread.is_alive():
                    raise TracegradError("what plays has ended. The servers cannot be asked. Start the run again.")
        except BaseException:
            future.cancel()
            raise
        finally:
            self.asked_s += time.monotonic() - began
        return future.result()

    def _gone(self) -> str:
        """Why none of the servers can be asked; "" where one can."""
        rows = self.servers.state()
        if not all(row["out"] or row["evicted"] for row in rows):
            return ""
        return "; ".join(f"{row['url']}: {row['out'] or row['evicted']}" for row in rows)

    def push(self, weights: Any, version: int) -> Any:
        """Brings weights to all servers; calls under way are sampled by two versions."""

        async def pushed(_: Any, sync: Any) -> Any:
            self.coming = version
            self.told(self, None)
            try:
                found = await sync.push(weights, version)
            finally:
                self.version = version
            self.told(self, found)
            return found

        return self.run(pushed)

    def soon(self, what: Callable[[], object]) -> None:
        """Has the loop do something; where it has ended, `check` says why."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:
            self.error = error
        finally:
            self._open.set()
            self.news.set()
            with suppress(Exception):
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _main(self) -> None:
        async with self.stack:
            self.servers = await self.stack.enter_async_context(self._make_servers())
            if not self.servers.model:
                self.servers.model = await model_of(self.servers)
            self.sync = self._make_sync(self.servers)
            self._open.set()
            stop = asyncio.create_task(self._stopping.wait())
            try:
                await _first(stop, asyncio.create_task(self._wanted.wait()))
                if self._work is not None and not stop.done():
                    await _first(stop, asyncio.create_task(self._work()))
            finally:
                stop.cancel()


async def _first(stop: asyncio.Task[Any], other: asyncio.Task[Any]) -> None:
    """Waits for either, and until both have ended where it is `other` that raises or `stop` that came."""
    await asyncio.wait({stop, other}, return_when=asyncio.FIRST_COMPLETED)
    if other.done():
        other.result()
        return
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def model_of(servers: Any) -> str:
    """The name by which the servers know the policy: that of the first model that each of them lists."""
    answers = await servers.each("/v1/models", method="GET")
    names = [_listed(url, answer) for url, answer in zip(servers.urls, answers, strict=True)]
    if len(set(names)) > 1:
        raise ArgumentError(
            f"the servers list {', '.join(map(repr, names))} first. They would be asked for one name. Start all with "
            "the same --served-model-name."
        )
    return names[0]


def _listed(url: str, answer: Any) -> str:
    try:
        return str(answer.body["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ArgumentError(
            f"{url} lists no model under /v1/models ({answer.words}). What to ask it for is not known. Look at its "
            "log, and whether the URL is right."
        ) from error
