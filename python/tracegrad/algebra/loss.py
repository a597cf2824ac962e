"""The whole objective: a surrogate, what weighs and drops its terms, what is added to it, and how it is reduced.

Values only; `tracegrad.correction` evaluates what is known before the step, `tracegrad.objective` what is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from tracegrad.algebra.gate import GATES, AnyGate, Budget, DropCovariance, Gate, TopEntropy
from tracegrad.algebra.idle import why_dropped, why_weightless, why_zero_advantage
from tracegrad.algebra.penalty import Entropy, Penalty, Shift
from tracegrad.algebra.ratio import HOLDS, OVER, TOKEN, Level, Ratio, left_over
from tracegrad.algebra.reduce import PER_TOKEN, Reduce
from tracegrad.algebra.refuse import kind_of, no_effect, one_of
from tracegrad.algebra.shape import Gamma
from tracegrad.algebra.surrogate import SURROGATES, CrossEntropy, GeoClip, PolicyGradient, Ratioed, Regress, Surrogate
from tracegrad.algebra.weight import Weight
from tracegrad.errors import ArgumentError

Missing = Literal["mask", "neutral", "refuse"]
Locality = Literal["term", "turn", "trace", "batch"]


@dataclass(frozen=True)
class Needs:
    """Which arrays an objective takes, whether it takes a trace's current-policy ratio, and what it cannot feel.

    With `trace_ratio` all branches of a trace must stand in one batch.

    Args:
        zero_advantage: why a trace whose every advantage is 0 matters to the gradient; "" where it can be left out.
        dropped: why the logprob of a term that `correct` dropped matters; "" where its head row can be left out.
        weightless: why the logprob of a term with weight or advantage 0 matters; likewise.
    """

    old: bool
    rollout: bool
    ref: bool
    trace_ratio: bool
    entropy: bool = False
    proximal: bool = False
    zero_advantage: str = field(default="nothing is said of traces without an advantage", compare=False)
    dropped: str = field(default="nothing is said of terms that are dropped", compare=False)
    weightless: str = field(default="nothing is said of terms without a weight", compare=False)


class Evaluable(Protocol):
    """The arrays of terms, which bring their own evaluator: `tracegrad.objective.Terms`."""

    def evaluate(self, objective: Any, logprobs: Any, entropy: Any) -> Any:
        """The loss of `objective` on these terms."""
        ...

    def coefficients(self, objective: Any, logprobs: Any) -> Any:
        """c with d loss / d logprob = -c."""
        ...


@dataclass(frozen=True)
class Objective:
    """loss = sum of scale * keep * weight * surrogate(ratio, A) + sum over penalties of coef * scale * penalty.

    An objective is called with the logprobs being trained and the other arrays of the terms, which carry the evaluator:
    `objective(logprobs, entropy, terms)`, see `tracegrad.objective`. Printed, it is its formula.

    Args:
        surrogate: PolicyGradient, CrossEntropy, Importance, Clip, Sigmoid, GeoClip or Regress.
        ratio: the ratio of the surrogate; None with PolicyGradient and CrossEntropy.
        weights: factors without gradient; their ratios times the surrogate's must telescope.
        gates: applied in order, those on the policy being trained after the others.
        penalties: added, each with its own coefficient.
        reduce: the scale of each term.
        shifts: subtracted from the advantage.
        entropy: a bonus; None is without.

    Raises:
        ArgumentError: if multiplied ratios do not telescope to theta/rollout, theta/old or 1, an option has no
            effect, or a part is of a type that the evaluators do not know.

    >>> from tracegrad.algebra import Clamp, Clip
    >>> print(Objective(Clip(), Ratio("theta", "old"), (Weight(Ratio("old", "rollout"), shape=Clamp(0, 2)),)))
    loss = sum of scale * keep * weight * S
      S = max(-A r, -A clip(r, 0.8, 1.2)); r = theta/old
      weight = clamp(w, 0, 2), w = old/rollout
      scale = 1 / terms
    """

    surrogate: Surrogate
    ratio: Ratio | None = None
    weights: tuple[Weight, ...] = ()
    gates: tuple[AnyGate, ...] = ()
    penalties: tuple[Penalty, ...] = ()
    reduce: Reduce = PER_TOKEN
    shifts: tuple[Shift, ...] = ()
    entropy: Entropy | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_ratio()
        for sign in "+0-":
            self._check_product([w.ratio for w in self.weights if sign in HOLDS[w.when]])
        self._check_gates()
        self._check_effects()
        gated = [part.gated for part in (*self.penalties, *([self.entropy] if self.entropy else []))]
        own = [part.reduce for part in (*self.penalties, *([self.entropy] if self.entropy else []))]
        for is_gated, reduce in zip(gated, own, strict=True):
            if (reduce or self.reduce).denominator == "kept" and not is_gated:
                raise ArgumentError(
                    "a penalty with gated=False runs over terms that denominator='kept' does not count. "
                    "Use gated=True or denominator='all'."
                )

    def _check_kinds(self) -> None:
        kind_of("Objective.surrogate", self.surrogate, SURROGATES)
        kind_of("Objective.reduce", self.reduce, (Reduce,))
        parts = {"weights": (Weight,), "gates": GATES, "penalties": (Penalty,), "shifts": (Shift,)}
        for name, kinds in parts.items():
            for place, part in enumerate(getattr(self, name)):
                kind_of(f"Objective.{name}[{place}]", part, kinds)
        if self.entropy is not None:
            kind_of("Objective.entropy", self.entropy, (Entropy,))

    def _check_ratio(self) -> None:
        name = type(self.surrogate).__name__
        if not isinstance(self.surrogate, Ratioed):
            no_effect(self.ratio is not None, "Objective.ratio", f"{name} takes no ratio")
        elif self.ratio is None or self.ratio.num != "theta" or "ref" in self.ratio:
            raise ArgumentError(
                f"{name} needs theta/old or theta/rollout, not {self.ratio}. Without theta nothing is trained."
            )
        if self.level.wide:
            raise ArgumentError(
                f"the surrogate's level is the {self.level.over}. Its ratio would mix traces with different "
                "advantages. Take the token, turn or trace."
            )
        if isinstance(self.surrogate, Regress) and self.weights:
            raise ArgumentError("Regress fits a residual, which no weight corrects. Leave the weights out.")

    def _check_product(self, ratios: list[Ratio]) -> None:
        if self.ratio is not None:
            ratios = [self.ratio, *ratios]
        allowed = [{}, {"theta": 1, "rollout": -1}, {"theta": 1, "old": -1}]
        if isinstance(self.surrogate, (PolicyGradient, CrossEntropy)):
            allowed.append({"old": 1, "rollout": -1})  # the score function, at one update per batch
        if left_over(ratios) not in allowed:
            raise ArgumentError(
                f"{' * '.join(map(str, ratios))} does not telescope to theta/rollout, theta/old or 1. "
                "The same mismatch would be corrected twice, or one that is not there. "
                "Weigh theta/old by old/rollout, or take theta/rollout without a weight."
            )

    def _check_gates(self) -> None:
        seen = False
        for gate in self.gates:
            if gate.detached and seen:
                raise ArgumentError(
                    f"the gate '{gate}' is known before the step and stands after one that is not. They are applied in "
                    "order. Put it first."
                )
            seen |= not gate.detached
        covariance = [gate for gate in self.gates if isinstance(gate, DropCovariance)]
        if covariance and (self.ratio is None or not hasattr(self.surrogate, "low")):
            raise ArgumentError("DropCovariance leaves clipped terms alone and needs a Clip. Take Clip, or a Gate.")

    def _check_effects(self) -> None:
        touched = any(penalty.weighted for penalty in self.penalties)
        no_effect(touched and not self.weights, "Penalty.weighted", "there are no weights")
        no_effect(bool(self.shifts) and isinstance(self.surrogate, CrossEntropy), "Objective.shifts", "A is not read")
        absorbing = any(weight.absorbs for weight in self.weights)
        no_effect(absorbing and not any(w.detached for w in self.weights), "Weight.absorbs", "no weight is detached")

    @property
    def level(self) -> Level:
        """The level of the surrogate's ratio; the token where it takes none."""
        return getattr(self.surrogate, "level", TOKEN)

    @property
    def per_microbatch(self) -> tuple[str, ...]:
        """The parts that see one micro-batch, so that the gradient depends on how the step was cut; mostly none."""
        parts = [*self.weights, *self.gates, *(penalty.where for penalty in self.penalties), *self.shifts]
        scopes = [getattr(part, "scope", None) or getattr(part, "center", None) for part in parts]
        levels = [getattr(part, "level", TOKEN).scope for part in parts]
        seen = zip(parts, scopes, levels, strict=True)
        return tuple(str(part) for part, *scope in seen if "microbatch" in scope)

    @property
    def locality(self) -> Locality:
        """The smallest set of terms that can be evaluated apart from the others of a batch, with the same sum.

        "term": the loss is a sum over terms. "turn", "trace": over turns or traces, whose current-policy ratios are
        aggregated. "batch": a part looks at all terms that are evaluated together. What is detached was evaluated
        before and does not count.

        >>> Objective(PolicyGradient()).locality
        'term'
        """
        if self.per_microbatch:
            return "batch"
        seen = [level.over for ratio, level in self.ratios() if not ratio.detached]
        widest = max(seen, key=OVER.index, default="token")
        return {"token": "term", "turn": "turn", "trace": "trace"}.get(widest, "batch")  # type: ignore[return-value]

    @property
    def reductions(self) -> tuple[Reduce, ...]:
        """The distinct reductions of surrogate, penalties and entropy bonus, the surrogate's first."""
        parts = [*self.penalties, *([self.entropy] if self.entropy else [])]
        return tuple(dict.fromkeys([self.reduce, *(part.reduce for part in parts if part.reduce)]))

    def ratios(self) -> Iterator[tuple[Ratio, Level]]:
        """Every ratio with its level."""
        if self.ratio is not None:
            yield self.ratio, self.level
        for weight in self.weights:
            yield weight.ratio, weight.level
        for gate in self.gates:
            if isinstance(gate, Gate):
                yield gate.ratio, Level(gate.scope, "max") if gate.scope else gate.level
            elif isinstance(gate, Budget):
                yield gate.ratio, TOKEN
        for penalty in self.penalties:
            yield penalty.ratio, TOKEN
            if penalty.importance is not None:
                yield penalty.importance, penalty.importance_level
        for shift in self.shifts:
            yield shift.ratio, TOKEN

    @property
    def needs(self) -> Needs:
        """Which arrays it takes, and whether a whole trace must stand in one batch."""
        used = list(self.ratios())
        proximal = any("proximal" in ratio for ratio, _ in used)
        return Needs(
            old=any("old" in ratio for ratio, _ in used),
            rollout=proximal or any("rollout" in ratio for ratio, _ in used),
            ref=any("ref" in ratio for ratio, _ in used),
            trace_ratio=any(level.over in ("turn", "trace") and not ratio.detached for ratio, level in used),
            entropy=self.entropy is not None or any(isinstance(gate, TopEntropy) for gate in self.gates),
            proximal=proximal,
            zero_advantage=why_zero_advantage(self),
            dropped=why_dropped(self),
            weightless=why_weightless(self),
        )

    def check_missing(self, missing: Missing) -> None:
        """Refuses a policy for missing rollout logprobs that would be a ratio of 1 in disguise.

        Raises:
            ArgumentError: if `missing` is "neutral" and rollout stands beside theta in anything but a gate.
        """
        one_of("missing", missing, ("mask", "neutral", "refuse"))
        trained = [self.ratio, *(part.ratio for part in (*self.penalties, *self.shifts))]
        trained += [weight.ratio for weight in self.weights if not weight.detached]
        if missing == "neutral" and any(r is not None and ("rollout" in r or "proximal" in r) for r in trained):
            raise ArgumentError(
                "missing='neutral' with rollout beside the policy being trained would assume a ratio of 1 where none "
                "is known. Use missing='mask', or an objective on theta/old, or one without a ratio (WEIGHTED_SFT)."
            )

    def __call__(self, logprobs: Any, entropy: Any, terms: Evaluable) -> Any:
        """The loss on `terms`, which bring the evaluator of their kind of array (see `tracegrad.objective.Terms`)."""
        return terms.evaluate(self, logprobs, entropy)

    def coefficients(self, logprobs: Any, terms: Evaluable) -> Any:
        """c with d loss / d logprob = -c at each term: per-token weights of -logp for any trainer.

        A trainer that minimises sum of -c * logp, c held constant, takes the same step, in whatever framework.

        Args:
            logprobs: [m] or [B, S] of the policy being trained, nats; any array.
            terms: the other arrays of the terms.

        Returns:
            numpy, of the shape of `logprobs`; float64 where they are, else float32.

        Raises:
            ArgumentError: with an entropy bonus, whose gradient needs the whole distribution.
        """
        return terms.coefficients(self, logprobs)

    def __str__(self) -> str:
        ratio = f"; r = {self._spoken_ratio()}" if self.ratio is not None else ""
        lines = [
            f"loss = sum of scale * keep * {'weight * ' if self.weights else ''}S",
            f"  S = {self.surrogate}{ratio}",
        ]
        lines += [f"  {'*' if place else 'weight ='} {weight}" for place, weight in enumerate(self.weights)]
        lines += [f"  gate: {gate}" for gate in self.gates]
        lines += [f"  {shift}" for shift in self.shifts]
        lines += [f"  + sum of scale * {penalty}" for penalty in self.penalties]
        lines += [f"  - sum of scale * {self.entropy}"] if self.entropy else []
        return "\n".join([*lines, f"  scale = {self.reduce}"])

    def _spoken_ratio(self) -> str:
        """What r is."""
        if self.level == TOKEN:
            return str(self.ratio)
        logs = "the l" if isinstance(self.surrogate, GeoClip) else f"log {self.ratio}"
        through = "" if self.level.grad == "through" else ", gradient through the token's own"
        told = f", l = log {self.ratio}" if isinstance(self.surrogate, GeoClip) else ""
        return f"exp({self.level} of {logs}){through}{told}"


