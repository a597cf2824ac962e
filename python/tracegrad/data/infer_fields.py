"""Guess which fields hold reward, group and session, as flags to type; a guess is never used by itself.

Only the first records are looked at. `doctor`, `train` and `init` print what is found.
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

from tracegrad.config import Map
from tracegrad.data import chat, json_path, sources
from tracegrad.data.field_map import Unfit, loads, prompt_of
from tracegrad.data.formats import adapt, is_chunk, is_failed, is_verdict, only_roots
from tracegrad.data.sessions import calls_of, moment, prefixes
from tracegrad.data.sources import named
from tracegrad.data.trace import Trace
from tracegrad.errors import TracegradError

SESSION = re.compile(r"session|conversation|thread|dialog|chat_?id|trace_?id|rollout|episode|run_?id|parent", re.I)
_INSIDE = ("messages", "request", "response", "choices", "calls", "tools", "logprobs", "usage", "delta", "generation")


def counted(value: Any) -> str:
    """A value as it is counted: its text, or the hash of a long one."""
    text = str(value)
    return text if len(text) <= 200 else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def outside(part: dict[str, Any]) -> dict[str, Any]:
    """A record without what was said in it."""
    return chat.without(part, *_INSIDE)


class Calls:
    """How the calls of the first records hang together."""

    def __init__(self, groups: bool, sessions: bool) -> None:
        self.calls = self._joined = self._whole = self._whole_joined = 0
        self.prompts: Counter[bytes] = Counter()
        self._groups, self._sessions = groups, sessions
        self._ends: set[bytes] = set()
        self._of_keys: dict[str, dict[str, dict[bytes, int]]] = {}
        self._whole_of_keys: dict[str, set[str]] = {}

    @property
    def joined(self) -> int:
        """How many records go on an earlier one.

        A record of a whole conversation may begin like another by chance. Such records count only where at least half
        of those that hold an earlier answer go on another record, as they do where calls were logged one by one.
        """
        return self._joined + (self._whole_joined if 2 * self._whole_joined >= self._whole else 0)

    def add(self, record: Any, made: Sequence[Any]) -> None:
        """Looks at the calls of what was made of one record; several answers have one prompt."""
        prompts = [self._add(each) for each in made]
        if self._groups:
            untold = [one for one, told in zip(made, prompts, strict=True) if told is None]
            prompts += [self._prompt(one, times) for one, times in _by_prompt(untold)]
        prompt = next((each for each in prompts if each), None)
        if self._sessions:
            whole = any(calls_of(each) is None for each in made)
            outer = {**(record if isinstance(record, dict) else {}), **made[0]}
            for path, value in itertools.islice(json_path.leaves(outside(outer)), json_path.MOST_WALKED):
                if value is not None and SESSION.search(path.rpartition(".")[2]):
                    self._seen(path, counted(value), prompt, whole)

    def _seen(self, path: str, value: str, prompt: bytes | None, whole: bool) -> None:
        """Counts a value of a key: the prompts that it has in their order, and whether it is of what is no call."""
        prompts = self._of_keys.setdefault(path, {}).setdefault(value, {})
        if prompt:
            prompts[prompt] = prompts.get(prompt, 0) + 1
        if whole:
            self._whole_of_keys.setdefault(path, set()).add(value)

    def names_prompts(self, path: str) -> bool:
        """Whether each value of a key has one prompt: what shares it was drawn anew, and is no conversation."""
        seen = {value: prompts for value, prompts in self._of_keys.get(path, {}).items() if prompts}
        return bool(seen) and not self.joined and all(len(prompts) == 1 for prompts in seen.values())

    def joins(self, path: str, times: Mapping[str, int]) -> bool:
        """Whether what shares a value of a key are single calls, as no other records are joined."""
        return not any(times.get(value, 0) > 1 for value in self._whole_of_keys.get(path, ()))

    def prompts_by(self, path: str) -> Counter[bytes]:
        """How many conversations begin with each prompt, where those of one value of a key are one."""
        return Counter(next(iter(prompts)) for prompts in self._of_keys.get(path, {}).values() if prompts)

    def _add(self, record: Any) -> bytes | None:
        """Looks at one; the prompt of a call that says its own, empty where it goes on another, else None."""
        if not (calls := calls_of(record)):
            return None
        before, _ = prefixes(calls[0])
        _, end = prefixes(calls[-1])
        self.calls += 1
        goes_on = any(each in self._ends for each in before)
        if "request" in record or "response" in record:
            self._joined += goes_on
        elif chat.has_answer(chat.table(calls[0].get("request")).get("messages")):
            self._whole += 1
            self._whole_joined += goes_on
        if end is not None:
            self._ends.add(end)
        if "request" not in record:
            return None
        if not before or goes_on:
            return b""
        self.prompts[before[-1]] += 1
        return before[-1]

    def _prompt(self, record: Any, times: int) -> bytes | None:
        """Looks at what came before the first sampled turn of a record that is no single call."""
        try:
            prompt = (prompt_of(Trace.from_dict(record)) or "").encode()
        except (TracegradError, IndexError):
            return None
        if prompt:
            self.prompts[prompt] += times
        return prompt


def _by_prompt(made: Sequence[Any]) -> list[tuple[Any, int]]:
    """One record of those that differ in their last message alone, as the answers to one prompt do, and how many."""
    if len(made) < 2:
        return [(each, 1) for each in made]
    alike: dict[Any, list[Any]] = {}
    for at, each in enumerate(made):
        talk = chat.table(each).get("messages")
        alike.setdefault(counted(talk[:-1]) if isinstance(talk, list) else at, []).append(each)
    return [(same[0], len(same)) for same in alike.values()]


RECORDS, BYTES = 2000, 1 << 26
FIELDS = ("reward", "group", "session")
_HELD = re.compile(r"(?:^|[._-])(?:sampling_?)?temp(?:erature)?$", re.I)
SHOWN, MOST_WORDS = 3, 8
MOST_CALLS = 64  # of a conversation, on the average: from there a key is rather that of a run
_GROUP = re.compile(
    r"task|prompt_?(id|key|name|hash)|group|question|problem|example|instance|item|case|query_?id|uid|\bdoc", re.I
)
_WHOLE = re.compile(r"^reward$|overall|\btotal$", re.I)  # where there are several, that of all
_LEAST = 8  # letters of a text that may be an id, under whatever name
_SESSION_NAME = re.compile(r"session|conversation|thread|dialog|chat", re.I)
_ORDER = re.compile(r"time|date|created|start|\bts$|step|turn|index|position|seq", re.I)
_NEVER = re.compile(
    r"token|latency|duration|cost|price|usage|max_|min_|temperature|top_[pk]|seed|created|timestamp|time|penalty|index|"
    r"\bn$|version|port|^status(_code)?$|^state$|_reason$|elapsed|_ms$|_s$|bytes|count|\bid$|_id$|length|size|step|turn",
    re.I,
)


@dataclass
class _Column:
    """What stands at one path."""

    count: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    values: Counter[Any] = field(default_factory=Counter)
    low: float = float("inf")
    high: float = float("-inf")
    total: float = 0.0
    numbers: int = 0
    places: int = 0
    """How often it was the place of its answer among the answers of a record."""

    def add(self, value: Any, times: int = 1, place: int | None = None) -> None:
        self.count += times
        self.places += place is not None and type(value) is int and value == place
        self.kinds[json_path.kind(value)] += times
        if len(self.values) < RECORDS:
            self.values[counted(value)] += times
        if (found := json_path.verdict(value)) is not None and abs(found) < 1e300:
            self.numbers += times
            self.low, self.high = min(self.low, found), max(self.high, found)
            self.total += found * times


@dataclass(frozen=True)
class Candidate:
    """One thing that may be meant.

    Args:
        field: of `Map`.
        path: its value.
        why: what was seen, in words.
        rank: the higher the better.
        order: of a session, the path by which its calls are in order.
        partial: whether some records lack it, or are alone in a group of it: then groups of one trace are expected.
        few: whether that are more than half of them.
    """

    field: str
    path: str
    why: str
    rank: float
    order: str = ""
    partial: bool = False
    few: bool = False

    def flags(self) -> list[str]:
        """As arguments of a command."""
        return [f"--map.{self.field}", self.path, *(["--map.order", self.order] if self.order else [])]

    def line(self) -> str:
        """As a line for a terminal, with the flag to type."""
        return f"found    {self.why}: {shlex.join(self.flags())}"


@dataclass(frozen=True)
class Candidates:
    """What was found in the first `records`, the best of each field first.

    Args:
        records: how many were looked at.
        found: what may be meant.
        joined: calls among them that go on an earlier one, or a key by which a reward beside the calls is theirs.
        labels: words that are no numbers, as lines that say how a function may make them ones.
    """

    records: int
    found: tuple[Candidate, ...]
    joined: int = 0
    labels: tuple[str, ...] = ()

    def of(self, name: str) -> list[Candidate]:
        """Those of one field."""
        return [each for each in self.found if each.field == name]

    def flags(self, names: Sequence[str]) -> list[str]:
        """The best of each of these fields, as arguments."""
        return [flag for each in self.taken(names) for flag in each.flags()]

    def taken(self, names: Sequence[str]) -> list[Candidate]:
        """The best of each; a session only where calls go on others, a group only where half the records have mates."""
        names = [*names, *(["temperature"] if "sampling" in names and not self.of("sampling") else [])]
        best = [self.of(name)[0] for name in names if self.of(name) and (name != "session" or self.joined)]
        return [each for each in best if not each.few]

    def lines(self, names: Sequence[str] = FIELDS) -> list[str]:
        """The best few of each field."""
        names = [*names, *(["temperature"] if "sampling" in names else [])]
        shown = [each.line() for name in names for each in self.of(name)[:SHOWN]]
        if "reward" in names and not self.of("reward"):
            shown += self.labels[:SHOWN]
        if shown and self.records >= RECORDS:
            shown.append(f"         (in the first {self.records:,} records; nothing of it is taken unless it is told)")
        return shown


def find(source: Any, told: Map | None = None, wanted: Sequence[str] = FIELDS) -> Candidates:
    """Looks through the first records of inputs; nothing is said of standard input, which cannot be read twice.

    Args:
        source: as for `read`.
        told: what needs no candidates.
        wanted: fields of `Map` to look for; what only others need is left alone.

    >>> said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> find([{"messages": said, "meta": {"score": n / 4}} for n in range(4)]).lines(["reward"])
    ['found    4 of 4 records have a number "meta.score" (0 to 0.75, mean 0.375, 4 values): --map.reward meta.score']
    """
    told = told or Map()
    wanted = [name for name in wanted if not getattr(told, name)]
    columns: dict[str, _Column] = {}
    beside: dict[str, _Column] = {}
    linked: dict[str, set[str]] = {}
    calls = Calls("group" in wanted, "session" in wanted or bool(told.session))
    count = silent = verdicts = 0
    for record, roots in _first(source):
        made = _made(record, roots)
        says = is_verdict(record)
        if says or (made == [] and isinstance(record, dict)):
            silent += 1
            verdicts += says
            _count(beside, record, 1, wanted)
            _link(linked, record)
        if not made or says:
            continue
        count += len(made)
        calls.add(record, made)
        for times, place, part in _parts(record, made):
            _count(columns, part, times, wanted, place)
        if count >= RECORDS:
            break
    sessions = list(_sessions(columns, count, calls))
    told_beside = list(_beside(beside, silent, columns, linked, sessions, verdicts == silent))
    joined = calls.joined + bool(told_beside)
    keys = sorted((each for each in (*sessions, *told_beside) if each.field == "session"), key=lambda each: -each.rank)
    by = told.session or (keys[0].path if keys and joined else "")
    found = [*_rewards(columns, count), *_groups(columns, count, calls, by), *sessions, *told_beside]
    found += _heats(columns, count) if "sampling" in wanted else []
    asked = {*wanted, *(["temperature"] if "sampling" in wanted else [])}
    kept = sorted((each for each in found if each.field in asked), key=lambda each: -each.rank)
    return Candidates(count, tuple(kept), joined, tuple(_labels(columns, count)) if "reward" in wanted else ())


def _count(
    columns: dict[str, _Column], part: dict[str, Any], times: int, wanted: Sequence[str], place: int | None = None
) -> None:
    """Counts what stands at the paths of a record, or of a part of it."""
    outer = outside(part)
    for path, value in itertools.islice(json_path.leaves(outer), json_path.MOST_WALKED):
        if value is not None and ("reward" in wanted or _may_be(path, wanted)):
            columns.setdefault(path, _Column()).add(value, times, place)
    for key, value in outer.items():
        numbers = [json_path.number(each) for each in value.values()] if isinstance(value, dict) else []
        if numbers and None not in numbers and json_path.REWARD.search(key):  # whose names may all be rewards
            columns.setdefault(f"{key}\0", _Column()).add(value, times)


def _link(linked: dict[str, set[str]], record: dict[str, Any]) -> None:
    """Keeps the session keys of a record without a call that says a reward."""
    told = list(itertools.islice(json_path.leaves(record), json_path.MOST_WALKED))
    if any(json_path.REWARD.search(path) and json_path.verdict(value) is not None for path, value in told):
        for path, value in told:
            named = SESSION.search(path.rpartition(".")[2])
            if value is not None and (named or (isinstance(value, str) and len(value) >= _LEAST)):
                linked.setdefault(path, set()).add(counted(value))


def _beside(
    beside: dict[str, _Column],
    count: int,
    columns: dict[str, _Column],
    linked: dict[str, set[str]],
    sessions: list[Candidate],
    graded: bool,
) -> Iterator[Candidate]:
    """Rewards in records without a call, which count for the conversation whose key they have, below those of calls.

    Where no session is found by which they are of calls, the key is one by which most of them are: not what leads to
    rows that say no reward, as the parent of a call may have one and the steps beside the call have none. Where all are
    `graded`, some calls may have no grade.
    """
    rewards = [each for each in _rewards(beside, count) if json_path.REWARD.search(each.path)]
    if not rewards:
        return
    both = [path for path in linked if path in columns and path in beside and len(linked[path]) > 1]
    # A key under whatever name is one of few rows, unlike the name of a model.
    both = [each for each in both if SESSION.search(each) or beside[each].count <= 1.2 * len(beside[each].values)]
    if not graded:
        both = [path for path in both if columns[path].values.keys() <= beside[path].values.keys()]
    joins = [path for path in both if len(linked[path] & columns[path].values.keys()) * 2 >= len(linked[path])]
    # What all runs share, as the id of a project or of a user, has fewer values than what a conversation shares.
    path = max(joins, key=lambda each: len(linked[each]), default=None)
    if path is None:
        return
    whole = [each for each in joins if len(linked[each]) == len(linked[path])]
    # By another key, as a parent's id, the rewards would be of no call.
    sessions[:] = [replace(each, rank=each.rank + (each.path in whole)) for each in sessions]
    if not any(each.path in whole for each in sessions):
        why = f'{columns[path].count:,} calls share "{path}" with records without a call'
        yield Candidate("session", path, why, 2.5, _order_of(columns))
    for each in rewards:
        why = each.why.replace(" records have", " records without a call have")
        yield replace(each, why=why, rank=each.rank / 10)


def _may_be(path: str, wanted: Sequence[str]) -> bool:
    """Whether the name of a path may be that of a group, or of a session or the order in it."""
    last = path.rpartition(".")[2]
    session = "session" in wanted and (SESSION.search(last) or _ORDER.search(last))
    heat = "sampling" in wanted and _HELD.search(last)
    return bool(session or heat or ("group" in wanted and _GROUP.search(last)))


def _made(record: Any, roots: bool) -> list[dict[str, Any]] | None:
    """What a record is read as: itself, or what an adapter makes of it; None for a chunk, a bad or a failed one."""
    if is_chunk(record):
        return None
    try:
        made = adapt(record, roots)
    except Unfit:
        return None  # whoever reads it says so
    if made is None:
        return [record] if isinstance(record, dict) else None
    return [each for each in made if not is_failed(each)] or (None if made else made)


def _parts(record: Any, made: list[dict[str, Any]]) -> Iterator[tuple[int, int | None, dict[str, Any]]]:
    """What is made of a record, with what the record says beside: what all share once, with how many they are, then
    what each has of its own, with its place among them.
    """
    outer = record if isinstance(record, dict) else {}
    first = {**outer, **made[0]}
    own = [key for key, value in first.items() if any(each.get(key, outer.get(key)) is not value for each in made)]
    shared = chat.without(first, *own)
    yield len(made), None, shared
    for place, each in enumerate(made):
        yield 1, place, chat.without({**outer, **each}, *shared)


def _first(source: Any) -> Iterator[tuple[Any, bool]]:
    """The first records, as Python has them, and what `only_roots` says of their source."""
    held = count = 0
    for each in _opened(source, sources.Options(on_error="skip")):
        with contextlib.suppress(TracegradError):  # what cannot be read is said by whoever reads it
            roots = only_roots(each.head())
            for part in each.records():
                for _, raw in part:
                    yield loads(raw), roots
                    held, count = held + len(raw), count + 1
                    if count >= RECORDS or held >= BYTES:
                        return


def _opened(source: Any, options: sources.Options) -> Iterator[sources.Source]:
    """The sources of what is named, but those that cannot be opened."""
    with contextlib.suppress(TracegradError):
        places, given = named(source)
        if not places:
            yield sources.of_object(given, options)
        for place in places:
            if place.kind != "stdin":
                with contextlib.suppress(TracegradError):
                    yield sources.of_place(place, options)


def _rewards(columns: dict[str, _Column], count: int) -> Iterator[Candidate]:
    for path, column in columns.items():
        partial = column.count < count
        if path.endswith("\0"):
            why = f'{column.count:,} of {count:,} records have an object "{path[:-1]}" of numbers'
            yield Candidate("reward", path[:-1], why, 2.5 * column.count / count, partial=partial)
            continue
        hint, last = bool(json_path.REWARD.search(path)), path.rpartition(".")[2]
        if column.numbers < column.count or column.numbers * 10 < count or column.low == column.high:
            continue
        if json_path.AGAINST.search(last):
            continue
        bounded = column.low >= -1 and column.high <= 1
        if column.places == column.count and (
            column.high > 1 or not json_path.REWARD.search(last)
        ):  # an answer's number
            continue
        if (_NEVER.search(last) and not json_path.REWARD.search(last)) or not (hint or bounded):
            continue
        kind = column.kinds.most_common(1)[0][0]
        why = (
            f'{column.count:,} of {count:,} records have {kind} "{path}" ({column.low:g} to {column.high:g}, '
            f"mean {column.total / column.numbers:.3g}, {len(column.values):,} values{_said(column)})"
        )
        named = 0.5 * bool(json_path.REWARD.search(last)) + 0.25 * bool(_WHOLE.search(last)) - (last == "weight")
        rank = (2 * hint + bounded + named + 0.5) * column.count / count
        yield Candidate("reward", path, why, rank, partial=partial)


def _said(column: _Column) -> str:
    """Which number each word of a column is."""
    words = [word for word in column.values if json_path.number(word) is None]
    return "".join(f", {word!r} is {json_path.verdict(word):g}" for word in words[:MOST_WORDS])


def _labels(columns: dict[str, _Column], count: int) -> Iterator[str]:
    """Words under the name of a reward, of which a few come again and again: no number, but a verdict."""
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
        said = ", ".join(f"{word[:30]!r} in {times:,}" for word, times in words.most_common())
        key, *more = path.split(".")
        where = f'columns["{key}"], one for each text' + (f" (in it {'.'.join(more)})" if more else "")
        yield (
            f'found    {column.count:,} of {count:,} records have words "{path}" ({said}), which are no numbers: a '
            f"function of score has them as {where}"
        )


def _groups(columns: dict[str, _Column], count: int, calls: Calls, session: str) -> Iterator[Candidate]:
    of_keys = calls.prompts_by(session)
    by_key, prompts = bool(of_keys), of_keys or calls.prompts
    if shared := {prompt: times for prompt, times in prompts.items() if times > 1}:
        many, one = sum(shared.values()), len(shared) == 1
        what = "conversations" if by_key else "records"
        begin = "the same prompt" if one else f"one of {len(shared):,} prompts that others share"
        why = f"{many:,} {what} begin with {begin}"
        total = sum(prompts.values())
        yield Candidate("group", "prompt", why, 1.5 * many / total, partial=many < total, few=2 * many < total)
    for path, column in columns.items():
        distinct, last = len(column.values), path.rpartition(".")[2]
        names = sum(column.kinds[kind] for kind in ("a text", "a number as text", "a number"))
        if not _GROUP.search(last) or names < column.count or not 1 < distinct <= column.count / 1.5:
            continue
        why = f'{column.count:,} of {count:,} records have "{path}", of {distinct:,} values'
        many = sum(times for times in column.values.values() if times > 1)
        yield Candidate("group", path, why, 2 * column.count / count, partial=many < count, few=2 * many < count)


def _heats(columns: dict[str, _Column], count: int) -> Iterator[Candidate]:
    """Numbers named temperature: the object that one stands in holds the other sampling options too."""
    for path, column in columns.items():
        holder, _, last = path.rpartition(".")
        if path.endswith("\0") or not _HELD.search(last) or column.numbers < column.count or column.low < 0:
            continue
        why = f'{column.count:,} of {count:,} records have a temperature "{path}" ({column.low:g} to {column.high:g})'
        named = ("sampling", holder) if last == "temperature" and holder else ("temperature", path)
        yield Candidate(*named, why, column.count / count - 0.1 * path.count("."))


def _sessions(columns: dict[str, _Column], count: int, calls: Calls) -> Iterator[Candidate]:
    if calls.joined:
        why = f"{calls.joined:,} of {calls.calls:,} calls go on an earlier one"
        yield Candidate("session", "prefix", why, 1.0)
    order = _order_of(columns)
    for path, column in columns.items():
        last, distinct = path.rpartition(".")[2], len(column.values)
        few = 1 < distinct <= column.count / 1.2 and column.count <= MOST_CALLS * distinct
        sure = bool(_SESSION_NAME.search(last))
        if not (calls.calls and few and SESSION.search(last) and (sure or calls.joined)) or calls.names_prompts(path):
            continue
        if not calls.joins(path, column.values):
            continue
        apart = "" if calls.joined else ", though no call goes on another"
        why = f'{column.count:,} of {count:,} calls have "{path}", of {distinct:,} values{apart}'
        yield Candidate("session", path, why, (2 if sure else 1.2) * column.count / count, order)


def _order_of(columns: dict[str, _Column]) -> str:
    """The first path that orders records, "" where there is none: a number or a time in all, hardly twice the same."""
    for path, column in columns.items():
        last, first = path.rpartition(".")[2], itertools.islice(column.values, 50)
        if not _ORDER.search(last) or len(column.values) * 2 < column.count or last.startswith("end"):
            continue
        if all(json_path.number(value) is not None or moment(value) is not None for value in first):
            return path
    return ""
