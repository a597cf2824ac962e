"""A process that does parts, one after another, as the process that started it asks for them through a pipe."""

import os
import pickle
import queue
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from tracegrad.errors import TracegradError
from tracegrad.prepare.part import Job, done
from tracegrad.prepare.parts import Part
from tracegrad.tokenizer import Tokenizer


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
