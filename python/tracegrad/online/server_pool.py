"""Send requests to the servers of a run from a thread with its own event loop: `ServerPool`.

Weight syncs and checks go through it, and rollouts of this process run in its event loop.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent import futures
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from tracegrad.errors import ArgumentError, ServerError, TracegradError
from tracegrad.progress import ProgressPrinter

T = TypeVar("T")
WARN_AFTER_S = 10
"""Seconds without an answer and without a reachable server after which a line is printed."""


class Interrupted(Exception):
    """Cancellation of a request to the servers by a signal."""


class ServerPool:
    """Thread that keeps the pool of servers open; a context manager.

    `version` is the version of the weights that every server has. `next_version` is the version that a running weight
    sync sends; otherwise it equals `version`.

    Args:
        servers: creates the pool; an async context manager.
        sync: creates the weight-sync backend for the pool.
        version: policy version that the servers get first.
        on_change: called when `version` or `next_version` has changed, with the result of a weight sync or None.
        end_reason: returns why the servers have ended permanently, or None. Only a server started here has a reason.
        log: receives a line while no server is reachable and an answer is pending, and lines from rollouts here.
    """

    def __init__(
        self,
        servers: Callable[[], Any],
        sync: Callable[[Any], Any] = lambda servers: None,
        version: int = 0,
        on_change: "Callable[[ServerPool, Any], None]" = lambda server_pool, sync_result: None,
        end_reason: Callable[[], str | None] = lambda: None,
        log: Callable[[str], None] = print,
    ) -> None:
        self.version = self.next_version = version
        self.on_change = on_change
        self.servers: Any = None
        self.sync: Any = None
        self.news = threading.Event()
        """Set when a group has finished, when all tasks are used, and when the thread ends."""
        self.stack = AsyncExitStack()
        self.error: BaseException | None = None
        self.interrupted: Callable[[], bool] = lambda: False
        """Returns whether a signal was received; then the pool does not wait for unreachable servers."""
        self.wait_s = self.unreachable_s = 0.0
        """Seconds that the trainer waited for answers, and the part of them without a reachable server."""
        self._make_servers, self._make_sync = servers, sync
        self._ended, self.log = end_reason, log
        self._loop = asyncio.new_event_loop()
        self._open = threading.Event()
        self._stopping, self._work_set = asyncio.Event(), asyncio.Event()
        self._work: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._thread = threading.Thread(target=self._run, name="tracegrad-servers", daemon=True)

    def __enter__(self) -> "ServerPool":
        """Return once the servers accept requests; raise the error if opening them failed."""
        self._thread.start()
        self._open.wait()
        self.check()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread and cancel its work."""
        self.call_soon(self._stopping.set)
        self._thread.join(30)

    def check(self) -> None:
        """Raise the error that ended the thread, or an error if the servers have ended permanently."""
        if self.error is not None:
            raise self.error
        if (reason := self._ended()) is not None:
            raise ServerError(reason)

    def wait(self, seconds: float) -> None:
        """Wait for news since the last call, at most this many seconds."""
        self.news.wait(seconds)
        self.news.clear()

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine in the loop until the pool ends; if it raises, the pool ends and `check` raises the error."""
        self._work = work
        self.call_soon(self._work_set.set)

    def run(
        self,
        work: Callable[[Any, Any], Coroutine[Any, Any, T]],
        progress: Callable[[float], str] | None = None,
    ) -> T:
        """Run `work(servers, sync)` in the loop and return its result.

        Args:
            progress: returns a log line from the elapsed seconds; it is printed from time to time. Work with `progress`
                is cancelled by a signal; other work is cancelled only while no server is reachable.

        Raises:
            Interrupted: if the work was cancelled.
        """
        coroutine = work(self.servers, self.sync)
        if not self._thread.is_alive():
            coroutine.close()
            self.check()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        started_at = last_at = time.monotonic()
        lines, has_warned = ProgressPrinter(self.log), False
        try:
            while not futures.wait([future], timeout=1.0).done:
                unreachable, now = self._unreachable_reason(), time.monotonic()
                self.unreachable_s += now - last_at if unreachable else 0.0
                last_at = now
                if self.interrupted() and (unreachable or progress is not None):
                    raise Interrupted
                if unreachable and not has_warned and now - started_at >= WARN_AFTER_S:
                    has_warned = True
                    self.log(f"server   no server is reachable; waiting for one: {unreachable}")
                if progress is not None:
                    lines.tick(progress)
                self.check()
                if not self._thread.is_alive():
                    raise TracegradError(
                        "TG-ONLINE-030: the thread that sends requests to the servers has ended. Resume the run."
                    )
        except BaseException:
            future.cancel()
            raise
        finally:
            self.wait_s += time.monotonic() - started_at
        return future.result()

    def _unreachable_reason(self) -> str | None:
        """Return why none of the servers is reachable; None if one is."""
        rows = self.servers.state()
        if not all(row["out"] or row["evicted"] for row in rows):
            return None
        return "; ".join(f"{row['url']}: {row['out'] or row['evicted']}" for row in rows)

    def sync_weights(self, weights: Any, version: int) -> Any:
        """Sync weights to all servers; calls in flight are sampled by two versions."""

        async def push(_: Any, sync: Any) -> Any:
            self.next_version = version
            self.on_change(self, None)
            try:
                result = await sync.push(weights, version)
            finally:
                self.version = version
            self.on_change(self, result)
            return result

        return self.run(push)

    def call_soon(self, what: Callable[[], object]) -> None:
        """Schedule a function in the loop; if the loop has ended, `check` raises the cause."""
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
                await _race(stop, asyncio.create_task(self._work_set.wait()))
                if self._work is not None and not stop.done():
                    await _race(stop, asyncio.create_task(self._work()))
            finally:
                stop.cancel()


async def _race(stop: asyncio.Task[Any], other: asyncio.Task[Any]) -> None:
    """Wait until one task is done; raise the error of `other`, or cancel it if `stop` was done first."""
    await asyncio.wait({stop, other}, return_when=asyncio.FIRST_COMPLETED)
    if other.done():
        other.result()
        return
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def model_of(servers: Any) -> str:
    """Return the model name of the policy: the first model that each server lists.

    Raises:
        ArgumentError: if a server lists no model, or the servers list different ones.
    """
    answers = await servers.request_all("/v1/models", method="GET")
    names = [_first_model(url, answer) for url, answer in zip(servers.urls, answers, strict=True)]
    if len(set(names)) > 1:
        raise ArgumentError(
            f"TG-ONLINE-031: the first models of the servers are {', '.join(map(repr, names))}, but requests use one "
            "name. Start all servers with the same --served-model-name."
        )
    return names[0]


def _first_model(url: str, answer: Any) -> str:
    try:
        return str(answer.body["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ArgumentError(
            f"TG-ONLINE-032: {url} lists no model under /v1/models ({answer.words}). Check the URL and the server's "
            "log."
        ) from error
