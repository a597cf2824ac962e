"""The options of a run as frozen dataclasses, each with its default and a docstring.

Values and their bounds alone; `reading` fills them from TOML and the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tracegrad.errors import ArgumentError

Scalar = bool | int | float | str


@dataclass(frozen=True)
class Data:
    """Which traces are read and what is made of them."""

    on_error: Literal["raise", "skip", "quarantine"] = "raise"
    """A record that cannot be read or aligned: stop, leave it out and count it, or write it aside with the reason."""
    logprob_kind: Literal["recorded", "raw", "processed", "unknown"] = "recorded"
    """What the logprobs are of: as each record says, or this. vLLM's default is raw, before temperature and top-p."""
    text_only: bool = False
    """Take the traces as text of another model: only objectives without a ratio can train on them."""
    lenient: bool = False
    """After an id that cannot be known go on with the canonical tokens of the text, untrained and counted."""
    reward: str = ""
    """Name of the reward column to train on; empty: the first."""
    holdout: float = 0.05
    """Share of the groups kept out of training to measure value; 0 measures none."""

    def __post_init__(self) -> None:
        _require(0 <= self.holdout < 1, "data.holdout", self.holdout, "it must be at least 0 and below 1")


@dataclass(frozen=True)
class Pack:
    """How traces become steps and rows."""

    token_budget: int = 8192
    """Tokens of one packed row, one forward pass. Lower it where memory runs out; the gradient stays the same."""
    step_groups: int = 16
    """Groups in one optimizer step."""
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    """A branch longer than token_budget: stop, leave its trace out, or cut its end. Both are counted."""
    leave_out: Literal["nothing", "repeats", "idle", "both"] = "nothing"
    """Work that changes no gradient: beginnings that traces share, where it pays; advantage or weight 0; or both."""

    def __post_init__(self) -> None:
        _require(self.token_budget > 1, "pack.token_budget", self.token_budget, "it must be at least 2")
        _require(self.step_groups > 0, "pack.step_groups", self.step_groups, "it must be at least 1")

    @property
    def share_prefixes(self) -> bool:
        """Whether what traces begin with alike is computed once, where that is predicted to pay."""
        return self.leave_out in ("repeats", "both")

    @property
    def skip_idle(self) -> bool:
        """Whether what has no advantage or no weight is left out; metrics are then of the rest."""
        return self.leave_out in ("idle", "both")


@dataclass(frozen=True)
class Advantage:
    """From rewards to advantages."""

    baseline: Literal["group_mean", "batch_mean", "rloo", "opo", "max_rl", "none"] = "group_mean"
    """Subtracted: the mean of the group, the batch, the others (rloo), by length (opo); max_rl divides by it too."""
    scale: Literal["none", "std", "batch_std"] = "none"
    """A mean's divisor: std of the group is GRPO as published, none Dr. GRPO (arXiv 2503.20783), batch_std of all."""
    ddof: int = 1
    """With a scale: 1 divides by n - 1 (TRL, verl, SkyRL), 0 by n (ART)."""
    singleton: Literal["refuse", "zero", "keep"] = "refuse"
    """A group of one trace has no baseline: stop, give it advantage 0, or let it keep its reward."""

    def __post_init__(self) -> None:
        _require(self.ddof in (0, 1), "advantage.ddof", self.ddof, "it must be 0 or 1")


@dataclass(frozen=True)
class Optimizer:
    """AdamW and its schedule: linear warm-up, then constant."""

    lr: float = 1e-6
    """Learning rate. 1e-6 suits models of a billion parameters and more; the quickstart's 0.7 M take 2e-4."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    warmup_steps: int = 0
    """Optimizer steps over which lr rises from 0 (exclusive) to its value."""
    grad_clip: float = 1.0
    """The gradient is scaled down to this norm; 0 leaves it as it is."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optimizer.lr", self.lr, "it must be above 0")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "it must be in [0, 1)")
        for name in ("eps", "weight_decay", "warmup_steps", "grad_clip"):
            _require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "it must not be negative")


