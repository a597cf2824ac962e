"""Run functions of users and environments: import `file.py:NAME`, limit their time, and report failures.

Coroutines are awaited within a time limit, and plain functions run in threads. A call that exceeds its limit is
abandoned: neither a thread nor a coroutine that swallows its cancellation can be stopped. Plain functions can also run
in processes, which are killed at the time limit. A failure names the line of user code that raised it. Frames of
tracegrad, Python and installed packages do not count as user code.
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

from tracegrad.errors import ArgumentError, TracegradError, escape_terminal
from tracegrad.storage.files import refuse_special

MAX_TRACEBACK_CHARACTERS = 8192
_HERE = str(Path(__file__).parent) + os.sep
_OTHERS = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Failure:
    """The reason why a function returned no value.

    Args:
        kind: "raised"; "late" (exceeded its time limit); "died" (its process ended); "wrong" (a value of another kind).
        message: description, on one line.
        location: file, line and function in the user's code, None if that is not known.
        traceback: as Python prints it, None if there is none. Only the last 8192 characters are kept.
    """

    kind: Literal["raised", "late", "died", "wrong"]
    message: str
    location: str | None = None
    traceback: str | None = None

    def __str__(self) -> str:
        return escape_terminal(f"{self.message} ({self.location})" if self.location else self.message)

    def as_dict(self) -> dict[str, str | None]:
        """Return the fields as a dict, for a record."""
        return {"kind": self.kind, "message": self.message, "location": self.location, "traceback": self.traceback}


class UserCodeError(TracegradError):
    """The exception for a function that returned no value. `failure` has the reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return UserCodeError, (self.failure,)


def failure_of(error: BaseException) -> Failure:
    """Return the failure that describes an exception, with the innermost line of user code in its traceback.

    >>> try:
    ...     {}["lamp"]
    ... except KeyError as error:
    ...     print(failure_of(error).message)
    KeyError: 'lamp'
    """
    if isinstance(error, UserCodeError):
        return error.failure
    frames = traceback.extract_tb(error.__traceback__)
    frames_of_user = [frame for frame in frames if is_user_code(frame.filename)] or frames[-1:]
    where = (
        f"{frames_of_user[-1].filename}:{frames_of_user[-1].lineno} in {frames_of_user[-1].name}"
        if frames_of_user
        else None
    )
    return Failure("raised", one_line(error), where, truncate_start("".join(traceback.format_exception(error))))


def one_line(error: BaseException) -> str:
    """Return the type and text of an exception on one line, at most 1000 characters."""
    # `__str__` of a user's exception is user code and can raise too.
    with contextlib.suppress(Exception):
        return " ".join(f"{type(error).__name__}: {error}".split())[:1000].removesuffix(": ")
    return type(error).__name__


def truncate_start(text: str) -> str:
    """Return at most the last `MAX_TRACEBACK_CHARACTERS` characters of a text."""
    return text if len(text) <= MAX_TRACEBACK_CHARACTERS else "…" + text[1 - MAX_TRACEBACK_CHARACTERS :]


def is_user_code(file: str) -> bool:
    """Return whether a file is user code: not part of tracegrad, Python or an installed package."""
    return not file.startswith((_HERE, *_OTHERS))


def location_of(frame: FrameType) -> str:
    """Return file, line and function of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


HUNG_THREADS = 256


async def await_within(seconds: float | None, work: Any, what: str) -> Any:
    """Await `work` for at most `seconds`. Work that swallows its cancellation is abandoned.

    Raises:
        UserCodeError: "late" if the limit is exceeded, "raised" if `work` raises or cancels itself.
    """
    task = asyncio.ensure_future(_without_exit(work))
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_forget)
        with contextlib.suppress(asyncio.CancelledError):  # Let it close its resources.
            await asyncio.wait({task}, timeout=1.0)
        raise
    if not task.done():
        where = _position(task)
        task.cancel()
        task.add_done_callback(_forget)
        await asyncio.wait({task}, timeout=1.0)
        raise UserCodeError(Failure("late", f"{what} took longer than {seconds:g} s", where))
    if task.cancelled():
        raise UserCodeError(Failure("raised", f"{what} cancelled itself"))
    error = task.exception()
    if error is not None:
        raise UserCodeError(failure_of(error)) from error
    return task.result()


async def _without_exit(work: Any) -> Any:
    """Return the result of `work`. A SystemExit becomes `UserCodeError`, because asyncio would end the loop."""
    try:
        return await work
    except SystemExit as error:
        raise UserCodeError(failure_of(error)) from error


def _position(task: asyncio.Future[Any]) -> str:
    """Return the innermost line of user code at which a task waits."""
    awaitable: Any = task.get_coro() if isinstance(task, asyncio.Task) else None
    position = ""
    while awaitable is not None:
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        if frame is not None and (not position or is_user_code(frame.f_code.co_filename)):
            position = location_of(frame)
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return position


def _forget(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned task, so that asyncio does not print it."""
    if not task.cancelled():
        task.exception()


