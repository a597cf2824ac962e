"""Recommend a recipe for recorded traces, from measurements on them. It never changes a run by itself.

The thresholds come from the runs in docs/how-to/choose-an-objective.md, which has the numbers of each recording. torch
is not needed.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _validation
from tracegrad.alignment.sequences import Sequences
from tracegrad.data.codes import FILLED, LOGPROB_KINDS
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
    "the logprob and id of each sampled token: set logprobs=true and return_token_ids=true in each request, or use "
    "tracegrad proxy, which sets both. Then a ratio corrects for staleness, and DAPO clips it."
)
WHOLE = "answers sampled from the full distribution: top_p 1, top_k -1, min_p 0, without penalties and logit_bias."
PROCESSED = "processed logprobs: start the server with --logprobs-mode processed_logprobs."


@dataclass(frozen=True)
class Measurements:
    """Measurements of a recording; None if `old` or versions are unknown.

    Args:
        terms: number of trained tokens.
        missing: share of them without a logprob, recorded or filled.
        kinds: kinds of logprobs in the recording, by name.
        raw_temperature: whether a trace has a temperature other than 1 and logprobs that are not processed.
        kl: mean of log rollout/old, nats: KL(rollout || old).
        outside: share of trained tokens with a logprob whose old/rollout is outside of [0.5, 2].
        ess: effective sample size of old/rollout, divided by the number of trained tokens.
        staleness: median staleness of trained tokens, in policy versions.
        reshaped: sampling options other than temperature that were on, so that tokens have another distribution.
        kept: mean and minimum of the probability mass S that these options kept, for processed logprobs.
        filled: share of trained tokens whose logprob `tracegrad fill` measured afterwards (level T7).
    """

    terms: int
    missing: float
    kinds: tuple[str, ...]
    raw_temperature: bool
    kl: float | None = None
    outside: float | None = None
    ess: float | None = None
    staleness: float | None = None
    reshaped: tuple[str, ...] = ()
    kept: tuple[float, float] | None = None
    filled: float = 0.0

    def __str__(self) -> str:
        rows = {"missing": f"{self.missing:.1%}", "kind": ", ".join(self.kinds)}
        rows |= {"filled": f"{self.filled:.1%}"} if self.filled else {}
        if self.kl is not None:
            rows |= {"KL(rollout||old)": f"{self.kl:.2g} nats", "old/rollout outside [0.5, 2]": f"{self.outside:.1%}"}
            rows |= {"ESS": f"{self.ess:.2f}"}
        rows |= {"sampled with": ", ".join(self.reshaped)} if self.reshaped else {}
        rows |= {"kept mass S": f"mean {self.kept[0]:.3f}, minimum {self.kept[1]:.3f}"} if self.kept else {}
        rows |= {} if self.staleness is None else {"versions behind": f"{self.staleness:g}"}
        return ", ".join(f"{name} {value}" for name, value in rows.items())


@dataclass(frozen=True)
class Advice:
    """A recommendation, with its reasons.

    Args:
        name: of the recipe, or of the objective if its source specifies only the loss.
        recipe: to be trained with.
        reason: two sentences.
        evidence: the measurement that decided, with its threshold.
        measured: all measurements.
        record: what to request from the server next time, if that would change the recommendation; else None.

    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [np.nan, -1.0, -2.0], [False, True, True])
    >>> advice = for_data(sequences, old=[-1.1, -1.9])
    >>> advice.name, advice.measured.terms, advice.evidence
    ('DAPO', 2, 'old/rollout outside [0.5, 2]: 0.0% of tokens, up to 1%')
    >>> advice.flags.split(" --")[:2]
    ['--objective DAPO', 'advantage.baseline group_mean']
    """

    name: str
    recipe: Recipe
    reason: str
    evidence: str
    measured: Measurements
    record: str | None = None

    @property
    def options(self) -> Options:
        """The recipe as options of `tracegrad train`."""
        return self.recipe.options

    @property
    def flags(self) -> str:
        """The options as flags of a command line."""
        options = {name: str(value).lower() if isinstance(value, bool) else value for name, value in self.options}
        return " ".join(f"--{name} {value}" for name, value in options.items())

    def as_dict(self) -> dict[str, Any]:
        """Return the recommendation as a dict for JSON."""
        result = {"name": self.name, "options": dict(self.options), "reason": self.reason, "decided": self.evidence}
        result |= {"record": self.record} if self.record else {}
        return {**result, "measured": asdict(self.measured)}

    def __str__(self) -> str:
        rows = {"decided": self.evidence, "measured": self.measured, "options": self.flags}
        rows |= {"record": self.record} if self.record else {}
        return "\n".join([f"{self.name}: {self.reason}", *(f"  {head:<8} {text}" for head, text in rows.items())])


def for_data(sequences: Sequences, old: ArrayLike | None = None) -> Advice:
    """Recommend a recipe for a recording, with the reason and the measurement that decided.

    Args:
        sequences: aligned traces.
        old: [T] or [M] logprobs of the policy that will be trained, nats, from `model.logprobs` or
            `doctor --check-logprobs`. None skips the measurements that need it.

    Raises:
        ArgumentError: if there are no trained tokens, or `old` has another length.

    >>> s = Sequences.from_arrays([5, 6, 7], [0, 3], [np.nan, -1.0, -2.0], [False, True, True])
    >>> advice = for_data(s, old=[-1.1, -1.9])
    >>> advice.name, advice.evidence
    ('DAPO', 'old/rollout outside [0.5, 2]: 0.0% of tokens, up to 1%')
    """
    return advise(measure(sequences, old))


def measure(sequences: Sequences, old: ArrayLike | None = None) -> Measurements:
    """Compute the measurements of `for_data`; arguments and errors as there."""
    terms = sequences.terms
    if not len(terms):
        raise ArgumentError(
            "TG-RECIPE-012: these traces have no trained token, so no loss can be recommended. Read the alignment "
            "report and run the doctor."
        )
    rollout = sequences.rollout_logprobs[terms]
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))[terms]
    kind = sequences.logprob_kind[owner]
    version = sequences.version[terms]
    known, recorded = ~np.isnan(rollout), version[version >= 0]
    measurements: dict[str, Any] = {
        "terms": len(terms),
        "missing": 1.0 - float(known.mean()),
        "filled": float((known & (sequences.alignment_level[terms] == FILLED)).mean()),
        "kinds": tuple(LOGPROB_KINDS[code] for code in np.unique(kind[known])),
        "raw_temperature": _has_raw_temperature(sequences, np.unique(owner[known])),
        "staleness": float(np.median(recorded.max() - recorded)) if len(recorded) else None,
        "reshaped": options_on(int(np.bitwise_or.reduce(sequences.reshaped[owner[known]], initial=0))),
    }
    if old is not None and known.any():
        old_ = _validation.floats(old, "old", np.float64)
        if len(old_) not in (len(terms), sequences.tokens):
            raise ArgumentError(
                f"TG-RECIPE-013: old has {len(old_)} logprobs for {len(terms)} trained tokens and {sequences.tokens} "
                "tokens in total. Pass one logprob per trained token, or one per token."
            )
        old_ = (old_ if len(old_) == len(terms) else old_[terms])[known]
        ratio = np.exp(np.clip(old_ - rollout[known], -20.0, 20.0))
        processed = kind[known] == LOGPROB_KINDS.index("processed")
        measurements["kept"] = kept_mass(old_, rollout[known], sequences.reshaped[owner[known]], processed)
        outside = float(np.mean((ratio < LOW) | (ratio > HIGH)))
        metrics = OffPolicySums.of(old_, rollout[known], trace=owner[known]).values()
        measurements |= {
            "kl": metrics["kl_rollout_old_k1"],
            "outside": outside,
            "ess": metrics["old_rollout_ratio_ess"],
        }
    return Measurements(**measurements)


def advise(m: Measurements) -> Advice:
    """Recommend a recipe for measurements, by the first rule that applies."""
    return _beyond_weights(m) or _dapo(m)


def _beyond_weights(m: Measurements) -> Advice | None:
    """Return the recommendation if no weight of single tokens helps; else None."""
    if m.missing >= NONE_KNOWN:
        return _advice(
            "TOPR_POSITIVE",
            "Without recorded logprobs there is no ratio. The positive half of TOPR needs none, and was the best such "
            "objective in our tests.",
            f"missing: {m.missing:.1%} of tokens, from {NONE_KNOWN:.0%}",
            m,
        )
    if m.reshaped:
        mass = "not measured" if m.kept is None else f"mean {m.kept[0]:.3f}, minimum {m.kept[1]:.3f}"
        return _advice(
            "TOPR_POSITIVE",
            "The tokens were sampled from another distribution than the trainer computes. For an unchanged policy, a "
            "ratio with processed logprobs is the kept mass S instead of 1; with raw logprobs it is 1 instead of S.",
            f"sampled with {', '.join(m.reshaped)}; kept mass S: {mass}",
            m,
        )
    if m.outside is not None and m.outside >= ANOTHER:
        return _advice(
            "TOPR_POSITIVE",
            "Half of the recorded logprobs differ greatly from this model's, as in traces of another model. No weight "
            "corrects that: imitate the good traces, or check template, temperature and weights first.",
            f"old/rollout outside [0.5, 2]: {m.outside:.1%} of tokens, from {ANOTHER:.0%}",
            m,
        )
    if m.staleness is not None and m.staleness >= OLD_VERSIONS:
        return _advice(
            "OAPL",
            "The traces are many policy versions old. A regression on rewards needs no importance ratio; its paper "
            "trained with a staleness of 400 steps, which we did not test.",
            f"versions behind: {m.staleness:g}, from {OLD_VERSIONS}",
            m,
            OAPL,
        )
    if m.ess is not None and m.ess < FEW_COUNT:
        return _advice(
            "M2PO",
            "A few tokens have nearly all of the weight. A budget on the squared log-ratio drops the worst of them; "
            "its paper reports this for traces up to 256 versions old, which we did not test.",
            f"ESS: {m.ess:.2f}, below {FEW_COUNT:g}",
            m,
        )
    return None


def _dapo(m: Measurements) -> Advice:
    """Return DAPO, with a reason that depends on the measurements."""
    if m.missing >= SOME_MISSING:
        return _dapo_with_missing(m)
    if m.raw_temperature:
        return _advice(
            "DAPO",
            "Raw logprobs at a temperature other than 1 are of another distribution than the sampled one. DAPO "
            "tolerates that; record processed logprobs.",
            f"kind: {', '.join(m.kinds)} with a temperature other than 1",
            m,
            DAPO,
        )
    if m.outside is None:
        return _advice(
            "DAPO",
            "The recording was not compared with the policy that will be trained. DAPO, the default, worked for all "
            "recordings that we tested; pass old= to compare.",
            "old: not passed",
            m,
            DAPO,
        )
    if m.outside <= CLOSE:
        return _advice(
            "DAPO",
            "Trainer and recorder agree closely, so DAPO's weight costs nothing, and its clip bounds every token. TOPR "
            "was equally good in our tests, within the difference between seeds.",
            _outside_text(m),
            m,
            DAPO,
        )
    if m.outside <= TRIED:
        return _advice(
            "DAPO",
            "The recording is some policy versions old, or of another precision. DAPO's truncated weight and clip were "
            "enough for all such recordings that we tested, up to 16 versions.",
            f"old/rollout outside [0.5, 2]: {m.outside:.1%} of tokens, from {CLOSE:.0%} to {TRIED:.0%}",
            m,
            DAPO,
        )
    return _advice(
        "DAPO",
        "The two policies differ more than in any recording that we tested. DAPO's truncated weight and clip are the "
        "usual default; watch the effective sample size, and also try M2PO.",
        f"old/rollout outside [0.5, 2]: {m.outside:.1%} of tokens, from {TRIED:.0%} to {ANOTHER:.0%}",
        m,
        DAPO,
    )


def _dapo_with_missing(m: Measurements) -> Advice:
    """Return DAPO for a recording with some missing logprobs, with the treatment of these tokens."""
    decided = f"missing: {m.missing:.1%} of tokens, from {SOME_MISSING:.0%}"
    if m.outside is not None and m.outside <= CLOSE:
        reason = "Some logprobs are missing. For the other tokens the two policies agree closely, so tokens without a "
        reason += "logprob get weight 1 instead of being dropped."
        return _advice("DAPO", reason, f"{decided}; {_outside_text(m)}", m, replace(DAPO, missing_logprobs="ratio_one"))
    reason = "Some logprobs are missing. No measurement shows that the two policies agree closely, so tokens without a "
    reason += "logprob are masked."
    return _advice("DAPO", reason, decided, m, replace(DAPO, missing_logprobs="mask"))


def _has_raw_temperature(sequences: Sequences, traces: NDArray[Any]) -> bool:
    """Return whether a trace has a temperature other than 1 and logprobs that are not processed."""
    temperature = sequences.temperature[traces]
    raw = sequences.logprob_kind[traces] != LOGPROB_KINDS.index("processed")
    return bool(np.any(raw & ~np.isnan(temperature) & (temperature != 1.0)))


def _outside_text(m: Measurements) -> str:
    return f"old/rollout outside [0.5, 2]: {m.outside:.1%} of tokens, up to {CLOSE:.0%}"


def _advice(name: str, reason: str, decided: str, measured: Measurements, recipe: Recipe | None = None) -> Advice:
    record = WHOLE if measured.reshaped else PROCESSED if measured.raw_temperature else ""
    record = record or (LOGPROBS if measured.missing >= SOME_MISSING else "")
    return Advice(name, recipe or Recipe(getattr(presets, name)), reason, decided, measured, record)
