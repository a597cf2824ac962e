"""Write metrics: metrics.jsonl, the progress line, TensorBoard, wandb and trackio.

A dashboard library is imported only if you select it. It receives the finite numbers of a row with the step number. A
resumed run continues under its old name.
"""

import io
import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol, TextIO

from tracegrad.data.trace import Trace
from tracegrad.errors import ArgumentError, ReadError, TracegradError
from tracegrad.progress import EVERY_S, Heartbeat, ProgressPrinter, progress_line, time_left
from tracegrad.storage import files

Row = Mapping[str, Any]


class Sink(Protocol):
    """Destination for one row per step.

    >>> class Printer:
    ...     def log(self, row):
    ...         print(f"step {row['step']}: loss {row['loss']}")
    ...
    ...     def close(self):
    ...         pass
    >>> sink: Sink = Printer()  # pass it as `sinks=[sink]` to `tracegrad.train`
    >>> sink.log({"step": 1, "loss": 0.5})
    step 1: loss 0.5
    """

    def log(self, row: Row) -> None:
        """Log the row of one step."""
        ...

    def close(self) -> None:
        """Write what is still buffered."""
        ...


class JsonLines:
    """metrics.jsonl: one JSON object per step, flushed at once; NaN and infinities are written as null.

    Args:
        path: the file; rows are appended.
        keep_to_step: rows of later steps are dropped first, because a run that resumes from a checkpoint repeats them.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     sink = JsonLines(Path(folder, "metrics.jsonl"))
    ...     sink.log({"step": 1, "loss": 0.5, "ope": math.nan})
    ...     sink.close()
    ...     print(sink.path.read_text(), end="")
    {"step": 1, "loss": 0.5, "ope": null}
    """

    def __init__(self, path: Path, *, keep_to_step: int | None = None) -> None:
        self.path = path
        if path.exists():
            kept = [] if keep_to_step is None else [row for row in read_rows(path) if row["step"] <= keep_to_step]
            with files.write_atomically(path) as file:
                file.write("".join(_line(row) for row in kept).encode())
        self._file = io.TextIOWrapper(files.append(path), encoding="utf-8")

    def log(self, row: Row) -> None:
        """Append one line.

        Raises:
            TracegradError: if the file cannot be written.
        """
        try:
            self._file.write(_line(row))
            self._file.flush()
        except OSError as error:
            raise TracegradError(
                f"TG-METRIC-004: {self.path}: {error.strerror}. The metrics of step {row.get('step')} are lost. "
                "Free space there and resume with resume=True."
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def finite(row: Row) -> dict[str, Any]:
    """Return the row with None for NaN and infinities, as in JSON.

    >>> finite({"step": 1, "loss": 0.5, "ope": float("nan")})
    {'step': 1, 'loss': 0.5, 'ope': None}
    """
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _line(row: Row) -> str:
    return json.dumps(finite(row), allow_nan=False) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, without a truncated last line.

    Raises:
        ReadError: for a line that is not a row.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "metrics.jsonl")
    ...     _ = path.write_text('{"step": 1, "loss": 0.5}\\n{"step": 2, "lo')
    ...     read_rows(path)  # the last line was not written to its end
    [{'step': 1, 'loss': 0.5}]
    """
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        row = _parse_row(line)
        if row is None:
            raise ReadError(
                f"TG-METRIC-005: {path}:{number}: not a row of metrics. The file was changed after it was written, so "
                "the run cannot continue its curves. Move the file away to continue without its rows."
            )
        rows.append(row)
    return rows


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), (int, float)) else None


_FEW_STEPS = 20
"""Steps of a run that prints a line after each of them."""


class Progress:
    """One live line by tqdm: the metrics of `step_metrics_text`, by their names in metrics.jsonl.

    Args:
        total: optimizer steps of the full run.
        done: steps before this process.
        stream: output stream, default stderr. If it is not a terminal, a separate line is printed at most every 10 s,
            with the time left, and after each step of a run of at most 20 steps.
        watch: stopwatch whose stages are reported if they take longer than 10 s, such as the old logprobs.
        clock: returns seconds.

    >>> progress = Progress(total=2, stream=sys.stdout, clock=lambda: 0.0)
    >>> progress.log({"step": 1, "loss": 0.5})
    step 1/2  loss 0.5000  0 s left
    >>> progress.log({"step": 2, "loss": 0.25})
    step 2/2  loss 0.2500
    >>> progress.close()
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        *,
        stream: TextIO | None = None,
        watch: "Stopwatch | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from tqdm import tqdm

        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        bar_format = "step {n_fmt}/{total_fmt} [{elapsed}<{remaining}]  {desc}"
        quiet = not self._live
        self._bar = tqdm(
            total=total, initial=done, file=self._stream, dynamic_ncols=True, bar_format=bar_format, disable=quiet
        )
        self._last: dict[str, Any] = {}
        self._step, self._total, self._start = done, total, done
        self._was_known = False
        self._printer = ProgressPrinter(lambda line: print(line, file=self._stream, flush=True), clock=clock)
        self._watch = watch
        self._heartbeat = None if watch is None else Heartbeat(self.report_stage).__enter__()

    def log(self, row: Row) -> None:
        """Show the row; metrics of earlier rows stay on the line."""
        self._last.update({k: v for k, v in row.items() if v is not None})
        self._was_known |= bool(row.get("ope_reliable"))
        line = step_metrics_text(self._last, was_known=self._was_known)
        self._bar.set_description_str(line, refresh=False)
        self._bar.update(row["step"] - self._step)
        self._step = row["step"]
        if not self._live:

            def words(seconds: float) -> str:
                left = time_left(seconds, self._step - self._start, self._total - self._start)
                return "  ".join(filter(None, [f"step {self._step}/{self._total}", line, left]))

            is_step = self._step > self._start
            self._printer.tick(words, at_once=is_step and (self._step == self._total or self._total <= _FEW_STEPS))

    def report_stage(self) -> None:
        """Print the running stage of the stopwatch, if it takes long and no line was printed lately."""
        line = None if self._watch is None else self._watch.line()
        if line is None:
            return
        if self._live:
            self._bar.set_description_str(line)
        else:
            self._printer.tick(lambda _: f"step {self._step}/{self._total}  {line}")

    def close(self) -> None:
        """Leave the last state of the line on the screen."""
        if self._heartbeat is not None:
            self._heartbeat.__exit__(None, None, None)
        self._bar.refresh()
        self._bar.close()


