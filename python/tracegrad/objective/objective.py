"""Define `Objective`: ratio, weights, rejections, surrogate, penalties and normalisation of a loss."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from tracegrad import _html
from tracegrad._validation import check_choice, check_kind, refuse_without_effect
from tracegrad.errors import ArgumentError
from tracegrad.objective.component import Component, core_of
from tracegrad.objective.penalty import AdvantageShift, EntropyBonus, Penalty
from tracegrad.objective.ratio import CONDITION_SIGNS, PER_TOKEN, TOKEN, Aggregation, Ratio, Reduce, remaining_powers
from tracegrad.objective.rejection import AnyRejection
from tracegrad.objective.surrogate import Function, Locality, Surrogate
from tracegrad.objective.weight import Weight


def zero_advantage_reason(objective: "Objective") -> str | None:
    """Return why a trace whose advantages are all 0 may change the gradient of a step; None if it cannot.

    It may do so by its own tokens, or through those of other traces. If there is no reason, its surrogate is a
    product with 0. Other traces then depend on it only through integer totals, which do not need its forward pass.
    """
    return next(chain(_beyond_advantage(objective), _statistics(objective)), None)


def dropped_reason(objective: "Objective") -> str | None:
    """Return why the logprob of a dropped token may change the gradient; None if it cannot.

    A token is dropped by a detached rejection, or because its logprob is missing.
    """
    kl = (f"the penalty '{penalty}'" for penalty in objective.penalties if not penalty.masked)
    bonus = ("the entropy bonus" for part in [objective.entropy] if part is not None and not part.masked)
    over = (f"{part} runs over dropped tokens too" for part in chain(kl, bonus))
    return next(chain(_microbatch_statistics(objective), _trained_levels(objective), over), None)


def zero_weight_reason(objective: "Objective") -> str | None:
    """Return why the logprob of a token with weight 0 or advantage 0 may change the gradient; None if it cannot."""
    return next(chain(_beyond_advantage(objective), _trained_levels(objective)), None)


def _beyond_advantage(objective: "Objective") -> Iterator[str]:
    """Yield components through which a token with advantage 0 has a gradient, or changes the gradient of others."""
    if not objective.surrogate.times_advantage:
        yield f"the surrogate {objective.surrogate} has a gradient even if the advantage is 0"
    for shift in objective.shifts:
        yield f"the shift '{shift}' adds to the advantage of each token"
    for penalty in objective.penalties:
        yield f"the penalty '{penalty}' has a gradient whatever the advantage"
    if objective.entropy is not None:
        yield "the entropy bonus has a gradient whatever the advantage"
    yield from _microbatch_statistics(objective)


def _microbatch_statistics(objective: "Objective") -> Iterator[str]:
    for part in objective.microbatch_components:
        yield f"'{part}' is a statistic of all tokens of a micro-batch"


def _trained_levels(objective: "Objective") -> Iterator[str]:
    """Yield ratios of the policy being trained that are aggregated over several tokens."""
    if objective.surrogate.locality != "term":
        yield f"the surrogate {objective.surrogate} reads all tokens of a {objective.surrogate.locality} together"
    for ratio, level in objective.ratios():
        if level.over != "token" and not ratio.detached:
            yield f"the ratio {ratio} is aggregated over all tokens of the {level.over}"


def _statistics(objective: "Objective") -> Iterator[str]:
    """Yield statistics over several traces that are not integers available before the step."""
    for reduce in objective.reductions:
        if reduce.denominator == "kept":
            yield f"the denominator of '{reduce}' counts the tokens that its rejections keep"
    yield from (
        part.cross_trace_reason for part in (*objective.rejections, *objective.weights) if part.cross_trace_reason
    )


MissingLogprobs = Literal["mask", "ratio_one", "error"]


@dataclass(frozen=True)
class Requirements:
    """Arrays that an objective reads, and tokens that cannot change its gradient.

    Args:
        old, rollout, ref, entropy, proximal: whether it reads this array or policy.
        ref_over: the ids over which the logprobs of ref are: "support" for those that the sampler kept, with its
            penalties; "vocabulary" for all ids without.
        trace_ratio: whether it reads a current-policy ratio over a trace or turn. If so, all branches of a trace must
            be in one batch.
        zero_advantage_reason: reason why a trace whose every advantage is 0 matters to the gradient; None if it can be
            left out.
        dropped_reason: reason why the logprob of a token that `correct` dropped matters; None if its logit row can be
            left out.
        zero_weight_reason: the same for a token with weight 0 or advantage 0.

    >>> from tracegrad.objective import presets
    >>> requirements = presets.with_kl(presets.GRPO, 0.04).requirements
    >>> requirements.old, requirements.rollout, requirements.ref, requirements.entropy
    (True, True, True, False)
    """

    old: bool
    rollout: bool
    ref: bool
    trace_ratio: bool
    entropy: bool = False
    proximal: bool = False
    ref_over: Literal["support", "vocabulary"] = "support"
    zero_advantage_reason: str | None = field(default="traces with advantage 0 were not analysed", compare=False)
    dropped_reason: str | None = field(default="dropped tokens were not analysed", compare=False)
    zero_weight_reason: str | None = field(default="tokens with weight 0 were not analysed", compare=False)


@dataclass(frozen=True)
class Objective:
    """loss = sum of scale * keep * weight * surrogate(ratio, A) + sum over penalties of coef * scale * penalty.

    Call it as `objective(logprobs, entropy, terms)`. `terms` has the other arrays, and the evaluator for their kind of
    array (see `tracegrad.objective`). `print` shows its formula.

    Args:
        surrogate: PolicyGradient, CrossEntropy, Importance, Clip, Sigmoid, GeoClip or Regression; a `Surrogate` of your
            own, or a function loss(view) -> per_term.
        ratio: the ratio of the surrogate; None with PolicyGradient and CrossEntropy.
        weights: factors without gradient; their ratios times the surrogate's must telescope.
        rejections: applied in order, those on the policy being trained after the others.
        penalties: added, each with its own coefficient.
        reduce: the scale of each token.
        shifts: subtracted from the advantage.
        entropy: entropy bonus; None means none.

    Raises:
        ArgumentError: if multiplied ratios do not telescope to theta/rollout, theta/old or 1, if an option has no
            effect, or if a component has a type that the evaluators do not support.

    >>> from tracegrad.objective import Truncate, Clip
    >>> print(Objective(Clip(), Ratio("theta", "old"), (Weight(Ratio("old", "rollout"), transform=Truncate(0, 2)),)))
    loss = sum of scale * keep * weight * S
      S = max(-A r, -A clip(r, 0.8, 1.2)); r = theta/old
      weight = clamp(w, 0, 2), w = old/rollout
      scale = 1 / tokens
    """

    surrogate: Any
    ratio: Ratio | None = None
    weights: tuple[Weight, ...] = ()
    rejections: tuple[AnyRejection, ...] = ()
    penalties: tuple[Penalty, ...] = ()
    reduce: Reduce = PER_TOKEN
    shifts: tuple[AdvantageShift, ...] = ()
    entropy: EntropyBonus | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_ratio()
        for part in (self.surrogate, *self.components):
            part.check(self)
        for sign in "+0-":
            self._check_product([w.ratio for w in self.weights if sign in CONDITION_SIGNS[w.when]])
        self._check_order()
        for part in self._added:
            if (part.reduce or self.reduce).denominator == "kept" and not part.masked:
                raise ArgumentError(
                    "TG-OBJ-014: a penalty with masked=False runs over tokens that denominator='kept' does not count. "
                    "Use masked=True, masked='detached' or denominator='all'."
                )

    def _check_kinds(self) -> None:
        """Check the types of the components. The core must implement those that it evaluates."""
        if callable(self.surrogate):
            object.__setattr__(self, "surrogate", Function(self.surrogate))
        check_kind("Objective.surrogate", self.surrogate, Surrogate)
        if not getattr(getattr(self.surrogate, "__dataclass_params__", None), "frozen", False):
            raise ArgumentError(
                f"TG-OBJ-015: the surrogate {type(self.surrogate).__name__} must be a frozen dataclass. Add "
                "@dataclass(frozen=True) to its class: a resumed run compares objectives by value."
            )
        check_kind("Objective.reduce", self.reduce, Reduce)
        kinds = {"weights": Weight, "rejections": AnyRejection, "penalties": Penalty, "shifts": AdvantageShift}
        for name, kind in kinds.items():
            for place, part in enumerate(getattr(self, name)):
                check_kind(f"Objective.{name}[{place}]", part, kind)
                if part.detached:
                    core_of(f"Objective.{name}[{place}]", part)
        if self.entropy is not None:
            check_kind("Objective.entropy", self.entropy, EntropyBonus)
        for reduce in self.reductions:
            core_of("Objective.reduce", reduce)

    def _check_ratio(self) -> None:
        name, needs_ratio = type(self.surrogate).__name__, self.surrogate.takes_ratio
        if needs_ratio is False:
            refuse_without_effect(self.ratio is not None, "Objective.ratio", f"{name} does not use a ratio")
        elif (needs_ratio or self.ratio) and (self.ratio is None or self.ratio.num != "theta" or "ref" in self.ratio):
            raise ArgumentError(
                f"TG-OBJ-016: {name} needs theta/old or theta/rollout, not {self.ratio}. Without theta nothing "
                f"is trained."
            )
        if self.level.spans_traces:
            raise ArgumentError(
                f"TG-OBJ-017: the surrogate's level is the {self.level.over}. Its ratio would mix traces with "
                "different advantages. Use the level token, turn or trace."
            )

    def _check_product(self, ratios: list[Ratio]) -> None:
        allowed = [{}, {"theta": 1, "rollout": -1}, {"theta": 1, "old": -1}]
        if self.ratio is not None:
            ratios = [self.ratio, *ratios]
        else:
            allowed.append({"old": 1, "rollout": -1})  # score function with one update per batch
        if remaining_powers(ratios) not in allowed:
            raise ArgumentError(
                f"TG-OBJ-018: {' * '.join(map(str, ratios))} does not telescope to theta/rollout, theta/old or 1. "
                "A mismatch would be corrected twice, or a correction would apply to no mismatch. "
                "Weight theta/old by old/rollout, or use theta/rollout without a weight."
            )

    def _check_order(self) -> None:
        has_trained = False
        for rejection in self.rejections:
            if rejection.detached and has_trained:
                raise ArgumentError(
                    f"TG-OBJ-019: the rejection '{rejection}' does not depend on theta but follows one that does. "
                    "Rejections are applied in order. Move it to the front."
                )
            has_trained |= not rejection.detached

    @property
    def components(self) -> tuple[Component, ...]:
        """Weights, rejections, penalties and shifts."""
        return (*self.weights, *self.rejections, *self.penalties, *self.shifts)

    @property
    def _added(self) -> tuple[Penalty | EntropyBonus, ...]:
        """Penalties and the entropy bonus, which may have a reduction of their own."""
        return (*self.penalties, *([self.entropy] if self.entropy else []))

    @property
    def plan(self) -> dict[str, Any]:
        """Arguments for `correct`: correct(old, rollout, ..., **objective.plan)."""
        parts = {"weights": self.weights, "rejections": self.rejections}
        return {**parts, "reduce": self.reduce, "reductions": self.reductions}

    @property
    def level(self) -> Aggregation:
        """The level of the surrogate's ratio; the token if it has no ratio."""
        return self.surrogate.level

    @property
    def microbatch_components(self) -> tuple[str, ...]:
        """Components that read a full micro-batch; usually none.

        With such a component the gradient depends on how a step was split.
        """
        surrogate = [self.surrogate] if self.surrogate.locality == "batch" else []
        return tuple(map(str, [*surrogate, *(part for part in self.components if part.microbatch)]))

    @property
    def locality(self) -> Locality:
        """The smallest set of tokens that can be evaluated apart from the other tokens of a batch, with the same sum.

        "term": the loss is a sum over tokens. "turn", "trace": over turns or traces, whose current-policy ratios are
        aggregated. "batch": a component reads all tokens that are evaluated together. Detached components were
        evaluated before and do not count.

        >>> from tracegrad.objective import PolicyGradient
        >>> Objective(PolicyGradient()).locality
        'term'
        """
        if self.microbatch_components:
            return "batch"
        localities: dict[str, Locality] = {"token": "term", "turn": "turn", "trace": "trace"}
        levels = [localities.get(level.over, "batch") for ratio, level in self.ratios() if not ratio.detached]
        return max([*levels, self.surrogate.locality], key=("term", "turn", "trace", "batch").index)

    @property
    def reductions(self) -> tuple[Reduce, ...]:
        """The distinct reductions of surrogate, penalties and entropy bonus, the surrogate's first."""
        return tuple(dict.fromkeys([self.reduce, *(part.reduce for part in self._added if part.reduce)]))

    def ratios(self) -> Iterator[tuple[Ratio, Aggregation]]:
        """Yield every ratio with its level."""
        if self.ratio is not None:
            yield self.ratio, self.level
        for part in self.components:
            yield from part.ratios()

    @property
    def requirements(self) -> Requirements:
        """Arrays that it reads, and whether all branches of a trace must be in one batch."""
        ratios, surrogate_reads = list(self.ratios()), self.surrogate.reads
        proximal = any("proximal" in ratio for ratio, _ in ratios)
        shared = any(level.over in ("turn", "trace") and not ratio.detached for ratio, level in ratios)
        return Requirements(
            old="old" in surrogate_reads or any("old" in ratio for ratio, _ in ratios),
            rollout="rollout" in surrogate_reads or any(ratio.recorded for ratio, _ in ratios),
            ref="ref" in surrogate_reads or any("ref" in ratio for ratio, _ in ratios),
            trace_ratio=shared or self.surrogate.locality != "term",
            entropy=self.entropy_gradient or any(part.takes_entropy for part in (self.surrogate, *self.components)),
            proximal=proximal,
            ref_over="vocabulary" if any(part.over == "vocabulary" for part in self.penalties) else "support",
            zero_advantage_reason=zero_advantage_reason(self),
            dropped_reason=dropped_reason(self),
            zero_weight_reason=zero_weight_reason(self),
        )

    @property
    def entropy_gradient(self) -> bool:
        """Whether a gradient flows through the entropy: from a bonus, or from a surrogate that reads it."""
        return self.entropy is not None or "entropy" in self.surrogate.reads

    def check_missing(self, missing_logprobs: MissingLogprobs) -> None:
        """Refuse a treatment of missing rollout logprobs that would silently assume a ratio of 1.

        Raises:
            ArgumentError: if `missing_logprobs` is "ratio_one", and rollout is in a ratio with theta in anything but a
                rejection.
        """
        check_choice("missing", missing_logprobs, ("mask", "ratio_one", "error"))
        trained = [self.ratio, *(part.ratio for part in (*self.penalties, *self.shifts))]
        trained += [weight.ratio for weight in self.weights if not weight.detached]
        recorded = "rollout" in self.surrogate.reads or any(ratio.recorded for ratio in trained if ratio)
        if missing_logprobs == "ratio_one" and recorded:
            raise ArgumentError(
                "TG-OBJ-020: missing_logprobs='ratio_one' does not work with rollout in a ratio of the policy being "
                "trained: unknown ratios would be 1. Use missing_logprobs='mask', an objective on theta/old, "
                "or one without a ratio (TOPR_POSITIVE)."
            )

    def __call__(self, logprobs: Any, entropy: Any, terms: Any, *, vocabulary_logprobs: Any = None) -> Any:
        """Return the loss on `terms`, whose class evaluates it for their kind of array (`objective.Terms`).

        Args:
            logprobs, entropy: of the policy being trained.
            terms: the other arrays.
            vocabulary_logprobs: for penalties with over="vocabulary", logprobs over the whole vocabulary without
                penalties of the sampler, with gradient. None if no token has support or penalties.
        """
        return terms.evaluate(self, logprobs, entropy, vocabulary_logprobs)

    def coefficients(self, logprobs: Any, terms: Any) -> Any:
        """Return c with d loss / d logprob = -c at each token: per-token weights of -logp for any trainer.

        A trainer in any framework that minimises sum of -c * logp with constant c makes the same step.

        Args:
            logprobs: [m] or [B, S] of the policy being trained, nats; any array.
            terms: the other arrays of the tokens.

        Returns:
            numpy array in the shape of `logprobs`; float64 if they are float64, else float32.

        Raises:
            ArgumentError: with an entropy bonus, whose gradient needs the full distribution.
        """
        return terms.coefficients(self, logprobs)

    def __str__(self) -> str:
        ratio = f"; r = {self._ratio_text()}" if self.ratio is not None else ""
        lines = [
            f"loss = sum of scale * keep * {'weight * ' if self.weights else ''}S",
            f"  S = {self.surrogate}{ratio}",
        ]
        lines += [f"  {'*' if place else 'weight ='} {weight}" for place, weight in enumerate(self.weights)]
        lines += [f"  rejection: {rejection}" for rejection in self.rejections]
        lines += [f"  {shift}" for shift in self.shifts]
        lines += [f"  + sum of scale * {penalty}" for penalty in self.penalties]
        lines += [f"  - sum of scale * {self.entropy}"] if self.entropy else []
        return "\n".join([*lines, f"  scale = {self.reduce}"])

    def _repr_html_(self) -> str:
        return _html.text(str(self))

    def _ratio_text(self) -> str:
        """Return the ratio r as text, for the printed formula."""
        if self.level == TOKEN:
            return str(self.ratio)
        through = "" if self.level.grad == "through" else ", gradient through the token's own"
        if self.surrogate.transforms_token_log_ratios:
            return f"exp({self.level} of the l){through}, l = log {self.ratio}"
        return f"exp({self.level} of log {self.ratio}){through}"


