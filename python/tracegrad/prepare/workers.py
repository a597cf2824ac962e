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
from tracegrad.prepare.part import Job, Record, prepare_part, threads_per_worker
from tracegrad.prepare.split import Part


def main(handle: int) -> None:
    """Serve parts from the pipe behind a file descriptor.

    The process exits when the pipe closes, even while it is working.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends this process on Ctrl-C.
    pipe = Connection(handle)
    queued: queue.SimpleQueue[Part] = queue.SimpleQueue()
    job: Job = pipe.recv()
    threading.Thread(target=_listen, args=(pipe, queued), daemon=True).start()
    tokenizer: Tokenizer | None = None
    while True:
        part = queued.get()
        pipe.send(("begun", 0, 0))
        try:
            tokenizer = tokenizer or Tokenizer.from_pretrained(Path(job.model))
            record = prepare_part(job, part, tokenizer, lambda taken, records: pipe.send(("far", taken, records)))
        except Exception as error:
            pipe.send(("failed", sendable(error), None))
        else:
            pipe.send(("done", record, None))


def _listen(pipe: Connection, queued: "queue.SimpleQueue[Part]") -> None:
    try:
        while True:
            queued.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(1)  # The parent is gone. Another process may do the part.


def sendable(error: Exception) -> Exception:
    """Return an error that can be pickled: the error itself, or a TracegradError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TracegradError(f"{type(error).__name__}: {error}")
    return error


MAX_RETRIES = 2
"""Maximum number of times that a part is assigned to another process."""
_START = "import sys; from tracegrad.prepare.workers import main; main(int(sys.argv[1]))"

ProgressCallback = Callable[[Part, int, int], None]
"""Called with a part, and its bytes and records read so far. Both are 0 when the part starts."""


class Workers:
    """A pool of processes that prepare parts. Use it as a context manager, which ends them all.

    Args:
        job: settings that the parts share.
        count: number of processes.
        lock: handle that the processes inherit, so that its lock lasts until the last of them has ended.
        log: progress callback for each part.
    """

    def __init__(self, job: Job, count: int, lock: int | None = None, log: ProgressCallback | None = None) -> None:
        self._job, self._count, self._lock, self._say = job, count, lock, log
        self._all: list[_Worker] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.end()

    def pid_of(self, part: Part) -> int | None:
        """Return the id of the process that works on a part now, or None."""
        return next((worker.process.pid for worker in self._all if worker.part == part), None)

    def records(self, parts: Sequence[Part]) -> Iterator[Record]:
        """Yield the records of parts as they finish.

        Raises:
            TracegradError: the error of the first failed part, after the parts before it are done. Also for a part
                whose process was lost three times.
        """
        waiting, lost = deque(parts), Counter[int]()
        failed: dict[int, Exception] = {}
        while waiting or any(worker.part for worker in self._all):
            self._assign(waiting)
            for worker in self._ready():
                part = worker.part
                if part is None or worker not in self._all:
                    continue  # It was ended because an earlier part failed.
                kind, payload, count = worker.receive()
                if kind in ("begun", "far"):
                    if self._say is not None:
                        self._say(part, payload, count)
                    continue
                worker.part = None
                if kind == "done":
                    yield payload
                elif kind == "failed":
                    failed[part.index] = payload
                else:
                    self._all.remove(worker)
                    lost[part.index] += 1
                    if lost[part.index] <= MAX_RETRIES:
                        waiting.appendleft(part)
                    else:
                        failed[part.index] = _lost(part, lost[part.index], worker.end())
                self._drop_later(waiting, min(failed, default=None))
        if failed:
            raise failed[min(failed)]

    def _assign(self, waiting: "deque[Part]") -> None:
        """Assign a part to each free process, and start processes up to the limit."""
        while waiting:
            worker = next((worker for worker in self._all if worker.part is None), None)
            if worker is None:
                if len(self._all) >= self._count:
                    return
                worker = _Worker(self._job, self._count, self._lock)
                self._all.append(worker)
            worker.ask(waiting.popleft())

    def _ready(self) -> list["_Worker"]:
        """Return the busy processes that have sent a message or have ended."""
        by_pipe: dict[Any, _Worker] = {worker.pipe: worker for worker in self._all if worker.part is not None}
        return [by_pipe[pipe] for pipe in wait(list(by_pipe))]

    def _drop_later(self, waiting: "deque[Part]", first: int | None) -> None:
        """After an error, drop the parts after the failed one.

        Parts before it continue, because one of them may fail too.
        """
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
        self.pipe, child_pipe = Pipe()
        self.part: Part | None = None
        environment = {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        if "RAYON_NUM_THREADS" not in os.environ:
            environment["RAYON_NUM_THREADS"] = str(threads_per_worker(count))
        handles = [child_pipe.fileno(), *([] if lock is None else [lock])]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, str(child_pipe.fileno())],
            env={**os.environ, **environment},
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
        )
        child_pipe.close()
        self._send(job)

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # The process has ended. `receive` reports that.
            self.pipe.send(message)

    def ask(self, part: Part) -> None:
        """Send a part to the process."""
        self.part = part
        self._send(part)

    def receive(self) -> tuple[str, Any, Any]:
        """Return the next message, "lost" if the process has ended."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return "lost", None, None

    def end(self) -> int:
        """Kill the process and return its exit status."""
        self.process.kill()
        self.pipe.close()
        return self.process.wait()


def _lost(part: Part, times: int, status: int) -> TracegradError:
    end = f"by signal {-status}" if status < 0 else f"with exit status {status}"
    return TracegradError(
        f"TG-PREPARE-020: {part}: its process ended {end}, {times} times. The other parts are kept. "
        "If memory ran out, use fewer workers or a smaller shard_traces, and continue with resume=True."
    )
