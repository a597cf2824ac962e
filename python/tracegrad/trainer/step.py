"""Take one optimizer step: forward, correction, objective, backward, clipping, update.

The gradient is that of the whole step, however it is cut into rows. On CUDA, `Idle` measures how long the device waits
for the host.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tracegrad.errors import TracegradError
from tracegrad.metrics.aggregate import AllReduce
from tracegrad.model import PolicyLoss
from tracegrad.objective import Objective
from tracegrad.objective.correction import Corrected, correct
from tracegrad.packing import Batch, Step, prefetch
from tracegrad.trainer.distributed import Placed, check_exchanged, placed, whole
from tracegrad.trainer.verify_attention import settle_batches


class Idle:
    """Share of the time between the first and the last piece of work in which the device had none queued.

    A piece is what is launched within one `busy()`. Waits inside a piece, between two kernels of it, are not seen:
    the share is a lower bound.

    Args:
        device: where the work runs.

    >>> idle = Idle(torch.device("cpu"))
    >>> with idle.busy():
    ...     pass
    >>> idle.share() is None
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pieces: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waited = self._total = 0.0

    @property
    def measures(self) -> bool:
        """Whether the device has a clock of its own."""
        return self.device.type == "cuda"

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around the launches of one piece of work."""
        if not self.measures:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(self.device))
        yield
        end.record(torch.cuda.current_stream(self.device))
        self._pieces.append((begin, end))

    def share(self) -> float | None:
        """Waits over the whole time, of the pieces since the last call; None without a clock or with no piece.

        Waits for the device. The last piece stays as the beginning of the next share's first wait.
        """
        if not self._pieces:
            return None
        torch.cuda.synchronize(self.device)
        pieces = self._pieces
        waited = sum(before[1].elapsed_time(after[0]) for before, after in pairwise(pieces))
        total = pieces[0][0].elapsed_time(pieces[-1][1])
        self._pieces = pieces[-1:]
        self._waited, self._total = self._waited + waited, self._total + total
        return waited / total if total > 0 else 0.0

    def overall(self) -> float | None:
        """The share over everything that `share` was asked for; None where nothing was measured."""
        return self._waited / self._total if self._total > 0 else None


Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Outcome:
    """What one optimizer step saw. Arrays are [M] in the step's order, detached, on the CPU.

    Of terms whose head row was left out (`left_out`) logprob, entropy and ratio are NaN and the gradient 0; weight and
    keep are the correction's.

    Args:
        loss: of the whole step.
        grad_norm: of the whole gradient, before clipping.
        corrected: weight, keep, scale and the correction's metrics.
        logprobs, entropy: of the policy before the update, nats.
        ratio: of the surrogate, at its level; 1 where it takes none.
        clipped: whether the clip took the term's gradient away (`Surrogate.clipped`).
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
    model: Any,
    step: Step,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    *,
    missing: Literal["mask", "neutral", "refuse"] = "mask",
    grad_clip: float = 0.0,
    precision: torch.dtype = torch.float32,
    corrected: Corrected | None = None,
    left_out: NDArray[np.bool_] | None = None,
    idle: Idle | None = None,
    check: Callable[[Floats], None] | None = None,
) -> Outcome:
    """Takes one step, gradients accumulated over the batches and summed over the ranks.

    Args:
        model: a transformers causal LM on its device, or what `distributed.prepare` or accelerate made of it.
        step: with the old and ref logprobs that the objective needs; of this rank, where there are several.
        missing: the policy for terms without a rollout logprob, as in `correct`.
        grad_clip: the gradient is scaled down to this norm; 0 leaves it.
        precision: bfloat16 runs the forward pass under autocast.
        corrected: `detached(step, ...)`, where it is known already.
        left_out: [M] bool, terms that can change neither loss nor gradient (`Step.idle`): no head rows for them.
        idle: takes the times of the device's work.
        check: called with the [M] logprobs of the policy before the update; what it raises, on any rank, leaves the
            parameters of all ranks as they were.

    Raises:
        ArgumentError: for a bare model where a process group is open: nobody would exchange its gradients.
        TracegradError: if the gradient is not finite; the parameters are then as they were.
    """
    target = placed(model)
    ranks = target.ranks
    check_exchanged(target)
    settle_batches(target, step.batches)
    corrected = corrected or detached(step, objective, missing, None if ranks.alone else ranks.all_reduce)
    optimizer.zero_grad(set_to_none=True)
    batches = step.batches if left_out is None else tuple(b.without(left_out[b.term]) for b in step.batches)
    seen = _accumulate(target, step, batches, objective, corrected, precision, idle or Idle(target.device))
    arrays = seen.arrays(batches, _unseen(len(step), corrected))
    if check is not None:
        ranks.agree(_refusal(check, arrays["logprobs"]))
    norm = _update(target, optimizer, grad_clip)
    return Outcome(loss=ranks.sum(seen.loss()), grad_norm=norm, corrected=corrected, **arrays)


