"""Awaiting within a time limit, and threads for plain functions.

What is past its limit is left behind, as neither a thread nor a coroutine that swallows its cancellation can be ended.
"""

import asyncio
import contextlib
import contextvars
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tracegrad.aside.failure import Failed, Failure, is_own, located, place

HUNG_THREADS = 256


async def within(seconds: float | None, work: Any, what: str) -> Any:
    """Awaits `work`, at most so long; work that swallows its cancellation is left behind.

    Raises:
        Failed: "late" past the limit, "raised" for what it raises.
    """
    task = asyncio.ensure_future(_without_exit(work))
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_forget)
        with contextlib.suppress(asyncio.CancelledError):  # what it holds open is closed first
            await asyncio.wait({task}, timeout=1.0)
        raise
    if not task.done():
        where = _standing(task)
        task.cancel()
        task.add_done_callback(_forget)
        await asyncio.wait({task}, timeout=1.0)
        raise Failed(Failure("late", f"{what} took longer than {seconds:g} s", where))
    if task.cancelled():
        raise Failed(Failure("raised", f"{what} cancelled itself"))
    error = task.exception()
    if error is not None:
        raise Failed(located(error)) from error
    return task.result()


async def _without_exit(work: Any) -> Any:
    """What `work` gives; asyncio would end the loop for an exit that a task raises."""
    try:
        return await work
    except SystemExit as error:
        raise Failed(located(error)) from error


def _standing(task: asyncio.Future[Any]) -> str:
    """The innermost line of the caller's own code at which a task waits."""
    waits: Any = task.get_coro() if isinstance(task, asyncio.Task) else None
    found = ""
    while waits is not None:
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None)
        if frame is not None and (not found or is_own(frame.f_code.co_filename)):
            found = place(frame)
        waits = getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None)
    return found


def _forget(task: asyncio.Future[Any]) -> None:
    """Asks for the exception of a task that nobody awaits any more, so that none is printed."""
    if not task.cancelled():
        task.exception()


class Thread:
    """One thread that runs functions one after another, started when it is first used.

    An object made in it is only used in it, as databases and browsers ask. A function past its time limit cannot be
    ended: the thread is left to it, and the next function gets another.
    """

    _hung = 0

    def __init__(self) -> None:
        self._ask: Any = None
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[..., Any], *args: Any, seconds: float | None, what: str) -> Any:
        """The value of `function(*args)`, with the context variables of the caller.

        Raises:
            Failed: it raised, or took longer than `seconds`.
        """
        if self._ask is None:
            if Thread._hung >= HUNG_THREADS:
                raise Failed(Failure("late", f"{what}: {HUNG_THREADS} threads hang in functions past their time limit"))
            self._ask = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._ask,), daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        run = contextvars.copy_context().run
        self._ask.put((run, function, args, lambda *result: _answer(loop, done, *result)))
        try:
            return await within(seconds, done, what)
        except Failed as failed:
            if failed.failure.kind != "late":
                raise
            where = self._standing()
            self._leave()
            raise Failed(replace(failed.failure, where=where)) from None
        except asyncio.CancelledError:
            self._leave()
            raise

    def close(self) -> None:
        """Lets the thread end once it has nothing to do."""
        if self._ask is not None:
            self._ask.put(None)
            self._ask = None

    def _standing(self) -> str:
        """The innermost line of the caller's own code at which the thread is."""
        frame = sys._current_frames().get((self._thread and self._thread.ident) or 0)
        while frame is not None and not is_own(frame.f_code.co_filename):
            frame = frame.f_back
        return "" if frame is None else place(frame)

    def _leave(self) -> None:
        Thread._hung += 1
        if self._ask is not None:
            self._ask.put((lambda run: run(), _came_back, (), lambda *_: None))
        self.close()


def _came_back() -> None:
    Thread._hung -= 1


def _serve(ask: Any) -> None:
    while (job := ask.get()) is not None:
        run, function, args, answer = job
        try:
            answer(run(function, *args), None)
        except BaseException as error:
            answer(None, error)


def _answer(
    loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], value: Any, error: BaseException | None
) -> None:
    def settle() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        elif isinstance(error, StopIteration):
            done.set_exception(Failed(located(error)))
        else:
            done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop may be gone
        loop.call_soon_threadsafe(settle)
