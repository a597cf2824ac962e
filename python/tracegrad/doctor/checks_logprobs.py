"""Check logprobs: missing, filled with zeros, of another distribution, contradicted by top_logprobs or a sum."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.data.codes import LOGPROB_KINDS, TEXT_TRAINS
from tracegrad.data.sampling import TRUNCATING, options
from tracegrad.doctor.finding import Hits, Place, check
from tracegrad.doctor.trace_batch import Array, Look

LARGEST = 4 << 20  # bytes of a record that is parsed again
CLOSE = 1e-4  # nats
LISTED = 8  # tokens of a turn that stand among their alternatives, from which they say something


def lag_of_tops(record: bytes) -> int:
    """The lag at which the logprobs of a record's turns equal those in their top_logprobs; 0 where that is in place.

    A turn counts with 8 tokens whose own text is among the alternatives: in place under half of them may agree, and at
    the lag nine in ten must.
    """
    if len(record) > LARGEST or b'"top_logprobs"' not in record:
        return 0
    try:
        turns = list(_turns(json.loads(record)))
    except (ValueError, RecursionError):
        return 0
    for logprobs, own in turns:
        agree = {lag: _agree(logprobs, own, lag) for lag in (-1, 0, 1)}
        lag = max(agree, key=agree.__getitem__)
        if np.sum(~np.isnan(own)) >= LISTED and agree[0] < 0.5 and agree[lag] >= 0.9:
            return lag
    return 0


def kept_mass(record: bytes, told: dict[str, Any]) -> tuple[float, float] | None:
    """Return the mean and the least kept mass S of a record's tokens under min_p, top_k and top_p.

    A token counts if its alternatives (top_logprobs) reach as far as the cut; None if no token does.

    Args:
        record: JSON whose logprobs are raw, of temperature 1.
        told: min_p, top_k and top_p, as far as they are on.
    """
    if len(record) > LARGEST or b'"top_logprobs"' not in record:
        return None
    try:
        found = [mass for listed in _listed(json.loads(record)) if (mass := _mass(listed, told)) is not None]
        return (float(np.mean(found)), float(np.min(found))) if found else None
    except (TypeError, ValueError, RecursionError):
        return None


def _listed(value: Any) -> Iterator[Any]:
    """The probabilities of each token's alternatives, the likeliest first."""
    if isinstance(value, dict):
        if isinstance(tops := value.get("top_logprobs"), list) and "logprob" in value:
            numbers = np.array([_number(each) for each in tops if isinstance(each, dict)], np.float64)
            yield -np.sort(-np.exp(numbers[numbers <= 0]))
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from _listed(each)


def _mass(listed: Any, told: dict[str, Any]) -> float | None:
    """What min_p, then top_k, then top_p of the rest leave of a distribution whose likeliest tokens are listed."""
    if not len(listed):
        return None
    kept, whole = listed, False  # whole: every token that is left is listed
    if least := float(told.get("min_p", 0)):
        kept = listed[listed >= least * listed[0]]
        whole = len(kept) < len(listed)
    if (most := int(told.get("top_k", 0))) > 0 and len(kept) >= most:
        kept, whole = kept[:most], True
    if (share := float(told.get("top_p", 1))) < 1:
        total = np.cumsum(kept)
        enough = np.flatnonzero(total >= share * (total[-1] if whole else 1.0))
        if len(enough):
            return float(total[enough[0]])
    return float(kept.sum()) if whole else None


def _agree(logprobs: Any, own: Any, lag: int) -> float:
    """Share of tokens whose logprob is that of the token `lag` places on, as its alternatives give it."""
    inner = np.arange(1, len(own) - 1)
    inner = inner[~np.isnan(own[inner + lag]) & ~np.isnan(logprobs[inner])]
    return float(np.mean(np.abs(logprobs[inner] - own[inner + lag]) < CLOSE)) if len(inner) else 0.0


def _turns(value: Any) -> Iterator[tuple[Any, Any]]:
    """Listed logprobs, and those that the alternatives give the same tokens, of each token list in a JSON value."""
    if isinstance(value, dict):
        for each in value.values():
            yield from _turns(each)
    elif isinstance(value, list) and value and all(isinstance(each, dict) and "logprob" in each for each in value):
        if "top_logprobs" in value[0]:
            yield np.array([_number(each) for each in value]), np.array([_among(each) for each in value])
    elif isinstance(value, list):
        for each in value:
            yield from _turns(each)