def step_metrics_text(row: Row, was_known: bool = False) -> str:
    """Return the text of the live line for a row; `was_known`: an earlier step had an off-policy estimate.

    >>> value = {"": 0.41, "_low": 0.33, "_high": 0.49, "_ess_fraction": 0.8, "_reliable": 1}
    >>> value = {f"ope{end}": number for end, number in value.items()}
    >>> step_metrics_text({"loss": -0.0123, **value, "ratio_mean": 1.002, "clip_fraction": 0.01})
    'loss -0.0123  ope 0.410 (0.330-0.490)  ratio_mean 1.002  clip_fraction 1.0%  ope_ess_fraction 80%'
    """
    parts = []
    if "loss" in row:
        parts.append(f"loss {row['loss']:.4f}")
    if "ope" in row:
        value = off_policy_estimate(row)
        text = value and "{:.3f} ({:.3f}-{:.3f})".format(*value)
        parts.append(f"ope {text or ('no longer reliable' if was_known else 'unreliable')}")
    if "ratio_mean" in row:
        parts.append(f"ratio_mean {row['ratio_mean']:.3f}")
    if "clip_fraction" in row:
        parts.append(f"clip_fraction {row['clip_fraction']:.1%}")
    if row.get("ope_ess_fraction"):  # 0 means that no trace has a ratio, not that the sample is small
        parts.append(f"ope_ess_fraction {row['ope_ess_fraction']:.0%}")
    if "tokens_per_s" in row:
        parts.append(f"tokens_per_s {row['tokens_per_s']:,.0f}")
    return "  ".join(parts)


def off_policy_estimate(row: Row) -> tuple[float, float, float] | None:
    """Return the off-policy estimate of a row and the ends of its interval; None if the row has no reliable estimate.

    Every display of the estimate (command line, report, model card, viewer, notebook) uses this function.

    >>> row = {"ope": 0.95, "ope_low": 0.9, "ope_high": 1.0}
    >>> off_policy_estimate({**row, "ope_reliable": 1})
    (0.95, 0.9, 1.0)
    >>> off_policy_estimate({**row, "ope_reliable": 0}) is None
    True
    """
    value, low, high = (row.get(f"ope{end}") for end in ("", "_low", "_high"))
    if not row.get("ope_reliable") or value is None or low is None or high is None:
        return None
    return float(value), float(low), float(high)


MIN_ESS = 10.0
"""Minimum effective sample size of an off-policy estimate, in traces. With fewer, its interval is not reliable."""
MIN_ESS_FRACTION = 0.3
"""Minimum effective share of the held-out traces. Below it, traces that the policy now prefers were hardly recorded."""


