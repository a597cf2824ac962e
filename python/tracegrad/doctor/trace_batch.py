"""Hold one batch of traces as flat columns for the checks, with the facts about a tokenizer that they need.

G generations of R traces, with no Python object per token.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.mismatch import SPELLED, lacks_tool_call, turn_messages
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.codes import FILLED, LOGPROB_KINDS, SAMPLED
from tracegrad.data.field_map import parse_record
from tracegrad.data.json_path import DEEPEST
from tracegrad.data.sampling import CANONICAL_NAMES, MASKS, NEUTRAL_VALUES, mismatch, options_on
from tracegrad.data.trace import Traces
from tracegrad.doctor.finding import Hits, Place
from tracegrad.errors import TemplateError


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer facts as arrays.

    Args:
        tokenizer: the model's.
        special: [V] bool, special tokens.
        size: [V] int64, bytes that each id spells.
        injected: text that the template writes before a first user message and that is in no message; "" if there is
            none.
    """

    tokenizer: Tokenizer
    special: NDArray[np.bool_]
    size: NDArray[np.int64]
    injected: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Look up every id, and render a conversation with two user messages."""
        ids, core = range(len(tokenizer)), tokenizer._core
        special = np.fromiter(map(core.is_special, ids), bool)
        size = np.fromiter((len(core.token_bytes(i) or b"") for i in ids), np.int64)
        return cls(tokenizer, special, size, injected_system_text(tokenizer))

    def spelled(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """Return [n] bytes that each of `ids` [n] spells; 0 for ids outside the tokenizer."""
        inside = (ids >= 0) & (ids < len(self.size))
        return np.where(inside, self.size[np.where(inside, ids, 0)], 0)

    def is_special(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        """Return [n] bool: whether each of `ids` [n] is a special token; False outside the tokenizer."""
        inside = (ids >= 0) & (ids < len(self.special))
        return inside & self.special[np.where(inside, ids, 0)]


def injected_system_text(tokenizer: Tokenizer) -> str:
    """Return the text that the template writes before the first user message only; "" if it has no words.

    It is the text before the first user message, without the ending that the text before the second one shares, and
    without special tokens. Fewer than 8 letters count as no words.
    """
    user = {"role": "user", "content": "first words"}
    later = [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": "second words"}]
    try:
        text = tokenizer.render([user, *later]).text
    except TemplateError:
        return ""
    before, _, after = text.partition("first words")
    before_second = after.partition("an answer")[2].partition("second words")[0]
    shared = 0
    while shared < min(len(before), len(before_second)) and before[-1 - shared] == before_second[-1 - shared]:
        shared += 1
    ids = tokenizer.encode(before[: len(before) - shared])
    plain = tokenizer.decode([i for i in ids.tolist() if not tokenizer._core.is_special(i)]).strip()
    return plain if sum(character.isalpha() for character in plain) >= 8 else ""


Array = NDArray[Any]
COMPLETION_TOKENS = tuple(
    re.compile(rb'"%s\\*"\s*:\s*(\d{1,18})' % name) for name in (b"completion_tokens", b"output_tokens")
)
REASONING_TOKENS = tuple(
    re.compile(rb'"%s\\*"\s*:\s*(\d{1,18})' % name) for name in (b"reasoning_tokens", b"thoughtsTokenCount")
)
ENDED = re.compile(rb'"finish_reason\\*"\s*:(?!\s*null)')
"""Match the end of a choice: earlier chunks have null. In the text of a stream the quotes are escaped."""
SEVERAL = re.compile(rb'"n"\s*:\s*(?:[2-9]|[1-9]\d+)\s*[,}]')
REQUEST_KEYS = {"messages", "prompt", "model", "temperature", "top_p", "max_tokens", "logprobs", "stream", "seed"}
"""Keys of a request: an object with `n` is a request if it has one of them."""
SAMPLING_REQUEST_KEYS = {"model", "temperature", "top_p", "max_tokens", "max_completion_tokens"}
"""Keys of a request: an object has sampling options if it has one of them."""
_NAMES = [name for name in NEUTRAL_VALUES if name != "top_p"]  # top_p and temperature are columns
RESHAPING = re.compile(
    rb'"(?=[a-z])(?!(?:token|logprob|bytes|top_logprobs)")(?:'  # Most keys are these, and no names of options.
    rb'(?:%s)"\s*:(?!\s*(?:null|false|-?[01](?:\.0)?)\s*[,}])|(?:%s)"\s*:\s*0(?:\.0)?\s*[,}]|'
    rb'(?:%s)"\s*:\s*-?1(?:\.0)?\s*[,}]|'
    rb'(?:%s)"\s*:(?!\s*(?:null|false|""|\[\]|\{\}|"auto"|"none")\s*[,}])|strict"\s*:\s*true)'
    % tuple(
        "|".join(names).encode()
        for names in (
            _NAMES,
            [name for name in _NAMES if 0 not in NEUTRAL_VALUES[name]],
            [name for name in _NAMES if 0 in NEUTRAL_VALUES[name]],
            [*MASKS, "response_format", "tool_choice"],
        )
    )
)
"""Match a record in which `sampling.mismatch` may find something."""
TEMPERATURE_LEFT_OUT, TOP_P_LEFT_OUT, REQUEST = 1, 2, 4  # bits in the column left_out
FIRST_TEXT_LEVEL = 4  # from this alignment level on, ids are the canonical ones of the text, not recorded ones


def _usage_counts(record: bytes, patterns: Sequence[re.Pattern[bytes]]) -> list[int]:
    """Return the numbers under the first of some names that is present."""
    numbers = next(filter(None, (pattern.findall(record) for pattern in patterns)), [])
    return [min(int(number), 1 << 40) for number in numbers]


def _responses(record: bytes) -> Iterator[bytes]:
    """Yield the responses of a record, each as JSON."""
    parsed = parse_record(record)
    calls = parsed.get("calls") if isinstance(parsed, dict) else None
    for call in calls if isinstance(calls, list) else [parsed]:
        yield json.dumps(call.get("response", call) if isinstance(call, dict) else call).encode()


def _requests_several_choices(record: bytes) -> bool:
    """Return whether a request in a record, or the parameters next to it, asks for several choices."""
    return bool(SEVERAL.search(record)) and any(map(_has_several_choices, _request_objects(parse_record(record))))


def _has_several_choices(request: dict[str, Any]) -> bool:
    n = request.get("n")
    return isinstance(n, int) and n > 1 and not REQUEST_KEYS.isdisjoint(request)


def _request_objects(value: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the objects in a record, without its messages, responses and tools."""
    if isinstance(value, dict):
        yield value
        children = [child for key, child in value.items() if key not in ("messages", "response", "tools")]
    else:
        children = value if isinstance(value, list) else []
    for child in children if depth < DEEPEST else ():
        yield from _request_objects(child, depth + 1)