def _refusal(check: Callable[[Floats], None], logprobs: Floats) -> TracegradError | None:
    try:
        check(logprobs)
    except TracegradError as error:
        return error
    return None


def _unseen(terms: int, corrected: Corrected) -> dict[str, NDArray[Any]]:
    """[M] each: what is said of a term that no batch holds."""
    unknown = np.full(terms, np.nan, np.float32)
    return {
        **{name: unknown.copy() for name in ("logprobs", "entropy", "ratio")},
        "weight": np.asarray(corrected.weight, np.float32).copy(),
        "gradient": np.zeros(terms, np.float32),
        "clipped": np.zeros(terms, bool),
        "keep": np.asarray(corrected.keep, bool).copy(),
    }


@dataclass
class _Seen:
    """What the batches of a step left on the device, copied to the host once, after the last."""

    found: list[PolicyLoss] = field(default_factory=list)

    def loss(self) -> float:
        return sum(float(each.loss.detach()) for each in self.found)

    def arrays(self, batches: Sequence[Batch], out: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Fills [M] each, in the step's order."""
        for name, values in out.items():
            for batch, each in zip(batches, self.found, strict=True):
                own = name in ("logprobs", "entropy", "gradient")
                values[batch.term] = getattr(each if own else each.per_term, name).cpu().numpy()
        return out


def _accumulate(
    target: Placed,
    step: Step,
    batches: Sequence[Batch],
    objective: Objective,
    corrected: Corrected,
    precision: torch.dtype,
    idle: Idle,
) -> _Seen:
    """Forward and backward passes of all batches; the next batch is on its way while one is worked on."""
    seen = _Seen()
    for number, batch in enumerate(prefetch(batches, target.device), start=1):
        with idle.busy(), target.last(number == len(batches)):
            loss, found = target.loss(batch, step.terms(batch, corrected), objective, precision)
            loss.backward()
        seen.found.append(replace(found, loss=found.loss.detach()))
    return seen


def detached(
    step: Step,
    objective: Objective,
    missing: Literal["mask", "neutral", "refuse"],
    all_reduce: AllReduce | None = None,
    **other: Any,
) -> Corrected:
    """`correct` with everything it takes from a step and an objective, or `other` in its place; over ranks with
    `all_reduce`.
    """
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
        **{**objective.plan, **other},
        totals=step.totals,
        group_terms=step.group_terms,
        group_traces=step.group_traces,
        missing=missing,
        all_reduce=all_reduce,
    )


def measure(model: Any, batches: Sequence[Batch], precision: torch.dtype = torch.float32) -> list[Floats]:
    """Logprobs of the terms of each batch under the model as it is, without gradient: `old`, `ref`, or for value."""
    target = placed(model)
    settle_batches(target, batches)
    with torch.no_grad():
        logprobs = [target.forward(batch.to(target.device), precision)[0] for batch in batches]
    target.rest()
    return [each.cpu().numpy() for each in logprobs]


def _update(target: Placed, optimizer: torch.optim.Optimizer, grad_clip: float) -> float:
    trained = [parameter for parameter in target.model.parameters() if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained])  # type: ignore[misc]
    norm = float(whole(total))
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        raise TracegradError(
            f"the norm of the gradient is {norm}. The step would turn every parameter into NaN, so it was not taken. "
            "Lower optimizer.lr or set optimizer.grad_clip, and go on from the last checkpoint with --resume."
        )
    torch.nn.utils.clip_grads_with_norm_(trained, grad_clip or math.inf, whole(total))
    optimizer.step()
    return norm
