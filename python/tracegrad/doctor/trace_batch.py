"""Hold one batch of traces as flat columns for the checks, with what they ask of a tokenizer.

G generations of R traces; no Python object per token.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.mismatch import SPELLED, said, without_call
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.codes import LOGPROB_KINDS, SAMPLED
from tracegrad.data.field_map import loads
from tracegrad.data.json_path import DEEPEST
from tracegrad.data.sampling import MASKS, OFF, mismatch
from tracegrad.data.trace import Traces
from tracegrad.doctor.finding import Hits, Place
from tracegrad.errors import TemplateError


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as arrays.

    Args:
        tokenizer: of the model.
        special: [V] bool, special tokens.
        size: [V] int64, bytes that each id spells.
        injected: what the template writes before a first user message that no message says, "" if nothing.
    """

    tokenizer: Tokenizer
    special: NDArray[np.bool_]
    size: NDArray[np.int64]
    injected: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Asks for every id, and renders two user messages."""
        ids, core = range(len(tokenizer)), tokenizer._core
        special = np.fromiter(map(core.is_special, ids), bool)
        size = np.fromiter((len(core.token_bytes(i) or b"") for i in ids), np.int64)
        return cls(tokenizer, special, size, injected(tokenizer))

    def spelled(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """[n] bytes that each of `ids` [n] spells; none for ids that only the model has."""
        inside = (ids >= 0) & (ids < len(self.size))
        return np.where(inside, self.size[np.where(inside, ids, 0)], 0)

    def is_special(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        """[n] bools: which of `ids` [n] are special tokens; none outside the vocabulary."""
        inside = (ids >= 0) & (ids < len(self.special))
        return inside & self.special[np.where(inside, ids, 0)]


def injected(tokenizer: Tokenizer) -> str:
    """What the template writes before the first of the user's words and not before later ones; "" if no words.

    The text before the first user message, less what stands before the second one, less special tokens.
    """
    user = {"role": "user", "content": "first words"}
    rest = [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": "second words"}]
    try:
        text = tokenizer.render([user, *rest]).text
    except TemplateError:
        return ""
    before, _, after = text.partition("first words")
    between = after.partition("an answer")[2].partition("second words")[0]
    shared = 0
    while shared < min(len(before), len(between)) and before[-1 - shared] == between[-1 - shared]:
        shared += 1
    ids = tokenizer.encode(before[: len(before) - shared])
    plain = tokenizer.decode([i for i in ids.tolist() if not tokenizer._core.is_special(i)]).strip()
    return plain if sum(character.isalpha() for character in plain) >= 8 else ""


Array = NDArray[Any]
USED = tuple(re.compile(rb'"%s\\*"\s*:\s*(\d{1,18})' % name) for name in (b"completion_tokens", b"output_tokens"))
THOUGHT = tuple(
    re.compile(rb'"%s\\*"\s*:\s*(\d{1,18})' % name) for name in (b"reasoning_tokens", b"thoughtsTokenCount")
)
ENDED = re.compile(rb'"finish_reason\\*"\s*:(?!\s*null)')
"""The end of a choice: chunks before the last say null. In the text of a stream quotes are escaped."""
SEVERAL = re.compile(rb'"n"\s*:\s*(?:[2-9]|[1-9]\d+)\s*[,}]')
OF_REQUEST = {"messages", "prompt", "model", "temperature", "top_p", "max_tokens", "logprobs", "stream", "seed"}
"""Keys of which one stands beside the `n` of a request."""
SAMPLED_WITH = {"model", "temperature", "top_p", "max_tokens", "max_completion_tokens"}
"""Keys of which one stands beside the sampling options of a request."""
_NAMES = [name for name in OFF if name != "top_p"]  # top_p and temperature are columns
RESHAPING = re.compile(
    rb'"(?:%s)"\s*:(?!\s*(?:null|false|-?[01](?:\.0)?)\s*[,}])|"(?:%s)"\s*:\s*0(?:\.0)?\s*[,}]|'
    rb'"(?:%s)"\s*:\s*-?1(?:\.0)?\s*[,}]|'
    rb'"(?:%s)"\s*:(?!\s*(?:null|false|""|\[\]|\{\}|"auto"|"none")\s*[,}])|"strict"\s*:\s*true'
    % tuple(
        "|".join(names).encode()
        for names in (
            _NAMES,
            [name for name in _NAMES if 0 not in OFF[name]],
            [name for name in _NAMES if 0 in OFF[name]],
            [*MASKS, "response_format", "tool_choice"],
        )
    )
)
"""What a record holds if `sampling.mismatch` may find something in it."""
TEMPERATURE_LEFT_OUT, TOP_P_LEFT_OUT, REQUEST = 1, 2, 4  # bits of the column left_out
TEXT_TIERS = 4  # from this tier on ids are canonical, not recorded


def _counts(record: bytes, patterns: Sequence[re.Pattern[bytes]]) -> list[int]:
    """The numbers under the first of some names that is there."""
    told = next(filter(None, (pattern.findall(record) for pattern in patterns)), [])
    return [min(int(each), 1 << 40) for each in told]


def _calls(record: bytes) -> Iterator[bytes]:
    """The responses of a record, each as JSON."""
    whole = loads(record)
    calls = whole.get("calls") if isinstance(whole, dict) else None
    for call in calls if isinstance(calls, list) else [whole]:
        yield json.dumps(call.get("response", call) if isinstance(call, dict) else call).encode()


def _asked_for_several(record: bytes) -> bool:
    """Whether a request in a record, or its parameters beside it, asks for several choices."""
    return bool(SEVERAL.search(record)) and any(map(_is_several, _objects(loads(record))))


def _is_several(told: dict[str, Any]) -> bool:
    n = told.get("n")
    return isinstance(n, int) and n > 1 and not OF_REQUEST.isdisjoint(told)


def _objects(value: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The objects in a record, but those that were said."""
    if isinstance(value, dict):
        yield value
        inside = [each for key, each in value.items() if key not in ("messages", "response", "tools")]
    else:
        inside = value if isinstance(value, list) else []
    for each in inside if depth < DEEPEST else ():
        yield from _objects(each, depth + 1)


