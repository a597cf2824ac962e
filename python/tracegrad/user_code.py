"""Run functions that users and environments bring: import `file.py:NAME`, limit time, report what failed.

Coroutines are awaited within a time limit and plain functions run in threads; what is late is left behind, because
neither a thread nor a coroutine that swallows its cancellation can be stopped. Plain functions can also run in
processes, which are killed when they are late. A failure says which line of whose code raised it: frames of tracegrad,
Python and installed packages are not the user's.
"""

import asyncio
import contextlib
import contextvars
import faulthandler
import importlib.util
import os
import pickle
import queue
import signal
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal

from tracegrad.errors import ArgumentError, TracegradError, shown
from tracegrad.storage.files import refuse_special

HELD_CHARACTERS = 8192
_HERE = str(Path(__file__).parent) + os.sep
_OTHERS = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Failure:
    """What became of a function that gave no value.

    Args:
        kind: "raised"; "late", past its time limit; "died", its process ended; "wrong", a value of another kind.
        words: one line.
        where: file, line and function of the caller's own code, "" where that is not known.
        traceback: as Python prints it, at most 8192 characters, the end kept.
    """

    kind: Literal["raised", "late", "died", "wrong"]
    words: str
    where: str = ""
    traceback: str = ""

    def __str__(self) -> str:
        return shown(f"{self.words} ({self.where})" if self.where else self.words)

    def as_dict(self) -> dict[str, str]:
        """For a record."""
        return {"kind": self.kind, "words": self.words, "where": self.where, "traceback": self.traceback}


class Failed(TracegradError):
    """A function gave no value; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return Failed, (self.failure,)


def located(error: BaseException) -> Failure:
    """The failure that an exception is, with its last line in the caller's own code.

    >>> try:
    ...     {}["lamp"]
    ... except KeyError as error:
    ...     print(located(error).words)
    KeyError: 'lamp'
    """
    if isinstance(error, Failed):
        return error.failure
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if is_own(each.filename)] or frames[-1:]
    where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return Failure("raised", one_line(error), where, cut("".join(traceback.format_exception(error))))


def one_line(error: BaseException) -> str:
    """Type and text of an exception, at most 1000 characters."""
    # The text of a stranger's exception is a stranger's function too.
    with contextlib.suppress(Exception):
        return " ".join(f"{type(error).__name__}: {error}".split())[:1000].removesuffix(": ")
    return type(error).__name__


def cut(text: str) -> str:
    """The end of a text, as much as a record holds."""
    return text if len(text) <= HELD_CHARACTERS else "…" + text[1 - HELD_CHARACTERS :]


def is_own(file: str) -> bool:
    """Whether a file is neither ours, nor Python's, nor an installed package's."""
    return not file.startswith((_HERE, *_OTHERS))


def place(frame: FrameType) -> str:
    """File, line and function of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


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


_modules: dict[Path, tuple[tuple[int, int], ModuleType]] = {}
_folders: set[Path] = set()


def module_of(path: str | Path) -> ModuleType:
    """Run a file as Python runs a script, and return it as a module.

    - A file is run once; after it was changed it is run again. Several names of it are of one module.
    - Files next to it can be imported by it. Two folders may have files of one name.
    - Its name is that of the file, so that its classes can be pickled; a name that another module has gets a number.

    Raises:
        OSError: if there is no such file.
        Exception: what running it raises.
    """
    path = Path(path).resolve()
    refuse_special(path)
    status = path.stat()
    stamp = status.st_mtime_ns, status.st_size
    if path in _modules and _modules[path][0] == stamp:
        return _modules[path][1]
    known = sys.modules.get(path.stem)
    if known is not None and path not in _modules and _file(known) == path:
        return known  # the script that runs, or what it has imported
    name = _modules[path][1].__name__ if path in _modules else _free(path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    _first_on_the_path(path.parent)
    importlib.invalidate_caches()
    before, module = sys.modules.get(name), importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    _modules[path] = stamp, module
    return module


def _free(stem: str) -> str:
    """A name that no module has."""
    if stem not in sys.modules:
        return stem
    return next(name for number in range(len(sys.modules) + 1) if (name := f"{stem}-{number}") not in sys.modules)


def _file(module: ModuleType) -> Path:
    return Path(getattr(module, "__file__", None) or "").resolve()


def _first_on_the_path(folder: Path) -> None:
    """Let imports find the files of a folder before those of another user's folder that have the same names."""
    for name, module in list(sys.modules.items()):
        home = _file(module).parent if isinstance(module, ModuleType) else folder
        beside = (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
        if beside and home != folder and (home in _folders or home.parent in _folders):
            del sys.modules[name]
    _folders.add(folder)
    if sys.path[:1] != [str(folder)]:
        sys.path[:] = [str(folder), *(each for each in sys.path if each != str(folder))]
