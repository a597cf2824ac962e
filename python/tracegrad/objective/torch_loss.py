"""Evaluate an objective in torch: what depends on the policy being trained, with its gradient.

`evaluate` takes flat arrays, `padded_loss` the padded tensors of other trainers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracegrad.errors import ArgumentError
from tracegrad.objective.component import LossInputs
from tracegrad.objective.correction import AllReduce, Correction, Totals, correct
from tracegrad.objective.objective import MissingLogprobs, Objective
from tracegrad.objective.ratio import Reduce
from tracegrad.objective.weight import total_weight


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Arrays that an objective needs in addition to the logprobs: [m] each, or [B, S]; tensors on any device, or numpy.

    As in `correct`, a row of a padded array is a trace unless `trace` is passed, and per-row arrays may be [B].

    Args:
        old, rollout, ref: float logprobs, nats; None if the objective does not need them.
        advantages: float.
        scale: float, 1 over the reduction's denominators (`Correction.scale`); 0 marks padding.
        weight: float, detached factor. None means 1, and is refused if the objective has weights that `correct`
            evaluates.
        keep: bool. None keeps all, and is refused if the objective has rejections that `correct` evaluates. Tokens with
            False are not read, so they may be NaN.
        trace, turn, group: integer ids, needed for levels above the token.
        alpha: float in [0, 1], the position of the proximal policy between rollout (0) and theta (1):
            `correction.proximal_alpha`.
        scales: `Correction.scales`, for penalties and bonuses with their own reduction.

    >>> from tracegrad.objective import presets
    >>> logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    >>> terms = Terms(old=logprobs.detach(), advantages=torch.tensor([1.0, -1.0]), scale=torch.tensor([0.5, 0.5]))
    >>> presets.VERL_DEFAULT(logprobs, None, terms).loss.backward()
    >>> logprobs.grad.tolist()  # the gradient of -A * ratio, over two tokens
    [-0.5, 0.5]
    """

    advantages: Any
    scale: Any
    old: Any = None
    rollout: Any = None
    ref: Any = None
    weight: Any = None
    keep: Any = None
    trace: Any = None
    turn: Any = None
    group: Any = None
    alpha: Any = None
    scales: Mapping[Reduce, Any] | None = None

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "scales"}
        arrays = {name: _tensor(value) for name, value in values.items() if value is not None}
        shape, scales = arrays["scale"].shape, {key: _tensor(value) for key, value in (self.scales or {}).items()}
        if len(shape) > 1:
            arrays.setdefault("trace", torch.arange(shape[0], device=arrays["scale"].device))
            arrays = {name: a[..., None].expand(shape) if a.shape == shape[:-1] else a for name, a in arrays.items()}
        for name, value in {**arrays, "scales": scales}.items():
            object.__setattr__(self, name, value)

    def select(self, where: Any) -> "Terms":
        """Return the tokens at `where`, a slice or an index, to evaluate a loss that reads no other tokens."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "scales"}
        selected = {name: None if value is None else value[where] for name, value in values.items()}
        return Terms(**selected, scales={key: value[where] for key, value in (self.scales or {}).items()})

    def evaluate(
        self,
        objective: Objective,
        logprobs: Tensor,
        entropy: Tensor | None,
        vocabulary_logprobs: Tensor | None = None,
    ) -> "Loss":
        """Return the loss of `objective` on these tokens; `objective(logprobs, entropy, terms)` calls it."""
        return evaluate(objective, logprobs, entropy, self, vocabulary_logprobs)

    def coefficients(self, objective: Objective, logprobs: Any) -> NDArray[Any]:
        """Return c with d loss / d logprob = -c, by autograd; `objective.coefficients(logprobs, terms)` calls it.

        Raises:
            ArgumentError: if the objective reads the entropy, whose gradient needs the full distribution.
        """
        if objective.requirements.entropy:
            raise ArgumentError(
                "TG-OBJ-043: the objective uses the entropy of the next-token distribution, whose gradient does not "
                "depend on the sampled token's logprob only. Remove the bonus or rejection, or call objective(...)."
            )
        value = torch.as_tensor(logprobs).detach()
        leaf = value.to(torch.promote_types(value.dtype, torch.float32)).clone().requires_grad_()
        (gradient,) = torch.autograd.grad(evaluate(objective, leaf, None, self).loss, leaf)
        return -gradient.cpu().numpy()


@dataclass(frozen=True)
class PerTerm:
    """Detached values of each token, for metrics and the report.

    Surrogate and penalty are 0 and the weight is 1 at tokens with keep False. Ratio and clipped cover all tokens that
    `Terms.keep` kept, whatever the rejections on the trained policy drop; elsewhere they are 1 and False.

    Args:
        surrogate: before weight and scale.
        ratio: of the surrogate at its level, clamped; 1 if it has no ratio.
        clipped: bool, True if the clip leaves no gradient: A > 0 above the bounds or above `delta`, A < 0 below them,
            or above `dual` or above both `delta` and the bounds.
        penalty: sum of coef * penalty, before scale.
        weight: the product of all weights.
        keep: bool, the tokens that all rejections kept.

    >>> from tracegrad.objective import Clip, Ratio
    >>> logprobs = torch.tensor([0.6, 0.3]).log()
    >>> terms = Terms(old=torch.tensor([0.4, 0.4]).log(), advantages=torch.ones(2), scale=torch.full((2,), 0.5))
    >>> tokens = Objective(Clip(), Ratio("theta", "old"))(logprobs, None, terms).per_term
    >>> tokens.ratio, tokens.clipped
    (tensor([1.5000, 0.7500]), tensor([ True, False]))
    """

    surrogate: Tensor
    ratio: Tensor
    clipped: Tensor
    penalty: Tensor
    weight: Tensor
    keep: Tensor


@dataclass(frozen=True)
class Loss:
    """A scalar to call backward on, and the detached values that it consists of.

    >>> from tracegrad.objective import PolicyGradient
    >>> logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    >>> terms = Terms(advantages=torch.tensor([1.0, -1.0]), scale=torch.tensor([0.5, 0.5]))
    >>> result = Objective(PolicyGradient())(logprobs, None, terms)
    >>> result.loss.item(), result.per_term.surrogate.tolist()  # 0.5 * 1 + 0.5 * -2
    (-0.5, [1.0, -2.0])
    """

    loss: Tensor
    per_term: PerTerm


def evaluate(
    objective: Objective,
    logprobs: Tensor,
    entropy: Tensor | None,
    terms: Terms,
    vocabulary_logprobs: Tensor | None = None,
) -> Loss:
    """Return sum of scale * weight * surrogate over kept tokens, plus the penalties, minus the entropy bonus.

    The sum over the batches of a step is the loss of the step, however the step was split.

    Args:
        logprobs: [m] float32 or float64 of the policy being trained, nats, with gradient.
        entropy: [m], read only by objectives with an entropy bonus or rejection; otherwise it may be None.
        terms: the other arrays.
        vocabulary_logprobs: [m] as `logprobs`, but over the whole vocabulary and without penalties of the sampler. Only
            penalties with over="vocabulary" read it. None if no token has support or penalties.

    Raises:
        ArgumentError: if the tokens lack what the objective needs, or shapes differ.

    >>> from tracegrad.objective import PolicyGradient
    >>> logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    >>> terms = Terms(advantages=torch.tensor([1.0, -1.0]), scale=torch.tensor([0.5, 0.5]))
    >>> evaluate(Objective(PolicyGradient()), logprobs, None, terms).loss.backward()
    >>> logprobs.grad.tolist()  # -A / 2 tokens
    [-0.5, 0.5]
    """
    view = _view(objective, logprobs, entropy, terms, vocabulary_logprobs)
    for shift in objective.shifts:
        view.advantages = view.advantages - shift.of(view)
    value = objective.surrogate.loss(view)
    if getattr(value, "shape", None) != view.keep.shape:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(
            f"TG-OBJ-044: the loss of {objective.surrogate} is {shape} and the tokens are "
            f"{tuple(view.keep.shape)}. It would count "
            "for other tokens than its own. Return one value for each token."
        )
    keep, detached = view.keep, view.detach()
    for rejection in objective.rejections:
        keep = keep if rejection.detached else rejection.keeps(detached, keep)
    given_weight = torch.ones_like(view.advantages) if terms.weight is None else terms.weight.to(view.advantages.dtype)
    weight = total_weight(objective.weights, detached, given_weight, keep)
    loss = (view.scale(None) * (weight * value).where(keep, 0)).sum()
    penalty = torch.zeros_like(weight)
    for part in objective.penalties:
        amount = part.coef * part.at(view, view.terms_for(part.masked, keep))
        amount = weight * amount if part.weighted else amount
        loss, penalty = loss + (view.scale(part.reduce) * amount).sum(), penalty + amount
    if objective.entropy is not None:
        bonus = view.entropy.where(view.terms_for(objective.entropy.masked, keep), 0)
        loss = loss - objective.entropy.coef * (view.scale(objective.entropy.reduce) * bonus).sum()
    ratio = torch.ones_like(weight) if objective.ratio is None else view.ratio.detach()
    per_term = (value.detach().where(keep, 0), ratio, view.clipped & view.keep, penalty.detach(), weight.where(keep, 1))
    return Loss(loss, PerTerm(*per_term, keep=keep))


def _tensor(value: Any) -> Tensor:
    """Return a tensor unchanged, and an array as a tensor. A read-only array (such as a broadcast scale) is copied."""
    return torch.as_tensor(value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value)


def _view(
    objective: Objective,
    logprobs: Tensor,
    entropy: Tensor | None,
    terms: Terms,
    vocabulary_logprobs: Tensor | None,
) -> LossInputs:
    arrays = {field.name: getattr(terms, field.name) for field in fields(terms) if field.name != "scales"}
    _check_shapes(objective, logprobs, entropy, arrays, vocabulary_logprobs)
    _check_detached(objective, arrays)
    logprobs = logprobs if logprobs.dtype == torch.float64 else logprobs.float()
    if vocabulary_logprobs is not None:
        vocabulary_logprobs = vocabulary_logprobs.to(logprobs.dtype)
    counted = terms.scale != 0
    keep = counted if terms.keep is None else terms.keep.bool()
    return LossInputs(
        objective,
        arrays,
        logprobs,
        entropy,
        counted=counted,
        keep=keep,
        scales={**(terms.scales or {}), objective.reduce: terms.scale},
        permutation=torch.randperm,
        vocabulary_logprobs=vocabulary_logprobs,
    )


def _check_detached(objective: Objective, arrays: Mapping[str, Any]) -> None:
    """Refuse tokens that lack the weight or keep of components that `correct` evaluates."""
    for name, parts in (("weight", objective.weights), ("keep", objective.rejections)):
        detached = [part for part in parts if part.detached]
        if detached and arrays[name] is None:
            does = "weighs its tokens by" if name == "weight" else "has the rejection"
            raise ArgumentError(
                f"TG-OBJ-045: the objective {does} '{detached[0]}', which `correct` evaluates before the step, "
                f"but the tokens have no {name}. It would be ignored silently. Pass Terms({name}=corrected.{name}) of "
                "correct(...), or an objective without it: replace(objective, "
                f"{'weights' if name == 'weight' else 'rejections'}=())."
            )


def _check_shapes(
    objective: Objective,
    logprobs: Tensor,
    entropy: Tensor | None,
    arrays: Mapping[str, Any],
    vocabulary_logprobs: Tensor | None,
) -> None:
    """Refuse arrays that do not have one entry per token, and a missing entropy that is needed."""
    if vocabulary_logprobs is not None and vocabulary_logprobs.shape != logprobs.shape:
        raise ArgumentError(
            f"TG-OBJ-055: vocabulary_logprobs is {tuple(vocabulary_logprobs.shape)} but logprobs are "
            f"{tuple(logprobs.shape)}. Pass one entry per token."
        )
    for name, value in arrays.items():
        if value is not None and value.shape != logprobs.shape:
            raise ArgumentError(
                f"TG-OBJ-046: terms.{name} is {tuple(value.shape)} but logprobs are {tuple(logprobs.shape)}. "
                "Pass one entry per token in every tensor."
            )
    if objective.requirements.entropy and entropy is None:
        raise ArgumentError(
            "TG-OBJ-047: the objective uses the entropy of the next-token distribution, but entropy is None. "
            "Pass it, as policy.logprobs_and_entropy returns it."
        )
    if entropy is not None and entropy.shape != logprobs.shape:
        raise ArgumentError(
            f"TG-OBJ-048: entropy is {tuple(entropy.shape)} but logprobs are {tuple(logprobs.shape)}. Pass one "
            f"entry per token."
        )


def build_terms(
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
    missing_logprobs: MissingLogprobs = "mask",
    all_reduce: AllReduce | None = None,
) -> tuple[Terms, Correction]:
    """Return the `Terms` of one step for an objective, and the `Correction` that they contain.

    Args:
        logprobs: [B, S] with `mask`, or flat [M] with `trace`, of the policy being trained, nats; a tensor or numpy.
        advantages: [B], [B, S] or [M].
        mask: bool, True at the tokens.
        old: logprobs before the step; None means the current policy, whose ratio to itself is 1.
        rollout, ref: read if the objective needs them; `rollout` is NaN if unknown.
        trace, turn, group, totals, missing_logprobs, all_reduce: as in `correct`.
        alpha: as in `Terms`.

    >>> from tracegrad.objective import presets
    >>> logprobs = torch.tensor([[-1.0, -2.0], [-1.0, 0.0]])
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> terms, corrected = build_terms(presets.GRPO, logprobs, mask=mask, advantages=torch.tensor([1.0, -1.0]),
    ...     rollout=logprobs)
    >>> terms.scale  # 1 / (2 traces * tokens of the trace); 0 at padding
    tensor([[0.2500, 0.2500],
            [0.5000, 0.0000]])
    >>> corrected.keep
    tensor([[ True,  True],
            [ True, False]])
    """
    needs, theta = objective.requirements, torch.as_tensor(logprobs).detach()
    if old is None or not needs.old:
        old = theta if needs.old else None if needs.rollout else theta.new_zeros(theta.shape)
    logprob_arrays = {"rollout": rollout if needs.rollout else None, "ref": ref if needs.ref else None}
    ids = {"advantages": advantages, "trace": trace, "turn": turn, "group": group}
    corrected = correct(
        old,
        **logprob_arrays,
        **ids,
        **objective.plan,
        mask=mask,
        totals=totals,
        missing_logprobs=missing_logprobs,
        all_reduce=all_reduce,
    )
    return Terms(
        old=old if needs.old else None,
        alpha=alpha,
        **logprob_arrays,
        **ids,
        weight=corrected.weight,
        keep=corrected.keep,
        scale=corrected.scale,
        scales=corrected.scales,
    ), corrected


def padded_loss(
    objective: Objective, logprobs: Tensor, *, mask: Any, advantages: Any, entropy: Tensor | None = None, **arrays: Any
) -> Loss:
    """Return the loss of one step given as padded tensors. The denominators are counted from them.

    Args:
        logprobs: [B, S] of the policy being trained, nats, with gradient.
        mask: [B, S] bool, True at the tokens; a row is a trace.
        advantages: [B] or [B, S].
        entropy: [B, S], for objectives that read it.
        arrays: old, rollout, ref and other arguments of `build_terms`.

    >>> import torch
    >>> from tracegrad.objective import presets
    >>> logprobs = torch.tensor([[-1.0, -2.0], [-1.0, 0.0]], requires_grad=True)
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> given = {"mask": mask, "advantages": torch.tensor([1.0, -1.0]), "rollout": logprobs.detach()}
    >>> padded_loss(presets.GRPO, logprobs, **given).loss.backward()
    >>> logprobs.grad.tolist()  # -A / (2 traces * tokens of the trace)
    [[-0.25, -0.25], [0.5, 0.0]]
    """
    terms, _ = build_terms(objective, logprobs, mask=mask, advantages=advantages, **arrays)
    return objective(logprobs, entropy, terms)
