"""Processes for plain functions, each call within a time limit; one that is late is killed, and where it stood is told.

Arguments and values are pickled; the functions are not, as processes are forked.
"""

import asyncio
import contextlib
import faulthandler
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tracegrad.aside.failure import Failed, Failure, cut, is_own, located, one_line
from tracegrad.aside.thread import Thread
from tracegrad.errors import ArgumentError

STAND = signal.SIGUSR1
"""Asks a process where it stands."""
STAND_S = 1.0
"""In which it answers."""
CUDA_AFTER_FORK = ("Cannot re-initialize CUDA in forked subprocess", "CUDA error: initialization error")
"""Texts of torch's errors in a forked process: on its first use of CUDA, and on a tensor of the parent process."""


class Processes:
    """Processes that run named functions, each call within a time limit; one that is late is killed.

    They are forked when they are first needed, so that functions may be closures; arguments and values are pickled.

    Args:
        functions: by name.
        count: at most so many at once.
        bytes_held: a value of more pickled bytes is refused.

    Use as an asynchronous context manager, or call `close`.
    """

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], *, count: int = 2, bytes_held: int = 64 << 20
    ) -> None:
        if count < 1:
            raise ArgumentError(f"count is {count}. No process would run anything. Pass 1 or more.")
        self._functions = dict(functions)
        self._bytes = bytes_held
        self._free = asyncio.Semaphore(count)
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    async def __aenter__(self) -> "Processes":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seconds: float) -> Any:
        """The value of a function.

        Raises:
            Failed: it raised, took longer than `seconds`, ended its process, or its arguments or value cannot be sent.
        """
        async with self._free:
            process = self._idle.pop() if self._idle else _Process(self._functions, self._bytes)
            self._busy.add(process)
            spent = True
            try:
                outcome = await process.call(name, args, dict(kwargs), seconds)
                spent = False
            finally:
                self._busy.discard(process)
                if spent or self._closed or process.ended:
                    process.kill()
                else:
                    self._idle.append(process)
        value, failure = outcome
        if failure is not None:
            raise Failed(failure)
        return value

    def close(self) -> None:
        """Ends all processes."""
        self._closed = True
        for process in (*self._idle, *self._busy):
            process.kill()
        self._idle.clear()


class _Process:
    """One process and the pipe to it."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], bytes_held: int) -> None:
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._trace = tempfile.NamedTemporaryFile("w+", prefix="tracegrad-", suffix=".trace")  # noqa: SIM115
        self._bytes = bytes_held
        self.ended = False
        self._process = context.Process(target=_work, args=(theirs, functions, self._trace.name), daemon=True)
        self._process.start()
        theirs.close()

    async def call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float
    ) -> tuple[Any, Failure | None]:
        try:
            asked = pickle.dumps((name, args, kwargs, seconds))
        except Exception as error:
            return None, Failure("wrong", f"{name}: arguments that cannot be sent to a process: {one_line(error)}")
        thread = Thread()
        try:
            return await thread.call(self._ask, name, bytes(asked), seconds, seconds=None, what=name)
        finally:
            thread.close()

    def _ask(self, name: str, asked: bytes, seconds: float) -> tuple[Any, Failure | None]:
        try:
            self._pipe.send_bytes(asked)
            if not self._pipe.poll(seconds):
                self._end_where_it_stands()
                self.kill(keep=True)
                return None, Failure("late", f"{name} took longer than {seconds:g} s", *self._stood())
            return pickle.loads(self._pipe.recv_bytes(self._bytes))
        except EOFError:
            self.kill(keep=True)
            return None, Failure("died", f"{name} ended its process (exit status {self._process.exitcode})")
        except OSError as error:
            self.kill(keep=True)
            return None, Failure("died", f"{name}: nothing could be read from its process: {one_line(error)}")
        except Exception as error:
            return None, Failure("wrong", f"{name}: a value that cannot be read back: {one_line(error)}")

    def _end_where_it_stands(self) -> None:
        """Ends the process by the signal at which it writes where it stands, and what its function has started."""
        process = self._process.pid or 0
        with contextlib.suppress(OSError):
            os.kill(process, STAND)
            wait([self._process.sentinel], STAND_S)
            os.killpg(process, signal.SIGKILL)

    def _stood(self) -> tuple[str, str]:
        """Where the function stood at its time limit: the innermost line of its own code, and all lines."""
        try:
            text = Path(self._trace.name).read_text(errors="replace")
        except OSError:
            return "", ""
        lines = [line.strip() for line in text.splitlines() if line.startswith('  File "')]
        own = [line for line in lines if is_own(line[6:])] or lines
        return (own[0].replace('File "', "").replace('", line ', ":") if own else ""), cut(text)

    def kill(self, keep: bool = False) -> None:
        """Ends the process; `keep` leaves its trace to be read."""
        self.ended = True
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.kill()
        self._process.join(5)
        self._pipe.close()
        if not keep:
            self._trace.close()


def _work(pipe: Connection, functions: Mapping[str, Callable[..., Any]], trace: str) -> None:
    """What a process does: calls, until the pipe ends or the process that asked is gone."""
    os.setsid()  # so that what a function starts ends with it
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(STAND, signal.SIG_DFL)
    asks = os.getppid()
    with open(trace, "w") as file:
        # Written in the handler itself, whatever holds the interpreter; then the signal does what it does by default.
        faulthandler.register(STAND, file=file, chain=True)
        while True:
            while not pipe.poll(5.0):
                if os.getppid() != asks:
                    os._exit(0)
            try:
                name, args, kwargs, seconds = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            signal.setitimer(signal.ITIMER_REAL, seconds + 5.0)  # where nobody is left to kill it
            try:
                answer = (functions[name](*args, **kwargs), None)
            except BaseException as error:
                answer = (None, _failure(name, error))
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            try:
                sent = pickle.dumps(answer)
            except Exception as error:
                sent = pickle.dumps((None, Failure("wrong", f"{name}: a value that cannot be sent: {one_line(error)}")))
            pipe.send_bytes(sent)


def _failure(name: str, error: BaseException) -> Failure:
    """Return the failure of a function in a forked process, with the remedy in its words if the cause is CUDA."""
    failure = located(error)
    if not any(text in one_line(each) for each in _causes(error) for text in CUDA_AFTER_FORK):
        return failure
    words = (
        f"{name} uses CUDA, but it runs in a process forked from one that has initialized CUDA, where CUDA does not "
        f"work. Keep the models and tensors of {name} on the CPU, ask a server for what needs the GPU, or write {name} "
        f"as `async def`: asynchronous functions run in the main process. It raised {failure.words}"
    )
    return replace(failure, words=words)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those it was raised from or during."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        yield each
        seen.append(each)
        each = each.__cause__ or each.__context__
