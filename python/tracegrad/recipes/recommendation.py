"""Recommend a recipe for recorded traces, from measurements on them. It never changes a run by itself.

The thresholds come from the runs in docs/choosing.md, which has the numbers of each recording. torch is not needed.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _validation
from tracegrad.alignment.sequences import Sequences
from tracegrad.data.codes import LOGPROB_KINDS
from tracegrad.data.sampling import kept_mass, options_on
from tracegrad.errors import ArgumentError
from tracegrad.metrics import OffPolicySums
from tracegrad.objective import presets
from tracegrad.recipes.recipe import DAPO, OAPL, Options, Recipe

NONE_KNOWN = 0.99
"""Share of trained tokens without a logprob from which a recording counts as one without logprobs."""
SOME_MISSING = 0.05
CLOSE = 0.01
"""Share of trained tokens with old/rollout outside of [0.5, 2], up to which trainer and recorder agree closely."""
TRIED = 0.03
"""Largest such share among the recordings that were tested: 16 policy versions of staleness."""
ANOTHER = 0.5
"""Such a share, from which the recording is of another model, or no correction of single tokens is enough."""
FEW_COUNT = 0.2
"""Effective sample size divided by trained tokens, below which the weights leave too few tokens."""
OLD_VERSIONS = 64
"""Staleness in policy versions, from which papers use a regression."""
LOW, HIGH = 0.5, 2.0
LOGPROBS = (
    "the logprob and id of each sampled token: logprobs=true and return_token_ids=true in each request, or let "
    "tracegrad proxy ask for them. A ratio then corrects what is stale, and DAPO clips it."
)
WHOLE = "answers sampled from the whole distribution: top_p 1, top_k -1, min_p 0, no penalty and no logit_bias."
PROCESSED = "processed logprobs: start the server with --logprobs-mode processed_logprobs."


@dataclass(frozen=True)
class Measurements:
    """Measurements of a recording; None if `old` or versions are unknown.

    Args:
        terms: number of trained tokens.
        missing: share of them without a recorded logprob.
        kinds: kinds of logprobs in the recording, by name.
        hot: whether a trace has a temperature other than 1 and logprobs that are not processed.
        kl: mean of log rollout/old, nats: KL(rollout || old).
        outside: share of trained tokens with a logprob whose old/rollout is outside of [0.5, 2].
        ess: effective sample size of old/rollout, divided by the number of trained tokens.
        lag: median staleness of trained tokens, in policy versions.
        reshaped: sampling options other than temperature that were on, so that tokens have another distribution.
        kept: mean and minimum of the probability mass S that these options kept, for processed logprobs.
    """

    terms: int
    missing: float
    kinds: tuple[str, ...]
    hot: bool
    kl: float | None = None
    outside: float | None = None
    ess: float | None = None
    lag: float | None = None
    reshaped: tuple[str, ...] = ()
    kept: tuple[float, float] | None = None

    def __str__(self) -> str:
        rows = {"missing": f"{self.missing:.1%}", "kind": ", ".join(self.kinds)}
        if self.kl is not None:
            rows |= {"KL(rollout||old)": f"{self.kl:.2g} nats", "old/rollout outside [0.5, 2]": f"{self.outside:.1%}"}
            rows |= {"ESS": f"{self.ess:.2f}"}
        rows |= {"sampled with": ", ".join(self.reshaped)} if self.reshaped else {}
        rows |= {"kept mass S": f"{self.kept[0]:.3f}, {self.kept[1]:.3f} at least"} if self.kept else {}
        rows |= {} if self.lag is None else {"versions behind": f"{self.lag:g}"}
        return ", ".join(f"{name} {value}" for name, value in rows.items())


@dataclass(frozen=True)
class Advice:
    """A recommendation, with its reasons.

    Args:
        name: of the recipe, or of the objective if its source specifies only the loss.
        recipe: to be trained with.
        reason: two sentences.
        decided: the measurement that decided, with its threshold.
        measured: all measurements.
        record: what to request from the server next time, if that would change the recommendation; else "".
    """

    name: str
    recipe: Recipe
    reason: str
    decided: str
    measured: Measurements
    record: str = ""

    @property
    def options(self) -> Options:
        """The recipe as options of `tracegrad train`."""
        return self.recipe.options

    @property
    def spoken(self) -> str:
        """The options as flags of a command line."""
        options = {name: str(value).lower() if isinstance(value, bool) else value for name, value in self.options}
        return " ".join(f"--{name} {value}" for name, value in options.items())

    def as_dict(self) -> dict[str, Any]:
        """Return the recommendation as a dict for JSON."""
        result = {"name": self.name, "options": dict(self.options), "reason": self.reason, "decided": self.decided}
        result |= {"record": self.record} if self.record else {}
        return {**result, "measured": asdict(self.measured)}

    def __str__(self) -> str:
        rows = {"decided": self.decided, "measured": self.measured, "options": self.spoken}
        rows |= {"record": self.record} if self.record else {}
        return "\n".join([f"{self.name}: {self.reason}", *(f"  {head:<8} {text}" for head, text in rows.items())])


def for_data(sequences: Sequences, old: ArrayLike | None = None) -> Advice:
    """Recommend a recipe for a recording, with the reason and the measurement that decided.

    Args:
        sequences: aligned traces.
        old: [T] or [M] logprobs of the policy that will be trained, nats (`model.logprobs`, or `doctor --rescore`);
            None skips the measurements that need it.

    Raises:
        ArgumentError: if there are no trained tokens, or `old` has another length.

    >>> s = Sequences.from_arrays([5, 6, 7], [0, 3], [np.nan, -1.0, -2.0], [False, True, True])
    >>> found = for_data(s, old=[-1.1, -1.9])
    >>> found.name, found.decided
    ('DAPO', 'old/rollout outside [0.5, 2]: 0.0% of terms, up to 1%')
    """
    return advise(measure(sequences, old))


def measure(sequences: Sequences, old: ArrayLike | None = None) -> Measurements:
    """Compute the measurements of `for_data`; arguments and errors as there."""
    terms = sequences.terms
    if not len(terms):
        raise ArgumentError(
            "TG-RECIPE-012: no token of these traces is trained, so nothing says which loss fits. Look at drift "
            "and the doctor."
        )
    rollout = sequences.rollout_logprobs[terms]
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))[terms]
    kind = sequences.logprob_kind[owner]
    version = sequences.version[terms]
    known, recorded = ~np.isnan(rollout), version[version >= 0]
    measurements: dict[str, Any] = {
        "terms": len(terms),
        "missing": 1.0 - float(known.mean()),
        "kinds": tuple(LOGPROB_KINDS[code] for code in np.unique(kind[known])),
        "hot": _has_raw_temperature(sequences, np.unique(owner[known])),
        "lag": float(np.median(recorded.max() - recorded)) if len(recorded) else None,
        "reshaped": options_on(int(np.bitwise_or.reduce(sequences.reshaped[owner[known]], initial=0))),
    }
    if old is not None and known.any():
        old_ = _validation.floats(old, "old", np.float64)
        if len(old_) not in (len(terms), sequences.tokens):
            raise ArgumentError(
                f"TG-RECIPE-013: old has {len(old_)} logprobs, and there are {len(terms)} terms of {sequences.tokens} "
                "tokens. Which is which is not known. Pass one for each term, or for each token."
            )
        old_ = (old_ if len(old_) == len(terms) else old_[terms])[known]
        ratio = np.exp(np.clip(old_ - rollout[known], -20.0, 20.0))
        processed = kind[known] == LOGPROB_KINDS.index("processed")
        measurements["kept"] = kept_mass(old_, rollout[known], sequences.reshaped[owner[known]], processed)
        outside = float(np.mean((ratio < LOW) | (ratio > HIGH)))
        metrics = OffPolicySums.of(old_, rollout[known], trace=owner[known]).named()
        measurements |= {"kl": metrics["kl_rollout_old_k1"], "outside": outside, "ess": metrics["mismatch_ess"]}
    return Measurements(**measurements)


def advise(m: Measurements) -> Advice:
    """Recommend a recipe for measurements, by the first rule that applies."""
    return _beyond_weights(m) or _dapo(m)


def _beyond_weights(m: Measurements) -> Advice | None:
    """Return the recommendation if no weight of single tokens helps; else None."""
    if m.missing >= NONE_KNOWN:
        return _advice(
            "TOPR_POSITIVE",
            "No ratio can be formed without recorded logprobs. The good half of TOPR needs none, and was the best of "
            "those that do without.",
            f"missing: {m.missing:.1%} of terms, from {NONE_KNOWN:.0%}",
            m,
        )
    if m.reshaped:
        mass = "not measured" if m.kept is None else f"{m.kept[0]:.3f} on average, {m.kept[1]:.3f} at least"
        return _advice(
            "TOPR_POSITIVE",
            "The tokens were drawn from another distribution than the one that the trainer computes. With processed "
            "logprobs a ratio is the kept mass S although nothing changed, with raw ones it is 1 instead of S.",
            f"sampled with {', '.join(m.reshaped)}; kept mass S: {mass}",
            m,
        )
    if m.outside is not None and m.outside >= ANOTHER:
        return _advice(
            "TOPR_POSITIVE",
            "Half of what was recorded is out of proportion to what this model gives, as in another model's traces. No "
            "weight repairs that: imitate the good ones, or look at template, temperature and weights first.",
            f"old/rollout outside [0.5, 2]: {m.outside:.1%} of terms, from {ANOTHER:.0%}",
            m,
        )
    if m.lag is not None and m.lag >= OLD_VERSIONS:
        return _advice(
            "OAPL",
            "The traces are many policy versions old. A regression on rewards needs no importance ratio, and was "
            "trained on a lag of 400 steps by its paper; nothing here was.",
            f"versions behind: {m.lag:g}, from {OLD_VERSIONS}",
            m,
            OAPL,
        )
    if m.ess is not None and m.ess < FEW_COUNT:
        return _advice(
            "M2PO",
            "A few terms carry nearly all of the weight. A budget on the squared log-ratio leaves the worst of them "
            "out, by its paper also for traces 256 versions old; nothing here was.",
            f"ESS: {m.ess:.2f}, below {FEW_COUNT:g}",
            m,
        )
    return None


def _dapo(m: Measurements) -> Advice:
    """Return DAPO, with a reason that depends on the measurements."""
    if m.missing >= SOME_MISSING:
        return _dapo_with_missing(m)
    if m.hot:
        return _advice(
            "DAPO",
            "Raw logprobs at a temperature other than 1 are of another distribution than the one that was sampled. "
            "DAPO bears it; record processed ones.",
            f"kind: {', '.join(m.kinds)} beside a temperature other than 1",
            m,
            DAPO,
        )
    if m.outside is None:
        return _advice(
            "DAPO",
            "Nothing was measured against the policy that will be trained. The field's default holds for all "
            "recordings that were tried here; pass old= to know more.",
            "old: not given",
            m,
            DAPO,
        )
    if m.outside <= CLOSE:
        return _advice(
            "DAPO",
            "Trainer and recorder agree closely, so that DAPO's weight costs nothing and its clip holds every term. "
            "TOPR did as well here, by less than seeds differ.",
            _outside_text(m),
            m,
            DAPO,
        )
    if m.outside <= TRIED:
        return _advice(
            "DAPO",
            "The recording is some policy versions old, or of another precision. DAPO's truncated weight and clip were "
            "enough for all such recordings that were tried here, up to 16 versions.",
            f"old/rollout outside [0.5, 2]: {m.outside:.1%} of terms, from {CLOSE:.0%} to {TRIED:.0%}",
            m,
            DAPO,
        )
    return _advice(
        "DAPO",
        "The two policies are further apart than in any recording that was tried here. DAPO's truncated weight and "
        "clip are the field's default; watch the effective sample size, and try M2PO beside it.",
        f"old/rollout outside [0.5, 2]: {m.outside:.1%} of terms, from {TRIED:.0%} to {ANOTHER:.0%}",
        m,
        DAPO,
    )


def _dapo_with_missing(m: Measurements) -> Advice:
    """Return DAPO for a recording with some missing logprobs, with the treatment of these tokens."""
    decided = f"missing: {m.missing:.1%} of terms, from {SOME_MISSING:.0%}"
    if m.outside is not None and m.outside <= CLOSE:
        reason = (
            "A part of the logprobs is missing. Where they are known the two policies agree closely, so that terms "
        )
        reason += "without one count with weight 1: they would else be lost."
        return _advice("DAPO", reason, f"{decided}; {_outside_text(m)}", m, replace(DAPO, missing="neutral"))
    reason = (
        "A part of the logprobs is missing. Nothing shows that the two policies agree closely, so that terms without "
    )
    reason += "one are left out."
    return _advice("DAPO", reason, decided, m, replace(DAPO, missing="mask"))


def _has_raw_temperature(sequences: Sequences, traces: NDArray[Any]) -> bool:
    """Return whether a trace has a temperature other than 1 and logprobs that are not processed."""
    temperature = sequences.temperature[traces]
    raw = sequences.logprob_kind[traces] != LOGPROB_KINDS.index("processed")
    return bool(np.any(raw & ~np.isnan(temperature) & (temperature != 1.0)))


def _outside_text(m: Measurements) -> str:
    return f"old/rollout outside [0.5, 2]: {m.outside:.1%} of terms, up to {CLOSE:.0%}"


def _advice(name: str, reason: str, decided: str, measured: Measurements, recipe: Recipe | None = None) -> Advice:
    record = WHOLE if measured.reshaped else PROCESSED if measured.hot else ""
    record = record or (LOGPROBS if measured.missing >= SOME_MISSING else "")
    return Advice(name, recipe or Recipe(getattr(presets, name)), reason, decided, measured, record)