class UserThread:
    """A thread that runs functions one after another. It starts on first use.

    An object created in the thread is used only in it, as databases and browsers require. A function that exceeds its
    time limit cannot be stopped: the thread is abandoned, and the next function gets a new one.
    """

    _hung = 0

    def __init__(self) -> None:
        self._jobs: Any = None
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[..., Any], *args: Any, seconds: float | None, what: str) -> Any:
        """Return the value of `function(*args)`, run with the caller's context variables.

        Raises:
            UserCodeError: if it raises or takes longer than `seconds`, or if too many abandoned threads hang.
        """
        if self._jobs is None:
            if UserThread._hung >= HUNG_THREADS:
                raise UserCodeError(
                    Failure(
                        "late", f"{what}: {HUNG_THREADS} threads are stuck in functions that exceeded their time limit"
                    )
                )
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve_jobs, args=(self._jobs,), daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        run = contextvars.copy_context().run
        self._jobs.put((run, function, args, lambda *result: _answer(loop, done, *result)))
        try:
            return await await_within(seconds, done, what)
        except UserCodeError as failed:
            if failed.failure.kind != "late":
                raise
            where = self._position()
            self._abandon()
            raise UserCodeError(replace(failed.failure, location=where)) from None
        except asyncio.CancelledError:
            self._abandon()
            raise

    def close(self) -> None:
        """Let the thread end after its queued work."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def _position(self) -> str:
        """Return the innermost line of user code that the thread executes now."""
        frame = sys._current_frames().get((self._thread and self._thread.ident) or 0)
        while frame is not None and not is_user_code(frame.f_code.co_filename):
            frame = frame.f_back
        return "" if frame is None else location_of(frame)

    def _abandon(self) -> None:
        UserThread._hung += 1
        if self._jobs is not None:
            self._jobs.put((lambda run: run(), _count_returned, (), lambda *_: None))
        self.close()


def _count_returned() -> None:
    UserThread._hung -= 1


def _serve_jobs(jobs: Any) -> None:
    while (job := jobs.get()) is not None:
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
            done.set_exception(UserCodeError(failure_of(error)))
        else:
            done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # The loop may be closed.
        loop.call_soon_threadsafe(settle)


TRACEBACK_SIGNAL = signal.SIGUSR1
"""Signal on which a process writes its current traceback."""
TRACEBACK_TIMEOUT_S = 1.0
"""Seconds that a process has for writing its traceback."""
CUDA_AFTER_FORK = ("Cannot re-initialize CUDA in forked subprocess", "CUDA error: initialization error")
"""Texts of torch's errors in a forked process: on its first use of CUDA, and on a tensor of the parent process."""


