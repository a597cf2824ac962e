"""Logprob checks: missing, filled with zeros, from another distribution, contradicted by top_logprobs or by a sum."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.data.codes import LOGPROB_KINDS, TEXT_TRAINS
from tracegrad.data.field_map import parse_record
from tracegrad.data.infer_tokens import list_as_long_as
from tracegrad.data.sampling import TRUNCATING, format_options
from tracegrad.doctor.finding import Hits, Place, check
from tracegrad.doctor.trace_batch import Array, TraceBatch, lacks_logprobs

LARGEST = 4 << 20  # bytes; larger records are not parsed a second time
CLOSE = 1e-4  # nats within which two logprobs are equal
LISTED = 8  # tokens that must appear among their own alternatives before a turn counts as evidence


def top_logprobs_lag(record: bytes) -> int:
    """Return the lag at which a record's logprobs equal those in its top_logprobs; 0 if they are in place or unclear.

    Only a turn with at least 8 tokens that appear among their own alternatives decides. At lag 0 fewer than half of its
    tokens may agree, and at the returned lag at least nine in ten must.
    """
    if len(record) > LARGEST or b'"top_logprobs"' not in record:
        return 0
    try:
        turns = list(_token_lists(json.loads(record)))
    except (ValueError, RecursionError):
        return 0
    for logprobs, in_tops in turns:
        agree = {lag: _agreement(logprobs, in_tops, lag) for lag in (-1, 0, 1)}
        lag = max(agree, key=agree.__getitem__)
        if np.sum(~np.isnan(in_tops)) >= LISTED and agree[0] < 0.5 and agree[lag] >= 0.9:
            return lag
    return 0


def kept_mass(record: bytes, sampling: dict[str, Any]) -> tuple[float, float] | None:
    """Return the mean and the least kept mass S of a record's tokens under min_p, top_k and top_p.

    A token counts if its alternatives (top_logprobs) reach as far as the truncation. Return None if no token does.

    Args:
        record: JSON whose logprobs are raw, sampled at temperature 1.
        sampling: the values of min_p, top_k and top_p that are switched on.
    """
    if len(record) > LARGEST or b'"top_logprobs"' not in record:
        return None
    try:
        masses = [
            mass
            for probabilities in _alternatives(json.loads(record))
            if (mass := _mass_under(probabilities, sampling)) is not None
        ]
        return (float(np.mean(masses)), float(np.min(masses))) if masses else None
    except (TypeError, ValueError, RecursionError):
        return None


def _alternatives(value: Any) -> Iterator[Any]:
    """Yield the probabilities of each token's alternatives, the most likely first."""
    if isinstance(value, dict):
        if isinstance(tops := value.get("top_logprobs"), list) and "logprob" in value:
            logprobs = np.array([_number(entry) for entry in tops if isinstance(entry, dict)], np.float64)
            yield -np.sort(-np.exp(logprobs[logprobs <= 0]))
        value = list(value.values())
    for entry in value if isinstance(value, list) else ():
        yield from _alternatives(entry)


def _mass_under(listed: Any, sampling: dict[str, Any]) -> float | None:
    """Return the mass that min_p, then top_k, then top_p leave of a distribution.

    `listed` has its most likely tokens only. Return None if they do not reach as far as the truncation.
    """
    if not len(listed):
        return None
    remaining, complete = listed, False  # complete: the list contains every token that is left
    if min_p := float(sampling.get("min_p", 0)):
        remaining = listed[listed >= min_p * listed[0]]
        complete = len(remaining) < len(listed)
    if (top_k := int(sampling.get("top_k", 0))) > 0 and len(remaining) >= top_k:
        remaining, complete = remaining[:top_k], True
    if (top_p := float(sampling.get("top_p", 1))) < 1:
        total = np.cumsum(remaining)
        reached = np.flatnonzero(total >= top_p * (total[-1] if complete else 1.0))
        if len(reached):
            return float(total[reached[0]])
    return float(remaining.sum()) if complete else None


def _agreement(logprobs: Any, in_tops: Any, lag: int) -> float:
    """Return the share of tokens whose logprob top_logprobs list for the token `lag` positions later."""
    inner = np.arange(1, len(in_tops) - 1)
    inner = inner[~np.isnan(in_tops[inner + lag]) & ~np.isnan(logprobs[inner])]
    return float(np.mean(np.abs(logprobs[inner] - in_tops[inner + lag]) < CLOSE)) if len(inner) else 0.0


