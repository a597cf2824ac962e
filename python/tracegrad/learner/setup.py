"""What a run needs before its first step: the model in its place, the optimizer, and proof that things fit together.

Called by the loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tracegrad.config import Config
from tracegrad.errors import ArgumentError
from tracegrad.learner.checkpoint import Progress
from tracegrad.sequence import Sequences

MAY_CHANGE = ("train.epochs", "train.value_per_epoch", "train.stop_below_ess", "train.tensorboard", "checkpoint.")
"""Options that a resumed run may have otherwise than the run it goes on with."""


def adamw(model: torch.nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW as the config says; vectors (norms, biases) are not decayed."""
    told = config.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": told.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=told.lr, betas=(told.beta1, told.beta2), eps=told.eps)


def learning_rate(config: Config, step: int) -> float:
    """lr of optimizer step `step`, from 0: linear warm-up, then constant.

    >>> learning_rate(Config(), 0)
    1e-06
    """
    return config.optimizer.lr * min(1.0, (step + 1) / max(config.optimizer.warmup_steps, 1))


def place(model: Any, config: Config) -> torch.dtype:
    """Moves the model where it trains, in float32 and without dropout; returns the precision of its forward pass."""
    told = config.train.device
    try:
        device = torch.device(
            "cuda" if told == "auto" and torch.cuda.is_available() else "cpu" if told == "auto" else told
        )
        model.to(device=device, dtype=torch.float32).eval()
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"train.device is {told!r}: {str(error).splitlines()[0]}. The model cannot go there. Leave it out for auto."
        ) from error
    bf16 = config.train.dtype == "bf16" or (config.train.dtype == "auto" and device.type == "cuda")
    return torch.bfloat16 if bf16 else torch.float32


def check_vocabulary(sequences: Sequences, model: Any) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    highest = int(sequences.ids.max(initial=0))
    if highest >= size:
        raise ArgumentError(
            f"token id {highest} stands in the traces, and the model has {size} embeddings. They are of another "
            "tokenizer. Align with the tokenizer of the model that is trained."
        )


def check_same(path: Path, progress: Progress, told: dict[str, Any], fingerprint: str) -> None:
    for name, value in told.items():
        before = progress.config.get(name)
        if before != value and not name.startswith(MAY_CHANGE):
            raise ArgumentError(
                f"{path}: {name} was {before!r} and is now {value!r}. The run would not be the one that is resumed. "
                f"Set it back, or start anew with another --out and --model {path}."
            )
    if progress.fingerprint != fingerprint:
        raise ArgumentError(
            f"{path}: the traces are not those that the run was started with. Its steps would be others. "
            f"Give the same traces, or start anew with another --out and --model {path}."
        )