class ProcessPool:
    """A pool of processes that run named functions, each call within a time limit. A process that exceeds it is killed.

    Processes are forked on demand, so functions can be closures. Arguments and values are pickled. Use it as an
    asynchronous context manager, or call `close`.

    Args:
        functions: functions by name.
        count: maximum number of processes at once.
        max_value_bytes: limit of a pickled value, in bytes. A larger value raises an error.
    """

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], *, count: int = 2, max_value_bytes: int = 64 << 20
    ) -> None:
        if count < 1:
            raise ArgumentError(f"TG-CODE-001: count is {count}, and at least one process is needed. Pass 1 or more.")
        self._functions = dict(functions)
        self._bytes = max_value_bytes
        self._slots = asyncio.Semaphore(count)
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    async def __aenter__(self) -> "ProcessPool":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seconds: float) -> Any:
        """Return the value of the function `name`.

        Raises:
            UserCodeError: if it raises, takes longer than `seconds` or ends its process, or if arguments or value
                cannot be sent.
        """
        async with self._slots:
            process = self._idle.pop() if self._idle else _Process(self._functions, self._bytes)
            self._busy.add(process)
            is_unusable = True
            try:
                outcome = await process.call(name, args, dict(kwargs), seconds)
                is_unusable = False
            finally:
                self._busy.discard(process)
                if is_unusable or self._closed or process.ended:
                    process.kill()
                else:
                    self._idle.append(process)
        value, failure = outcome
        if failure is not None:
            raise UserCodeError(failure)
        return value

    def close(self) -> None:
        """End all processes."""
        self._closed = True
        for process in (*self._idle, *self._busy):
            process.kill()
        self._idle.clear()


class _Process:
    """One process and the pipe to it."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], max_bytes: int) -> None:
        context = get_context("fork")
        self._pipe, child_pipe = context.Pipe()
        self._trace = tempfile.NamedTemporaryFile("w+", prefix="tracegrad-", suffix=".trace")  # noqa: SIM115
        self._bytes = max_bytes
        self.ended = False
        self._process = context.Process(
            target=_serve_calls, args=(child_pipe, functions, self._trace.name), daemon=True
        )
        self._process.start()
        child_pipe.close()

    async def call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float
    ) -> tuple[Any, Failure | None]:
        try:
            request = pickle.dumps((name, args, kwargs, seconds))
        except Exception as error:
            return None, Failure("wrong", f"{name}: arguments that cannot be sent to a process: {one_line(error)}")
        thread = UserThread()
        try:
            return await thread.call(self._exchange, name, bytes(request), seconds, seconds=None, what=name)
        finally:
            thread.close()

    def _exchange(self, name: str, request: bytes, seconds: float) -> tuple[Any, Failure | None]:
        try:
            self._pipe.send_bytes(request)
            if not self._pipe.poll(seconds):
                self._end_with_traceback()
                self.kill(keep=True)
                return None, Failure("late", f"{name} took longer than {seconds:g} s", *self._read_traceback())
            return pickle.loads(self._pipe.recv_bytes(self._bytes))
        except EOFError:
            self.kill(keep=True)
            return None, Failure("died", f"{name} ended its process (exit status {self._process.exitcode})")
        except OSError as error:
            self.kill(keep=True)
            return None, Failure("died", f"{name}: the result could not be read from its process: {one_line(error)}")
        except Exception as error:
            return None, Failure("wrong", f"{name}: a value that cannot be read back: {one_line(error)}")

    def _end_with_traceback(self) -> None:
        """Signal the process to write its traceback and end, then kill its process group."""
        process = self._process.pid or 0
        with contextlib.suppress(OSError):
            os.kill(process, TRACEBACK_SIGNAL)
            wait([self._process.sentinel], TRACEBACK_TIMEOUT_S)
            os.killpg(process, signal.SIGKILL)

    def _read_traceback(self) -> tuple[str | None, str | None]:
        """Return the innermost line of user code at the time limit, and the text of the traceback."""
        try:
            text = Path(self._trace.name).read_text(errors="replace")
        except OSError:
            return None, None
        lines = [line.strip() for line in text.splitlines() if line.startswith('  File "')]
        lines_of_user = [line for line in lines if is_user_code(line[6:])] or lines
        return (
            lines_of_user[0].replace('File "', "").replace('", line ', ":") if lines_of_user else ""
        ), truncate_start(text)

    def kill(self, keep: bool = False) -> None:
        """End the process. `keep` leaves the file with its traceback."""
        self.ended = True
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            self._process.kill()
        self._process.join(5)
        self._pipe.close()
        if not keep:
            self._trace.close()


def _serve_calls(pipe: Connection, functions: Mapping[str, Callable[..., Any]], trace: str) -> None:
    """Serve calls in a worker process until the pipe closes or the parent process is gone."""
    os.setsid()  # A new process group, so that processes started by a function are killed with it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(TRACEBACK_SIGNAL, signal.SIG_DFL)
    parent = os.getppid()
    with open(trace, "w") as file:
        # The handler writes the traceback itself, even if native code blocks the interpreter. `chain` then runs the
        # signal's default action, which ends the process.
        faulthandler.register(TRACEBACK_SIGNAL, file=file, chain=True)
        while True:
            while not pipe.poll(5.0):
                if os.getppid() != parent:
                    os._exit(0)
            try:
                name, args, kwargs, seconds = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            signal.setitimer(signal.ITIMER_REAL, seconds + 5.0)  # In case the parent is gone.
            try:
                answer = (functions[name](*args, **kwargs), None)
            except BaseException as error:
                answer = (None, _failure(name, error))
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            try:
                response = pickle.dumps(answer)
            except Exception as error:
                response = pickle.dumps(
                    (None, Failure("wrong", f"{name}: a value that cannot be sent: {one_line(error)}"))
                )
            pipe.send_bytes(response)


def _failure(name: str, error: BaseException) -> Failure:
    """Return the failure of a function in a forked process. If the cause is CUDA, the failure explains the remedy."""
    failure = failure_of(error)
    if not any(text in one_line(cause) for cause in _chain(error) for text in CUDA_AFTER_FORK):
        return failure
    message = (
        f"{name} uses CUDA, but it runs in a process forked from one that has initialized CUDA, where CUDA does not "
        f"work. Keep the models and tensors of {name} on the CPU, call a server for work on the GPU, or write {name} "
        f"as `async def`: asynchronous functions run in the main process. It raised {failure.message}"
    )
    return replace(failure, message=message)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those it was raised from or during."""
    visited: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in visited:
        yield current
        visited.append(current)
        current = current.__cause__ or current.__context__