def _among(entry: dict[str, Any]) -> float:
    found = [each for each in entry.get("top_logprobs") or () if isinstance(each, dict)]
    same = [
        each for each in found if each.get("token") == entry.get("token") and each.get("bytes") == entry.get("bytes")
    ]
    return _number(same[0]) if same else float("nan")


def _number(entry: dict[str, Any]) -> float:
    value = entry.get("logprob")
    return float(value) if isinstance(value, int | float) else float("nan")


GREEDY = 0.01  # temperature below which tokens are not drawn
PLAIN = 0.7  # temperature from which few tokens are certain
NEAR = 0.01  # nats: probabilities from 0.99 to 1, which a model gives more often than exactly 1
MORE = 10  # zeros for each logprob that near: real data had up to 2
ROUNDED = 1e-4  # a file whose logprobs are all multiples of it has zeros by rounding
PROMPTS = 256  # whose last answers are kept
APART, SHARE_APART = 3, 0.1  # contradictions, and their share of the places at which answers part
STOPS, SHARE_STOPS, SHARE_OTHERS = 8, 0.5, 0.02
TOKENS, ZEROS, SHARE = 64, 20, 0.03


@dataclass
class Count:
    """Logprobs of one kind of token: how many, exactly 0, and near 0; where the first zero stands."""

    tokens: int = 0
    zeros: int = 0
    near: int = 0
    first: Place | None = None

    def add(self, look: Look, at: Array, logprobs: Array) -> None:
        """Adds tokens `at` of the own ones of a batch, with their logprobs."""
        zero = logprobs == 0
        self.tokens += len(at)
        self.zeros += int(zero.sum())
        self.near += int(np.sum((logprobs < 0) & (logprobs > -NEAR)))
        if self.first is None and zero.any():
            self.first = look.at(int(look.own_generation[at[zero.argmax()]]))

    @property
    def share(self) -> float:
        """Zeros among the tokens."""
        return self.zeros / max(self.tokens, 1)

    @property
    def is_bare(self) -> bool:
        """Whether exact zeros stand without the logprobs near 0 that a model gives beside them."""
        return self.zeros > MORE * self.near


@dataclass
class Zeros:
    """Zeros of a file.

    Args:
        parted, contradicted: places at which two answers to one prompt part, and those where a token that was drawn
            has a logprob of exactly 0.
        stops, others: stop tokens and other tokens, where the temperature is known not to be low.
        unsaid_stops, unsaid: the same where no temperature is recorded.
        exact: whether a logprob is no multiple of 0.0001.
    """

    parted: int = 0
    contradicted: int = 0
    first: Place | None = None
    found: str = ""
    stops: Count = field(default_factory=Count)
    others: Count = field(default_factory=Count)
    unsaid_stops: Count = field(default_factory=Count)
    unsaid: Count = field(default_factory=Count)
    exact: bool = False
    nonzero: bool = False
    answers: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def add(self, look: Look) -> None:
        """Counts one batch."""
        own, generation = look.own, look.own_generation
        logprobs = look.sequences.rollout_logprobs[own].astype(np.float64)
        heat = look["temperature"][generation]
        known = ~np.isnan(logprobs)
        values = logprobs[known & (logprobs != 0)] / ROUNDED
        self.nonzero |= len(values) > 0
        self.exact |= bool(np.any(np.abs(values - np.round(values)) > 0.01))
        last = np.diff(generation, append=-1) != 0
        stop = last & look.vocabulary.is_special(look.sequences.ids[own])
        # What a grammar forces has probability 1.
        forced = look.finish == "tool_calls"
        forced[[g for g, asked in look.mismatch.items() if asked.keys() - {"temperature", "top_p"}]] = True
        known &= ~forced[generation]
        for usable, stops, others in (
            (known & (heat >= PLAIN), self.stops, self.others),
            (known & np.isnan(heat), self.unsaid_stops, self.unsaid),
        ):
            stops.add(look, at := np.flatnonzero(usable & stop), logprobs[at])
            others.add(look, at := np.flatnonzero(usable & ~stop), logprobs[at])
        self._compare(look, logprobs)

    def _compare(self, look: Look, logprobs: Array) -> None:
        sequences, own = look.sequences, look.own
        cu = np.searchsorted(look.own_generation, np.arange(look.generations + 1))
        for g in np.flatnonzero((np.diff(cu) > 0) & ~(look["temperature"] < GREEDY)):
            span = slice(cu[g], cu[g + 1])
            start = int(own[span.start])
            ids, said = sequences.ids[own[span]], logprobs[span]
            prompt = hash(sequences.ids[sequences.cu_seqlens[look.branch[start]] : start].tobytes())
            before = self.answers.pop(prompt, None)
            self.answers[prompt] = ids, said
            if len(self.answers) > PROMPTS:
                self.answers.pop(next(iter(self.answers)))
            if before is None:
                continue
            both = min(len(ids), len(before[0]))
            parts = np.flatnonzero(ids[:both] != before[0][:both])
            if not len(parts) or np.isnan(said[at := int(parts[0])]) or np.isnan(before[1][at]):
                continue
            self.parted += 1
            if said[at] == 0 or before[1][at] == 0:
                self.contradicted += 1
                if self.first is None:
                    self.first = look.at(int(g), at)
                    self.found = "another answer to the prompt goes on with another token, and one of the two has 0"

    def hits(self, turns: int) -> Hits:
        """Hits where the zeros cannot be a model's; `turns` are those of the file."""
        if self.contradicted >= APART and self.contradicted >= SHARE_APART * self.parted:
            said = f"{self.found} ({self.contradicted:,} of {self.parted:,} such places)"
            return Hits(self.contradicted, self.parted, self.first, said)
        if self.nonzero and not self.exact:
            return Hits(0, turns)
        for stops, others in ((self.stops, self.others), (self.unsaid_stops, self.unsaid)):
            alone = others.share <= SHARE_OTHERS or (stops is self.stops and others.is_bare)
            if stops.tokens >= STOPS and stops.share >= SHARE_STOPS and stops.is_bare and alone:
                said = f"{stops.zeros:,} of {stops.tokens:,} stop tokens have 0, {others.share:.1%} of the others"
                return Hits(stops.zeros, stops.tokens, stops.first, said)
        found = self.others
        if found.tokens >= TOKENS and found.zeros >= ZEROS and found.share >= SHARE and found.is_bare:
            said = f"{found.zeros:,} of {found.tokens:,} tokens have 0, and {found.near:,} a probability from 0.99 to 1"
            return Hits(found.zeros, found.tokens, found.first, said)
        return Hits(0, turns)