def _sampling_options(value: Any) -> dict[str, Any]:
    """Return the sampling options in a request, or in an object that contains it."""
    requests = [request for request in _request_objects(value) if not SAMPLING_REQUEST_KEYS.isdisjoint(request)]
    inner = [request.get(key) for request in requests for key in ("extra_body", "sampling_params")]
    return {
        key: option for request in (*requests, *inner) if isinstance(request, dict) for key, option in request.items()
    }


def lacks_logprobs(columns: Mapping[str, Array], filled: Array) -> Array:
    """Return [G] bool: whether no logprob of a turn is recorded or filled.

    Args:
        columns: columns of the records, as `_core.Traces.columns` returns them.
        filled: [G] number of filled logprobs.
    """
    missing = columns["missing"]
    return ((columns["logprobs"] <= 0) | ((missing > 0) & (missing == columns["logprobs"]))) & (filled <= 0)


def logprob_kinds(columns: Mapping[str, Array], filled: Array) -> Array:
    """Return [G] index into `LOGPROB_KINDS`. Arguments as for `lacks_logprobs`."""
    return np.where((columns["logprobs"] <= 0) & (filled > 0), columns["filled_kind"], columns["logprob_kind"])


def unknown_kind(columns: Mapping[str, Array], filled: Array) -> Array:
    """Return [G] bool: whether logprobs are of unknown kind at a temperature that is not known to be 1."""
    is_unknown = logprob_kinds(columns, filled) == LOGPROB_KINDS.index("unknown")
    return is_unknown & ~(columns["temperature"] == 1.0) & ((columns["logprobs"] > 0) | (filled > 0))


def without_filled(sequences: Sequences) -> Array:
    """Return [T] float32: the recorded logprobs; NaN where there is none, or `tracegrad fill` measured it."""
    return np.where(sequences.alignment_level == FILLED, np.float32(np.nan), sequences.rollout_logprobs)


