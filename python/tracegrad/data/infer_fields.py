"""Guess which fields contain the reward, group and session, and suggest command-line flags for them.

A guess is never applied automatically. Only the first records are read. `doctor`, `train` and `init` print the guesses.
"""

import contextlib
import hashlib
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tracegrad.config import FieldMap
from tracegrad.data import chat, json_path, sources
from tracegrad.data.batches import Batches, is_batch_line
from tracegrad.data.field_map import BadValueError, parse_record, prompt_group
from tracegrad.data.formats import (
    adapt,
    core_reads,
    is_chunk,
    is_failed,
    is_reward_row,
    is_spans,
    only_roots,
    span_calls,
    span_containers,
)
from tracegrad.data.infer_tokens import TEMPERATURE, TokenColumns
from tracegrad.data.sessions import calls_of, is_text_state, prefix_hashes
from tracegrad.data.sources import resolve
from tracegrad.data.trace import Trace
from tracegrad.errors import TracegradError

_ID_WORDS = r"(ids?|idx|index|key|uid|uuid|guid|name|number|num|no|nr|ref|hash|slug|handle|ts)"
_SESSION = re.compile(
    rf"(^|_)((session|conversation|thread|dialog(ue)?|rollout|episode|parent)s?(_?{_ID_WORDS}|_.*_{_ID_WORDS})?|"
    rf"(chat|trace|run)s?_?{_ID_WORDS})$"
)
"""Names of sessions, in lower case with `_` between words: they end with the thing or with a word for its id."""
_INSIDE = ("messages", "request", "response", "choices", "calls", "tools", "logprobs", "usage", "delta", "generation")


def words_of(key: str) -> str:
    """Return a key in lower case with `_` between its words.

    >>> words_of("parentRunID"), words_of("Conversation Completeness [GEval]")
    ('parent_run_id', 'conversation_completeness_g_eval')
    """
    return "_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+", key)).lower()


def is_session_name(path: str) -> bool:
    """Return whether the last key of a path may name the session of a record."""
    return bool(_SESSION.search(words_of(path.rpartition(".")[2])))


