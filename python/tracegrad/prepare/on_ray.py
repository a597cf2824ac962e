"""The same parts through Ray Data: actors that load the tokenizer once do them, and write shards where they are made.

Ray is imported on use (extra `ray`). Shards go to a folder that all nodes see, or to an address.
"""

import base64
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.prepare.part import Job, Record, done
from tracegrad.prepare.parts import Part
from tracegrad.prepare.worker import sendable
from tracegrad.tokenizer import Tokenizer


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

    def _outcome(self, job: Job, part: Part) -> tuple[Part, Record | Exception]:
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
        ArgumentError: if Ray is not installed, or there is no cluster at the address.
        TracegradError: the error of the first of the parts that has one.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ArgumentError(f"{error}. --ray needs it. pip install 'tracegrad[ray]'") from error
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
        rows = ray.data.from_items([{"part": _closed((job, part))} for part in parts], override_num_blocks=len(parts))
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
    finally:
        if is_own:
            ray.shutdown()


def _closed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _opened(text: Any) -> Any:
    return pickle.loads(base64.b64decode(str(text)))