def _token_lists(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield two arrays for each token list in a JSON value.

    The first has the logprobs of the tokens, the second the logprobs that top_logprobs list for the same tokens.
    """
    if isinstance(value, dict):
        for entry in value.values():
            yield from _token_lists(entry)
    elif isinstance(value, list) and value and all(isinstance(entry, dict) and "logprob" in entry for entry in value):
        if "top_logprobs" in value[0]:
            yield np.array([_number(entry) for entry in value]), np.array([_own_logprob(entry) for entry in value])
    elif isinstance(value, list):
        for entry in value:
            yield from _token_lists(entry)


def _own_logprob(entry: dict[str, Any]) -> float:
    tops = [top for top in entry.get("top_logprobs") or () if isinstance(top, dict)]
    matches = [top for top in tops if top.get("token") == entry.get("token") and top.get("bytes") == entry.get("bytes")]
    return _number(matches[0]) if matches else float("nan")


def _number(entry: dict[str, Any]) -> float:
    value = entry.get("logprob")
    return float(value) if isinstance(value, int | float) else float("nan")


GREEDY = 0.01  # below this temperature decoding counts as greedy
PLAIN = 0.7  # from this temperature on few tokens are certain
NEAR = 0.01  # nats: probabilities from 0.99 to 1, which a model gives more often than exactly 1
MORE = 10  # zeros per logprob that close to 0; real data had at most 2
ROUNDED = 1e-4  # if all logprobs are multiples of this, zeros come from rounding
PROMPTS = 256  # prompts whose last answer is remembered
APART, SHARE_APART = 3, 0.1  # least number of contradictions, and their least share of the diverging places
STOPS, SHARE_STOPS, SHARE_OTHERS = 8, 0.5, 0.02
TOKENS, ZEROS, SHARE = 64, 20, 0.03


@dataclass
class ZeroCount:
    """Number of logprobs of one kind of token: all, exactly 0, and near 0; with the place of the first zero."""

    tokens: int = 0
    zeros: int = 0
    near: int = 0
    first: Place | None = None

    def add(self, look: TraceBatch, at: Array, logprobs: Array) -> None:
        """Add the tokens `at`, indices into `look.own`, with their logprobs."""
        zero = logprobs == 0
        self.tokens += len(at)
        self.zeros += int(zero.sum())
        self.near += int(np.sum((logprobs < 0) & (logprobs > -NEAR)))
        if self.first is None and zero.any():
            self.first = look.place_of(int(look.sampled_generation[at[zero.argmax()]]))

    @property
    def share(self) -> float:
        """Share of zeros among the tokens."""
        return self.zeros / max(self.tokens, 1)

    @property
    def is_bare(self) -> bool:
        """Whether exact zeros come without the logprobs near 0 that a model produces more often."""
        return self.zeros > MORE * self.near


@dataclass
class Zeros:
    """Counts of exact zeros among the logprobs of a file.

    Args:
        parted, contradicted: places at which two answers to one prompt diverge, and those of them at which a drawn
            token has a logprob of exactly 0.
        first, found: the first contradicted place, and its description.
        stops, others: stop tokens and other tokens of turns at a temperature of at least 0.7.
        unsaid_stops, unsaid: the same for turns without a recorded temperature.
        exact: whether any logprob is not a multiple of 0.0001.
        nonzero: whether any logprob differs from 0.
        answers: ids and logprobs of the last answer to each of the last 256 prompts, by a hash of the prompt.
    """

    parted: int = 0
    contradicted: int = 0
    first: Place | None = None
    found: str = ""
    stops: ZeroCount = field(default_factory=ZeroCount)
    others: ZeroCount = field(default_factory=ZeroCount)
    unsaid_stops: ZeroCount = field(default_factory=ZeroCount)
    unsaid: ZeroCount = field(default_factory=ZeroCount)
    exact: bool = False
    nonzero: bool = False
    answers: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def add(self, look: TraceBatch) -> None:
        """Add one batch."""
        own, generation = look.sampled, look.sampled_generation
        logprobs = look.recorded_logprobs.astype(np.float64)
        temperature = look["temperature"][generation]
        present = ~np.isnan(logprobs)
        values = logprobs[present & (logprobs != 0)] / ROUNDED
        self.nonzero |= len(values) > 0
        self.exact |= bool(np.any(np.abs(values - np.round(values)) > 0.01))
        last = np.diff(generation, append=-1) != 0
        stop = last & look.vocabulary.is_special(look.sequences.ids[own])
        # A grammar gives the token that it forces probability 1, so a logprob of 0 is right there.
        forced = look.finish == "tool_calls"
        forced[[g for g, mismatch in look.sampling_mismatch.items() if mismatch.keys() - {"temperature", "top_p"}]] = (
            True
        )
        forced |= look.is_replayed  # a token that is the only one kept has probability 1
        present &= ~forced[generation]
        for usable, stops, others in (
            (present & (temperature >= PLAIN), self.stops, self.others),
            (present & np.isnan(temperature), self.unsaid_stops, self.unsaid),
        ):
            stops.add(look, at := np.flatnonzero(usable & stop), logprobs[at])
            others.add(look, at := np.flatnonzero(usable & ~stop), logprobs[at])
        self._compare(look, logprobs)

    def _compare(self, look: TraceBatch, logprobs: Array) -> None:
        sequences, own = look.sequences, look.sampled
        cu = np.searchsorted(look.sampled_generation, np.arange(look.generations + 1))
        for g in np.flatnonzero((np.diff(cu) > 0) & ~(look["temperature"] < GREEDY) & ~look.is_replayed):
            span = slice(cu[g], cu[g + 1])
            start = int(own[span.start])
            ids, answer = sequences.ids[own[span]], logprobs[span]
            prompt = hash(sequences.ids[sequences.cu_seqlens[look.branch[start]] : start].tobytes())
            earlier = self.answers.pop(prompt, None)
            self.answers[prompt] = ids, answer
            if len(self.answers) > PROMPTS:
                self.answers.pop(next(iter(self.answers)))
            if earlier is None:
                continue
            shared = min(len(ids), len(earlier[0]))
            differences = np.flatnonzero(ids[:shared] != earlier[0][:shared])
            if (
                not len(differences)
                or np.isnan(answer[position := int(differences[0])])
                or np.isnan(earlier[1][position])
            ):
                continue
            self.parted += 1
            if answer[position] == 0 or earlier[1][position] == 0:
                self.contradicted += 1
                if self.first is None:
                    self.first = look.place_of(int(g), position)
                    self.found = "another answer to the prompt continues with another token, and one of the two has 0"

    def hits(self, turns: int) -> Hits:
        """Return hits if the zeros cannot come from a model; `turns` is the number of turns in the file."""
        if self.contradicted >= APART and self.contradicted >= SHARE_APART * self.parted:
            description = f"{self.found} ({self.contradicted:,} of {self.parted:,} such places)"
            return Hits(self.contradicted, self.parted, self.first, description)
        if self.nonzero and not self.exact:
            return Hits(0, turns)
        for stops, others in ((self.stops, self.others), (self.unsaid_stops, self.unsaid)):
            isolated = others.share <= SHARE_OTHERS or (stops is self.stops and others.is_bare)
            if stops.tokens >= STOPS and stops.share >= SHARE_STOPS and stops.is_bare and isolated:
                description = (
                    f"{stops.zeros:,} of {stops.tokens:,} stop tokens have 0, {others.share:.1%} of the others"
                )
                return Hits(stops.zeros, stops.tokens, stops.first, description)
        plain = self.others
        if plain.tokens >= TOKENS and plain.zeros >= ZEROS and plain.share >= SHARE and plain.is_bare:
            description = (
                f"{plain.zeros:,} of {plain.tokens:,} tokens have 0, and {plain.near:,} a probability from 0.99 to 1"
            )
            return Hits(plain.zeros, plain.tokens, plain.first, description)
        return Hits(0, turns)


FILLED_TURN = 8  # least number of equal logprobs for which a turn counts as filled
FILLED_TAIL = 4  # least number of zeros at the end of a turn that has other values before


@check(
    "turns without logprobs",
    costs=0.0,
    wrong=1.0,
    impact="The ratio needs the logprobs of the policy that sampled. Without them, the turn can only be imitated, "
    "not corrected.",
    fix=f"Record with logprobs=true (and return_token_ids on vLLM). Text without logprobs trains with {TEXT_TRAINS}.",
    hides=("missing_logprobs", "mismatches"),
)
def no_logprobs(look: TraceBatch) -> Hits:
    """Detect turns that do not list any logprob, and for which `tracegrad fill` measured none.

    Threshold: any turn costs; wrong if no turn has logprobs.
    """
    return look.hits(lacks_logprobs(look.columns, look.filled), None, lambda g: _found_list(look, g))


def _found_list(look: TraceBatch, generation: int) -> str:
    """Return where the record has a list that may contain the logprobs of a turn, by its length and its values."""
    record = parse_record(look.traces.core.record(int(look.trace[generation])))
    aligned = int(look.aligned[generation])  # A stop token that is not recorded may be among them.
    lengths = {count for count in (int(look["ids"][generation]), aligned, aligned - 1) if count > 0}
    if (path := list_as_long_as(record, sorted(lengths))) is None:
        has_list = list_as_long_as(record, None) is not None
        return "no logprobs were read for the turn" if has_list else "the record has no logprobs"
    return f"no logprobs were read, but a list as long as the turn is at {path}: --map.logprobs {shlex.quote(path)}"


@check(
    "logprobs that are null, NaN or -inf",
    costs=0.0,
    impact="These tokens are masked, and the ratio of their trace lacks their factor.",
    fix="Request the logprob of the sampled token from the server (logprobs=true; top_logprobs=0 is enough). Do not "
    "fill gaps.",
)
def missing_logprobs(look: TraceBatch) -> Hits:
    """Detect turns in which some logprobs are missing and others are present (R23).

    Threshold: any turn. A missing logprob is NaN and masked, never 0.
    """
    missing = np.maximum(look["missing"] - look.filled, 0)
    some = (missing > 0) & (missing < look["logprobs"])
    return look.hits(some, None, lambda g: f"{missing[g]} of {look['logprobs'][g]} are missing")


@check(
    "logprobs that were measured afterwards",
    note=0.0,
    impact="tracegrad fill measured these logprobs with a checkpoint; the record does not contain them. They are right "
    "only if this checkpoint sampled the tokens. They cannot show how far the sampling engine is from the trainer.",
    fix="Nothing. --filter.worst_level T6 leaves such traces out of training. Record logprobs=true next time.",
)
def measured_logprobs(look: TraceBatch) -> Hits:
    """Detect turns with tokens of alignment level T7.

    Threshold: any such turn; always a note.
    """
    recorded = np.maximum(look["logprobs"], 0) - look["missing"] * (look["logprobs"] > 0)
    return look.hits(look.filled > 0, None, lambda g: f"{look.filled[g]} logprobs filled, {recorded[g]} recorded")


@check(
    "numbers that are not log-probabilities",
    costs=0.0,
    wrong=0.01,
    impact="A positive number is a probability, a loss or a sum; -9999.0 is a server's sentinel. These tokens are "
    "masked. If some numbers are of the wrong kind, the others may be too.",
    fix="Record log-probabilities in nats as the server returned them. Convert probabilities with log(p), not -log(p).",
)
def impossible_logprobs(look: TraceBatch) -> Hits:
    """Detect turns with a positive logprob (above 0.001) or exactly -9999.0 (R24).

    Threshold: any turn; wrong from 1 % of turns, because the numbers are then of another kind and not an accident.
    """
    return look.hits(look["invalid"] > 0, None, lambda g: f"{look['invalid'][g]} of {look['logprobs'][g]}")


@check(
    "more or fewer logprobs than tokens",
    costs=0.0,
    wrong=0.01,
    impact="It is unknown which logprob belongs to which token. All tokens of these turns are masked, because "
    "pairing the lists by position would shift every ratio.",
    fix="Keep ids and logprobs of one response together. Truncate both lists (stop strings, padding) or neither.",
)
def count_mismatch(look: TraceBatch) -> Hits:
    """Detect turns whose list of logprobs is longer or shorter than their list of tokens (R22).

    Threshold: any turn; wrong from 1 % of turns, because the recorder then pairs lists that do not belong together.
    """
    return look.mismatch_hits(22)


@check(
    "logprobs filled with one value",
    costs=0.0,
    wrong=0.01,
    impact="A logprob of 0 means probability 1. The ratio becomes the policy's own probability, far from 1. Unlike a "
    "missing logprob, it is not masked.",
    fix="Write null if the server returned no logprob. Missing logprobs are masked, but invented ones are trained on.",
    hides=("made_up_zeros",),
)
def filled_logprobs(look: TraceBatch) -> Hits:
    """Detect turns of at least 8 tokens that all have one value, and turns that end in 4 or more exact zeros.

    Threshold: 8 equal values. 4 zeros at the end count if under 5 % of the batch's other logprobs are 0: a confident
    model rounds single tokens to 0.0, so zeros are not a proof. Greedy turns (temperature 0) are skipped, and turns
    whose truncated sampling is replayed: a token that is the only one kept has 0. Wrong from 1 % of turns.
    """
    constant, tail, least = filled_turns(look)
    return look.hits(
        constant | tail,
        None,
        lambda g: f"all {look['logprobs'][g]} logprobs are {least[g]:g}" if constant[g] else "the turn ends in zeros",
    )


def filled_turns(look: TraceBatch) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[Any]]:
    """Return three [G] arrays: all logprobs are equal, zeros end the turn, and the lowest logprob or 0."""
    cu, flat = look.cu_logprobs, look["flat_logprobs"]
    count = np.diff(cu)
    least, most = np.zeros(look.generations), np.full(look.generations, -1.0)
    full = np.flatnonzero(count)
    if len(full):
        least[full], most[full] = (function.reduceat(flat, cu[:-1][full]) for function in (np.minimum, np.maximum))
    turn = np.repeat(np.arange(look.generations), count)
    last_nonzero = np.full(look.generations, -1, np.int64)
    nonzero = np.flatnonzero(flat != 0)
    last_nonzero[turn[nonzero]] = nonzero
    zeros = np.where(last_nonzero >= 0, cu[1:] - 1 - last_nonzero, 0)
    may_be_sure = (look["temperature"] == 0) | look.is_replayed
    constant = (count >= FILLED_TURN) & (least == most) & ~may_be_sure
    tail = (zeros >= FILLED_TAIL) & ~may_be_sure
    other_zeros = np.sum(flat == 0) - int(zeros.sum()) - int(count[constant & (least == 0)].sum())
    return constant, tail & (other_zeros < 0.05 * max(len(flat), 1)), least


@check(
    "raw or unknown logprobs at a temperature other than 1, or greedy decoding",
    costs=0.0,
    wrong=0.01,
    impact="The tokens were sampled from the distribution at that temperature, and raw logprobs are computed at "
    "temperature 1. The ratio corrects for a policy that did not sample the tokens. Greedy decoding does not sample "
    "from any distribution.",
    fix="If the logprobs are already processed, and top_p, top_k, min_p and penalties were off, pass --logprob-kind "
    "processed. Otherwise serve with --logprobs-mode processed_logprobs, sample with these options off, and record "
    "logprob_kind 'processed'. Or sample at temperature 1. Processed logprobs correct the temperature only: under "
    "top_p or top_k their ratio is the kept mass. The recorded text trains without a ratio: --objective TOPR_POSITIVE "
    "--text-only.",
)
def raw_at_temperature(look: TraceBatch) -> Hits:
    """Detect turns at a temperature other than 1 whose logprobs are raw or of unknown kind, and turns at a temperature
    below 0.01.

    Threshold: any difference from 1; wrong from 1 % of turns.
    """
    kinds = ("of an unknown kind", "raw", "processed")
    hit = np.array(["temperature" in look.sampling_mismatch.get(g, ()) for g in range(look.generations)], bool)
    return look.hits(
        hit,
        None,
        lambda g: f"temperature {look.sampling_mismatch[g]['temperature']}, logprobs {kinds[look.logprob_kind[g]]}",
    )


@check(
    "truncated, penalized or forced sampling",
    costs=0.0,
    wrong=0.01,
    impact="top_p, top_k, min_p, penalties, logit_bias, beam search, grammars and similar options change the "
    "distribution that the tokens were sampled from. The trainer computes the full distribution. If truncation keeps "
    "the mass S, the ratio to processed logprobs is S at each token even if the policy did not change. The ratio to "
    "raw logprobs is 1 instead of S.",
    fix="Sample without these options. They are off by default, except for options in the model's "
    "generation_config.json, which vLLM ignores with --generation-config vllm. The recorded text trains without a "
    "ratio: --objective TOPR_POSITIVE --text-only. --check-logprobs measures S. --accept-truncated-sampling of train "
    "uses the ratio as it is.",
)
def reshaped_sampling(look: TraceBatch) -> Hits:
    """Detect turns whose request sets an option that truncates, penalizes, favours or forces tokens.

    Threshold: any value that has an effect; wrong from 1 % of turns.
    """
    reshaping = {
        g: {name: value for name, value in mismatch.items() if name != "temperature"}
        for g, mismatch in look.sampling_mismatch.items()
    }
    hit = np.array([bool(reshaping.get(g)) for g in range(look.generations)], bool)
    kinds = ("of an unknown kind", "raw", "processed")
    return look.hits(
        hit,
        None,
        lambda g: (
            f"{format_options(reshaping[g])}, logprobs {kinds[look.logprob_kind[g]]}{_mass_note(look, g, reshaping[g])}"
        ),
    )


def _mass_note(look: TraceBatch, generation: int, sampling: dict[str, Any]) -> str:
    """Return a description of the kept mass S of a turn with truncated sampling; "" without truncation."""
    if sampling.keys().isdisjoint(TRUNCATING):
        return ""
    raw = look["logprob_kind"][generation] != LOGPROB_KINDS.index("processed") and look["temperature"][generation] == 1
    record = look.traces.core.record(int(look.trace[generation]))
    mass = kept_mass(record, sampling) if raw and sampling.keys() <= {"top_p", "top_k", "min_p"} else None
    if mass is None:
        return "; the kept mass S is not measured"
    return f"; kept mass S {mass[0]:.3f} on average, {mass[1]:.3f} at least, by the top_logprobs of its record"


@check(
    "truncated sampling that is replayed from the record",
    note=0.0,
    impact="The record shows from which ids the sampler drew each token: by a sampling mask, or by alternatives "
    "(top_logprobs) that contain all of them. Logprobs, recorded and computed, are compared over these ids. The "
    "logprobs of other tokens of these turns, whose ids the record does not prove, count as missing.",
    fix="Nothing. To know the ids of more tokens, start vLLM with a larger --max-logprobs and request as many "
    "top_logprobs: one more than top_k, or enough to contain what top_p keeps.",
)
def replayed_sampling(look: TraceBatch) -> Hits:
    """Detect turns sampled with top_p, top_k or min_p of which the record shows the kept ids.

    Threshold: any such turn; always a note.
    """
    hit = np.array([g in look.replayed for g in range(look.generations)], bool)
    return look.hits(hit, None, lambda g: format_options(look.replayed[g]) or "a sampling mask without its options")


@check(
    "requests that omit options set by the model's generation_config.json",
    costs=0.0,
    impact="vLLM in its default mode (--generation-config auto) reads omitted options from this file. The tokens may "
    "have been sampled at another temperature or with truncation that the record does not show.",
    fix="Look up how the server was started. Pass --sampling-defaults model if it used the file, or neutral if it "
    "did not (--generation-config vllm, or another server). In future, send every sampling option with each request.",
)
def server_defaults(look: TraceBatch) -> Hits:
    """Detect requests with logprobs that omit a temperature, top_p, top_k, min_p or penalty for which the
    generation_config.json next to the tokenizer sets a value that is not neutral. With --sampling-defaults, nothing is
    reported.

    Threshold: any turn costs; never wrong, because the file does not show how the server was started.
    """
    omitted = {} if look.sampling_defaults else look.omitted_options
    hit = np.array([g in omitted for g in range(look.generations)], bool)
    return look.hits(hit, None, lambda g: format_options({name: look.defaults[name] for name in omitted[g]}))


@check(
    "logprobs that do not add up to the recorded sum",
    costs=0.0,
    wrong=0.01,
    impact="The server's own checksum shows that a logprob was lost, added or changed after the server returned it.",
    fix="Find the step between server and file that edits the list. A list that is shifted by one position loses a "
    "logprob.",
)
def wrong_sum(look: TraceBatch) -> Hits:
    """Detect turns that have all their logprobs and whose sum differs from cumulative_logprob.

    Threshold: 0.01 nats and 0.1 %. Rounding to three decimals stays below it over hundreds of tokens; a single lost
    logprob rarely does. Wrong from 1 % of turns.
    """
    flat = np.nan_to_num(look["flat_logprobs"].astype(np.float64))
    turn = np.repeat(np.arange(look.generations), np.diff(look.cu_logprobs))
    total = np.bincount(turn, flat, minlength=look.generations)
    recorded = look["cumulative_logprob"]
    complete = ~np.isnan(recorded) & (look["logprobs"] > 0) & (look["missing"] + look["invalid"] == 0)
    gap = np.abs(total - recorded)
    hit = complete & (gap > 0.01) & (gap > 1e-3 * np.abs(recorded))
    return look.hits(hit, complete, lambda g: f"they sum to {total[g]:.4f}, cumulative_logprob is {recorded[g]:.4f}")