def _sampling(value: Any) -> dict[str, Any]:
    """The sampling options in a request, or in what holds it."""
    found = [each for each in _objects(value) if not SAMPLED_WITH.isdisjoint(each)]
    inner = [each.get(key) for each in found for key in ("extra_body", "sampling_params")]
    return {key: held for each in (*found, *inner) if isinstance(each, dict) for key, held in each.items()}


class Look:
    """One batch.

    Args:
        traces: as read.
        sequences: as aligned; traces that cannot be aligned are missing there.
        vocabulary: of the model's tokenizer.
        options: what the user asked: max_tokens, held-out prompts.
        logprob_kind: what the logprobs are of, over what the records say.
        defaults: what the model's generation_config.json sets, by `sampling.model_defaults`.
        sampling_defaults: how options that requests leave out are read: "neutral", "model", or None, as nobody said.
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
        """[G] column of the records; names as in `_core.Traces.columns`."""
        return self.columns[name]

    @cached_property
    def finish(self) -> Array:
        """[G] strings: finish reasons, "" where unsaid."""
        return np.asarray(self.columns["finish_reason"], dtype=object)

    @cached_property
    def first_generation(self) -> Array:
        """[R+1]: trace r owns generations first[r]:first[r+1]."""
        return np.searchsorted(self.trace, np.arange(len(self.traces) + 1))

    @cached_property
    def rows(self) -> Array:
        """[aligned] index into the batch of each aligned trace; they keep their order."""
        return np.delete(np.arange(len(self.traces)), self.sequences.drift.left_out)

    @cached_property
    def branch(self) -> Array:
        """[T] branch of each token."""
        return np.repeat(np.arange(self.sequences.branches), np.diff(self.sequences.cu_seqlens))

    @cached_property
    def own(self) -> Array:
        """Positions of sampled tokens, each event once, where it is trained; generations stand together, in order."""
        at = np.flatnonzero((self.sequences.source == SAMPLED) & (self.sequences.turn >= 0))
        generation = self._generation(at)
        first = np.full(self.generations, self.sequences.branches, np.int64)
        np.minimum.at(first, generation, self.branch[at])
        mine = self.branch[at] == first[generation]
        return at[mine][np.argsort(generation[mine], kind="stable")]

    def _generation(self, at: Array) -> Array:
        row = self.sequences.trace[self.branch[at]]
        return self.first_generation[self.rows[row]] + self.sequences.turn[at]

    @cached_property
    def own_generation(self) -> Array:
        """[own] generation of each."""
        return self._generation(self.own)

    @cached_property
    def aligned(self) -> Array:
        """[G] tokens of each generation that stand in a branch."""
        return np.bincount(self.own_generation, minlength=self.generations)

    @cached_property
    def known(self) -> Array:
        """[G] bool: every listed token stands in a branch, with an id that the record determines."""
        text = self.sequences.tier[self.own] >= TEXT_TIERS
        canonical = np.bincount(self.own_generation[text], minlength=self.generations) > 0
        return (self.aligned > 0) & (self.aligned >= self["tokens"]) & ~canonical

    @cached_property
    def unlisted(self) -> Array:
        """[G] bool: a tool was called, and tokens that are recorded as texts spell the words and not the call."""
        out, own = np.zeros(self.generations, bool), self.own_generation
        cu = np.searchsorted(own, np.arange(self.generations + 1))
        ids, tier = self.sequences.ids[self.own], self.sequences.tier[self.own]
        for g in np.flatnonzero((self.finish == "tool_calls") & self.known):
            at = slice(cu[g], cu[g + 1])
            if np.isin(tier[at], SPELLED).all():
                message = said(self.traces.core, int(self.trace[g]))[int(self.turn[g])]
                out[g] = without_call(message, self.vocabulary.tokenizer.decode(ids[at].tolist()))
        return out

    @cached_property
    def last_id(self) -> Array:
        """[G] last id that stands in a branch, -1 where none does."""
        last = np.full(self.generations, -1, np.int64)
        last[self.own_generation] = self.sequences.ids[self.own]
        return last

    @cached_property
    def usage(self) -> tuple[Array, Array]:
        """[G] completion tokens by the record's own usage, and reasoning tokens among them; -1 where not told.

        Only where a record tells usage once for each generation, and no response has several choices, or was asked for
        several and lost the others: usage counts all.
        """
        used, thought = (np.full(self.generations, -1, np.int64) for _ in range(2))
        for index in range(len(self.traces)):
            start, end = self.first_generation[index : index + 2]
            record = self.traces.core.record(index)
            if len(ENDED.findall(record)) > end - start or _asked_for_several(record):
                continue
            for patterns, column in ((USED, used), (THOUGHT, thought)):
                told = _counts(record, patterns)
                if len(told) > end - start:
                    # Servers that count in every chunk count up: the largest is that of the call.
                    told = [max(of_call) for call in _calls(record) if (of_call := _counts(call, patterns))]
                if len(told) == end - start:
                    column[start:end] = told
        return used, thought

    @cached_property
    def mismatch(self) -> dict[int, dict[str, Any]]:
        """Generations with logprobs and options under which these are of another distribution than the trainer's."""
        heat, cut, kinds = self["temperature"], self["top_p"], self["logprob_kind"]
        asked = dict[int, dict[str, Any]]()
        for g in np.flatnonzero((~np.isnan(heat) & (heat != 1)) | (cut < 1)):
            told = {"temperature": heat[g], "top_p": cut[g]}
            asked[int(g)] = {name: round(float(value), 6) for name, value in told.items() if not np.isnan(value)}
        for g, told in enumerate(self["sampling"]):
            if told is not None:
                asked[g] = {**told, **asked.get(g, {})}
        if self.sampling_defaults == "model":
            for g, names in self.left_out.items():
                asked[g] = {**asked.get(g, {}), **{name: self.defaults[name] for name in names}}
        for index in range(len(self.traces)):
            if RESHAPING.search(raw := self.traces.core.record(index)) and isinstance(record := loads(raw), dict):
                start, end = self.first_generation[index : index + 2]
                calls = record.get("calls")
                calls = calls if isinstance(calls, list) else []
                apart = len(calls) == end - start
                of_record = {key: value for key, value in record.items() if key not in ("calls", "metadata", "task")}
                common = _sampling(of_record if apart else {**of_record, "calls": calls})
                for g in range(start, end):
                    asked[g] = {**common, **(_sampling(calls[g - start]) if apart else {}), **asked.get(g, {})}
        found = {g: mismatch(told, LOGPROB_KINDS[kinds[g]]) for g, told in asked.items() if self["logprobs"][g] > 0}
        return {g: wrong for g, wrong in sorted(found.items()) if wrong}

    @cached_property
    def left_out(self) -> dict[int, list[str]]:
        """Generations with logprobs whose request leaves out what the model's generation_config.json sets: which."""
        if not self.defaults:
            return {}
        found = dict[int, list[str]]()
        bits = {"temperature": TEMPERATURE_LEFT_OUT, "top_p": TOP_P_LEFT_OUT}
        for g in np.flatnonzero((self["left_out"] & REQUEST != 0) & (self["logprobs"] > 0)):
            told, left = self["sampling"][g] or {}, int(self["left_out"][g])
            names = [name for name in self.defaults if left & bits.get(name, REQUEST) and name not in told]
            if names:
                found[int(g)] = names
        return found

    @cached_property
    def cu_logprobs(self) -> Array:
        """[G+1]: generation g has flat_logprobs[cu[g]:cu[g+1]] as recorded."""
        return np.concatenate([[0], np.cumsum(np.maximum(self["logprobs"], 0))])

    @cached_property
    def headless(self) -> Array:
        """[G] bool: of two or more logprobs the first one is missing, and no other."""
        first = np.minimum(self.cu_logprobs[:-1], max(len(self["flat_logprobs"]) - 1, 0))
        some = (self["logprobs"] > 1) & (self["missing"] == 1)
        return some & np.isnan(self["flat_logprobs"][first]) if len(self["flat_logprobs"]) else some

    def drift(self, *codes: int) -> dict[int, tuple[int, str]]:
        """Generations with a finding of these reasons (R<code>): generation to (first token or -1, detail)."""
        drift, found = self.sequences.drift, {}
        for at in np.flatnonzero(np.isin(drift.reason, codes)):
            start = int(self.first_generation[self.rows[drift.trace[at]]])
            generation = start + max(int(drift.turn[at]), 0)
            if generation < self.generations and generation not in found:
                found[generation] = (int(drift.token[at]), drift.detail[at])
        return found

    def at(self, generation: int, token: int = -1) -> Place:
        """The place of a generation, or of a token of it."""
        index = int(self.trace[generation])
        return Place.of(self.traces, index, int(self.turn[generation]), token if token >= 0 else None)

    def trace_at(self, index: int) -> Place:
        """The place of a trace."""
        return Place.of(self.traces, index)

    def hits(
        self, hit: Array, of: Array | None = None, found: Callable[[int], str] = lambda _: "", token: int = -1
    ) -> Hits:
        """Hits of [G] bools among `of` (default: all generations); `found` says what the first one shows."""
        at = np.flatnonzero(hit)
        total = self.generations if of is None else int(of.sum())
        if not len(at):
            return Hits(0, total)
        return Hits(len(at), total, self.at(int(at[0]), token), found(int(at[0])))

    def drift_hits(self, *codes: int) -> Hits:
        """Hits of generations with a drift finding of these reasons."""
        if not (found := self.drift(*codes)):
            return Hits(0, self.generations)
        first = min(found)
        return Hits(len(found), self.generations, self.at(first, found[first][0]), found[first][1])
