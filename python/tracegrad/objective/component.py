"""Define `Component`, the base class of components of an objective, and `LossInputs`, the tensors that they are
evaluated on."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from tracegrad.errors import ArgumentError
from tracegrad.objective.ratio import TOKEN, Aggregation, Ratio, Reduce, clamp_log_ratio

if TYPE_CHECKING:
    from tracegrad.objective.objective import Objective


class Component:
    """Component of an objective."""

    takes_entropy = False
    """Whether it reads the entropy of the policy being trained."""

    @property
    def detached(self) -> bool:
        """Whether its value is known before the step, so that `correct` evaluates it."""
        ratios = self.ratios()
        return bool(ratios) and all(ratio.detached for ratio, _ in ratios)

    @property
    def microbatch(self) -> bool:
        """Whether a field, or a field of a field, is "microbatch": a statistic of the tokens evaluated together."""
        return any("microbatch" in (value, getattr(value, "scope", None)) for value in vars(self).values())

    @property
    def cross_trace_reason(self) -> str:
        """Reason why its value depends on other traces; "" if it does not.

        A dependence through integers that are available before the step does not count.
        """
        return ""

    def ratios(self) -> Sequence[tuple[Ratio, Aggregation]]:
        """Return the ratios that it reads, each with its level; by default its field `ratio` at its field `level`."""
        ratio = getattr(self, "ratio", None)
        return [] if ratio is None else [(ratio, getattr(self, "level", TOKEN))]

    def check(self, objective: "Objective") -> None:
        """Raise if it would have no effect in this objective, or another effect than its fields say."""

    def to_core(self) -> NamedTuple:
        """Return its plain form from `core_forms`, from which the Rust core evaluates it."""
        raise NotImplementedError


def core_of(name: str, part: Any) -> Any:
    """Return `part.to_core()` of a detached component.

    Raises:
        ArgumentError: for a class of your own, because the core does not implement its formula.
    """
    if "to_core" not in vars(type(part)):
        raise ArgumentError(
            f"TG-OBJ-001: {name} is a {type(part).__name__}, and no evaluator implements its formula. The Rust core "
            "evaluates components that do not depend on theta, and it would compute another formula. Use theta in the "
            "ratio, so that the component's own formula runs, or extend the core (docs/how-to/extend.md)."
        )
    return part.to_core()


class LossInputs:
    """Trained tokens of one evaluation. Tensors are [m] or [B, S]; floats have the dtype of the logprobs.

    Missing logprobs follow one rule, which is applied here first. A ratio that names rollout (or the proximal policy,
    which is computed from it) has a value only at tokens with a recorded logprob. Any other ratio has a value at every
    token. A level runs over the tokens that are `present`: known, or kept without a logprob by
    `correct(missing_logprobs="ratio_one")`.

    Args:
        objective: the objective to evaluate.
        arrays: old, rollout, ref, alpha, advantages, trace, turn, group by name.
        logprobs: logprobs under the policy being trained.
        entropy: its entropy, or None.
        counted: bool, False at padding.
        keep: bool, the tokens that `correct` kept.
        scales: scale of each token, by reduction.
        permutation: returns a random permutation of n; used by components that draw at random.
        vocabulary_logprobs: logprobs under the policy being trained over the whole vocabulary, for tokens that were
            sampled from a part of it or with penalties. None if they equal `logprobs`.

    Attributes:
        advantages: advantages at kept tokens, 0 elsewhere. The evaluator subtracts the shifts.

    >>> import torch
    >>> from tracegrad.objective import Function, Objective, padded_loss
    >>> def squared(view):
    ...     return (view.log_ratio - view.advantages).square()
    >>> objective = Objective(Function(squared, locality="term"), Ratio("theta", "old"))
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([[1.0, -1.0]])}
    >>> # Log-ratios of 0.5.
    >>> logprobs, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.5]])
    >>> # (0.5 - 1)^2 and (0.5 + 1)^2
    >>> padded_loss(objective, logprobs, old=old, **step).per_term.surrogate
    tensor([[0.2500, 2.2500]])
    """

    def __init__(
        self,
        objective: "Objective",
        arrays: Mapping[str, Any],
        logprobs: Any,
        entropy: Any,
        *,
        counted: Any,
        keep: Any,
        scales: Mapping[Reduce, Any],
        permutation: Callable[[int], Any],
        vocabulary_logprobs: Any = None,
    ) -> None:
        self.objective, self.arrays, self.permutation = objective, arrays, permutation
        self._theta, self._entropy, self._scales, self._segments = logprobs, entropy, scales, {}
        self._over_vocabulary = logprobs if vocabulary_logprobs is None else vocabulary_logprobs
        self.counted, self.keep = counted, keep
        rollout = arrays["rollout"]
        self.known = counted if rollout is None else counted & ~rollout.isnan()
        self.present = counted & (keep | self.known)
        self.advantages = self.masked_array("advantages", keep)

    @cached_property
    def logprobs(self) -> Any:
        """Logprobs under the policy being trained at kept tokens, with gradient; 0 elsewhere."""
        return self.logprob("theta", self.keep)

    @cached_property
    def log_ratio(self) -> Any:
        """Log of `ratio`, not clamped."""
        return self.objective.surrogate.log_ratio(self).where(self.keep, 0)

    @cached_property
    def ratio(self) -> Any:
        """The objective's ratio at the level of its surrogate, with gradient, at kept tokens; 1 elsewhere."""
        return clamp_log_ratio(self.log_ratio).exp()

    @property
    def pair(self) -> Ratio:
        """The policies of `ratio`.

        Raises:
            ArgumentError: if the objective has no ratio.
        """
        if self.objective.ratio is None:
            raise ArgumentError(
                f"TG-OBJ-002: the surrogate {self.objective.surrogate} reads a ratio, but its objective has none. "
                "Pass one: Objective(surrogate, Ratio('theta', 'old'))."
            )
        return self.objective.ratio

    @cached_property
    def clipped(self) -> Any:
        """Bool: tokens whose gradient was removed by the bounds of the surrogate."""
        return self.objective.surrogate.clip_mask(self)

    @property
    def entropy(self) -> Any:
        """Entropy of the next-token distribution at each token, nats.

        Raises:
            ArgumentError: if no entropy was passed.
        """
        if self._entropy is None:
            raise ArgumentError(
                "TG-OBJ-003: a component of the objective reads the entropy, and it is None. Pass it, and declare it."
            )
        return self._entropy

    def array(self, name: str) -> Any:
        """Return an array of the tokens as it was passed.

        Raises:
            ArgumentError: if the tokens do not have it.
        """
        values = self.arrays[name]
        if values is None:
            raise ArgumentError(
                f"TG-OBJ-004: the objective needs {name} of every token, and the tokens have none. Pass "
                f"Terms({name}=...)."
            )
        return values

    def masked_array(self, name: str, mask: Any) -> Any:
        """Return an array in the dtype of the logprobs, 0 at tokens outside `mask`."""
        return self.array(name).where(mask, 0).to(self._theta.dtype)

    def logprob(self, policy: str, mask: Any) -> Any:
        """Return the logprob under a policy; 0 without a gradient outside `mask`."""
        if policy == "theta":
            return self._theta.where(mask, 0)
        if policy != "proximal":
            return self.masked_array(policy, mask)
        rollout, theta = self.logprob("rollout", mask), self.logprob("theta", mask).detach()
        return rollout + self.masked_array("alpha", mask) * (theta - rollout)

    def log_difference(self, ratio: Ratio, mask: Any, *, over_vocabulary: bool = False) -> Any:
        """Return log num - log den; 0 without a gradient outside `mask`.

        Args:
            over_vocabulary: take theta's logprobs over the whole vocabulary. Those of `den` must be, too.
        """
        num = self._over_vocabulary.where(mask, 0) if over_vocabulary else self.logprob(ratio.num, mask)
        return num - self.logprob(ratio.den, mask)

    def has_value(self, ratio: Ratio) -> Any:
        """Return at which tokens a ratio has a value."""
        return self.known if ratio.recorded else self.counted

    def level_terms(self, level: Aggregation) -> Any:
        """Return the tokens over which the surrogate's level runs."""
        return self.keep if level.terms == "kept" or level.over == "token" else self.present

    def terms_for(self, masked: bool | str, keep: Any) -> Any:
        """Return the tokens that a penalty or bonus runs over.

        Args:
            masked: the field `masked` of the penalty or bonus.
            keep: bool, the tokens that all rejections kept.
        """
        return self.keep if masked == "detached" else keep if masked else self.counted

    def log_ratio_at(self, ratio: Ratio, level: Aggregation, factor: Any = None, keep: Any = None) -> tuple[Any, Any]:
        """Return the clamped log-ratio at a level (0 without a value), and at which tokens it has a value.

        Args:
            factor: multiplies the ratio of each token.
            keep: bool, used if the level runs over kept tokens.
        """
        has = self.has_value(ratio)
        log_ratio = self.log_difference(ratio, has)
        if factor is not None:
            log_ratio = (log_ratio + factor.log()).where(has, 0)
        inside = has & self.present
        level_log = level.apply(
            log_ratio, self, inside & keep if keep is not None and level.terms == "kept" else inside
        )
        known = has & ~level_log.isnan()
        return clamp_log_ratio(level_log.where(known, 0)), known

    def scale(self, reduce: Reduce | None) -> Any:
        """Return the scale of a reduction; None means the objective's reduction.

        Raises:
            ArgumentError: if the tokens do not have it.
        """
        reduction = reduce or self.objective.reduce
        if reduction not in self._scales:
            raise ArgumentError(
                f"TG-OBJ-005: a penalty or bonus has its own denominators, {reduction}, and the tokens have no scale "
                "for them. Pass correct(reductions=objective.reductions) and Terms(scales=corrected.scales)."
            )
        return self._scales[reduction].to(self._theta.dtype)

    def detach(self) -> "LossInputs":
        """Return the same view with logprobs and entropy that have no gradient."""
        entropy = None if self._entropy is None else self._entropy.detach()
        view = LossInputs(
            self.objective,
            self.arrays,
            self._theta.detach(),
            entropy,
            counted=self.counted,
            keep=self.keep,
            scales=self._scales,
            permutation=self.permutation,
            vocabulary_logprobs=self._over_vocabulary.detach(),
        )
        view._segments, view.advantages = self._segments, self.advantages
        return view

    def segments(self, over: str) -> Any:
        """Return [tokens] the dense index of the turn, trace, group or batch of each token, flat."""
        if over not in self._segments:
            self._segments[over] = self._index(over)
        return self._segments[over]

    def _index(self, over: str) -> Any:
        if over == "batch":
            return self.counted.reshape(-1).long() * 0
        if over != "turn":
            return _dense(self.array(over))
        return _dense(self.segments("trace") * self._theta.numel() + _dense(self.array("turn")))


def _dense(ids: Any) -> Any:
    """Return [tokens] the rank of each id among the distinct ids.

    Unlike torch.unique it does not wait for the device.
    """
    ordered, order = ids.reshape(-1).long().sort()
    steps = (ordered != ordered.roll(1)).long()
    steps[:1] = 0
    return ordered.new_empty(len(ordered)).scatter(0, order, steps.cumsum(0))
