"""What `train` returns: the outcome of a run, and per-term arrays for the report."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tracegrad.packing import Step
from tracegrad.storage import safetensors_file
from tracegrad.trainer.step import Outcome


@dataclass(frozen=True)
class TermRecord:
    """Per-term arrays of one step, for the report; [M] each, in the step's order.

    Args:
        step: the optimizer step, from 1.
        origin: token of the `Sequences`.
        trace: row of the `Sequences`.
        ratio, weight, keep, advantages, logprobs, gradient: as in `Outcome` and `Corrected`.
    """

    step: int
    origin: NDArray[np.int64]
    trace: NDArray[np.int32]
    ratio: NDArray[np.float32]
    weight: NDArray[np.float32]
    keep: NDArray[np.bool_]
    clipped: NDArray[np.bool_]
    advantages: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    gradient: NDArray[np.float32]

    @classmethod
    def of(cls, step: int, packed: Step, outcome: Outcome) -> "TermRecord":
        """Of the terms whose logprob the step has computed."""
        seen = ~np.isnan(outcome.logprobs)
        columns = {name: getattr(packed, name)[seen] for name in ("origin", "trace", "advantages")}
        names = ("ratio", "weight", "keep", "clipped", "logprobs", "gradient")
        return cls(step, **columns, **{name: getattr(outcome, name)[seen] for name in names})


def save_terms(path: Path, terms: Sequence[TermRecord]) -> None:
    """Writes records for a checkpoint, end to end."""
    arrays = {name: _joined([getattr(term, name) for term in terms], kind) for name, kind in _COLUMNS.items()}
    steps = np.repeat([term.step for term in terms], [len(term.origin) for term in terms]).astype(np.int64)
    safetensors_file.write(path, {**arrays, "step": steps})


def load_terms(path: Path) -> list[TermRecord]:
    """Reads them back.

    Raises:
        ReadError, FormatError: if the file is none that can be read.
        ValueError, KeyError: if it holds something else.
    """
    arrays, _ = safetensors_file.read(path)
    steps = arrays["step"]
    wrong = [name for name, kind in _COLUMNS.items() if arrays[name].dtype != kind or arrays[name].shape != steps.shape]
    if wrong or steps.ndim != 1 or steps.dtype != np.int64 or np.any(steps[1:] < steps[:-1]):
        raise ValueError(f"{path.name} holds no terms of steps, one after the other")
    ends = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)] if len(steps) else [0]
    parts = [slice(start, stop) for start, stop in pairwise(ends)]
    return [
        TermRecord(int(steps[part.start]), **{name: arrays[name][part].copy() for name in _COLUMNS}) for part in parts
    ]


_KINDS = {"origin": np.int64, "trace": np.int32, "keep": np.bool_, "clipped": np.bool_}
_COLUMNS: dict[str, Any] = {each.name: _KINDS.get(each.name, np.float32) for each in fields(TermRecord)[1:]}


def _joined(columns: list[NDArray[Any]], kind: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, kind), *columns]).astype(kind)


@dataclass
class Trained:
    """What a run has come to.

    Args:
        step: optimizer steps taken, of `total`.
        stopped: "done", "ess" or "worse" (as `[stop]` says), or "signal".
        exit_code: 0, or 128 + signal.
        checkpoint: the newest one; of a run at an address what is left of it in this process's folder, until it ends.
        rows: of metrics.jsonl, those before a resume included.
        terms: of the last epoch's steps, those before a resume included, all ranks' on the first and else its own. Of
            a run from shards those of the traces that a report shows.
        seconds: wall time by stage, that before a resume included.
        idle: share of the device's time without work queued, a lower bound; None on a CPU, where it does not apply.
        pull: of all terms of the last epoch's steps, sum of |d loss / d logprob|.
        address: of the newest checkpoint, where the run is at an address; else "".
    """

    step: int
    total: int
    stopped: Literal["done", "ess", "worse", "signal"]
    exit_code: int
    checkpoint: Path
    rows: list[dict[str, Any]]
    terms: list[TermRecord]
    seconds: dict[str, float]
    idle: float | None = None
    pull: float = 0.0
    address: str = ""

    @property
    def best(self) -> int:
        """The step after which value was highest, among those at which it was known; 0 where it never was."""
        known = [row for row in self.rows if row.get("off_policy_value_known")]
        return max(known, key=lambda row: row["off_policy_value"])["step"] if known else 0
