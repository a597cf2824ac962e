"""Dashboards that people already look at: TensorBoard, wandb and trackio, each imported when it is chosen.

Each is a sink: it takes the finite numbers of a row under the step's number. trackio takes traces as well.
`opened` makes the chosen ones for the folder of a run; a run that is resumed goes on under its name there.
"""

import math
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tracegrad import outputs
from tracegrad.dotted import split_names
from tracegrad.errors import ArgumentError
from tracegrad.metrics.sinks import Row, Sink
from tracegrad.trace import Trace

PROJECT = "tracegrad"
_ID = "dashboard_id"


def opened(told: str, out: Path, config: Mapping[str, Any]) -> list[Sink]:
    """The dashboards that are chosen, ready for rows.

    Args:
        told: their names, with commas between, as `train.log_to` has them.
        out: folder of the run, which has its name on the dashboard. It keeps the id under which a resumed run goes on.
        config: options by dotted name, shown beside the curves.
    """
    return [_SINKS[name](out, config) for name in split_names(told)]


class TensorBoard:
    """Scalars in event files below `out/tensorboard`."""

    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._writer = SummaryWriter(str(out / "tensorboard"))
        self._writer.add_text("config", "\n".join(f"    {name} = {value!r}" for name, value in config.items()))

    def log(self, row: Row) -> None:
        """Writes the finite numbers of the row."""
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, in the project of WANDB_PROJECT or "tracegrad"; wandb's own variables apply."""

    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        settings = wandb.Settings(silent=True)
        project = None if settings.project else PROJECT
        told: dict[str, Any] = {
            "id": _id(out),
            "name": out.name,
            "dir": str(out),
            "config": dict(config),
            "settings": settings,
        }
        self._run = wandb.init(project=project, resume="allow", **told)

    def log(self, row: Row) -> None:
        """Logs the finite numbers of the row."""
        self._run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        """Writes what is held back and ends the run."""
        self._run.finish()


class Trackio:
    """A run of trackio, in the project "tracegrad", with rows and the traces of steps; its own variables apply."""

    def __init__(self, out: Path, config: Mapping[str, Any]) -> None:
        try:
            import trackio
        except ImportError as error:
            raise _missing("trackio") from error
        self._trackio = trackio
        name = f"{out.name}-{_id(out)}"
        quiet: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(PROJECT, name=name, config=dict(config), resume="allow", **quiet)

    def log(self, row: Row) -> None:
        """Logs the finite numbers of the row."""
        self._run.log(_numbers(row), step=row["step"])

    def log_traces(self, traces: Iterable[Trace], step: int) -> None:
        """Logs conversations with their rewards, as trackio shows them."""
        for trace in traces:
            about = {"id": trace.id, "group": trace.group, "reward": trace.reward, **trace.rewards}
            shown = self._trackio.Trace(messages=trace.messages, metadata=about)
            self._run.log({f"traces/{trace.id}": shown}, step=step)

    def close(self) -> None:
        """Writes what is held back and ends the run."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


_SINKS: dict[str, Callable[[Path, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


def log_traces(sinks: Iterable[Sink], traces: Iterable[Trace], step: int) -> None:
    """Gives traces to every sink that takes them."""
    if takers := [sink for sink in sinks if isinstance(sink, Trackio)]:
        traces = list(traces)
        for sink in takers:
            sink.log_traces(traces, step)


def _numbers(row: Row) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
    }


def _id(out: Path) -> str:
    """The run's id on dashboards, made once for its folder."""
    path = out / _ID
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        outputs.write(path, secrets.token_hex(4) + "\n")
    return path.read_text(encoding="ascii").strip()


def _missing(name: str) -> ArgumentError:
    return ArgumentError(
        f"train.log_to names {name}, and that package is not installed. Nothing can be written for it. "
        f"pip install 'tracegrad[{name}]', or leave the name out: metrics.jsonl is always written."
    )
