"""Define `Objective`: ratio, weights, rejections, surrogate, penalties and normalisation of a loss."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from tracegrad import _html
from tracegrad._validation import check_choice, kind_of, no_effect
from tracegrad.errors import ArgumentError
from tracegrad.objective.component import Part, core_of
from tracegrad.objective.penalty import Entropy, Penalty, Shift
from tracegrad.objective.ratio import HOLDS, PER_TOKEN, TOKEN, Level, Ratio, Reduce, left_over
from tracegrad.objective.rejection import AnyGate
from tracegrad.objective.surrogate import Function, Locality, Surrogate
from tracegrad.objective.weight import Weight


def why_zero_advantage(objective: "Objective") -> str:
    """Why a trace whose advantages are all 0 may change the gradient of a step, by its own terms or those of others.

    Without a reason its surrogate is 0 times something, and other traces depend on it by integer totals alone, which
    are known without its forward pass.
    """
    return next(chain(_beyond_advantage(objective), _statistics(objective)), "")


def why_dropped(objective: "Objective") -> str:
    """Why the logprob of a dropped term (closed detached gate, missing logprob) may change the gradient."""
    kl = (f"the penalty '{penalty}'" for penalty in objective.penalties if not penalty.gated)
    bonus = ("the entropy bonus" for part in [objective.entropy] if part is not None and not part.gated)
    over = (f"{part} runs over dropped terms too" for part in chain(kl, bonus))
    return next(chain(_of_microbatch(objective), _trained_levels(objective), over), "")


def why_weightless(objective: "Objective") -> str:
    """Why the logprob of a term with weight 0 or advantage 0 may change the gradient."""
    return next(chain(_beyond_advantage(objective), _trained_levels(objective)), "")


def _beyond_advantage(objective: "Objective") -> Iterator[str]:
    """Parts through which a term with advantage 0 has a gradient, or changes that of others."""
    if not objective.surrogate.times_advantage:
        yield f"the surrogate {objective.surrogate} has a gradient where the advantage is 0"
    for shift in objective.shifts:
        yield f"the shift '{shift}' gives a term an advantage of its own"
    for penalty in objective.penalties:
        yield f"the penalty '{penalty}' has a gradient whatever the advantage"
    if objective.entropy is not None:
        yield "the entropy bonus has a gradient whatever the advantage"
    yield from _of_microbatch(objective)


def _of_microbatch(objective: "Objective") -> Iterator[str]:
    for part in objective.per_microbatch:
        yield f"'{part}' is a statistic of all terms of a micro-batch"


def _trained_levels(objective: "Objective") -> Iterator[str]:
    """Ratios of the policy being trained that are aggregated over several terms."""
    if objective.surrogate.locality != "term":
        yield f"the surrogate {objective.surrogate} looks at a {objective.surrogate.locality}, its terms together"
    for ratio, level in objective.ratios():
        if level.over != "token" and not ratio.detached:
            yield f"the ratio {ratio} is taken over the {level.over}, its terms together"


def _statistics(objective: "Objective") -> Iterator[str]:
    """Statistics over several traces that are not integers known before the step."""
    for reduce in objective.reductions:
        if reduce.denominator == "kept":
            yield f"the denominator of '{reduce}' counts the terms that its gates keep"
    yield from (part.reach for part in (*objective.gates, *objective.weights) if part.reach)


Missing = Literal["mask", "neutral", "refuse"]


@dataclass(frozen=True)
class Needs:
    """Which arrays an objective takes, whether it takes a trace's current-policy ratio, and which terms cannot change
    its gradient.

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


