"""Define what is added to the surrogate: KL penalties, an entropy bonus, and shifts of the advantage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tracegrad._validation import check_choice, check_kind, check_order, check_positive, refuse_without_effect
from tracegrad.errors import ArgumentError
from tracegrad.objective.component import Component, LossInputs
from tracegrad.objective.ratio import KINDS, TOKEN, Aggregation, Ratio, Reduce, check_scope
from tracegrad.objective.rejection import TopCovariance

if TYPE_CHECKING:
    from tracegrad.objective.objective import Objective


Gated = bool | Literal["detached"]
_GATED: dict[Gated, list[str]] = {
    True: ["kept tokens only"],
    "detached": ["tokens that detached rejections keep"],
    False: [],
}


@dataclass(frozen=True)
class Penalty(Component):
    """coef * an estimate of KL(num || den) at each token, with l = log num - log den.

    k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l, abs = |l|, square = l^2. For tokens sampled from num, k1 and k3 are
    unbiased in value, and k2 in gradient.

    Args:
        ratio: theta/ref, or another ratio with theta as numerator.
        kind: one of the above.
        coef: its factor in the loss.
        masked: which dropped tokens are left out. True: those of all rejections. False: none. "detached": those of the
            detached rejections and those that `missing_logprobs="mask"` dropped, as `Reduce.denominator` counts (verl's
            KL loss).
        weighted: whether the weights multiply it.
        straight_through: the value of `kind` with the gradient of k2 (verl's "k3+").
        importance: this ratio multiplies it, with gradient, for tokens that another policy sampled (TRL's
            use_bias_correction_kl, DeepSeek-V3.2's unbiased KL); None means no ratio.
        importance_level: the level of that ratio.
        cap: the estimate is clamped to [-cap, cap] and has no gradient beyond (verl and SkyRL: 10 for k3).
        where: only on the tokens that this selects.
        reduce: its own denominators; None means those of the objective.
        over: "support": both logprobs of a token that was sampled with top-p, top-k, min-p or penalties are over the
            ids that the sampler kept, with its penalties (`Batch.support`), like those of the ratio. "vocabulary": both
            are those of softmax(logits / temperature). Only for theta/ref; ref has one kind of logprobs.

    Source: Schulman 2020, "Approximating KL divergence"; straight_through: verl's kl_penalty; importance:
    DeepSeek-V3.2, arXiv 2512.02556, eq. 7.

    >>> import torch
    >>> from tracegrad.objective import Objective, PolicyGradient, padded_loss
    >>> penalty = Penalty(Ratio("theta", "ref"), "k2", coef=0.1, masked=True, weighted=False)
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([1.0])}
    >>> # l = 2 and 0
    >>> logprobs, ref = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-3.0, -1.0]])
    >>> padded_loss(Objective(PolicyGradient(), penalties=(penalty,)), logprobs, ref=ref, **step).per_term.penalty
    tensor([[0.2000, 0.0000]])
    """

    ratio: Ratio
    kind: Literal["k1", "k2", "k3", "abs", "square"]
    coef: float
    masked: Gated
    weighted: bool
    straight_through: bool = False
    importance: Ratio | None = None
    importance_level: Aggregation = TOKEN
    cap: float | None = None
    where: TopCovariance | None = None
    reduce: Reduce | None = None
    over: Literal["support", "vocabulary"] = "support"

    def __post_init__(self) -> None:
        check_choice("Penalty.over", self.over, ("support", "vocabulary"))
        if self.over == "vocabulary" and self.ratio != Ratio("theta", "ref"):
            raise ArgumentError(
                f"TG-OBJ-056: a penalty on {self.ratio} is over the vocabulary. The logprobs of {self.ratio.den} are "
                "over the sampler's support. Use over='support', or Ratio('theta', 'ref')."
            )
        check_choice("Penalty.kind", self.kind, tuple(KINDS))
        check_choice("Penalty.masked", self.masked, tuple(_GATED))
        if self.ratio.num != "theta":
            raise ArgumentError(
                f"TG-OBJ-021: the penalty ratio {self.ratio} must have theta above. Write Ratio('theta', ...)."
            )
        check_positive("Penalty.coef", self.coef, "leave the penalty out for none")
        refuse_without_effect(
            self.straight_through and self.kind == "k2", "Penalty.straight_through", "k2 has its own gradient"
        )
        if self.importance is not None and self.importance.num != "theta":
            raise ArgumentError(
                f"TG-OBJ-022: Penalty.importance is {self.importance}. It corrects for the policy that drew the "
                "tokens: Ratio('theta', 'old') or Ratio('theta', 'rollout')."
            )
        refuse_without_effect(
            self.importance is None and self.importance_level != TOKEN, "Penalty.importance_level", "there is no ratio"
        )
        if self.importance is not None:
            check_scope("Penalty.importance", self.importance, self.importance_level)
        if self.cap is not None:
            check_positive("Penalty.cap", self.cap)
        if self.where is not None:
            check_kind("Penalty.where", self.where, TopCovariance)

    def ratios(self) -> Sequence[tuple[Ratio, Aggregation]]:
        importance = [] if self.importance is None else [(self.importance, self.importance_level)]
        return [(self.ratio, TOKEN), *importance]

    def check(self, objective: "Objective") -> None:
        refuse_without_effect(self.weighted and not objective.weights, "Penalty.weighted", "there are no weights")
        if self.over == "support":
            return
        over_support = [part for part in objective.penalties if part.over == "support" and "ref" in part.ratio]
        other_readers = [*objective.weights, *objective.rejections, *objective.shifts]
        over_support += [part for part in other_readers if any("ref" in ratio for ratio, _ in part.ratios())]
        over_support += [
            part.importance for part in objective.penalties if part.importance and "ref" in part.importance
        ]
        over_support += [objective.surrogate] if "ref" in objective.surrogate.reads else []
        if over_support:
            raise ArgumentError(
                f"TG-OBJ-057: the penalty '{self}' reads ref over the vocabulary, and '{over_support[0]}' over the "
                "support. Each token has one logprob of ref. Use the same `over` in all penalties on theta/ref, and "
                "ref nowhere else."
            )

    def at(self, view: LossInputs, mask: Any) -> Any:
        """Return the estimate at each token in `mask` with its ratio and cap, before `coef`; 0 elsewhere."""
        mask = mask & view.has_value(self.ratio)
        if self.where is not None:
            mask = self.where.of(view, mask)
        log_ratio = view.log_difference(self.ratio, mask, over_vocabulary=self.over == "vocabulary")
        value = KINDS[self.kind](-log_ratio if self.kind == "k3" else log_ratio)
        if self.cap is not None:
            value = value.clamp(-self.cap, self.cap)
        if self.straight_through:
            k2 = KINDS["k2"](log_ratio)
            value = k2 - k2.detach() + value.detach()
        if self.importance is not None:
            log_factor, known = view.log_ratio_at(self.importance, self.importance_level)
            value = value * log_factor.exp().where(mask & known, 1)
        return value.where(mask, 0)

    def __str__(self) -> str:
        kind = f"{self.kind}+" if self.straight_through else self.kind
        level = "" if self.importance_level == TOKEN else f" ({self.importance_level})"
        factors = f" * {self.importance}{level}" if self.importance else ""
        notes = [*_GATED[self.masked], *["weighted"] * self.weighted]
        notes += [str(self.where)] if self.where else []
        notes += [f"at most {self.cap:g}"] if self.cap else []
        notes += ["over the vocabulary"] if self.over == "vocabulary" else []
        notes += [f"scale {self.reduce}"] if self.reduce else []
        return f"{self.coef:g} * {kind}({self.ratio}){factors}" + (f" [{', '.join(notes)}]" if notes else "")


@dataclass(frozen=True)
class AdaptiveEntropy:
    """Entropy coefficient that follows a target: up by `delta` after a step at or below it, down after one above.

    The bonus is applied only after a step at or below the target. The state is in
    `trainer.optim.EntropyController`.

    Args:
        target: target entropy, nats.
        delta: change of the coefficient after each optimizer step.
        low, high: bounds of the coefficient.

    Source: Skywork-OR1, arXiv 2505.22312, section 4.2; TRL's use_adaptive_entropy and its defaults.

    >>> from tracegrad.objective import EntropyBonus, with_entropy
    >>> bonus = EntropyBonus(0.01, masked=False, adapt=AdaptiveEntropy(target=0.5, delta=0.005))
    >>> print(bonus)
    0.01 * entropy [adapting to 0.5 nats]
    """

    target: float = 0.2
    delta: float = 0.005
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        check_order("Adapt", self.low, self.high)
        check_positive("AdaptiveEntropy.target", self.target)
        check_positive("AdaptiveEntropy.delta", self.delta)


@dataclass(frozen=True)
class EntropyBonus:
    """Entropy bonus: -coef * the entropy of the next-token distribution at each token, with gradient.

    Args:
        coef: its factor, not negative; the start value if the coefficient adapts.
        masked: which dropped tokens are left out, as in `Penalty`.
        reduce: its own denominators; None means those of the objective.
        adapt: how the coefficient changes between steps; None means not at all.
        over: "vocabulary": the entropy of softmax(logits / temperature). "support": for a token that was sampled with
            top-p, top-k or min-p, the entropy over the ids from which the sampler drew it (`Batch.support`).

    Source: Williams and Peng 1991, "Function optimization using connectionist reinforcement learning algorithms".

    >>> import torch
    >>> from tracegrad.objective import Objective, PolicyGradient, padded_loss
    >>> objective = Objective(PolicyGradient(), entropy=EntropyBonus(0.01, masked=False))
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([0.0])}
    >>> entropy = torch.tensor([[1.0, 2.0]])
    >>> # -0.01 * (1 + 2) / 2 tokens
    >>> padded_loss(objective, torch.tensor([[-1.0, -2.0]]), entropy=entropy, **step).loss
    tensor(-0.0150)
    """

    coef: float
    masked: Gated
    reduce: Reduce | None = None
    adapt: AdaptiveEntropy | None = None
    over: Literal["vocabulary", "support"] = "vocabulary"

    def __post_init__(self) -> None:
        check_choice("EntropyBonus.masked", self.masked, tuple(_GATED))
        check_choice("EntropyBonus.over", self.over, ("vocabulary", "support"))
        if not 0 <= self.coef < float("inf"):
            raise ArgumentError(
                f"TG-OBJ-023: EntropyBonus.coef is {self.coef}. It is a bonus and must not be negative."
            )
        refuse_without_effect(
            self.coef == 0 and self.adapt is None, "Entropy", "its coefficient is 0 and does not adapt"
        )
        if self.adapt is not None and self.masked == "detached":
            raise ArgumentError(
                "TG-OBJ-024: EntropyBonus.masked is 'detached', and its coefficient adapts to the entropy of the "
                "tokens that all "
                "rejections keep, or of all tokens. Use masked=True or masked=False."
            )

    def __str__(self) -> str:
        notes = _GATED[self.masked] + ([f"scale {self.reduce}"] if self.reduce else [])
        notes += [f"adapting to {self.adapt.target:g} nats"] if self.adapt else []
        notes += ["over the support"] if self.over == "support" else []
        return f"{self.coef:g} * entropy" + (f" [{', '.join(notes)}]" if notes else "")


@dataclass(frozen=True)
class AdvantageShift(Component):
    """A - coef * l in place of A, with l constant (detached): a KL penalty subtracted from the advantage, token by
    token.

    Args:
        ratio: theta/ref, theta/rollout or theta/old.
        coef: in units of the advantage per nat.
        center: "microbatch" uses l - mean l over the tokens evaluated together; None uses l. You must ask for it,
            because the gradient then depends on how the step was split.

    Source: Kimi K2, arXiv 2507.20534, as ART's kimi_k2_tau; centred: ART's kl_penalty_coef.

    >>> import torch
    >>> from tracegrad.objective import Objective, PolicyGradient, padded_loss
    >>> shift = AdvantageShift(Ratio("theta", "ref"), coef=0.1)
    >>> step = {"mask": torch.tensor([[True]]), "advantages": torch.tensor([1.0]), "ref": torch.tensor([[-3.0]])}
    >>> logprobs = torch.tensor([[-1.0]])  # l = -1 + 3 = 2, so A = 1 - 0.1 * 2 = 0.8
    >>> # -0.8 * -1
    >>> padded_loss(Objective(PolicyGradient(), shifts=(shift,)), logprobs, **step).per_term.surrogate
    tensor([[0.8000]])
    """

    ratio: Ratio
    coef: float
    center: Literal["microbatch"] | None = None

    def __post_init__(self) -> None:
        check_choice("AdvantageShift.center", self.center, ("microbatch", None))
        check_positive("AdvantageShift.coef", self.coef, "leave the shift out for none")
        if self.ratio.num != "theta":
            raise ArgumentError(
                f"TG-OBJ-025: the shift's ratio {self.ratio} must have theta above. Write Ratio('theta', ...)."
            )

    def of(self, view: LossInputs) -> Any:
        """Return what is subtracted from the advantage of each kept token."""
        charged = view.keep & view.has_value(self.ratio)
        log_ratio = view.log_difference(self.ratio, charged).detach()
        if self.center is not None:
            log_ratio = (log_ratio - log_ratio.sum() / charged.sum().clamp(min=1)).where(charged, 0)
        return self.coef * log_ratio

    def __str__(self) -> str:
        centre = f" - mean over the {self.center}" if self.center else ""
        return f"A - {self.coef:g} * (log {self.ratio}{centre}) in place of A"