def unreliable_reason(row: Row) -> str | None:
    """Return why the off-policy estimate of a row is not reliable, as a clause; None if it is reliable.

    >>> unreliable_reason({"ope": 0.5, "ope_ess": 6.0, "ope_ess_fraction": 0.05, "ope_traces": 120, "ope_clamped": 0})
    'the effective sample size is 6 of 120 held-out traces, and at least 36 are needed'
    """
    if off_policy_estimate(row) is not None:
        return None
    traces, clamped = (int(row.get(f"ope_{name}") or 0) for name in ("traces", "clamped"))
    ess, fraction = (float(row.get(f"ope_{name}") or 0.0) for name in ("ess", "ess_fraction"))
    ends = row.get("ope_low"), row.get("ope_high")
    low, high = (math.nan if end is None else float(end) for end in ends)
    return unreliable_sample_reason(traces, ess, fraction, clamped, low, high)


def unreliable_sample_reason(
    traces: int, ess: float, ess_fraction: float, clamped: int, low: float, high: float
) -> str | None:
    """Return why the interval of an off-policy estimate is not reliable, as a clause; None if it is reliable.

    Args:
        traces: number of held-out traces with a weight.
        ess, ess_fraction: effective sample size in traces, and its share of `traces`.
        clamped: number of traces with a clamped weight.
        low, high: ends of the interval; NaN if the traces are of one group.

    >>> unreliable_sample_reason(120, 90.0, 0.75, 2, 0.4, 0.5)
    '2 of 120 held-out traces have a clamped weight: the policy is far from the recorded one'
    """
    needed = max(MIN_ESS, math.ceil(MIN_ESS_FRACTION * traces - 1e-9))
    if not traces:
        return "no held-out trace has a reward and a recorded logprob for each of its trained tokens"
    if traces < MIN_ESS:
        return f"only {traces} held-out traces have a reward and recorded logprobs, and at least {MIN_ESS:g} are needed"
    if clamped:
        return f"{clamped} of {traces} held-out traces have a clamped weight: the policy is far from the recorded one"
    if not (ess >= MIN_ESS and ess_fraction >= MIN_ESS_FRACTION):
        return (
            f"the effective sample size is {int(ess)} of {traces} held-out traces, and at least {needed:g} are needed"
        )
    if math.isnan(low):
        return "the held-out traces are of one group"
    return None if low < high else "all held-out traces have the same reward"


STAGES = {
    "read": "reading",
    "align": "aligning",
    "import": "importing torch",
    "load": "loading the model",
    "verify": "verifying attention",
    "prepare": "packing",
    "old": "computing old logprobs",
    "ref": "computing reference logprobs",
    "value": "evaluating held-out traces",
    "train": "computing the gradient",
    "metrics": "computing metrics",
    "checkpoint": "saving a checkpoint",
    "report": "writing report.html",
}
"""What progress lines call the stages of a stopwatch."""