def with_kl(objective: Objective, coef: float) -> Objective:
    """The objective with a k3 penalty against the reference model, or without one where `coef` is 0.

    The penalty is neither gated nor weighted: TRL's with use_bias_correction_kl=False. TRL's default is `with_beta`.

    >>> with_kl(Objective(PolicyGradient()), 0.04).needs.ref
    True
    """
    return _penalised(objective, coef)


def with_beta(objective: Objective, beta: float) -> Objective:
    """The objective with exactly what TRL's `beta` adds by default, or without a penalty where `beta` is 0.

    As `with_kl`, times the ratio of the policy being trained at the level of the surrogate
    (use_bias_correction_kl=True). Where the surrogate takes no ratio it is that of the weight on the trained policy, at
    the token under a Gamma shape (VESPO), or the token's theta/old.

    Source: TRL 1.16's GRPOConfig; DeepSeek-V3.2, arXiv 2512.02556, eq. 7.

    >>> print(with_beta(Objective(PolicyGradient()), 0.04).penalties[0])
    0.04 * k3(theta/ref) * theta/old
    """
    ratio, level = objective.ratio or Ratio("theta", "old"), objective.level
    trained = [weight for weight in objective.weights if not weight.detached]
    if objective.ratio is None and trained:
        ratio, level = trained[0].ratio, TOKEN if isinstance(trained[0].shape, Gamma) else trained[0].level
    return _penalised(objective, beta, ratio, level)


def _penalised(objective: Objective, coef: float, importance: Ratio | None = None, level: Level = TOKEN) -> Objective:
    others = tuple(penalty for penalty in objective.penalties if penalty.ratio != Ratio("theta", "ref"))
    if coef == 0:
        return replace(objective, penalties=others)
    gated = objective.reduce.denominator == "kept"
    kl = Penalty(
        Ratio("theta", "ref"), "k3", coef, gated, weighted=False, importance=importance, importance_level=level
    )
    return replace(objective, penalties=(*others, kl))


def with_entropy(objective: Objective, coef: float) -> Objective:
    """The objective with a fixed entropy bonus over all its terms, or without one where `coef` is 0.

    >>> with_entropy(Objective(PolicyGradient()), 0.01).needs.entropy
    True
    """
    gated = objective.reduce.denominator == "kept"
    return replace(objective, entropy=Entropy(coef, gated=gated) if coef else None)
