"""Metrics by the field's names: what each is of, by what it is divided, and where it goes.

`METRICS` is the table that docs/metrics.md shows; `Tally` adds up sums with their integer denominators; the sinks write
rows. Nothing here computes a ratio. Called by the learner, usable by any training loop.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from tracegrad.errors import ArgumentError, TracegradError


@dataclass(frozen=True)
class Metric:
    """One row of the table: a number that metrics.jsonl may hold.

    Args:
        name: key in metrics.jsonl.
        unit: of the value.
        ratio: which policies it compares, numerator first; "" where it compares none.
        per: what the sum is divided by; "" where it is no mean.
        meaning: definition in one sentence.
    """

    name: str
    unit: str
    ratio: str
    per: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("step", "optimizer steps", "", "", "Optimizer steps taken, this one included; 0 is before the first."),
    Metric("epoch", "epochs", "", "", "Epoch of the step, from 0."),
    Metric("loss", "1", "", "the objective's own denominator", "What was minimised: surrogate plus penalties."),
    Metric("lr", "1", "", "", "Learning rate of the step."),
    Metric("grad_norm", "1", "", "", "Euclidean norm of the whole gradient before clipping."),
    Metric("terms", "terms", "", "", "Trained sampling events of the step."),
    Metric("traces", "traces", "", "", "Traces of the step with at least one term."),
    Metric("tokens", "tokens", "", "", "Tokens of the step that went through the model, padding excluded."),
    Metric("seconds", "s", "", "", "Wall time of the step, its share of the `old` pass excluded."),
    Metric("tokens_per_s", "tokens/s", "", "", "tokens / seconds."),
    Metric("reward", "reward", "", "traces", "Mean recorded reward of the step's traces."),
    Metric("frac_zero_advantage", "share", "", "traces", "Traces whose advantage is 0: they pull on nothing."),
    Metric("entropy", "nats", "", "terms", "Mean entropy of the policy's next-token distribution at the terms."),
    Metric(
        "frac_old_logprobs_valid",
        "share",
        "",
        "terms",
        "Terms with a recorded rollout logprob. `old` is ART's word for the recorded logprobs.",
    ),
    Metric(
        "frac_old_logprobs_valid_all",
        "share",
        "",
        "tokens",
        "Tokens of all kinds, prompts included, that have a recorded rollout logprob: ART's denominator without padding.",
    ),
    Metric(
        "mean_importance_ratio",
        "1",
        "theta / rollout",
        "terms with a rollout logprob",
        "Mean of exp(logprob - rollout logprob). ART counts a missing logprob as 1; here it stands outside.",
    ),
    Metric(
        "ratio_mean",
        "1",
        "theta / old, or theta / rollout in objectives without old",
        "kept terms",
        "Mean of the ratio inside the surrogate, at the surrogate's level; absent where it takes none.",
    ),
    Metric("ratio_max", "1", "as ratio_mean", "", "Largest ratio inside the surrogate over the step's kept terms."),
    Metric(
        "clip_fraction",
        "share",
        "as ratio_mean",
        "terms",
        "Terms whose gradient the clip removed: ratio above 1 + high (A > 0), below 1 - low or above dual (A < 0).",
    ),
    Metric(
        "clip_fraction_any",
        "share",
        "as ratio_mean",
        "terms",
        "Terms with a ratio outside the clip range, whatever the sign of the advantage: ART's clip_fraction.",
    ),
    Metric("kl", "nats", "theta / ref", "terms", "k3 estimate of KL(theta, ref); only with a reference model."),
    Metric(
        "kl_rollout",
        "nats",
        "theta / rollout",
        "terms with a rollout logprob",
        "k3 estimate of KL(rollout, theta): how far the policy has gone from the one that was recorded.",
    ),
    Metric(
        "kl_old", "nats", "theta / old", "terms", "k3 estimate of KL(old, theta): how far since `old` was refreshed."
    ),
    Metric(
        "rollout_gap",
        "nats",
        "theta / rollout",
        "terms with a rollout logprob",
        "Mean absolute difference of logprob and rollout logprob. At step 1 it is the mismatch of trainer and engine; later the policy has moved too.",
    ),
    Metric(
        "value",
        "reward",
        "theta / rollout, product over the trace",
        "weights of held-out traces",
        "Self-normalised importance-weighted reward on the held-out groups: sum w r / sum w.",
    ),
    Metric("value_low", "reward", "as value", "", "Lower end of value's 95 % interval (delta method over groups)."),
    Metric("value_high", "reward", "as value", "", "Upper end of value's 95 % interval."),
    Metric("value_recorded", "reward", "", "held-out traces", "Mean recorded reward of the same held-out traces."),
    Metric("value_ess", "traces", "as value", "", "Kish effective sample size of the held-out traces: (sum w)^2 / sum w^2."),
    Metric("value_ess_fraction", "share", "as value", "held-out traces", "value_ess / held-out traces with known ratios."),
    Metric("value_known", "0 or 1", "as value", "", "1 while value_ess is large enough for value to mean something."),
    Metric("value_traces", "traces", "", "", "Held-out traces all of whose terms have a rollout logprob."),
    Metric("value_clamped", "traces", "as value", "", "Held-out traces whose summed log-ratio was clamped."),
    Metric("logprob_good", "nats", "", "terms", "Mean logprob of held-out traces with a reward above their group's mean."),
    Metric("logprob_bad", "nats", "", "terms", "The same for traces with a reward below their group's mean."),
)

_BY_NAME = {metric.name: metric for metric in METRICS}


def table() -> str:
    """The metrics as a markdown table, as docs/metrics.md shows it.

    >>> table().splitlines()[0]
    '| name | unit | which ratio | divided by | meaning |'
    """
    rows = [f"| `{m.name}` | {m.unit} | {m.ratio or '-'} | {m.per or '-'} | {m.meaning} |" for m in METRICS]
    return "\n".join(["| name | unit | which ratio | divided by | meaning |", "|---|---|---|---|---|", *rows])


@dataclass
class Tally:
    """Sums with integer denominators; a mean is taken once, at the end, over everything added.

    >>> tally = Tally()
    >>> tally.add("entropy", 3.0, 2)
    >>> tally.add("entropy", 1.0, 2)
    >>> tally.means()
    {'entropy': 1.0}
    """

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, total: float, count: int) -> None:
        """Adds a sum over `count` elements.

        Raises:
            ArgumentError: if the table does not know `name`.
        """
        _known(name)
        self.sums[name] = self.sums.get(name, 0.0) + float(total)
        self.counts[name] = self.counts.get(name, 0) + int(count)

    def maximum(self, name: str, value: float) -> None:
        """Keeps the largest value seen."""
        _known(name)
        self.maxima[name] = max(self.maxima.get(name, -math.inf), float(value))

    def means(self) -> dict[str, float]:
        """Each sum over its count; NaN where the count is 0."""
        means = {name: self.sums[name] / n if n else math.nan for name, n in self.counts.items()}
        return {**means, **self.maxima}


def _known(name: str) -> None:
    if name not in _BY_NAME:
        raise ArgumentError(f"metric {name!r} is not in the table. A number without a definition is not logged. Add it to METRICS.")


Row = Mapping[str, Any]


class Sink(Protocol):
    """Something that takes one row a step."""

    def log(self, row: Row) -> None:
        """Takes the row of one step."""
        ...

    def close(self) -> None:
        """Writes what is still held back."""
        ...


class JsonLines:
    """metrics.jsonl: one JSON object a step, flushed at once; NaN and infinities are written as null.

    Args:
        path: the file; appended to.
        keep_to_step: rows of later steps are dropped first (a run that resumes from a checkpoint repeats them).
    """

    def __init__(self, path: Path, *, keep_to_step: int | None = None) -> None:
        self.path = path
        if path.exists():
            kept = [] if keep_to_step is None else [row for row in read_rows(path) if row["step"] <= keep_to_step]
            staged = path.with_suffix(".jsonl.tmp")
            staged.write_text("".join(_line(row) for row in kept), encoding="utf-8")
            staged.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, row: Row) -> None:
        """Appends one line.

        Raises:
            TracegradError: if the file cannot be written.
        """
        try:
            self._file.write(_line(row))
            self._file.flush()
        except OSError as error:
            raise TracegradError(
                f"{self.path}: {error.strerror}. The metrics of step {row.get('step')} are lost. "
                "Free space there and resume with --resume."
            ) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def finite(row: Row) -> dict[str, Any]:
    """The row with None for NaN and infinities, as JSON has it."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _line(row: Row) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl, a last line that was cut off left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