FILLED_TURN = 8  # tokens of one value from which a whole turn counts as filled
FILLED_TAIL = 4  # zeros at the end of a turn that has other values before


@check(
    "turns without logprobs",
    costs=0.0,
    wrong=1.0,
    hurts="Without the sampling logprob there is no ratio: the turn can only be imitated, not corrected.",
    cure=f"Record with logprobs=true (and return_token_ids on vLLM). Text alone trains with {TEXT_TRAINS}.",
    hides=("missing_logprobs", "drift"),
)
def no_logprobs(look: Look) -> Hits:
    """Sees turns that list no logprob at all.

    Threshold: any turn costs it; wrong where no turn has one.
    """
    none = (look["logprobs"] <= 0) | ((look["missing"] > 0) & (look["missing"] == look["logprobs"]))
    return look.hits(none, None, lambda g: "the record has no logprobs")


@check(
    "logprobs that are null, NaN or -inf",
    costs=0.0,
    hurts="These tokens are masked, and a trace's ratio lacks their factor.",
    cure="Ask the server for the sampled token's logprob (logprobs=true, top_logprobs=0 is enough); do not fill gaps.",
)
def missing_logprobs(look: Look) -> Hits:
    """Sees turns of which some logprobs are missing and others are there (R23).

    Threshold: any turn; what is missing is NaN and masked, never taken as 0.
    """
    some = (look["missing"] > 0) & (look["missing"] < look["logprobs"])
    return look.hits(some, None, lambda g: f"{look['missing'][g]} of {look['logprobs'][g]} are missing")


@check(
    "logprobs that no probability has",
    costs=0.0,
    wrong=0.01,
    hurts="A positive number is a probability, a loss or a sum, and -9999.0 a server's sentinel. They are masked, but "
    "where some are of the wrong kind the others may be too.",
    cure="Record log-probabilities in nats as the server gave them: log(p) for linear ones, not -log(p).",
)
def impossible_logprobs(look: Look) -> Hits:
    """Sees turns with a positive logprob (above 0.001) or exactly -9999.0 (R24).

    Threshold: any turn; wrong from 1 % of turns, where it is a kind of number and no accident.
    """
    return look.hits(look["invalid"] > 0, None, lambda g: f"{look['invalid'][g]} of {look['logprobs'][g]}")


