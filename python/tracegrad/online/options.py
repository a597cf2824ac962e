"""What an online run can be told beside the options of training; a run.toml holds them under [online]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tracegrad.errors import ArgumentError


@dataclass(frozen=True)
class Online:
    """How is played. Groups in a step are `pack.step_groups`; a checkpoint's cadence is `checkpoint.every`."""

    steps: int = 100
    """Optimizer steps."""
    samples: int = 8
    """Trajectories of each task: a group."""
    max_lag: int = 1
    """Steps that the trainer may be ahead of what is played. 0 plays and trains in turns."""
    refill: int = 3
    """A step is given up to so many times its groups, where the rewards of some are equal and teach nothing."""
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
    eval_every: int = 0
    """Steps between evaluations; 0: before the first step and after the last alone."""
    patience: float = 900.0
    """Seconds without a finished group after which the run stops and names the oldest trajectory."""
    failures: int = 32
    """Failed trajectories in a row after which the run stops with the traceback of the first."""
    sync: Literal["file", "lora", "nccl"] = "file"
    """How weights reach the servers: whole by a file, adapters (`train.lora_rank`) by a name for each version, or whole
    by NCCL from CUDA to CUDA, which no GPU has run yet."""

    def __post_init__(self) -> None:
        for name in ("steps", "samples", "refill", "max_tokens", "turns", "failures"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(self.ids in ("chat", "tokens"), "ids", self.ids, 'one of "chat" and "tokens"')
        for name in ("max_lag", "eval_every"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        for name in ("temperature", "seconds", "patience"):
            _require(0 < getattr(self, name) < float("inf"), name, getattr(self, name), "above 0, and finite")


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ArgumentError(f"online.{name} is {value!r}. A run with it would play nothing. It must be {rule}.")