@dataclass(frozen=True)
class Train:
    """The loop."""

    epochs: int = 1
    """Passes over the groups."""
    seed: int = 0
    """Of the held-out choice and of the order of the groups."""
    updates_per_old: int = 0
    """Optimizer steps between two refreshes of `old`; 0: one epoch. At 1, theta is old and nothing clips."""
    missing: Literal["mask", "neutral", "refuse"] = "mask"
    """A term without a rollout logprob: leave it out, weigh it 1 (not where the surrogate takes rollout), stop."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu; or any torch device."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the forward pass. auto: bf16 autocast on cuda, fp32 on cpu. Parameters and optimizer stay fp32."""
    value_per_epoch: int = 4
    """Measurements of value in an epoch, the one at its end included; there is always one before the first step."""
    stop_below_ess: float = 0.0
    """Stop, with a checkpoint, when value's effective sample size falls below this share of the held-out traces."""
    tensorboard: bool = False
    """Write TensorBoard scalars beside metrics.jsonl."""
    memory: Literal["speed", "balanced", "low"] = "speed"
    """Memory or time: balanced recomputes layers and cuts the head's chunks, low shrinks more and takes longer."""
    compile: bool = False
    """Compile each layer by torch.compile; needs a C++ or CUDA compiler on the machine."""
    lora_rank: int = 0
    """Rank of LoRA adapters on all linear layers but the head, which alone are then trained (peft); 0: none."""
    ref_every: int = 0
    """Optimizer steps after which the policy becomes its own reference again; 0: the reference stays as it began."""
    ref_model: str = ""
    """Folder of another model as reference; empty: the starting model, with adapters the model without them."""

    def __post_init__(self) -> None:
        _require(self.epochs > 0, "train.epochs", self.epochs, "it must be at least 1")
        for name in ("seed", "updates_per_old", "lora_rank", "ref_every"):
            _require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "it must not be negative")
        _require(self.value_per_epoch > 0, "train.value_per_epoch", self.value_per_epoch, "it must be at least 1")
        _require(0 <= self.stop_below_ess < 1, "train.stop_below_ess", self.stop_below_ess, "it must be in [0, 1)")


@dataclass(frozen=True)
class Parallel:
    """Several processes, which torchrun starts."""

    mode: Literal["auto", "fsdp", "ddp", "none"] = "auto"
    """fsdp shards parameters, gradients and optimizer; ddp copies them; auto: fsdp on CUDA, ddp on CPU, none alone."""


@dataclass(frozen=True)
class Checkpoint:
    """When the run's state is written, and how much of it stays."""

    every: int = 0
    """Optimizer steps between checkpoints; 0: at the end of each epoch."""
    keep: int = 2
    """How many of the newest checkpoints stay."""

    def __post_init__(self) -> None:
        _require(self.every >= 0, "checkpoint.every", self.every, "it must not be negative")
        _require(self.keep > 0, "checkpoint.keep", self.keep, "it must be at least 1")


@dataclass(frozen=True)
class Choice:
    """Which objective: a preset's name and what is changed in it."""

    preset: str = "DAPO"
    """Attribute of tracegrad.presets, or module:NAME."""
    overrides: tuple[tuple[str, Scalar], ...] = ()
    """Fields of the preset by their own names: objective.surrogate.high = 0.28."""


@dataclass(frozen=True)
class Config:
    """A whole run.

    >>> Config().optimizer.lr
    1e-06
    """

    data: Data = field(default_factory=Data)
    pack: Pack = field(default_factory=Pack)
    advantage: Advantage = field(default_factory=Advantage)
    optimizer: Optimizer = field(default_factory=Optimizer)
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    objective: Choice = field(default_factory=Choice)


SECTIONS = tuple(f.name for f in fields(Config))


def _require(holds: bool, name: str, value: Any, rule: str) -> None:
    if not holds:
        raise ArgumentError(
            f"{name} is {value!r}: {rule}. A run with it would mean nothing. Correct it or leave it out."
        )
