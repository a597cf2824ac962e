"""What an online run can be told beside the options of training; a run.toml holds them under [online] and [play]."""

from dataclasses import dataclass
from typing import Literal

from tracegrad.errors import ArgumentError

IN_PROCESS = "in-process"
"""What `servers=` says for vLLM in the trainer's process; alone, or as the only one of a list."""


@dataclass(frozen=True)
class Online:
    """What the trainer does. Groups in a step are `pack.step_groups`; a checkpoint's cadence is `checkpoint.every`."""

    steps: int = 100
    """Optimizer steps."""
    steps_ahead: int = 1
    """Steps whose groups may be begun before the trainer needs them; 0 plays and trains in turns. It bounds what is
    begun, and not how old a trained token may be: a group that is slower than others is trained when it has finished,
    by its recorded logprobs, and `staleness_max` says by how many versions."""
    refill: int = 3
    """A step is given up to so many times its groups, where the rewards of some are equal and teach nothing."""
    eval_every: int = 0
    """Steps between evaluations; 0: before the first step and after the last alone."""
    sync: Literal["file", "lora", "nccl"] = "file"
    """How weights reach the servers: whole by a file, adapters (`train.lora_rank`) by a name for each version, or whole
    by NCCL from CUDA to CUDA, which has not run between two GPUs yet."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("refill", 1), ("steps_ahead", 0), ("eval_every", 0)):
            _require(getattr(self, name) >= least, f"online.{name}", getattr(self, name), f"at least {least}")


@dataclass(frozen=True)
class Play:
    """How a task is played, with or without training."""

    samples: int = 8
    """Trajectories of each task: a group."""
    temperature: float = 1.0
    """Of the sampling."""
    ids: Literal["chat", "tokens"] = "chat"
    """How turns reach the servers: "chat" renders each anew, for any agent; "tokens" sends ids, so that no sampled
    token is tokenised again: to servers with --enable-scale-out, for contracts that ask `policy.chat`."""
    max_tokens: int = 1024
    """Sampled tokens of one call at most."""
    turns: int = 16
    """Calls of one trajectory at most."""
    seconds: float = 600.0
    """Time of one trajectory at most."""
    patience: float = 900.0
    """Seconds without a finished group after which all stops and the oldest trajectory is named."""
    failures: int = 32
    """Failed trajectories in a row after which all stops with the traceback of the first."""

    def __post_init__(self) -> None:
        for name in ("samples", "max_tokens", "turns", "failures"):
            _require(getattr(self, name) >= 1, f"play.{name}", getattr(self, name), "at least 1")
        _require(self.ids in ("chat", "tokens"), "play.ids", self.ids, 'one of "chat" and "tokens"')
        for name in ("temperature", "seconds", "patience"):
            _require(0 < getattr(self, name) < float("inf"), f"play.{name}", getattr(self, name), "above 0, and finite")


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ArgumentError(f"{name} is {value!r}. A run with it would play nothing. It must be {rule}.")