class TraceBatch:
    """One batch of traces as flat columns.

    Args:
        traces: as read.
        sequences: as aligned. Traces that cannot be aligned are missing there.
        vocabulary: tokenizer facts of the model.
        options: user options that checks read: max_tokens and held_out.
        logprob_kind: kind of the logprobs; overrides what the records say.
        defaults: options that the model's generation_config.json sets (`sampling.model_defaults`).
        sampling_defaults: how to read options that requests leave out: "neutral", "model", or None if not specified.
    """

    def __init__(
        self,
        traces: Traces,
        sequences: Sequences,
        vocabulary: Vocabulary,
        options: Any = None,
        logprob_kind: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        sampling_defaults: str | None = None,
    ) -> None:
        self.traces, self.sequences, self.vocabulary, self.options = traces, sequences, vocabulary, options
        self.defaults, self.sampling_defaults = defaults or {}, sampling_defaults
        self.columns: dict[str, Any] = traces.core.columns()
        if logprob_kind is not None:
            self.columns["logprob_kind"] = np.full(len(self.columns["trace"]), LOGPROB_KINDS.index(logprob_kind))
        self.trace: Array = self.columns["trace"]
        self.turn: Array = self.columns["turn"]
        self.generations = len(self.trace)

    def __getitem__(self, name: str) -> Array:
        """Return a [G] column of the records; names as in `_core.Traces.columns`."""
        return self.columns[name]

    @cached_property
    def finish(self) -> Array:
        """[G] str, finish reasons; "" if not recorded."""
        return np.asarray(self.columns["finish_reason"], dtype=object)

    @cached_property
    def first_generation(self) -> Array:
        """[R+1] offsets: trace r has generations first[r]:first[r+1]."""
        return np.searchsorted(self.trace, np.arange(len(self.traces) + 1))

    @cached_property
    def rows(self) -> Array:
        """[aligned] index into the batch of each aligned trace, in their order."""
        return np.delete(np.arange(len(self.traces)), self.sequences.alignment_report.left_out)

    @cached_property
    def branch(self) -> Array:
        """[T] branch of each token."""
        return np.repeat(np.arange(self.sequences.branches), np.diff(self.sequences.cu_seqlens))

    @cached_property
    def sampled(self) -> Array:
        """Positions of sampled tokens, grouped by generation in order.

        A token that several branches share is listed once, in the first branch that has its generation.
        """
        position = np.flatnonzero((self.sequences.source == SAMPLED) & (self.sequences.turn >= 0))
        generation = self._generation(position)
        first = np.full(self.generations, self.sequences.branches, np.int64)
        np.minimum.at(first, generation, self.branch[position])
        in_first = self.branch[position] == first[generation]
        return position[in_first][np.argsort(generation[in_first], kind="stable")]

    def _generation(self, at: Array) -> Array:
        row = self.sequences.trace[self.branch[at]]
        return self.first_generation[self.rows[row]] + self.sequences.turn[at]

    @cached_property
    def sampled_generation(self) -> Array:
        """[own] generation of each position in `own`."""
        return self._generation(self.sampled)

    @cached_property
    def aligned(self) -> Array:
        """[G] number of tokens of each generation that are in a branch."""
        return np.bincount(self.sampled_generation, minlength=self.generations)

    @cached_property
    def has_known_ids(self) -> Array:
        """[G] bool: whether all listed tokens are in a branch, with ids that the record determines."""
        level = self.sequences.alignment_level[self.sampled]
        has_ids = (self["ids"] >= 0) | (self["spelled"] > 0)
        # The level of a filled token does not show whether its id is recorded.
        text = np.where(level == FILLED, ~has_ids[self.sampled_generation], level >= FIRST_TEXT_LEVEL)
        canonical = np.bincount(self.sampled_generation[text], minlength=self.generations) > 0
        return (self.aligned > 0) & (self.aligned >= self["tokens"]) & ~canonical

    @cached_property
    def recorded_logprobs(self) -> Array:
        """[S] float32: the recorded logprobs of the sampled tokens, NaN where there is none or it was filled."""
        return without_filled(self.sequences)[self.sampled]

    @cached_property
    def filled(self) -> Array:
        """[G] number of tokens of each generation with a logprob that `tracegrad fill` measured."""
        own, sequences = self.sampled, self.sequences
        is_filled = (sequences.alignment_level[own] == FILLED) & ~np.isnan(sequences.rollout_logprobs[own])
        return np.bincount(self.sampled_generation[is_filled], minlength=self.generations)

    @cached_property
    def has_logprobs(self) -> Array:
        """[G] bool: whether a logprob of the generation is recorded or filled."""
        return (self["logprobs"] > 0) | (self.filled > 0)

    @cached_property
    def logprob_kind(self) -> Array:
        """[G] index into `LOGPROB_KINDS` of the recorded logprobs, or of the filled ones if none is recorded."""
        return logprob_kinds(self.columns, self.filled)

    @cached_property
    def unlisted_tool_call(self) -> Array:
        """[G] bool: whether a tool was called but the recorded token texts spell only the words before the call."""
        flags, own = np.zeros(self.generations, bool), self.sampled_generation
        cu = np.searchsorted(own, np.arange(self.generations + 1))
        ids, level = self.sequences.ids[self.sampled], self.sequences.alignment_level[self.sampled]
        for g in np.flatnonzero((self.finish == "tool_calls") & self.has_known_ids):
            span = slice(cu[g], cu[g + 1])
            is_filled_text = (level[span] == FILLED) & (self["ids"][g] < 0)
            if (np.isin(level[span], SPELLED) | is_filled_text).all():
                message = turn_messages(self.traces.core, int(self.trace[g]))[int(self.turn[g])]
                flags[g] = lacks_tool_call(message, self.vocabulary.tokenizer.decode(ids[span].tolist()))
        return flags

    @cached_property
    def last_id(self) -> Array:
        """[G] last id that is in a branch; -1 if none is."""
        last = np.full(self.generations, -1, np.int64)
        last[self.sampled_generation] = self.sequences.ids[self.sampled]
        return last

    @cached_property
    def usage(self) -> tuple[Array, Array]:
        """[G] completion tokens according to the record's usage, and the reasoning tokens among them; -1 if unknown.

        The numbers are used only if a record has one usage for each generation. A record is skipped if a response has
        several choices, or if several were requested, because usage counts all of them.
        """
        completion, reasoning = (np.full(self.generations, -1, np.int64) for _ in range(2))
        for index in range(len(self.traces)):
            start, end = self.first_generation[index : index + 2]
            record = self.traces.core.record(index)
            if len(ENDED.findall(record)) > end - start or _requests_several_choices(record):
                continue
            for patterns, column in ((COMPLETION_TOKENS, completion), (REASONING_TOKENS, reasoning)):
                counts = _usage_counts(record, patterns)
                if len(counts) > end - start:
                    # Servers that count in every chunk count up, so the largest number is the call's.
                    counts = [max(of_call) for call in _responses(record) if (of_call := _usage_counts(call, patterns))]
                if len(counts) == end - start:
                    column[start:end] = counts
        return completion, reasoning

    @cached_property
    def sampling_mismatch(self) -> dict[int, dict[str, Any]]:
        """Generations whose logprobs come from another distribution than the trainer's.

        Maps a generation to the sampling options that cause the difference. Only generations with logprobs are
        included.
        """
        return self._options_of_sampling[0]

    @cached_property
    def replayed(self) -> dict[int, dict[str, Any]]:
        """Generations whose support the record contains: generation to the options that the support replays."""
        return self._options_of_sampling[1]

    @cached_property
    def is_replayed(self) -> Array:
        """[G] bool: whether the record contains the support of a generation."""
        return np.isin(np.arange(self.generations), list(self.replayed))

    @cached_property
    def _options_of_sampling(self) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
        """The options that cause a difference, and those whose effect is replayed, by generation."""
        mismatches, replayed = self._changed_options(), dict[int, dict[str, Any]]()
        if (support := self.sequences.support) is None:
            return mismatches, replayed
        has_support = support.keys(self.sampled) != 0
        for g in np.unique(self.sampled_generation[has_support]).tolist():
            row = int(np.searchsorted(self.rows, self.trace[g]))
            names = {CANONICAL_NAMES.get(name, name): name for name in mismatches.get(g, {})}
            of_support = [names[name] for name in options_on(int(self.sequences.replayed[row])) if name in names]
            options = mismatches.pop(g, {})
            replayed[g] = {name: options.pop(name) for name in of_support}
            options.pop("temperature", None)  # logprobs over a support are those of the sampled distribution
            if options:
                mismatches[g] = options
        return dict(sorted(mismatches.items())), replayed

    def _changed_options(self) -> dict[int, dict[str, Any]]:
        """Return for each generation with logprobs the options for which `sampling.mismatch` finds a difference."""
        temperature, top_p, kinds = self["temperature"], self["top_p"], self.logprob_kind
        sampling = dict[int, dict[str, Any]]()
        for g in np.flatnonzero((~np.isnan(temperature) & (temperature != 1)) | (top_p < 1)):
            columns = {"temperature": temperature[g], "top_p": top_p[g]}
            sampling[int(g)] = {name: round(float(value), 6) for name, value in columns.items() if not np.isnan(value)}
        for g, options in enumerate(self["sampling"]):
            if options is not None:
                sampling[g] = {**options, **sampling.get(g, {})}
        if self.sampling_defaults == "model":
            for g, names in self.omitted_options.items():
                sampling[g] = {**sampling.get(g, {}), **{name: self.defaults[name] for name in names}}
        for index in range(len(self.traces)):
            if RESHAPING.search(raw := self.traces.core.record(index)) and isinstance(
                record := parse_record(raw), dict
            ):
                start, end = self.first_generation[index : index + 2]
                calls = record.get("calls")
                calls = calls if isinstance(calls, list) else []
                one_call_each = len(calls) == end - start
                record_options = {
                    key: value for key, value in record.items() if key not in ("calls", "metadata", "task")
                }
                common = _sampling_options(record_options if one_call_each else {**record_options, "calls": calls})
                for g in range(start, end):
                    sampling[g] = {
                        **common,
                        **(_sampling_options(calls[g - start]) if one_call_each else {}),
                        **sampling.get(g, {}),
                    }
        causes = {
            g: mismatch(options, LOGPROB_KINDS[kinds[g]]) for g, options in sampling.items() if self.has_logprobs[g]
        }
        return {g: cause for g, cause in sorted(causes.items()) if cause}

    @cached_property
    def omitted_options(self) -> dict[int, list[str]]:
        """Generations with logprobs whose request omits options that the model's generation_config.json sets.

        Maps a generation to the names of these options.
        """
        if not self.defaults:
            return {}
        omitted = dict[int, list[str]]()
        bits = {"temperature": TEMPERATURE_LEFT_OUT, "top_p": TOP_P_LEFT_OUT}
        for g in np.flatnonzero((self["left_out"] & REQUEST != 0) & self.has_logprobs):
            request, flags = self["sampling"][g] or {}, int(self["left_out"][g])
            names = [name for name in self.defaults if flags & bits.get(name, REQUEST) and name not in request]
            if names:
                omitted[int(g)] = names
        return omitted

    @cached_property
    def cu_logprobs(self) -> Array:
        """[G+1] offsets: generation g has flat_logprobs[cu[g]:cu[g+1]] as recorded."""
        return np.concatenate([[0], np.cumsum(np.maximum(self["logprobs"], 0))])

    @cached_property
    def missing_first_logprob(self) -> Array:
        """[G] bool: whether the first of two or more logprobs is missing, and no other."""
        first = np.minimum(self.cu_logprobs[:-1], max(len(self["flat_logprobs"]) - 1, 0))
        some = (self["logprobs"] > 1) & (self["missing"] == 1)
        return some & np.isnan(self["flat_logprobs"][first]) if len(self["flat_logprobs"]) else some

    def mismatches(self, *codes: int) -> dict[int, tuple[int, str]]:
        """Return generations with an alignment reason R<code>: generation to (first token or -1, detail)."""
        report, findings = self.sequences.alignment_report, {}
        for row in np.flatnonzero(np.isin(report.reason, codes)):
            start = int(self.first_generation[self.rows[report.trace[row]]])
            generation = start + max(int(report.turn[row]), 0)
            if generation < self.generations and generation not in findings:
                findings[generation] = (int(report.token[row]), report.detail[row])
        return findings

    def place_of(self, generation: int, token: int = -1) -> Place:
        """Return the place of a generation, or of a token of it."""
        index = int(self.trace[generation])
        return Place.of(self.traces, index, int(self.turn[generation]), token if token >= 0 else None)

    def trace_at(self, index: int) -> Place:
        """Return the place of a trace."""
        return Place.of(self.traces, index)

    def hits(
        self, hit: Array, of: Array | None = None, describe: Callable[[int], str] = lambda _: "", token: int = -1
    ) -> Hits:
        """Return hits of [G] bools.

        Args:
            hit: [G] bool.
            of: [G] bool, the generations that were checked; default all.
            describe: returns the description of the first hit, given its generation.
            token: token of the first hit, or -1.
        """
        indices = np.flatnonzero(hit)
        total = self.generations if of is None else int(of.sum())
        if not len(indices):
            return Hits(0, total)
        return Hits(len(indices), total, self.place_of(int(indices[0]), token), describe(int(indices[0])))

    def mismatch_hits(self, *codes: int) -> Hits:
        """Return hits of generations with one of these alignment reasons."""
        if not (findings := self.mismatches(*codes)):
            return Hits(0, self.generations)
        first = min(findings)
        return Hits(len(findings), self.generations, self.place_of(first, findings[first][0]), findings[first][1])
