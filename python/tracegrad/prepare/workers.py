"""Run the parts of `prepare` in worker processes."""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.errors import TracegradError
from tracegrad.prepare.part import Job, Record, done, threads
from tracegrad.prepare.split import Part


def main(handle: int) -> None:
    """Answers on the pipe behind a file descriptor until it ends; with it ends the process, whatever it is doing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks for parts ends this process too
    pipe = Connection(handle)
    asked: queue.SimpleQueue[Part] = queue.SimpleQueue()
    job: Job = pipe.recv()
    threading.Thread(target=_listen, args=(pipe, asked), daemon=True).start()
    tokenizer: Tokenizer | None = None
    while True:
        part = asked.get()
        pipe.send(("begun", 0, 0))
        try:
            tokenizer = tokenizer or Tokenizer.from_pretrained(Path(job.model))
            record = done(job, part, tokenizer, lambda taken, records: pipe.send(("far", taken, records)))
        except Exception as error:
            pipe.send(("failed", sendable(error), None))
        else:
            pipe.send(("done", record, None))


def _listen(pipe: Connection, asked: "queue.SimpleQueue[Part]") -> None:
    try:
        while True:
            asked.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(1)  # nobody waits for the part, and another may be given it


def sendable(error: Exception) -> Exception:
    """An error as it can be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TracegradError(f"{type(error).__name__}: {error}")
    return error


MOST_LOST = 2
"""How often a part is given to another process."""
_START = "import sys; from tracegrad.prepare.workers import main; main(int(sys.argv[1]))"

Say = Callable[[Part, int, int], None]
"""Called with a part that is being done, bytes taken and records read of it; with 0 and 0 when it is begun."""


class Workers:
    """Processes that do parts. Use as a context manager: at its end all of them are ended.

    Args:
        job: what the parts have in common.
        count: of the processes.
        lock: a handle that they hold as well, so that what it locks is locked until the last of them has ended.
        say: told how far each part is.
    """

    def __init__(self, job: Job, count: int, lock: int | None = None, say: Say | None = None) -> None:
        self._job, self._count, self._lock, self._say = job, count, lock, say
        self._all: list[_Worker] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.end()

    def doing(self, part: Part) -> int | None:
        """The process that does a part now."""
        return next((worker.process.pid for worker in self._all if worker.part == part), None)

    def records(self, parts: Sequence[Part]) -> Iterator[Record]:
        """The records of parts as they are done.

        Raises:
            TracegradError: the error of the first of the parts that has one, when those before it are done; for a part
                whose process was lost three times.
        """
        waiting, lost = deque(parts), Counter[int]()
        failed: dict[int, Exception] = {}
        while waiting or any(worker.part for worker in self._all):
            self._give(waiting)
            for worker in self._heard():
                part = worker.part
                if part is None or worker not in self._all:
                    continue  # ended since, as a part before its own has failed
                kind, what, count = worker.heard()
                if kind in ("begun", "far"):
                    if self._say is not None:
                        self._say(part, what, count)
                    continue
                worker.part = None
                if kind == "done":
                    yield what
                elif kind == "failed":
                    failed[part.index] = what
                else:
                    self._all.remove(worker)
                    lost[part.index] += 1
                    if lost[part.index] <= MOST_LOST:
                        waiting.appendleft(part)
                    else:
                        failed[part.index] = _lost(part, lost[part.index], worker.end())
                self._leave(waiting, min(failed, default=None))
        if failed:
            raise failed[min(failed)]

    def _give(self, waiting: "deque[Part]") -> None:
        """Gives each process that is free a part, and starts those that are wanted."""
        while waiting:
            free = next((worker for worker in self._all if worker.part is None), None)
            if free is None:
                if len(self._all) >= self._count:
                    return
                free = _Worker(self._job, self._count, self._lock)
                self._all.append(free)
            free.ask(waiting.popleft())

    def _heard(self) -> list["_Worker"]:
        """The busy processes that have said something, or have ended."""
        by_pipe: dict[Any, _Worker] = {worker.pipe: worker for worker in self._all if worker.part is not None}
        return [by_pipe[pipe] for pipe in wait(list(by_pipe))]

    def _leave(self, waiting: "deque[Part]", first: int | None) -> None:
        """After an error only the parts before it are done, as one of them may have one too."""
        if first is None:
            return
        for part in [part for part in waiting if part.index > first]:
            waiting.remove(part)
        for worker in [worker for worker in self._all if worker.part and worker.part.index > first]:
            worker.end()
            self._all.remove(worker)


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, job: Job, count: int, lock: int | None) -> None:
        self.pipe, theirs = Pipe()
        self.part: Part | None = None
        own = {"PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}
        if "RAYON_NUM_THREADS" not in os.environ:
            own["RAYON_NUM_THREADS"] = str(threads(count))
        handles = [theirs.fileno(), *([] if lock is None else [lock])]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno())],
            env={**os.environ, **own},
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._send(job)

    def _send(self, what: Any) -> None:
        with suppress(OSError):  # it has ended, which `heard` says
            self.pipe.send(what)

    def ask(self, part: Part) -> None:
        """Gives it a part to do."""
        self.part = part
        self._send(part)

    def heard(self) -> tuple[str, Any, Any]:
        """What it says next; "lost" where it has ended."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return "lost", None, None

    def end(self) -> int:
        """Ends it, and gives its exit status."""
        self.process.kill()
        self.pipe.close()
        return self.process.wait()


def _lost(part: Part, times: int, status: int) -> TracegradError:
    how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
    return TracegradError(
        f"{part}: the process that did it ended {how}, {times} times. The part is not done; the others are kept. Where "
        "memory was short, give fewer --workers or smaller --shard-traces, and go on with --resume."
    )
