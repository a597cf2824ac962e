"""The result of `train`, and per-token arrays for the report."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tracegrad.packing import Step
from tracegrad.storage import safetensors_file
from tracegrad.trainer.step import StepResult


@dataclass(frozen=True)
class TokenRecord:
    """Per-token arrays of one step for the report; [M] each, in the step's order.

    Args:
        step: the optimizer step, from 1.
        origin: token index in the `Sequences`.
        trace: trace index in the `Sequences`.
        ratio, weight, keep, clipped, advantages, logprobs, gradient: as in `StepResult` and `Step`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import torch
    >>> from tracegrad import Sequences, pack
    >>> from tracegrad.objective import Objective, PolicyGradient
    >>> from tracegrad.trainer import optimizer_step
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size))
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [float("nan"), -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> record = TokenRecord.of(1, step, optimizer_step(model, step, Objective(PolicyGradient()), optimizer))
    >>> record.origin.tolist(), record.gradient.tolist()  # -A / 2 tokens
    ([1, 2], [-0.5, -0.5])
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
    def of(cls, step: int, packed: Step, outcome: StepResult) -> "TokenRecord":
        """Build a record of the trained tokens whose logprob the step has computed."""
        computed = ~np.isnan(outcome.logprobs)
        columns = {name: getattr(packed, name)[computed] for name in ("origin", "trace", "advantages")}
        names = ("ratio", "weight", "keep", "clipped", "logprobs", "gradient")
        return cls(step, **columns, **{name: getattr(outcome, name)[computed] for name in names})


def save_token_records(path: Path, terms: Sequence[TokenRecord]) -> None:
    """Write the concatenated records into a checkpoint."""
    arrays = {name: _joined([getattr(term, name) for term in terms], kind) for name, kind in _COLUMNS.items()}
    steps = np.repeat([term.step for term in terms], [len(term.origin) for term in terms]).astype(np.int64)
    safetensors_file.write(path, {**arrays, "step": steps})


def load_token_records(path: Path) -> list[TokenRecord]:
    """Read the records that `save_token_records` wrote.

    Raises:
        ReadError, FormatError: if the file cannot be read.
        ValueError, KeyError: if its contents are invalid.
    """
    arrays, _ = safetensors_file.read(path)
    steps = arrays["step"]
    wrong = [name for name, kind in _COLUMNS.items() if arrays[name].dtype != kind or arrays[name].shape != steps.shape]
    if wrong or steps.ndim != 1 or steps.dtype != np.int64 or np.any(steps[1:] < steps[:-1]):
        raise ValueError(f"{path.name} does not contain the tokens of steps in ascending order")
    ends = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)] if len(steps) else [0]
    parts = [slice(start, stop) for start, stop in pairwise(ends)]
    return [
        TokenRecord(int(steps[part.start]), **{name: arrays[name][part].copy() for name in _COLUMNS}) for part in parts
    ]


_KINDS = {"origin": np.int64, "trace": np.int32, "keep": np.bool_, "clipped": np.bool_}
_COLUMNS: dict[str, Any] = {column.name: _KINDS.get(column.name, np.float32) for column in fields(TokenRecord)[1:]}


def _joined(columns: list[NDArray[Any]], kind: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, kind), *columns]).astype(kind)


@dataclass
class TrainResult:
    """The result of a training run.

    Args:
        step: number of optimizer steps done, out of `total`.
        total: number of planned optimizer steps.
        stopped: why training stopped: "done", "ope_ess" or "ope_falls" (conditions of `[stop]`), or "signal".
        exit_code: 0, or 128 + signal.
        checkpoint: the newest checkpoint. For a run at an address, its local copy in a folder of this process, which is
            deleted when the process ends.
        rows: the rows of metrics.jsonl, including those before a resume.
        terms: records of trained tokens of the last epoch, including those before a resume. The first rank has the
            records of all ranks, another rank its own. For `PreparedDataset`, only records of traces that a report
            shows.
        seconds: wall time by stage in seconds, including that before a resume.
        device_idle_share: share of time in which the device had no queued work, a lower bound; None on a CPU.
        gradient_magnitude: sum of |d loss / d logprob| over all trained tokens of the last epoch.
        address: address of the newest checkpoint if the run is at an address, else None.
        counts: traces and tokens of an epoch by their use, from `TrainingData.counts`.

    >>> from tempfile import TemporaryDirectory
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracegrad import Sequences, presets
    >>> from tracegrad.config import Config, Data
    >>> from tracegrad.trainer import train
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size))
    >>> logprobs, trainable = [float("nan"), -2.0] * 2, [False, True] * 2
    >>> data = Sequences.from_arrays([5, 6, 5, 7], [0, 2, 4], logprobs, trainable, group=[0, 0], rewards=[1.0, 0.0])
    >>> options = {"objective": presets.GRPO, "config": Config(data=Data(holdout=0.0)), "sinks": []}
    >>> with TemporaryDirectory() as folder:
    ...     result = train(data, model, out=folder, log=lambda line: None, **options)
    >>> result.step, result.total, result.stopped, result.checkpoint.name
    (1, 1, 'done', 'step-00000001')
    """

    step: int
    total: int
    stopped: Literal["done", "ope_ess", "ope_falls", "signal"]
    exit_code: int
    checkpoint: Path
    rows: list[dict[str, Any]]
    terms: list[TokenRecord]
    seconds: dict[str, float]
    device_idle_share: float | None = None
    gradient_magnitude: float = 0.0
    address: str | None = None
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def trained(self) -> dict[str, int]:
        """Numbers of traces and tokens that the first epoch trained, and of those with a gradient in their step."""
        rows = [row for row in self.rows if row.get("epoch") == 0]
        names = {"traces": "traces", "tokens": "tokens_trained"}
        names |= {name: name for name in ("traces_with_gradient", "tokens_with_gradient")}
        return {name: sum(int(row.get(metric) or 0) for row in rows) for name, metric in names.items()}

    @property
    def best_step(self) -> int:
        """The step with the highest reliable off-policy estimate; 0 if no estimate was reliable."""
        reliable = [row for row in self.rows if row.get("ope_reliable")]
        return max(reliable, key=lambda row: row["ope"])["step"] if reliable else 0