_modules: dict[Path, tuple[tuple[int, int], ModuleType]] = {}
_folders: set[Path] = set()


def load_module(path: str | Path) -> ModuleType:
    """Run a file as Python runs a script, and return it as a module.

    - A file runs once, and again only after it changed. All names imported from it belong to one module.
    - It can import files next to it. Two folders can have files of the same name.
    - The module has the name of the file, so that its classes can be pickled. If another module has the name, a number
      is added.

    Raises:
        OSError: if there is no such file, or it is a pipe, a socket or a device.
        ImportError: if it is not a Python file.
        Exception: any exception that the file raises.
    """
    path = Path(path).resolve()
    refuse_special(path)
    status = path.stat()
    stamp = status.st_mtime_ns, status.st_size
    if path in _modules and _modules[path][0] == stamp:
        return _modules[path][1]
    imported = sys.modules.get(path.stem)
    if imported is not None and path not in _modules and _file_of(imported) == path:
        return imported  # The running script, or a module it imported.
    name = _modules[path][1].__name__ if path in _modules else _unused_name(path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    _put_first_on_path(path.parent)
    importlib.invalidate_caches()
    previous, module = sys.modules.get(name), importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if previous is not None:
            sys.modules[name] = previous
        raise
    _modules[path] = stamp, module
    return module


def _unused_name(stem: str) -> str:
    """Return a module name that is not in use, the stem itself if possible."""
    if stem not in sys.modules:
        return stem
    return next(name for number in range(len(sys.modules) + 1) if (name := f"{stem}-{number}") not in sys.modules)


def _file_of(module: ModuleType) -> Path:
    return Path(getattr(module, "__file__", None) or "").resolve()


def _put_first_on_path(folder: Path) -> None:
    """Put a folder first on the import path, and unload same-named modules from other users' folders."""
    try:
        entries = os.listdir(folder)
    except OSError:  # Python imports nothing from a folder that it cannot list.
        entries = []
    for name in {entry.removesuffix(".py") for entry in entries} & sys.modules.keys():
        module = sys.modules[name]
        module_folder = _file_of(module).parent if isinstance(module, ModuleType) else folder
        is_shadowed = (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
        if is_shadowed and module_folder != folder and (module_folder in _folders or module_folder.parent in _folders):
            del sys.modules[name]
    _folders.add(folder)
    if sys.path[:1] != [str(folder)]:
        sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]