@check(
    "more or fewer logprobs than tokens",
    costs=0.0,
    wrong=0.01,
    hurts="Which logprob belongs to which token cannot be known. These turns are masked whole; a zip of the two lists "
    "would shift every ratio.",
    cure="Keep ids and logprobs of one response together; cut both (stop strings, padding) or none.",
)
def count_mismatch(look: Look) -> Hits:
    """Sees turns whose list of logprobs is longer or shorter than that of their tokens (R22).

    Threshold: any turn; wrong from 1 % of turns, as the recorder then pairs lists that do not belong together.
    """
    return look.drift_hits(22)


@check(
    "logprobs filled up with one value",
    costs=0.0,
    wrong=0.01,
    hurts="A logprob of 0 says probability 1: the ratio becomes the policy's own probability, far from 1, and unlike a "
    "missing one it is not masked.",
    cure="Write null where the server gave no logprob. Missing ones are masked, made-up ones are trained on.",
    hides=("made_up_zeros",),
)
def filled_logprobs(look: Look) -> Hits:
    """Sees turns of at least 8 tokens with one value throughout, or that end in 4 or more exact zeros.

    Threshold: 8 equal, 4 zeros at the end while under 5 % of the batch's other logprobs are 0: a confident model
    rounds single tokens to 0.0, so zeros alone prove nothing. Greedy turns (temperature 0) are not looked at. Wrong
    from 1 % of turns.
    """
    whole, tail, least = fillings(look)
    return look.hits(
        whole | tail,
        None,
        lambda g: f"all {look['logprobs'][g]} logprobs are {least[g]:g}" if whole[g] else "the turn ends in zeros",
    )


def fillings(look: Look) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[Any]]:
    """[G] bools: one value throughout; zeros at the end; and [G] the least value, 0 where a turn has none."""
    cu, flat = look.cu_logprobs, look["flat_logprobs"]
    count = np.diff(cu)
    least, most = np.zeros(look.generations), np.full(look.generations, -1.0)
    full = np.flatnonzero(count)
    if len(full):
        least[full], most[full] = (each.reduceat(flat, cu[:-1][full]) for each in (np.minimum, np.maximum))
    turn = np.repeat(np.arange(look.generations), count)
    solid = np.full(look.generations, -1, np.int64)  # the last token of each turn that is not exactly 0
    other = np.flatnonzero(flat != 0)
    solid[turn[other]] = other
    zeros = np.where(solid >= 0, cu[1:] - 1 - solid, 0)
    greedy = look["temperature"] == 0
    whole = (count >= FILLED_TURN) & (least == most) & ~greedy
    tail = (zeros >= FILLED_TAIL) & ~greedy
    inside = np.sum(flat == 0) - int(zeros.sum()) - int(count[whole & (least == 0)].sum())
    return whole, tail & (inside < 0.05 * max(len(flat), 1)), least


@check(
    "raw logprobs, or of an unknown kind, at a temperature other than 1; or greedy decoding",
    costs=0.0,
    wrong=0.01,
    hurts="The tokens were drawn from the tempered distribution, raw logprobs are of the untempered one: the ratio "
    "corrects for a policy that did not sample them. Greedy decoding draws from no distribution.",
    cure="If the numbers are processed already and top_p, top_k, min_p and penalties were off, say --logprob-kind "
    "processed. Else serve with --logprobs-mode processed_logprobs, sample with these off, and record logprob_kind "
    "'processed'; or sample at temperature 1. Processed logprobs cure the temperature alone: under top_p or top_k "
    "their ratio is the kept mass. What is recorded trains without a ratio: --objective TOPR_POSITIVE --text-only.",
)
def raw_at_temperature(look: Look) -> Hits:
    """Sees turns at a temperature other than 1 whose logprobs are raw or of no known kind, or at one below 0.01.

    Threshold: any difference from 1; wrong from 1 % of turns.
    """
    kinds = ("of an unknown kind", "raw", "processed")
    hit = np.array(["temperature" in look.mismatch.get(g, ()) for g in range(look.generations)], bool)
    return look.hits(
        hit,
        None,
        lambda g: f"temperature {look.mismatch[g]['temperature']}, logprobs {kinds[look['logprob_kind'][g]]}",
    )


