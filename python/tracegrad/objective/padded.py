"""Tensors in, loss out: `correct` and an objective in one call, for trainers that hold a step's tensors already.

Padded or flat; nothing is packed and no model is run. Called by any trainer, and by the tests of losses.
"""

from typing import Any

import torch
from torch import Tensor

from tracegrad.algebra import Missing, Objective
from tracegrad.correction import AllReduce, Corrected, Totals, correct
from tracegrad.objective.evaluate import Loss, Terms


def terms_of(
    objective: Objective,
    logprobs: Any,
    *,
    advantages: Any,
    mask: Any = None,
    old: Any = None,
    rollout: Any = None,
    ref: Any = None,
    trace: Any = None,
    turn: Any = None,
    group: Any = None,
    alpha: Any = None,
    totals: Totals | None = None,
    missing: Missing = "mask",
    all_reduce: AllReduce | None = None,
) -> tuple[Terms, Corrected]:
    """What an objective takes of terms beside their logprobs, corrected as one step.

    Args:
        logprobs: [B, S] with `mask`, or flat [M] with `trace`, of the policy being trained, nats; a tensor or numpy.
        advantages: [B], [B, S] or [M].
        mask: bool, True at the terms.
        old: logprobs before the step; None is the policy as it is, whose ratio to itself is 1.
        rollout, ref: read where the objective needs them; `rollout` is NaN where not known.
        trace, turn, group, totals, missing, all_reduce: as in `correct`.
        alpha: as in `Terms`.
    """
    needs, theta = objective.needs, torch.as_tensor(logprobs).detach()
    if old is None or not needs.old:
        old = theta if needs.old else None if needs.rollout else theta.new_zeros(theta.shape)
    known = {"rollout": rollout if needs.rollout else None, "ref": ref if needs.ref else None}
    ids = {"advantages": advantages, "trace": trace, "turn": turn, "group": group}
    how: Any = {"mask": mask, "totals": totals, "missing": missing, "all_reduce": all_reduce}
    corrected = correct(old, **known, **ids, **objective.plan, **how)
    half: Any = {
        "weight": corrected.weight,
        "keep": corrected.keep,
        "scale": corrected.scale,
        "scales": corrected.scales,
    }
    return Terms(old=old if needs.old else None, alpha=alpha, **known, **ids, **half), corrected


def padded_loss(
    objective: Objective, logprobs: Tensor, *, mask: Any, advantages: Any, entropy: Tensor | None = None, **arrays: Any
) -> Loss:
    """The loss of one step held as padded tensors, its denominators counted from them.

    Args:
        logprobs: [B, S] of the policy being trained, nats, with gradient.
        mask: [B, S] bool, True at the terms; a row is a trace.
        advantages: [B] or [B, S].
        entropy: [B, S], for objectives that take it.
        arrays: old, rollout, ref and the rest, as in `terms_of`.

    >>> import torch
    >>> from tracegrad import presets
    >>> logprobs = torch.tensor([[-1.0, -2.0], [-1.0, 0.0]], requires_grad=True)
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> given = {"mask": mask, "advantages": torch.tensor([1.0, -1.0]), "rollout": logprobs.detach()}
    >>> padded_loss(presets.GRPO, logprobs, **given).loss.backward()
    >>> logprobs.grad.tolist()  # -A / (2 traces * terms of the trace)
    [[-0.25, -0.25], [0.5, 0.0]]
    """
    terms, _ = terms_of(objective, logprobs, mask=mask, advantages=advantages, **arrays)
    return objective(logprobs, entropy, terms)