class TensorBoard:
    """Scalars for TensorBoard, one a metric, under the step's number."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ArgumentError(
                "--tensorboard: the package tensorboard is not installed. No scalars can be written for it. "
                "pip install 'tracegrad[tensorboard]', or leave the option out: metrics.jsonl is always written."
            ) from error
        self._writer = SummaryWriter(str(directory))

    def log(self, row: Row) -> None:
        """Writes the finite numbers of the row."""
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value):
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class Progress:
    """One live line by tqdm: loss, value, ratio mean, clip fraction, ESS, tokens/s.

    Args:
        total: optimizer steps of the whole run.
        done: steps taken before this process.
        stream: where the line goes, default stderr; where that is no terminal, a line every 10 s.
    """

    def __init__(self, total: int, done: int = 0, *, stream: TextIO | None = None) -> None:
        from tqdm import tqdm

        stream = stream or sys.stderr
        live = stream.isatty()
        self._bar = tqdm(
            total=total, initial=done, unit="step", file=stream, dynamic_ncols=live, mininterval=0.1 if live else 10.0,
            bar_format="step {n_fmt}/{total_fmt} [{elapsed}<{remaining}]  {desc}",
        )  # fmt: skip
        self._last: dict[str, Any] = {}
        self._step = done

    def log(self, row: Row) -> None:
        """Shows the row; a value that was measured earlier stays on the line."""
        self._last.update({k: v for k, v in row.items() if v is not None})
        self._bar.set_description_str(progress_line(self._last), refresh=False)
        self._bar.update(row["step"] - self._step)
        self._step = row["step"]

    def close(self) -> None:
        """Leaves the last state of the line standing."""
        self._bar.refresh()
        self._bar.close()


def progress_line(row: Row) -> str:
    """What the live line says of a row.

    >>> progress_line({"loss": -0.0123, "ratio_mean": 1.002, "clip_fraction": 0.01, "tokens_per_s": 12345.6,
    ...                "value": 0.41, "value_low": 0.33, "value_high": 0.49, "value_ess_fraction": 0.8, "value_known": 1})
    'loss -0.0123  value 0.410 (0.330-0.490)  ratio 1.002  clip 1.0%  ESS 80%  12,346 tok/s'
    """
    parts = []
    if "loss" in row:
        parts.append(f"loss {row['loss']:.4f}")
    if "value" in row:
        known = row["value_known"] and f"{row['value']:.3f} ({row['value_low']:.3f}-{row['value_high']:.3f})"
        parts.append(f"value {known or 'no longer known'}")
    if "ratio_mean" in row:
        parts.append(f"ratio {row['ratio_mean']:.3f}")
    if "clip_fraction" in row:
        parts.append(f"clip {row['clip_fraction']:.1%}")
    if "value_ess_fraction" in row:
        parts.append(f"ESS {row['value_ess_fraction']:.0%}")
    if "tokens_per_s" in row:
        parts.append(f"{row['tokens_per_s']:,.0f} tok/s")
    return "  ".join(parts)


class Stopwatch:
    """Wall seconds by stage.

    >>> watch = Stopwatch()
    >>> with watch("read"):
    ...     pass
    >>> list(watch.seconds)
    ['read']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[tuple[str, float]] = []

    def __call__(self, stage: str) -> Stopwatch:
        self._running.append((stage, time.perf_counter()))
        return self

    def __enter__(self) -> Stopwatch:
        return self

    def __exit__(self, *_: object) -> None:
        stage, began = self._running.pop()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began


def log_all(sinks: Iterable[Sink], row: Row) -> None:
    """Gives one row to every sink."""
    for sink in sinks:
        sink.log(row)