def with_kl(objective: Objective, coef: float) -> Objective:
    """Return the objective with a k3 penalty against the reference model; without one if `coef` is 0.

    The penalty is neither masked nor weighted: TRL's with use_bias_correction_kl=False. TRL's default is `with_beta`.

    >>> from tracegrad.objective import PolicyGradient
    >>> with_kl(Objective(PolicyGradient()), 0.04).requirements.ref
    True
    """
    return _with_kl_penalty(objective, coef)


def with_beta(objective: Objective, beta: float) -> Objective:
    """Return the objective with exactly what TRL's `beta` adds by default; without a penalty if `beta` is 0.

    The penalty is the one of `with_kl`, times the ratio of the policy being trained at the level of the surrogate
    (use_bias_correction_kl=True). If the surrogate has no ratio, the ratio comes from the weight on the trained policy,
    at the token level under a Gamma shape (VESPO). Without such a weight it is the token's theta/old.

    Source: TRL 1.16's GRPOConfig; DeepSeek-V3.2, arXiv 2512.02556, eq. 7.

    >>> from tracegrad.objective import PolicyGradient
    >>> print(with_beta(Objective(PolicyGradient()), 0.04).penalties[0])
    0.04 * k3(theta/ref) * theta/old
    """
    ratio, level = objective.ratio or Ratio("theta", "old"), objective.level
    trained = [weight for weight in objective.weights if not weight.detached]
    if objective.ratio is None and trained:
        ratio, level = trained[0].ratio, TOKEN if trained[0].transform.can_absorb else trained[0].level
    return _with_kl_penalty(objective, beta, ratio, level)


def _with_kl_penalty(
    objective: Objective, coef: float, importance: Ratio | None = None, level: Aggregation = TOKEN
) -> Objective:
    others = tuple(penalty for penalty in objective.penalties if penalty.ratio != Ratio("theta", "ref"))
    if coef == 0:
        return replace(objective, penalties=others)
    masked = objective.reduce.denominator == "kept"
    kl = Penalty(
        Ratio("theta", "ref"), "k3", coef, masked, weighted=False, importance=importance, importance_level=level
    )
    return replace(objective, penalties=(*others, kl))


def with_entropy(objective: Objective, coef: float) -> Objective:
    """Return the objective with a fixed entropy bonus over all its tokens; without one if `coef` is 0.

    >>> from tracegrad.objective import PolicyGradient
    >>> with_entropy(Objective(PolicyGradient()), 0.01).requirements.entropy
    True
    """
    masked = objective.reduce.denominator == "kept"
    return replace(objective, entropy=EntropyBonus(coef, masked=masked) if coef else None)
