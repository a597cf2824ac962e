"""Prepare parts with Ray Data. Each actor loads the tokenizer once and writes its shards itself.

Ray is imported on first use (extra `ray`). The shards must go to a folder that all nodes share, or to an address.
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
from tracegrad.prepare.part import Job, Record, prepare_part
from tracegrad.prepare.split import Part
from tracegrad.prepare.workers import sendable

ANSWER_S = 60.0
"""Seconds that a listening cluster may take to accept a process."""
_LISTEN_S = 5.0
_JOIN = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='error')"


class Preparer:
    """A Ray actor that loads a tokenizer once. Each call gets rows with one part each.

    Each row includes the job, and the constructor has no arguments, so a lost actor can be restarted anywhere.
    """

    def __init__(self) -> None:
        os.environ.setdefault("RAYON_NUM_THREADS", "1")  # Ray reserves one CPU for each actor.
        self._tokenizer: Tokenizer | None = None

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[str]]:
        """Return the records of the parts, or their errors."""
        return {"outcome": [_serialize(self._outcome(*_deserialize(row))) for row in rows["part"]]}

    def _outcome(self, job: Job, part: Part, where: str) -> tuple[Part, Record | Exception]:
        with suppress(OSError):  # A node without this folder can still do parts with absolute paths.
            os.chdir(where)
        try:
            self._tokenizer = self._tokenizer or Tokenizer.from_pretrained(Path(job.model))
            return part, prepare_part(job, part, self._tokenizer)
        except Exception as error:
            return part, sendable(error)


def records(job: Job, parts: Sequence[Part], address: str, workers: int) -> Iterator[Record]:
    """Yield the records of parts as they finish.

    Args:
        job: settings that the parts share.
        parts: the parts to prepare.
        address: address of the cluster. "" uses the cluster that Ray finds, or starts a local one.
        workers: maximum number of actors. 0 means the number of CPUs in the cluster.

    Raises:
        ArgumentError: if there is no cluster at the address.
        TracegradError: the error of the first failed part. Also if the cluster cannot run parts at all.
    """
    import ray
    import ray.data

    is_own = not ray.is_initialized()
    if is_own:
        try:
            ray.init(address=address or None, log_to_driver=False, logging_level="warning")
        except Exception as error:
            raise ArgumentError(
                f"TG-PREPARE-005: --ray {address}: {type(error).__name__}: {str(error)[:200]}. "
                "Start the cluster, or leave the address out."
            ) from error
    try:
        max_actors = workers or int(ray.cluster_resources().get("CPU", 1))
        actors = ray.data.ActorPoolStrategy(min_size=1, max_size=max(min(max_actors, len(parts)), 1))
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)  # Warn about a full cluster, not about each step.
        logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
        rows = ray.data.from_items(
            [{"part": _serialize((job, part, os.getcwd()))} for part in parts], override_num_blocks=len(parts)
        )
        results = rows.map_batches(Preparer, batch_size=1, compute=actors, num_cpus=1)
        failed: dict[int, Exception] = {}
        for row in results.iter_rows():
            part, outcome = _deserialize(row["outcome"])
            if isinstance(outcome, Exception):
                failed[part.index] = outcome
            else:
                yield outcome
        if failed:
            raise failed[min(failed)]
    except ray.exceptions.RayError as error:
        raise TracegradError(
            f"TG-PREPARE-006: Ray: {_last_line(str(error))}. Completed parts are kept. Install "
            f"tracegrad {_core.__version__} on every node, fix this error, and continue with resume=True."
        ) from error
    finally:
        if is_own:
            ray.shutdown()


def check(address: str) -> None:
    """Raise if no Ray cluster can be reached. Ray itself would retry for 8 minutes.

    Args:
        address: as for `records`.

    Raises:
        ArgumentError: if Ray is not installed, nothing listens at the address, or no Ray cluster answers there.
    """
    resolved = address or os.environ.get("RAY_ADDRESS", "")
    setting = f"--ray {address}" if address else f"RAY_ADDRESS is {resolved}" if resolved else "--ray"
    if reason := _connection_error(resolved):
        raise ArgumentError(f"TG-PREPARE-007: {setting}: no connection ({reason}). {_FIX}")
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ImportError as error:
        raise ArgumentError(f"TG-PREPARE-008: {error}. --ray requires it. Run pip install 'tracegrad[ray]'") from error
    if resolved == "local" or ray.is_initialized():
        return
    try:
        joined = subprocess.run(
            [sys.executable, "-c", _JOIN, resolved or "auto"],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        where = "" if resolved else " a local cluster ended without `ray stop`, or is busy:"
        raise ArgumentError(
            f"TG-PREPARE-009: {setting}:{where} no response of a Ray cluster within {ANSWER_S:.0f} s. {_FIX}"
        ) from error
    if joined.returncode and resolved:  # Without an address and without a running cluster, Ray starts a local one.
        raise ArgumentError(f"TG-PREPARE-021: {setting}: {_last_line(joined.stderr)}. {_FIX}")


_FIX = (
    "Start a cluster (ray start --head), correct the address, or use a local cluster: leave out the address and "
    "RAY_ADDRESS. `ray stop` removes the record of a cluster that has ended."
)


def _connection_error(address: str) -> str:
    """Return the reason why HOST:PORT does not accept connections, or "".

    "" is also returned for an address that only Ray can interpret.
    """
    match = re.fullmatch(r"(ray://)?\[?([^/\[\]]*[^/\[\]:])\]?:(\d{1,5})", address)
    if match is None:
        return ""
    try:
        socket.create_connection((match[2], int(match[3])), _LISTEN_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ""


def _last_line(traceback: str) -> str:
    """Return the last line of a traceback."""
    return (traceback.strip().splitlines() or ["it ended without a message"])[-1].strip().rstrip(".")[:200]


def _serialize(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _deserialize(text: Any) -> Any:
    return pickle.loads(base64.b64decode(str(text)))