class Stopwatch:
    """Wall time by stage, in seconds.

    Args:
        on_begin: called with the name of each stage when it starts.
        clock: returns seconds.

    >>> watch = Stopwatch()
    >>> with watch("read"):
    ...     pass
    >>> list(watch.seconds)
    ['read']
    """

    def __init__(
        self, on_begin: Callable[[str], None] | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._on_begin, self._clock = on_begin, clock
        self._running: list[tuple[str, float]] = []
        self._work: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._unit = "steps"

    def __call__(self, stage: str) -> "Stopwatch":
        if self._on_begin is not None:
            self._on_begin(stage)
        self.advance(0, 0)
        self._running.append((stage, self._clock()))
        return self

    def __enter__(self) -> "Stopwatch":
        return self

    def __exit__(self, *_: object) -> None:
        stage, start = self._running.pop()
        self.advance(0, 0)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + self._clock() - start

    def advance(self, done: int, total: int) -> None:
        """Set how many steps of the running stage are done."""
        self.follow(lambda: done, total, "steps")

    def follow(self, done: Callable[[], int], total: int, unit: str) -> None:
        """Set where to read how much of the running stage is done, in a unit such as "conversations"."""
        self._work, self._unit = lambda: (done(), total), unit

    def line(self, without: Iterable[str] = ()) -> str | None:
        """Return the progress of the running stage; None if there is none, or for less than ten seconds.

        Args:
            without: stages that report their own progress.
        """
        running, (done, total) = self._running[-1:], self._work()  # a copy: another thread may end the stage
        if not running:
            return None
        [(stage, start)] = running
        seconds = self._clock() - start
        if seconds < EVERY_S or stage in without:
            return None
        details = [f"{done:,} of {total:,} {self._unit}"] if total else []
        return progress_line(STAGES.get(stage, stage), details, seconds=seconds, done=done, total=total)


@contextmanager
def reported_stages(
    watch: Stopwatch, log: Callable[[str], None] | None = None, *, without: Iterable[str] = ()
) -> Iterator[None]:
    """Print the running stage of a stopwatch every ten seconds, until the block ends.

    Args:
        log: receives the lines; default: standard error.
        without: stages that report their own progress.

    >>> watch = Stopwatch()
    >>> with reported_stages(watch, print), watch("align"):  # a stage of less than ten seconds prints nothing
    ...     pass
    """
    printer = ProgressPrinter(log)

    def beat() -> None:
        if (line := watch.line(without)) is not None:
            printer.tick(lambda _: line)

    try:
        with Heartbeat(beat):
            yield
    finally:
        printer.clear()


def log_all(sinks: Iterable[Sink], row: Row) -> None:
    """Log one row to every sink.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     sinks = [JsonLines(Path(folder, name)) for name in ("first.jsonl", "second.jsonl")]
    ...     log_all(sinks, {"step": 1, "loss": 0.5})
    ...     for sink in sinks:
    ...         sink.close()
    ...     [read_rows(sink.path)[0]["loss"] for sink in sinks]
    [0.5, 0.5]
    """
    for sink in sinks:
        sink.log(row)


PROJECT = "tracegrad"
_ID = "dashboard_id"


def open_sinks(names: Iterable[str], out: Path, config: Mapping[str, Any]) -> list[Sink]:
    """Return the selected dashboards, ready for rows.

    Args:
        names: their names, as in `train.report_to`.
        out: directory of the run. Its name is the run's name on the dashboard, and it stores the id with which a
            resumed run continues.
        config: options by dotted name, shown next to the curves.
    """
    return [_SINKS[name](out, config) for name in names]


class TensorBoard:
    """Scalars in event files below `out/tensorboard`."""

    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing_package("tensorboard") from error
        self._writer = SummaryWriter(str(out / "tensorboard"))
        self._writer.add_text("config", "\n".join(f"    {name} = {value!r}" for name, value in config.items()))

    def log(self, row: Row) -> None:
        """Write the finite numbers of the row."""
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """A Weights & Biases run in the project of WANDB_PROJECT or "tracegrad"; wandb's environment variables apply."""

    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing_package("wandb") from error
        settings = wandb.Settings(silent=True)
        project = None if settings.project else PROJECT
        self._run = wandb.init(
            project=project,
            resume="allow",
            id=_id(out),
            name=out.name,
            dir=str(out),
            config=dict(config),
            settings=settings,
        )

    def log(self, row: Row) -> None:
        """Log the finite numbers of the row."""
        self._run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        """Write what is buffered and end the run."""
        self._run.finish()


class Trackio:
    """A trackio run in the project "tracegrad", with rows and the traces of steps; its environment variables apply."""

    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        try:
            import trackio
        except ImportError as error:
            raise _missing_package("trackio") from error
        self._trackio = trackio
        name = f"{out.name}-{_id(out)}"
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(
                PROJECT,
                name=name,
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, row: Row) -> None:
        """Log the finite numbers of the row."""
        self._run.log(_numbers(row), step=row["step"])

    def log_traces(self, traces: Iterable[Trace], step: int) -> None:
        """Log conversations with their rewards, as trackio shows them."""
        for trace in traces:
            metadata = {"id": trace.id, "group": trace.group, "reward": trace.reward, **trace.rewards}
            conversation = self._trackio.Trace(messages=trace.messages, metadata=metadata)
            self._run.log({f"traces/{trace.id}": conversation}, step=step)

    def close(self) -> None:
        """Write what is buffered and end the run."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


_SINKS: dict[str, Callable[[Path, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def log_traces(sinks: Iterable[Sink], traces: Iterable[Trace], step: int) -> None:
    """Log traces to every sink that accepts them."""
    if accepting := [sink for sink in sinks if isinstance(sink, Trackio)]:
        traces = list(traces)
        for sink in accepting:
            sink.log_traces(traces, step)


def _numbers(row: Row) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
    }


def _id(out: Path) -> str:
    """Return the run's id on dashboards; it is created once for its directory."""
    path = out / _ID
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        files.write(path, secrets.token_hex(4) + "\n")
    return path.read_text(encoding="ascii").strip()


def _missing_package(name: str) -> ArgumentError:
    return ArgumentError(
        f"TG-METRIC-006: train.report_to names {name}, but that package is not installed. "
        f"Run pip install 'tracegrad[{name}]', or remove the name: metrics.jsonl is always written."
    )
