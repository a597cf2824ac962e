"""One optimizer step over a `Step`: forward, correction, objective, backward, clip, update, and what was seen.

The gradient is that of the whole step, however it was cut into rows. No loop, no files. Called by `loop`, or by a
trainer that packs with `tracegrad.batch` and keeps its own loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tracegrad.algebra import Objective
from tracegrad.batch import Batch, Step
from tracegrad.correction import Corrected, correct
from tracegrad.errors import TracegradError
from tracegrad.objective import Loss
from tracegrad.policy import logprobs, logprobs_and_entropy

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Outcome:
    """What one optimizer step saw. Arrays are [M] in the step's order, detached, on the CPU.

    Args:
        loss: of the whole step.
        grad_norm: of the whole gradient, before clipping.
        corrected: weight, keep, scale and the correction's metrics.
        logprobs, entropy: of the policy before the update, nats.
        ratio: of the surrogate, at its level; 1 where it takes none.
        clipped: whether the clip took the term's gradient away.
        gradient: d loss / d logprob, what the term pulls with.
        weight: the product of all weights, those on the trained policy included; 1 where not kept.
        keep: what all gates have left, those on the trained policy included.
    """

    loss: float
    grad_norm: float
    corrected: Corrected
    logprobs: Floats
    entropy: Floats
    ratio: Floats
    clipped: NDArray[np.bool_]
    gradient: Floats
    weight: Floats
    keep: NDArray[np.bool_]


def optimizer_step(
    model: nn.Module,
    step: Step,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    *,
    missing: Literal["mask", "neutral", "refuse"] = "mask",
    grad_clip: float = 0.0,
    precision: torch.dtype = torch.float32,
) -> Outcome:
    """Takes one step, gradients accumulated over the batches.

    Args:
        model: a transformers causal LM on its device.
        step: with the old and ref logprobs that the objective needs.
        missing: the policy for terms without a rollout logprob, as in `correct`.
        grad_clip: the gradient is scaled down to this norm; 0 leaves it.
        precision: bfloat16 runs the forward pass under autocast.

    Raises:
        TracegradError: if the gradient is not finite; the parameters are then as they were.
    """
    corrected = detached(step, objective, missing)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    seen = {name: np.zeros(len(step), np.float32) for name in ("logprobs", "entropy", "ratio", "weight", "gradient")}
    flags = {name: np.zeros(len(step), bool) for name in ("clipped", "keep")}
    for batch in step.batches:
        moved = batch.to(device_of(model))
        with autocast(model, precision):
            logp, entropy = logprobs_and_entropy(model, moved)
        logp.retain_grad()
        loss: Loss = objective(logp, entropy, step.terms(moved, corrected))
        loss.loss.backward()
        total += float(loss.loss.detach())
        told = loss.per_term
        columns = {"logprobs": logp, "entropy": entropy, "ratio": told.ratio, "weight": told.weight}
        for name, values in {**columns, "gradient": logp.grad}.items():
            seen[name][batch.term] = 0.0 if values is None else _host(values)
        for name, values in flags.items():
            values[batch.term] = _host(getattr(told, name))
    norm = _update(model, optimizer, grad_clip)
    return Outcome(loss=total, grad_norm=norm, corrected=corrected, **seen, **flags)


def detached(step: Step, objective: Objective, missing: Literal["mask", "neutral", "refuse"]) -> Corrected:
    """`correct` with everything it takes from a step and an objective."""
    needs = objective.needs
    nothing = None if needs.rollout else np.zeros_like(step.advantages)  # without any ratio only keep and scale matter
    return correct(
        step.old_logprobs if needs.old else nothing,
        step.rollout_logprobs if needs.rollout else None,
        ref=step.ref_logprobs if needs.ref else None,
        trace=step.trace,
        turn=step.turn,
        group=step.group,
        advantages=step.advantages,
        weights=objective.weights,
        gates=objective.gates,
        reduce=objective.reduce,
        reductions=objective.reductions,
        totals=step.totals,
        group_terms=step.group_terms,
        group_traces=step.group_traces,
        missing=missing,
    )


def measure(model: nn.Module, batches: Sequence[Batch], precision: torch.dtype = torch.float32) -> list[Floats]:
    """Logprobs of the terms of each batch under the model as it is, without gradient: `old`, `ref`, or for value."""
    found = []
    with torch.no_grad():
        for batch in batches:
            with autocast(model, precision):
                found.append(_host(logprobs(model, batch.to(device_of(model)))))
    return found


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next(model.parameters()).device


def autocast(model: nn.Module, precision: torch.dtype) -> AbstractContextManager[Any]:
    """Autocast to `precision` on the model's device; nothing for float32."""
    if precision == torch.float32:
        return nullcontext()
    return torch.autocast(device_of(model).type, dtype=precision)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, grad_clip: float) -> float:
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = float(torch.nn.utils.clip_grad_norm_(trained, grad_clip or math.inf))
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        raise TracegradError(
            f"the norm of the gradient is {norm}. The step would turn every parameter into NaN, so it was not taken. "
            "Lower optimizer.lr or set optimizer.grad_clip, and go on from the last checkpoint with --resume."
        )
    optimizer.step()
    return norm


def _host(values: Tensor) -> NDArray[Any]:
    return values.detach().cpu().numpy()
