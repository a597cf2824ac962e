"""What a run leaves in memory for its caller: the outcome, and per-term arrays for the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tracegrad.batch import Step
from tracegrad.learner.step import Outcome


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
    def of(cls, step: int, packed: Step, outcome: Outcome) -> TermRecord:
        """Of the terms whose logprob the step has computed."""
        seen = ~np.isnan(outcome.logprobs)
        columns = {name: getattr(packed, name)[seen] for name in ("origin", "trace", "advantages")}
        names = ("ratio", "weight", "keep", "clipped", "logprobs", "gradient")
        return cls(step, **columns, **{name: getattr(outcome, name)[seen] for name in names})


@dataclass
class Trained:
    """What a run has come to.

    Args:
        step: optimizer steps taken, of `total`.
        stopped: "done", "ess" (value's effective sample fell below `stop_below_ess`) or "signal".
        exit_code: 0, or 128 + signal.
        checkpoint: the newest one.
        rows: of metrics.jsonl, those before a resume included.
        terms: of the last epoch's steps, all ranks' on the first and its own on the others.
        seconds: wall time by stage.
        idle: share of the device's time without work queued, a lower bound; None on a CPU, where it does not apply.
    """

    step: int
    total: int
    stopped: Literal["done", "ess", "signal"]
    exit_code: int
    checkpoint: Path
    rows: list[dict[str, Any]]
    terms: list[TermRecord]
    seconds: dict[str, float]
    idle: float | None = None