@dataclass(frozen=True)
class Objective:
    """loss = sum of scale * keep * weight * surrogate(ratio, A) + sum over penalties of coef * scale * penalty.

    An objective is called with the logprobs being trained and the other arrays of the terms, which carry the evaluator:
    `objective(logprobs, entropy, terms)`, see `tracegrad.objective`. Printed, it is its formula.

    Args:
        surrogate: PolicyGradient, CrossEntropy, Importance, Clip, Sigmoid, GeoClip or Regress; a `Surrogate` of your
            own, or a function loss(view) -> per_term.
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

    >>> from tracegrad.objective import Clamp, Clip
    >>> print(Objective(Clip(), Ratio("theta", "old"), (Weight(Ratio("old", "rollout"), shape=Clamp(0, 2)),)))
    loss = sum of scale * keep * weight * S
      S = max(-A r, -A clip(r, 0.8, 1.2)); r = theta/old
      weight = clamp(w, 0, 2), w = old/rollout
      scale = 1 / terms
    """

    surrogate: Any
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
        for part in (self.surrogate, *self.parts):
            part.check(self)
        for sign in "+0-":
            self._check_product([w.ratio for w in self.weights if sign in HOLDS[w.when]])
        self._check_order()
        for part in self._added:
            if (part.reduce or self.reduce).denominator == "kept" and not part.gated:
                raise ArgumentError(
                    "a penalty with gated=False runs over terms that denominator='kept' does not count. "
                    "Use gated=True, gated='detached' or denominator='all'."
                )

    def _check_kinds(self) -> None:
        """Kinds of the parts, of which the core must know those that it evaluates."""
        if callable(self.surrogate):
            object.__setattr__(self, "surrogate", Function(self.surrogate))
        kind_of("Objective.surrogate", self.surrogate, Surrogate)
        if not getattr(getattr(self.surrogate, "__dataclass_params__", None), "frozen", False):
            raise ArgumentError(
                f"the surrogate {type(self.surrogate).__name__} is no frozen dataclass. A run that is resumed could "
                "not tell it from another one. Write @dataclass(frozen=True) above its class."
            )
        kind_of("Objective.reduce", self.reduce, Reduce)
        kinds = {"weights": Weight, "gates": AnyGate, "penalties": Penalty, "shifts": Shift}
        for name, kind in kinds.items():
            for place, part in enumerate(getattr(self, name)):
                kind_of(f"Objective.{name}[{place}]", part, kind)
                if part.detached:
                    core_of(f"Objective.{name}[{place}]", part)
        if self.entropy is not None:
            kind_of("Objective.entropy", self.entropy, Entropy)
        for reduce in self.reductions:
            core_of("Objective.reduce", reduce)

    def _check_ratio(self) -> None:
        name, takes = type(self.surrogate).__name__, self.surrogate.takes_ratio
        if takes is False:
            no_effect(self.ratio is not None, "Objective.ratio", f"{name} takes no ratio")
        elif (takes or self.ratio) and (self.ratio is None or self.ratio.num != "theta" or "ref" in self.ratio):
            raise ArgumentError(
                f"{name} needs theta/old or theta/rollout, not {self.ratio}. Without theta nothing is trained."
            )
        if self.level.wide:
            raise ArgumentError(
                f"the surrogate's level is the {self.level.over}. Its ratio would mix traces with different "
                "advantages. Take the token, turn or trace."
            )

    def _check_product(self, ratios: list[Ratio]) -> None:
        allowed = [{}, {"theta": 1, "rollout": -1}, {"theta": 1, "old": -1}]
        if self.ratio is not None:
            ratios = [self.ratio, *ratios]
        else:
            allowed.append({"old": 1, "rollout": -1})  # the score function, at one update per batch
        if left_over(ratios) not in allowed:
            raise ArgumentError(
                f"{' * '.join(map(str, ratios))} does not telescope to theta/rollout, theta/old or 1. "
                "The same mismatch would be corrected twice, or one that is not there. "
                "Weigh theta/old by old/rollout, or take theta/rollout without a weight."
            )

    def _check_order(self) -> None:
        seen = False
        for gate in self.gates:
            if gate.detached and seen:
                raise ArgumentError(
                    f"the gate '{gate}' is known before the step and stands after one that is not. They are applied in "
                    "order. Put it first."
                )
            seen |= not gate.detached

    @property
    def parts(self) -> tuple[Part, ...]:
        """Weights, gates, penalties and shifts."""
        return (*self.weights, *self.gates, *self.penalties, *self.shifts)

    @property
    def _added(self) -> tuple[Penalty | Entropy, ...]:
        """Penalties and the entropy bonus, which may have a reduction of their own."""
        return (*self.penalties, *([self.entropy] if self.entropy else []))

    @property
    def plan(self) -> dict[str, Any]:
        """What `correct` takes of it: correct(old, rollout, ..., **objective.plan)."""
        parts = {"weights": self.weights, "gates": self.gates}
        return {**parts, "reduce": self.reduce, "reductions": self.reductions}

    @property
    def level(self) -> Level:
        """The level of the surrogate's ratio; the token where it takes none."""
        return self.surrogate.level

    @property
    def per_microbatch(self) -> tuple[str, ...]:
        """Parts that look at a micro-batch, so that the gradient depends on how a step was cut; mostly none."""
        whole = [self.surrogate] if self.surrogate.locality == "batch" else []
        return tuple(map(str, [*whole, *(part for part in self.parts if part.microbatch)]))

    @property
    def locality(self) -> Locality:
        """The smallest set of terms that can be evaluated apart from the others of a batch, with the same sum.

        "term": the loss is a sum over terms. "turn", "trace": over turns or traces, whose current-policy ratios are
        aggregated. "batch": a part looks at all terms that are evaluated together. What is detached was evaluated
        before and does not count.

        >>> from tracegrad.objective import PolicyGradient
        >>> Objective(PolicyGradient()).locality
        'term'
        """
        if self.per_microbatch:
            return "batch"
        named: dict[str, Locality] = {"token": "term", "turn": "turn", "trace": "trace"}
        seen = [named.get(level.over, "batch") for ratio, level in self.ratios() if not ratio.detached]
        return max([*seen, self.surrogate.locality], key=("term", "turn", "trace", "batch").index)

    @property
    def reductions(self) -> tuple[Reduce, ...]:
        """The distinct reductions of surrogate, penalties and entropy bonus, the surrogate's first."""
        return tuple(dict.fromkeys([self.reduce, *(part.reduce for part in self._added if part.reduce)]))

    def ratios(self) -> Iterator[tuple[Ratio, Level]]:
        """Every ratio with its level."""
        if self.ratio is not None:
            yield self.ratio, self.level
        for part in self.parts:
            yield from part.ratios()

    @property
    def needs(self) -> Needs:
        """Which arrays it takes, and whether a whole trace must stand in one batch."""
        used, reads = list(self.ratios()), self.surrogate.reads
        proximal = any("proximal" in ratio for ratio, _ in used)
        shared = any(level.over in ("turn", "trace") and not ratio.detached for ratio, level in used)
        return Needs(
            old="old" in reads or any("old" in ratio for ratio, _ in used),
            rollout="rollout" in reads or any(ratio.recorded for ratio, _ in used),
            ref="ref" in reads or any("ref" in ratio for ratio, _ in used),
            trace_ratio=shared or self.surrogate.locality != "term",
            entropy=self.entropy_gradient or any(part.takes_entropy for part in (self.surrogate, *self.parts)),
            proximal=proximal,
            zero_advantage=why_zero_advantage(self),
            dropped=why_dropped(self),
            weightless=why_weightless(self),
        )

    @property
    def entropy_gradient(self) -> bool:
        """Whether a gradient goes through the entropy: of a bonus, or of a surrogate that reads it."""
        return self.entropy is not None or "entropy" in self.surrogate.reads

    def check_missing(self, missing: Missing) -> None:
        """Refuses a policy for missing rollout logprobs that would be a ratio of 1 in disguise.

        Raises:
            ArgumentError: if `missing` is "neutral" and rollout stands beside theta in anything but a gate.
        """
        check_choice("missing", missing, ("mask", "neutral", "refuse"))
        trained = [self.ratio, *(part.ratio for part in (*self.penalties, *self.shifts))]
        trained += [weight.ratio for weight in self.weights if not weight.detached]
        recorded = "rollout" in self.surrogate.reads or any(ratio.recorded for ratio in trained if ratio)
        if missing == "neutral" and recorded:
            raise ArgumentError(
                "missing='neutral' with rollout beside the policy being trained would assume a ratio of 1 where none "
                "is known. Use missing='mask', or an objective on theta/old, or one without a ratio (TOPR_POSITIVE)."
            )

    def __call__(self, logprobs: Any, entropy: Any, terms: Any) -> Any:
        """The loss on `terms`, which bring the evaluator of their kind of array (see `tracegrad.objective.Terms`)."""
        return terms.evaluate(self, logprobs, entropy)

    def coefficients(self, logprobs: Any, terms: Any) -> Any:
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

    def _repr_html_(self) -> str:
        return _html.text(str(self))

    def _spoken_ratio(self) -> str:
        """The ratio r in words, for the printed formula."""
        if self.level == TOKEN:
            return str(self.ratio)
        through = "" if self.level.grad == "through" else ", gradient through the token's own"
        if self.surrogate.holds_tokens:
            return f"exp({self.level} of the l){through}, l = log {self.ratio}"
        return f"exp({self.level} of log {self.ratio}){through}"


def with_kl(objective: Objective, coef: float) -> Objective:
    """The objective with a k3 penalty against the reference model, or without one where `coef` is 0.

    The penalty is neither gated nor weighted: TRL's with use_bias_correction_kl=False. TRL's default is `with_beta`.

    >>> from tracegrad.objective import PolicyGradient
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

    >>> from tracegrad.objective import PolicyGradient
    >>> print(with_beta(Objective(PolicyGradient()), 0.04).penalties[0])
    0.04 * k3(theta/ref) * theta/old
    """
    ratio, level = objective.ratio or Ratio("theta", "old"), objective.level
    trained = [weight for weight in objective.weights if not weight.detached]
    if objective.ratio is None and trained:
        ratio, level = trained[0].ratio, TOKEN if trained[0].shape.absorbing else trained[0].level
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

    >>> from tracegrad.objective import PolicyGradient
    >>> with_entropy(Objective(PolicyGradient()), 0.01).needs.entropy
    True
    """
    gated = objective.reduce.denominator == "kept"
    return replace(objective, entropy=Entropy(coef, gated=gated) if coef else None)