def count_key(value: Any) -> str:
    """Return a value as a key for counting: its string, or a hash of a long one."""
    text = str(value)
    return text if len(text) <= 200 else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def without_conversation(part: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the fields of its conversation."""
    return chat.without(part, *_INSIDE)


class CallStatistics:
    """Statistics of the first records: which calls continue others, and which prompts and keys they share."""

    def __init__(self, groups: bool, sessions: bool) -> None:
        self.calls = self._joined = self._conversations = self._joined_conversations = 0
        self.prompts: Counter[bytes] = Counter()
        self._groups, self._sessions = groups, sessions
        self._ends: set[bytes] = set()
        self._states: set[bytes] = set()
        self._continued_states: set[bytes] = set()
        self._prompts_of_keys: dict[str, dict[str, dict[bytes, int]]] = {}
        self._conversations_of_keys: dict[str, set[str]] = {}

    @property
    def joined(self) -> int:
        """Number of records that continue an earlier one.

        A record of messages may start like another by chance. Such records count only if at least half of those with an
        earlier answer continue another record, as in a log of single calls. So do records whose last message has no
        answer: they are states of a conversation if another record continues them.
        """
        conversations = self._joined_conversations if 2 * self._joined_conversations >= self._conversations else 0
        continued = len(self._continued_states)
        return self._joined + conversations + (continued if 2 * continued >= len(self._states) else 0)

    def add(self, record: Any, made: Sequence[Any]) -> None:
        """Add the calls of one record. `made` are the records converted from it; several answers share one prompt."""
        prompts = [self._add_call(each) for each in made]
        if self._groups:
            without_prompt = [
                item for item, prompt_or_none in zip(made, prompts, strict=True) if prompt_or_none is None
            ]
            prompts += [self._add_prompt(item, times) for item, times in _by_prompt(without_prompt)]
        prompt = next((each for each in prompts if each), None)
        if self._sessions:
            is_conversation = any(calls_of(each) is None for each in made)
            fields = {**(record if isinstance(record, dict) else {}), **made[0]}
            for path, value in itertools.islice(json_path.leaves(without_conversation(fields)), json_path.MAX_LEAVES):
                if value is not None and is_session_name(path):
                    self._count_value(path, count_key(value), prompt, is_conversation)

    def _count_value(self, path: str, value: str, prompt: bytes | None, is_conversation: bool) -> None:
        """Count a value of a key, its prompt, and whether its record is a complete conversation instead of a call."""
        prompts = self._prompts_of_keys.setdefault(path, {}).setdefault(value, {})
        if prompt:
            prompts[prompt] = prompts.get(prompt, 0) + 1
        if is_conversation:
            self._conversations_of_keys.setdefault(path, set()).add(value)

    def names_prompts(self, path: str) -> bool:
        """Return whether each value of a key has exactly one prompt.

        Records that share such a value are samples of one prompt and not calls of one conversation.
        """
        prompts_of_values = {
            value: prompts for value, prompts in self._prompts_of_keys.get(path, {}).items() if prompts
        }
        return (
            bool(prompts_of_values)
            and not self.joined
            and all(len(prompts) == 1 for prompts in prompts_of_values.values())
        )

    def joins(self, path: str, times: Mapping[str, int]) -> bool:
        """Return whether all records that share a value of a key are single calls. Other records cannot be joined."""
        return not any(times.get(value, 0) > 1 for value in self._conversations_of_keys.get(path, ()))

    def prompts_by(self, path: str) -> Counter[bytes]:
        """Count the conversations that start with each prompt, if each value of a key is one conversation."""
        return Counter(next(iter(prompts)) for prompts in self._prompts_of_keys.get(path, {}).values() if prompts)

    def _add_call(self, record: Any) -> bytes | None:
        """Add one record, and return the hash of its prompt.

        Empty if the call continues another one; None if the record is not a call with its own request.
        """
        if not (calls := calls_of(record)):
            if is_text_state(record) and chat.has_answer(record["messages"]):
                self._states.add(prefix_hashes({"request": record})[0][-1])
            return None
        hashes, _ = prefix_hashes(calls[0])
        self._continued_states |= self._states.intersection(hashes)
        _, end = prefix_hashes(calls[-1])
        self.calls += 1
        continues = any(each in self._ends for each in hashes)
        if "request" in record or "response" in record:
            self._joined += continues
        elif chat.has_answer(chat.as_mapping(calls[0].get("request")).get("messages")):
            self._conversations += 1
            self._joined_conversations += continues
        if end is not None:
            self._ends.add(end)
        if "request" not in record:
            return None
        if not hashes or continues:
            return b""
        self.prompts[hashes[-1]] += 1
        return hashes[-1]

    def _add_prompt(self, record: Any, times: int) -> bytes | None:
        """Count the messages before the first sampled turn of a record that is not a single call."""
        try:
            prompt = (prompt_group(Trace.from_dict(record)) or "").encode()
        except (TracegradError, IndexError):
            return None
        if prompt:
            self.prompts[prompt] += times
        return prompt


def _by_prompt(records: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return (record, count) for each group of records that differ only in their last message."""
    if len(records) < 2:
        return [(each, 1) for each in records]
    groups: dict[Any, list[Any]] = {}
    for index, each in enumerate(records):
        messages = chat.as_mapping(each).get("messages")
        groups.setdefault(count_key(messages[:-1]) if isinstance(messages, list) else index, []).append(each)
    return [(group[0], len(group)) for group in groups.values()]


RECORDS, BYTES = 2000, 1 << 26
FIELDS = ("reward", "group", "session")
_ALTERNATIVES = {"sampling": "temperature", "logprobs": "token_ids"}
"""Fields that are suggested in place of another one if nothing is found for that."""
SHOWN, MOST_WORDS = 3, 8
MOST_FILES, MOST_KEYS = 8, 64
"""Most files of which each gets a share of the first records, and most values of a record that may be a key."""
MOST_CALLS = 64  # Average calls of a conversation. Above that, a key probably names a run.
_GROUP = re.compile(
    r"task|prompt_?(id|key|name|hash)|group|question|problem|example|instance|item|case|query_?id|uid|\bdoc", re.I
)
_NO_GROUP = re.compile(
    r"token|latency|duration|elapsed|cost|price|usage|spend|budget|\bloss|probab|prob$|score|grade|rating|temperature|"
    r"_time$|_ms$|_s$|count$|length$|size$|template|config",
    re.I,
)
"""Names of measurements, and of texts and settings that records of different tasks share."""
_NOT_ONLY_OF_SAMPLING = {
    *("top_k", "topK", "top-k", "best_of", "bestOf", "min_tokens", "min_new_tokens", "num_beams"),
    *("beam_search", "use_beam_search", "watermark", "bad_words", "mirostat", "top_a"),
}
"""Names of sampling options that other objects have too, such as the top_k of a search."""
_TOTAL = re.compile(r"^reward$|overall|\btotal$", re.I)  # Names of the total, if there are several rewards.
_MIN_ID_LENGTH = 8  # Characters of a string that may be an id under an unusual name.
_ROW_ID = re.compile(r"(^|_)(id|idx|index|key|uid|uuid)$", re.I)
"""Names of ids. The only one of a row that has a reward and no call may be that of its conversation."""
_SESSION_NAME = re.compile(r"session|conversation|thread|dialog|chat", re.I)
_ORDER = re.compile(r"time|date|created|start|\bts$|step|turn|index|position|seq", re.I)
_NO_ORDER = re.compile(r"^end|_to_|duration|elapsed|latency|timeout", re.I)
"""Names of times that do not order calls: their ends, and durations."""
_NEVER = re.compile(
    r"token|latency|duration|cost|price|usage|max_|min_|temperature|top_[pk]|seed|created|timestamp|time|penalty|index|"
    r"\bn$|^choice$|version|port|^status(_code)?$|^state$|_reason$|elapsed|_ms$|_s$|bytes|count|\bid$|_id$|length|size|step|turn",
    re.I,
)


_REWARD_WORDS = re.compile(r"(^|_)(rewards?|scores?|ratings?|grades?|accuracy|correct|correctness|success)$")
"""Last words of names of rewards, whatever comes before them."""
_MEASURED = re.compile(
    r"(^|_)(tokens?|latency|duration|elapsed|seconds|ms|costs?|prices?|usage|budget|perturbations?|settings?|config|"
    r"configuration|options?|params|parameters|args|kwargs|arguments|limits?|temperature|top_[pkn]|seed|penalty|timeout)(_|$)"
)
"""Words in names of settings and measurements, in lower case with `_` between words."""


@dataclass
class _Column:
    """Statistics of the values at one path."""

    count: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    values: Counter[Any] = field(default_factory=Counter)
    low: float = float("inf")
    high: float = float("-inf")
    total: float = 0.0
    numbers: int = 0
    places: int = 0
    """How often the value was the index of its answer among the answers of a record."""

    def add(self, value: Any, times: int = 1, place: int | None = None) -> None:
        self.count += times
        self.places += place is not None and type(value) is int and value == place
        self.kinds[json_path.describe_type(value)] += times
        if len(self.values) < RECORDS:
            self.values[count_key(value)] += times
        if (reward := json_path.reward_value(value)) is not None and abs(reward) < 1e300:
            self.numbers += times
            self.low, self.high = min(self.low, reward), max(self.high, reward)
            self.total += reward * times


@dataclass(frozen=True)
class Candidate:
    """One guess.

    Args:
        field: field of `FieldMap`.
        path: suggested value of the field.
        evidence: the evidence, in words.
        rank: higher is better.
        also: other fields and their paths, which belong to it: the order of a session, the ids of logprobs.
        partial: whether some records lack the value, or are the only one of their group. Groups of one trace are then
            expected.
        mostly_alone: whether these are more than half of the records.
    """

    field: str
    path: str
    evidence: str
    rank: float
    also: tuple[tuple[str, str], ...] = ()
    partial: bool = False
    mostly_alone: bool = False

    def flags(self) -> list[str]:
        """Return the guess as command-line arguments."""
        return [part for name, path in ((self.field, self.path), *self.also) for part in (f"--map.{name}", path)]

    def line(self) -> str:
        """Return the guess as a line for a terminal, with the flags to use."""
        return f"guess    {self.evidence}: {shlex.join(self.flags())}"


@dataclass(frozen=True)
class Candidates:
    """Guesses from the first records, best first.

    Args:
        records: number of records read.
        guesses: the guesses.
        joined: number of calls that continue an earlier one, plus 1 if rewards in separate records share a key with
            calls.
        labels: lines about fields with non-numeric rewards, which a scoring function can convert.
    """

    records: int
    guesses: tuple[Candidate, ...]
    joined: int = 0
    labels: tuple[str, ...] = ()

    def of(self, name: str) -> list[Candidate]:
        """Return the guesses for one field."""
        return [each for each in self.guesses if each.field == name]

    def flags(self, names: Sequence[str]) -> list[str]:
        """Return the best guess of each of these fields as command-line arguments."""
        return [flag for each in self.best(names) for flag in each.flags()]

    def best(self, names: Sequence[str]) -> list[Candidate]:
        """Return the best guess of each field.

        A session is included only if calls continue others, and a guess with `mostly_alone` set is left out.
        """
        names = [*names, *(_ALTERNATIVES[name] for name in names if name in _ALTERNATIVES and not self.of(name))]
        names = list(dict.fromkeys(names))
        best = [self.of(name)[0] for name in names if self.of(name) and (name != "session" or self.joined)]
        return [each for each in best if not each.mostly_alone]

    def lines(self, names: Sequence[str] = FIELDS) -> list[str]:
        """Return the best `SHOWN` guesses of each field as lines for a terminal."""
        names = list(dict.fromkeys([*names, *(_ALTERNATIVES[name] for name in names if name in _ALTERNATIVES)]))
        lines = [each.line() for name in names for each in self.of(name)[:SHOWN]]
        if "reward" in names and not self.of("reward"):
            lines += self.labels[:SHOWN]
        if lines and self.records >= RECORDS:
            lines.append(f"         (in the first {self.records:,} records; nothing of it is taken unless it is told)")
        return lines


def infer(source: Any, field_map: FieldMap | None = None, names: Sequence[str] = FIELDS) -> Candidates:
    """Guess fields from the first records of inputs. Standard input is left out, as it cannot be read twice.

    Args:
        source: as for `read`.
        field_map: fields that are already set; they get no guesses.
        names: fields of `FieldMap` to guess.

    >>> said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> infer([{"messages": said, "meta": {"score": n / 4}} for n in range(4)]).lines(["reward"])
    ['guess    4 of 4 records have a number "meta.score" (0 to 0.75, mean 0.375, 4 values): --map.reward meta.score']
    """
    field_map = field_map or FieldMap()
    names = [name for name in names if not getattr(field_map, name)]
    columns: dict[str, _Column] = {}
    other_columns: dict[str, _Column] = {}
    linked: dict[str, set[str]] = {}
    calls = CallStatistics("group" in names, "session" in names or bool(field_map.session))
    spans = SpanStatistics()
    call_records = other_records = graded_records = 0
    tokens, wants_tokens = TokenColumns(), bool({"logprobs", "token_ids", "sampling"}.intersection(names))
    repeated = RepeatedRecords()
    places, records = _resolved(source)
    for record, roots, place in _first(places, records):
        if (record_spans := _spans(record)) is not None:
            for kind, span in record_spans:
                spans.add(kind, span)
            call = next((span for kind, span in record_spans if kind == span_calls.CALL), None)
            if wants_tokens and call is not None:
                tokens.add(record, call)
            continue
        converted = _converted(record, roots)
        is_graded = is_reward_row(record, field_map.reward)
        if is_graded or (converted == [] and isinstance(record, dict)):
            other_records += 1
            graded_records += is_graded
            _count(other_columns, record, 1, names)
            _link(linked, record)
        if converted is None and wants_tokens and isinstance(record, dict):
            tokens.add(record, record)  # With the right lists, the record may be read.
        if not converted or is_graded:
            continue
        call_records += len(converted)
        calls.add(record, converted)
        if "session" in names and len(places) > 1:
            repeated.add(place, record, converted)
        if wants_tokens:
            tokens.add(record, {**converted[0], **(record if isinstance(record, dict) else {})})
        for times, place, part in _parts(record, converted):
            _count(columns, part, times, names, place)
        if call_records >= RECORDS:
            break
    copies = list(repeated.candidates())
    sessions = [*_sessions(columns, call_records, calls), *copies]
    other_rewards = list(
        _rewards_of_other_records(
            other_columns, other_records, columns, linked, sessions, graded_records == other_records
        )
    )
    joined = calls.joined + bool(other_rewards) + bool(copies)
    keys = sorted(
        (each for each in (*sessions, *other_rewards) if each.field == "session"), key=lambda each: -each.rank
    )
    session_key = field_map.session or (keys[0].path if keys and joined else "")
    candidates = [
        *_rewards(columns, call_records),
        *_groups(columns, call_records, calls, session_key),
        *sessions,
        *other_rewards,
    ]
    candidates += _temperatures(columns, call_records) if "sampling" in names else []
    for lists in tokens.find(field_map, names):
        (name, path), *also = lists.paths.items()
        candidates.append(Candidate(name, path, lists.evidence, lists.records / tokens.records, tuple(also)))
    if "sampling" in names:
        guesses_of_options = _sampling_options(columns, call_records, candidates)
        candidates += [each for each in guesses_of_options if tokens.sampling_is_readable(each.path, field_map)]
    candidates += spans.candidates(field_map.session)
    call_records, joined = call_records + spans.calls.calls, joined + spans.continued
    fields = {*names, *(_ALTERNATIVES[name] for name in names if name in _ALTERNATIVES)}
    guesses = sorted((each for each in candidates if each.field in fields), key=lambda each: -each.rank)
    return Candidates(
        call_records, tuple(guesses), joined, tuple(_labels(columns, call_records)) if "reward" in names else ()
    )


class RepeatedRecords:
    """Finds keys by which records of several files with equal messages can be joined, such as answers and their scores.

    Each file has a value of such a key at most once, and all records with one value have the same messages.
    """

    def __init__(self) -> None:
        self._files: dict[int, list[tuple[bytes, dict[str, str]]]] = {}

    def add(self, place: int, record: Any, made: Sequence[Any]) -> None:
        """Add the record of a file. Records that were converted to several are left out."""
        if len(made) != 1:
            return
        end = None
        if calls := calls_of(made[0]):
            end = prefix_hashes(calls[-1])[1]
        elif is_text_state(made[0]):
            end = prefix_hashes({"request": made[0]})[0][-1]
        if end is None:
            return
        fields = without_conversation({**(record if isinstance(record, dict) else {}), **made[0]})
        leaves = itertools.islice(json_path.leaves(fields), MOST_KEYS)
        keys = {path: str(value) for path, value in leaves if type(value) in (int, str) and len(str(value)) <= 100}
        self._files.setdefault(place, []).append((end, keys))

    def candidates(self) -> Iterator[Candidate]:
        """Yield the session guess of the first such key that at least half of the records of two files share."""
        paths = {path: None for rows in self._files.values() for _, keys in rows for path in keys}
        for path in paths if len(self._files) > 1 else ():
            messages: dict[str, bytes] = {}
            shared = 0
            for rows in self._files.values():
                values = [(keys[path], end) for end, keys in rows if path in keys]
                if len(dict(values)) < len(values) or any(messages.get(value, end) != end for value, end in values):
                    break
                shared += sum(value in messages for value, _ in values)
                messages |= dict(values)
            else:
                if 2 * shared >= min(map(len, self._files.values())) and shared:
                    evidence = f'{shared:,} records repeat the messages of another file and have the same "{path}"'
                    yield Candidate("session", path, evidence, 3.0)
                    return


def _spans(record: Any) -> list[tuple[str, dict[str, Any]]] | None:
    """Return the spans of a record with their kinds, without those that the reader refuses; None for other records."""
    if not is_spans(record):
        return None
    converted = []
    with contextlib.suppress(BadValueError):
        for span in span_containers.spans_of(record) or ():
            with contextlib.suppress(BadValueError):
                converted.append(span_calls.convert(span))
    return converted


class SpanStatistics:
    """Statistics of the first spans, which the reader joins by their trace ids.

    A value counts once for each trace, whatever the span that has it: it belongs to the conversation of its trace.
    """

    def __init__(self) -> None:
        self.calls = CallStatistics(groups=True, sessions=True)
        self.continued = 0
        """Number of calls that continue a call of another trace."""
        self._columns: dict[str, _Column] = {}
        self._traces: dict[str, None] = {}
        self._seen: set[tuple[str, str]] = set()
        self._ends: dict[bytes, str] = {}
        self._trace_of: dict[str, str] = {}
        self._annotations: list[dict[str, Any]] = []

    def add(self, kind: str, span: dict[str, Any]) -> None:
        """Count a span. Only attributes that no convention defines for something else may be a reward or a group."""
        context = span["context"]
        if context["trace_id"] is None and str(context["span_id"]) not in self._trace_of:
            self._annotations.append(span)
            return
        trace = str(context["trace_id"] or self._trace_of[str(context["span_id"])])
        self._trace_of.setdefault(str(context["span_id"]), trace)
        attributes = {name: value for name, value in span["attributes"].items() if not _DEFINED.search(name)}
        others = {name: value for name, value in span.items() if name not in _SPAN_FIELDS}
        fields = {"attributes": attributes, **others}
        if len(self._traces) < RECORDS:
            self._traces[trace] = None
        if kind == span_calls.CALL:
            self.calls.add(span, [span])
            before, end = prefix_hashes(span)
            self.continued += any(self._ends.get(digest, trace) != trace for digest in before)
            self._ends |= {} if end is None else {end: trace}
        for path, value in itertools.islice(json_path.leaves(without_conversation(fields)), json_path.MAX_LEAVES):
            if value is not None and trace in self._traces and (trace, path) not in self._seen:
                self._seen.add((trace, path))
                self._columns.setdefault(path, _Column()).add(value)

    def candidates(self, session: str) -> Iterator[Candidate]:
        """Yield guesses for the reward and the group, and for the session if traces continue one another."""
        for span in self._annotations:
            if str(span["context"]["span_id"]) in self._trace_of:
                self.add(span_calls.STEP, span)
        count = len(self._traces)
        columns = {path: column for path, column in self._columns.items() if not _SPAN_SESSION.search(path)}
        for each in (*_rewards(columns, count), *_groups(columns, count, self.calls, session or span_containers.TRACE)):
            yield replace(each, evidence=each.evidence.replace(" records ", " traces "))
        for path, column in self._columns.items():
            if self.continued and _SPAN_SESSION.search(path) and len(column.values) < column.count:
                evidence = f'{column.count:,} of {count:,} traces have "{path}", of {len(column.values):,} values'
                yield Candidate("session", path, evidence, 2 * column.count / count)


_SPAN_FIELDS = (
    *("name", "context", "parent_id", "start_time", "events", "status", "attributes", "is_cut", "dropped_attributes"),
    *chat.PARTIAL,
)
_SPAN_SESSION = re.compile(r"\b(session|conversation|thread)[._]?id$", re.I)
_DEFINED = re.compile(
    r"^(input|output|llm|retrieval|reranker|embedding|document|tool|http|url|server|client|network|mlflow|openinference)"
    r"[._]|^gen_ai\.(?!conversation\.id$)|(^|[._])(annotations|evaluations)\.\d"
)
"""Names of attributes that conventions define, and that are no rewards. Annotations are read as `scores`."""


def _count(
    columns: dict[str, _Column], part: dict[str, Any], times: int, wanted: Sequence[str], place: int | None = None
) -> None:
    """Count the values at the paths of a record, or of a part of it."""
    fields = without_conversation(part)
    for path, value in itertools.islice(json_path.leaves(fields), json_path.MAX_LEAVES):
        if value is not None and ("reward" in wanted or _may_be_wanted(path, wanted)):
            columns.setdefault(path, _Column()).add(value, times, place)
    for key, value in fields.items():
        numbers = [json_path.number(each) for each in value.values()] if isinstance(value, dict) else []
        if numbers and None not in numbers and json_path.REWARD.search(key):  # All of its values may be rewards.
            columns.setdefault(f"{key}\0", _Column()).add(value, times)


def _link(linked: dict[str, set[str]], record: dict[str, Any]) -> None:
    """Store the possible session keys of a record that has a reward and no call."""
    leaves = list(itertools.islice(json_path.leaves(record), json_path.MAX_LEAVES))
    ids = [path for path, _ in leaves if _ROW_ID.search(path.rpartition(".")[2])]
    if any(json_path.REWARD.search(path) and json_path.reward_value(value) is not None for path, value in leaves):
        for path, value in leaves:
            is_session = is_session_name(path)
            is_long = isinstance(value, str) and len(value) >= _MIN_ID_LENGTH
            if value is not None and (is_session or is_long or ids == [path]):
                linked.setdefault(path, set()).add(count_key(value))


def _rewards_of_other_records(
    other_columns: dict[str, _Column],
    count: int,
    columns: dict[str, _Column],
    linked: dict[str, set[str]],
    sessions: list[Candidate],
    all_graded: bool,
) -> Iterator[Candidate]:
    """Yield guesses for rewards in records without a call. They rank below rewards of calls.

    Such a reward belongs to the conversation with the same session key. If no guessed session matches the two, yield
    a session guess for a key that at least half of these records share with calls.

    Args:
        other_columns: columns of the records without a call.
        count: number of these records.
        columns: columns of the records with calls.
        linked: values of possible session keys, by path.
        sessions: session guesses; those that match get a higher rank.
        all_graded: whether all records without a call contain only rewards. If so, some calls may lack a reward. If
            not, every value of the key in calls must occur in records without a call.
    """
    rewards = [each for each in _rewards(other_columns, count) if json_path.REWARD.search(each.path)]
    if not rewards:
        return
    shared_keys = [path for path in linked if path in columns and path in other_columns and len(linked[path]) > 1]
    # A key under an unusual name must have few rows per value, unlike the name of a model.
    shared_keys = [
        each
        for each in shared_keys
        if is_session_name(each) or other_columns[each].count <= 1.2 * len(other_columns[each].values)
    ]
    if not all_graded:
        shared_keys = [path for path in shared_keys if columns[path].values.keys() <= other_columns[path].values.keys()]
    candidates = [
        path for path in shared_keys if len(linked[path] & columns[path].values.keys()) * 2 >= len(linked[path])
    ]
    # A value that all runs share, such as the id of a project or a user, has fewer distinct values than a session key.
    path = max(candidates, key=lambda each: len(linked[each]), default=None)
    if path is None:
        return
    best_keys = [each for each in candidates if len(linked[each]) == len(linked[path])]
    # With another key, such as a parent's id, no call would get these rewards.
    sessions[:] = [replace(each, rank=each.rank + (each.path in best_keys)) for each in sessions]
    if not any(each.path in best_keys for each in sessions):
        evidence = f'{columns[path].count:,} calls share "{path}" with records without a call'
        yield Candidate("session", path, evidence, 2.5, _order_of(columns, columns[path].count))
    for each in rewards:
        evidence = each.evidence.replace(" records have", " records without a call have")
        yield replace(each, evidence=evidence, rank=each.rank / 10)


def _may_be_wanted(path: str, wanted: Sequence[str]) -> bool:
    """Return whether the last key of a path may name a group, a session, an order or a sampling option in `wanted`."""
    last = path.rpartition(".")[2]
    is_session_or_order = "session" in wanted and (is_session_name(last) or _ORDER.search(last))
    is_sampling = "sampling" in wanted and (TEMPERATURE.search(last) or last in chat.SAMPLING)
    return bool(is_session_or_order or is_sampling or ("group" in wanted and _GROUP.search(last)))


def _converted(record: Any, roots: bool) -> list[dict[str, Any]] | None:
    """Return the records that the reader makes of a record; None for a chunk, an unread record or a failed call."""
    if is_chunk(record):
        return None
    try:
        converted = adapt(record, roots)
    except BadValueError:
        return None  # The reader reports the error.
    if converted is None:
        return [record] if isinstance(record, dict) and core_reads(record) else None
    return [each for each in converted if not is_failed(each) and core_reads(each)] or (
        None if converted else converted
    )


def _parts(record: Any, converted: list[dict[str, Any]]) -> Iterator[tuple[int, int | None, dict[str, Any]]]:
    """Yield (count, index, fields) of converted records, with the other fields of the original record.

    First come the fields that all converted records share, with their number and no index. Then come the own fields of
    each, with count 1 and its index.
    """
    original = record if isinstance(record, dict) else {}
    merged = {**original, **converted[0]}
    own_keys = [
        key for key, value in merged.items() if any(each.get(key, original.get(key)) is not value for each in converted)
    ]
    shared = chat.without(merged, *own_keys)
    yield len(converted), None, shared
    for place, each in enumerate(converted):
        yield 1, place, chat.without({**original, **each}, *shared)


def _resolved(source: Any) -> tuple[list[sources.Place], Any]:
    """Return the result of `resolve`, without places and records if it fails: the reader reports errors."""
    with contextlib.suppress(TracegradError):
        return resolve(source)
    return [], None


def _first(places: Sequence[sources.Place], records: Any) -> Iterator[tuple[Any, bool, int]]:
    """Yield the first records, parsed, with the result of `only_roots` for their source, and the number of that source.

    Of a few files, each gets an equal share. Lines of a batch come last, and answers have their requests if both are
    among the first lines of their files.
    """
    byte_count = count = 0
    joined = Batches([])
    shares = len(places) if 1 < len(places) <= MOST_FILES else 1
    for number, opened_source in enumerate(_opened(places, records, sources.Options(on_error="skip"))):
        file_bytes = 0
        with contextlib.suppress(TracegradError):  # The reader reports errors.
            roots = only_roots(opened_source.head())
            raws = (raw for chunk in opened_source.records() for _, raw in chunk)
            for raw in itertools.islice(raws, RECORDS // shares):
                record, byte_count, file_bytes = parse_record(raw), byte_count + len(raw), file_bytes + len(raw)
                if is_batch_line(record):
                    with contextlib.suppress(BadValueError):
                        joined.add(0, 0, raw, record)
                else:
                    yield record, roots, number
                    count += 1
                if count >= RECORDS or byte_count >= BYTES:
                    return
                if file_bytes >= BYTES // shares:
                    break
    for line in joined.join():
        yield parse_record(line.raw), False, 0


def _opened(places: Sequence[sources.Place], records: Any, options: sources.Options) -> Iterator[sources.Source]:
    """Yield the sources of the inputs that can be opened."""
    with contextlib.suppress(TracegradError):
        if not places:
            yield sources.open_object(records, options)
        for place in places:
            if place.kind != "stdin":
                with contextlib.suppress(TracegradError):
                    yield sources.open_place(place, options)


def _rewards(columns: dict[str, _Column], count: int) -> Iterator[Candidate]:
    for path, column in columns.items():
        partial = column.count < count
        if path.endswith("\0"):
            if _is_no_reward(path[:-1]):
                continue
            evidence = f'{column.count:,} of {count:,} records have an object "{path[:-1]}" of numbers'
            yield Candidate("reward", path[:-1], evidence, 2.5 * column.count / count, partial=partial)
            continue
        is_reward_path, last = bool(json_path.REWARD.search(path)), path.rpartition(".")[2]
        if column.numbers < column.count or column.numbers * 10 < count or column.low == column.high:
            continue
        if json_path.AGAINST.search(last):
            continue
        bounded = column.low >= -1 and column.high <= 1
        if column.places == column.count and (
            column.high > 1 or not json_path.REWARD.search(last)
        ):  # The index of an answer.
            continue
        if not (is_reward_path or bounded) or _is_no_reward(path):
            continue
        kind = column.kinds.most_common(1)[0][0]
        evidence = (
            f'{column.count:,} of {count:,} records have {kind} "{path}" ({column.low:g} to {column.high:g}, '
            f"mean {column.total / column.numbers:.3g}, {len(column.values):,} values{_word_values(column)})"
        )
        name_bonus = 0.5 * bool(json_path.REWARD.search(last)) + 0.25 * bool(_TOTAL.search(last)) - (last == "weight")
        rank = (2 * is_reward_path + bounded + name_bonus + 0.5) * column.count / count
        yield Candidate("reward", path, evidence, rank, partial=partial)


def _is_no_reward(path: str) -> bool:
    """Return whether a path names a setting or a measurement, such as a price or a count of tokens, and no reward."""
    *parents, last = path.split(".")
    words = words_of(last)
    if _REWARD_WORDS.search(words):
        return False
    names = [*map(words_of, parents), words]
    is_measurement = any(_MEASURED.search(name) for name in names)
    return is_measurement or bool(_NEVER.search(last) and not json_path.REWARD.search(last))


def _word_values(column: _Column) -> str:
    """Describe the number of each word in a column."""
    words = [word for word in column.values if json_path.number(word) is None]
    return "".join(f", {word!r} is {json_path.reward_value(word):g}" for word in words[:MOST_WORDS])


def _labels(columns: dict[str, _Column], count: int) -> Iterator[str]:
    """Yield lines about columns with the name of a reward whose values are a few repeated words without a number."""
    for path, column in columns.items():
        words = column.values
        if (
            path.endswith("\0")
            or not json_path.REWARD.search(path.rpartition(".")[2])
            or column.numbers == column.count
        ):
            continue
        if column.kinds["a text"] < column.count or not 1 < len(words) <= MOST_WORDS or column.count < 2 * len(words):
            continue
        counts = ", ".join(f"{word[:30]!r} in {times:,}" for word, times in words.most_common())
        key, *rest_of_path = path.split(".")
        access = f'columns["{key}"], one for each completion' + (
            f" (in it {'.'.join(rest_of_path)})" if rest_of_path else ""
        )
        yield (
            f'guess    {column.count:,} of {count:,} records have words "{path}" ({counts}), which are no numbers: a '
            f"function of score has them as {access}"
        )


def _groups(columns: dict[str, _Column], count: int, calls: CallStatistics, session: str) -> Iterator[Candidate]:
    if "group" in columns and 2 * columns["group"].count >= count:
        return  # The reader uses it, so no other field is suggested.
    prompts_of_keys = calls.prompts_by(session)
    has_keys, prompts = bool(prompts_of_keys), prompts_of_keys or calls.prompts
    if shared := {prompt: times for prompt, times in prompts.items() if times > 1}:
        in_groups, is_one = sum(shared.values()), len(shared) == 1
        unit = "conversations" if has_keys else "records"
        prompt_description = "the same prompt" if is_one else f"one of {len(shared):,} prompts that others share"
        evidence = f"{in_groups:,} {unit} begin with {prompt_description}"
        total = sum(prompts.values())
        yield Candidate(
            "group",
            "prompt",
            evidence,
            1.5 * in_groups / total,
            partial=in_groups < total,
            mostly_alone=2 * in_groups < total,
        )
    for path, column in columns.items():
        distinct, last = len(column.values), path.rpartition(".")[2]
        names = sum(column.kinds[kind] for kind in ("a text", "a number as text", "a number"))
        if not _GROUP.search(last) or names < column.count or not 1 < distinct <= column.count / 1.5:
            continue
        if _NO_GROUP.search(last) or json_path.REWARD.search(last) or _is_measured(column):
            continue
        evidence = f'{column.count:,} of {count:,} records have "{path}", of {distinct:,} values'
        in_groups = sum(times for times in column.values.values() if times > 1)
        yield Candidate(
            "group",
            path,
            evidence,
            2 * column.count / count,
            partial=in_groups < count,
            mostly_alone=2 * in_groups < count,
        )


def _is_measured(column: _Column) -> bool:
    """Return whether all values are numbers and some are no integers: they are measurements and not names."""
    numbers = [json_path.number(value) for value in column.values]
    return None not in numbers and any(number is not None and number % 1 != 0 for number in numbers)


def _temperatures(columns: dict[str, _Column], count: int) -> Iterator[Candidate]:
    """Yield guesses for columns named temperature. Their parent object usually has the other sampling options too."""
    for path, column in columns.items():
        parent, _, last = path.rpartition(".")
        if path.endswith("\0") or not TEMPERATURE.search(last) or column.numbers < column.count or column.low < 0:
            continue
        evidence = (
            f'{column.count:,} of {count:,} records have a temperature "{path}" ({column.low:g} to {column.high:g})'
        )
        field_and_path = ("sampling", parent) if last == "temperature" and parent else ("temperature", path)
        yield Candidate(*field_and_path, evidence, column.count / count - 0.1 * path.count("."))


def _sampling_options(columns: dict[str, _Column], count: int, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield guesses for objects of sampling options without a temperature.

    The temperature stays unknown, unless one of the candidates has it: it then belongs to the guess.
    """
    known = {each.path for each in candidates if each.field == "sampling"}
    temperatures = sorted((each for each in candidates if each.field == "temperature"), key=lambda each: -each.rank)
    also = tuple(("temperature", each.path) for each in temperatures[:1])
    options: dict[str, dict[str, _Column]] = {}
    for path, column in columns.items():
        parent, _, last = path.rpartition(".")
        is_usable = column.numbers == column.count and (last != "top_p" or 0 <= column.low <= column.high <= 1)
        if parent and parent not in known and last in chat.SAMPLING[1:] and is_usable:
            options.setdefault(parent, {})[last] = column
    for parent, named in options.items():
        are_read = all(name in columns and columns[name].count >= column.count for name, column in named.items())
        if are_read or named.keys() <= _NOT_ONLY_OF_SAMPLING:
            continue
        present = max(column.count for column in named.values())
        evidence = f'{present:,} of {count:,} records have {", ".join(named)} in "{parent}", without a temperature'
        yield Candidate("sampling", parent, evidence, present / count - 0.1 * parent.count(".") - 0.5, also)


def _sessions(columns: dict[str, _Column], count: int, calls: CallStatistics) -> Iterator[Candidate]:
    if calls.joined:
        evidence = f"{calls.joined:,} of {calls.calls:,} calls go on an earlier one"
        yield Candidate("session", "prefix", evidence, 1.0)
    for path, column in columns.items():
        last, distinct = path.rpartition(".")[2], len(column.values)
        is_selective = 1 < distinct <= column.count / 1.2 and column.count <= MOST_CALLS * distinct
        has_session_name = bool(_SESSION_NAME.search(last))
        if not (
            calls.calls and is_selective and is_session_name(path) and (has_session_name or calls.joined)
        ) or calls.names_prompts(path):
            continue
        if not calls.joins(path, column.values):
            continue
        note = "" if calls.joined else ", though no call goes on another"
        evidence = f'{column.count:,} of {count:,} calls have "{path}", of {distinct:,} values{note}'
        yield Candidate(
            "session",
            path,
            evidence,
            (2 if has_session_name else 1.2) * column.count / count,
            _order_of(columns, column.count),
        )


def _order_of(columns: dict[str, _Column], count: int) -> tuple[tuple[str, str], ...]:
    """Return ("order", path) of the first path whose values are mostly distinct numbers or times, if there is one.

    At least `count` records have it, those with a session: a call without its order is a bad record.
    """
    for path, column in columns.items():
        if column.count < count:
            continue
        last, sample = path.rpartition(".")[2], itertools.islice(column.values, 50)
        if not _ORDER.search(last) or _NO_ORDER.search(last) or len(column.values) * 2 < column.count:
            continue
        if all(json_path.number(value) is not None or json_path.parse_time(value) is not None for value in sample):
            return (("order", path),)
    return ()