@check(
    "tokens cut off, penalised or forced when they were sampled",
    costs=0.0,
    wrong=0.01,
    hurts="top_p, top_k, min_p, penalties, logit_bias, beam search, grammars and the like change the distribution that "
    "the tokens were drawn from; the trainer computes the whole one. Where a cut keeps the mass S of it, the ratio to "
    "processed logprobs is S at each token although nothing changed, and that to raw ones is 1 instead of S.",
    cure="Sample without them: they are off by default, but for those in the model's generation_config.json, which "
    "vLLM leaves out with --generation-config vllm. What is recorded trains without a ratio: --objective TOPR_POSITIVE "
    "--text-only. --rescore measures S; --accept-truncated-sampling of train takes the ratio as it is.",
)
def reshaped_sampling(look: Look) -> Hits:
    """Sees turns whose request names an option that cuts off, penalises, favours or forces tokens.

    Threshold: any value other than the one at which the option does nothing; wrong from 1 % of turns.
    """
    found = {
        g: {name: value for name, value in told.items() if name != "temperature"} for g, told in look.mismatch.items()
    }
    hit = np.array([bool(found.get(g)) for g in range(look.generations)], bool)
    kinds = ("of an unknown kind", "raw", "processed")
    return look.hits(
        hit, None, lambda g: f"{options(found[g])}, logprobs {kinds[look['logprob_kind'][g]]}{_kept(look, g, found[g])}"
    )


def _kept(look: Look, generation: int, told: dict[str, Any]) -> str:
    """The kept mass S of a turn whose tokens were cut off, by its alternatives where these say it; else ""."""
    if told.keys().isdisjoint(TRUNCATING):
        return ""
    raw = look["logprob_kind"][generation] != LOGPROB_KINDS.index("processed") and look["temperature"][generation] == 1
    record = look.traces.core.record(int(look.trace[generation]))
    mass = kept_mass(record, told) if raw and told.keys() <= {"top_p", "top_k", "min_p"} else None
    if mass is None:
        return "; the kept mass S is not measured"
    return f"; kept mass S {mass[0]:.3f} on average, {mass[1]:.3f} at least, by the top_logprobs of its record"


@check(
    "requests that leave out what the model's generation_config.json sets",
    costs=0.0,
    hurts="A vLLM that was started in the ordinary way (--generation-config auto) takes what a request leaves out from "
    "this file, so that the tokens may be drawn at another temperature or with a cut than the record says. Nothing in "
    "the record shows it.",
    cure="Look how the server was started, then say it: --sampling-defaults model if it took the file, neutral if it "
    "did not (--generation-config vllm, or another server). Next time send every sampling option with each request.",
)
def server_defaults(look: Look) -> Hits:
    """Sees requests with logprobs that leave out a temperature, top_p, top_k, min_p or penalty which the
    generation_config.json beside the tokenizer sets to something that is not neutral; nothing with --sampling-defaults.

    Threshold: any turn costs; never wrong, as the file does not say how the server was started.
    """
    left = {} if look.sampling_defaults else look.left_out
    hit = np.array([g in left for g in range(look.generations)], bool)
    return look.hits(hit, None, lambda g: options({name: look.defaults[name] for name in left[g]}))


@check(
    "logprobs that do not add up to the recorded sum",
    costs=0.0,
    wrong=0.01,
    hurts="The server's own checksum says that a logprob was lost, added or changed after it was given.",
    cure="Find the step between server and file that edits the list; a list shifted by one loses one of them.",
)
def wrong_sum(look: Look) -> Hits:
    """Sees turns whose logprobs are all there and sum to something else than cumulative_logprob.

    Threshold: 0.01 nats and 0.1 %: rounding to three decimals stays below it over hundreds of tokens, a single lost
    logprob rarely does. Wrong from 1 % of turns.
    """
    flat = np.nan_to_num(look["flat_logprobs"].astype(np.float64))
    turn = np.repeat(np.arange(look.generations), np.diff(look.cu_logprobs))
    total = np.bincount(turn, flat, minlength=look.generations)
    told = look["cumulative_logprob"]
    whole = ~np.isnan(told) & (look["logprobs"] > 0) & (look["missing"] + look["invalid"] == 0)
    gap = np.abs(total - told)
    hit = whole & (gap > 0.01) & (gap > 1e-3 * np.abs(told))
    return look.hits(hit, whole, lambda g: f"they sum to {total[g]:.4f}, cumulative_logprob is {told[g]:.4f}")
