"""The same parts through Ray Data: actors that load the tokenizer once do them, and write shards where they are made.

Ray is imported on use (extra `ray`). Shards go to a folder that all nodes see, or to an address.
"""

import base64
import importlib
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tracegrad import _core
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.prepare.part import Job, Record, done
from tracegrad.prepare.split import Part
from tracegrad.prepare.workers import sendable

ANSWER_S = 60.0
"""How long a cluster that listens may take to let a process in."""
_LISTEN_S = 5.0
_JOIN = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='error')"


class Preparer:
    """What an actor is: a tokenizer, loaded once; called with rows of one part each.

    The job comes with each part, and nothing when the actor is made: one that is lost can be made again anywhere.
    """

    def __init__(self) -> None:
        os.environ.setdefault("RAYON_NUM_THREADS", "1")  # as many as the CPUs that Ray counts for it
        self._tokenizer: Tokenizer | None = None

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[str]]:
        """The records of parts, or their errors."""
        return {"outcome": [_closed(self._outcome(*_opened(row))) for row in rows["part"]]}

    def _outcome(self, job: Job, part: Part, where: str) -> tuple[Part, Record | Exception]:
        with suppress(OSError):  # a node that has no such folder may do parts whose paths are whole
            os.chdir(where)
        try:
            self._tokenizer = self._tokenizer or Tokenizer.from_pretrained(Path(job.model))
            return part, done(job, part, self._tokenizer)
        except Exception as error:
            return part, sendable(error)


def records(job: Job, parts: Sequence[Part], address: str, workers: int) -> Iterator[Record]:
    """The records of parts as they are done.

    Args:
        job: what the parts have in common.
        parts: to be done.
        address: of the cluster; "" for the one that Ray finds, or else one of this machine.
        workers: actors at most; 0 for as many as the cluster has CPUs.

    Raises:
        ArgumentError: if there is no cluster at the address.
        TracegradError: the error of the first of the parts that has one; if the cluster cannot do parts at all.
    """
    import ray
    import ray.data

    is_own = not ray.is_initialized()
    if is_own:
        try:
            ray.init(address=address or None, log_to_driver=False, logging_level="warning")
        except Exception as error:
            raise ArgumentError(
                f"--ray {address}: {type(error).__name__}: {str(error)[:200]}. No part can be done there. Start the "
                "cluster, or leave the address out."
            ) from error
    try:
        most = workers or int(ray.cluster_resources().get("CPU", 1))
        actors = ray.data.ActorPoolStrategy(min_size=1, max_size=max(min(most, len(parts)), 1))
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)  # of a cluster without room, not of each step
        logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
        rows = ray.data.from_items(
            [{"part": _closed((job, part, os.getcwd()))} for part in parts], override_num_blocks=len(parts)
        )
        made = rows.map_batches(Preparer, batch_size=1, compute=actors, num_cpus=1)
        failed: dict[int, Exception] = {}
        for row in made.iter_rows():
            part, outcome = _opened(row["outcome"])
            if isinstance(outcome, Exception):
                failed[part.index] = outcome
            else:
                yield outcome
        if failed:
            raise failed[min(failed)]
    except ray.exceptions.RayError as error:
        raise TracegradError(
            f"Ray: {_last(str(error))}. Its parts are not done; those that were are kept. Install tracegrad "
            f"{_core.__version__} on every node, mend what is named, and go on with --resume."
        ) from error
    finally:
        if is_own:
            ray.shutdown()


def check(address: str) -> None:
    """Looks whether there is a cluster, before anything is written or counted: Ray itself would try for 8 minutes.

    Args:
        address: as for `records`.

    Raises:
        ArgumentError: if Ray is not installed, nobody listens at the address, or who listens does not answer as Ray.
    """
    told = address or os.environ.get("RAY_ADDRESS", "")
    what = f"--ray {address}" if address else f"RAY_ADDRESS is {told}" if told else "--ray"
    if why := _deaf(told):
        raise ArgumentError(f"{what}: nobody answers there ({why}). {_CURE}")
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ImportError as error:
        raise ArgumentError(f"{error}. --ray needs it. pip install 'tracegrad[ray]'") from error
    if told == "local" or ray.is_initialized():
        return
    try:
        joined = subprocess.run(
            [sys.executable, "-c", _JOIN, told or "auto"], capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        where = "" if told else " a cluster that was started here, and is gone without `ray stop`, or is busy:"
        raise ArgumentError(
            f"{what}:{where} no answer as a cluster gives it within {ANSWER_S:.0f} s. {_CURE}"
        ) from error
    if joined.returncode and told:  # where none is told and none is found, one of this machine is started
        raise ArgumentError(f"{what}: {_last(joined.stderr)}. {_CURE}")


_CURE = (
    "No part can be done there. Start it (ray start --head), correct the address, or leave address and RAY_ADDRESS out "
    "for a cluster of this machine; `ray stop` forgets one that is gone."
)


def _deaf(address: str) -> str:
    """Why nobody can be reached at HOST:PORT; "" where somebody listens, or only Ray knows what the address means."""
    found = re.fullmatch(r"(ray://)?\[?([^/\[\]]*[^/\[\]:])\]?:(\d{1,5})", address)
    if found is None:
        return ""
    try:
        socket.create_connection((found[2], int(found[3])), _LISTEN_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ""


def _last(told: str) -> str:
    """What a trace of calls ends with."""
    return (told.strip().splitlines() or ["it ended without a word"])[-1].strip().rstrip(".")[:200]


def _closed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _opened(text: Any) -> Any:
    return pickle.loads(base64.b64decode(str(text)))
