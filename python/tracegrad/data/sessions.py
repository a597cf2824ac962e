"""Join records that are single calls into conversations, by a key or because one continues another.

Two messages are the same if role, text, tool calls and the call they answer are. Records are spooled to an unnamed file
until the last is read, with one line of index each, so that memory does not grow with their size.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from tracegrad import _core
from tracegrad.config import Map
from tracegrad.data import chat, json_path
from tracegrad.data.field_map import MOST_BYTES, Unfit, add, loads
from tracegrad.data.sources import Made, Row
from tracegrad.data.trace import Line, Trace
from tracegrad.errors import FormatError, TracegradError

_SAMPLING = (*chat.SAMPLING, "policy_version", "logprob_kind", "choice", "sampling_defaults")
_PREVIOUS = "previous_response_id"
_RESPONSE_FIELDS = ("token_ids", "finish_reason", "stop_reason", "logprobs")


def calls_of(record: Any) -> list[dict[str, Any]] | None:
    """The calls of a record that is one or several; None where it is none.

    A list of messages is the call that gave its last one: what the assistant said before was given.

    >>> said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "token_ids": [19]}]
    >>> calls_of({"messages": said})[0]["response"]["choices"][0]["token_ids"]
    [19]
    """
    if not isinstance(record, Mapping):
        return None
    calls = record.get("calls")
    if isinstance(calls, list):
        return [dict(call) for call in calls] if all(isinstance(call, Mapping) for call in calls) else None
    sampling = chat.told(record, _SAMPLING)
    response, request = json_path.opened(record.get("response")), json_path.opened(record.get("request"))
    messages = record.get("messages")
    if isinstance(response, (Mapping, list)) and isinstance(request, Mapping):
        return [{**sampling, "request": request, "response": response}]
    if isinstance(response, Mapping) and isinstance(messages, list):
        asked = chat.table(record.get("model_parameters"))
        partial = {} if asked else chat.PARTIAL
        return [{**partial, **sampling, "request": {**asked, "messages": messages}, "response": response}]
    if isinstance(record.get("choices"), list) and "prompt_token_ids" in record:
        return [{**sampling, "response": record}]
    if isinstance(messages, list) and messages and chat.role(messages[-1]) == "assistant":
        tools = {"tools": record["tools"]} if record.get("tools") else {}
        request = {"messages": messages[:-1], **tools}
        return [{**chat.PARTIAL, **sampling, "request": request, "response": _answer(messages[-1])}]
    return None


def _answer(message: Mapping[str, Any]) -> dict[str, Any]:
    """The response that a recorded message came in."""
    told = {**message, **chat.table(message.get("generation"))}
    choice = chat.told(told, _RESPONSE_FIELDS)
    if "logprobs" in choice and isinstance(choice["logprobs"], list) and told.get("tokens"):
        choice["logprobs"] = {"tokens": told["tokens"], "logprobs": choice["logprobs"]}
    kept = chat.without(message, *_RESPONSE_FIELDS, "generation", "prompt_token_ids")
    return {**chat.told(told, ["prompt_token_ids"]), "choices": [{"index": 0, **choice, "message": kept}]}


def prefixes(call: Mapping[str, Any]) -> tuple[list[bytes], bytes | None]:
    """Hashes of the messages of a call's request up to each of them, and of all with its answer, None without one.

    A call of the Responses API goes by what it was asked, or by the id of the response that it goes on, and by its own.
    """
    request, response = chat.table(call.get("request")), chat.table(call.get("response"))
    messages = request.get("messages")
    if messages is None and "input" in request:
        before = _hash(request.get(_PREVIOUS) or [request.get("instructions"), request["input"]])
        return [before], _hash(response["id"]) if isinstance(response.get("id"), str) else None
    told = messages if isinstance(messages, list) else []
    chain, found = hashlib.blake2b(digest_size=16), []
    for message in told:
        chain.update(_normal(message))
        found.append(chain.digest())
    answer = _answered(call.get("response"))
    if answer is None or not told:
        return found, None
    chain.update(_normal({"role": "assistant", **answer}))
    return found, chain.digest()


def whole_inputs(calls: list[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """Calls of the Responses API with what `previous_response_id` stands for before their own input, where the call
    that gave that response is among those before.

    Raises:
        OverflowError: if all that is put before them has more than `most_bytes`.
    """
    known: dict[str, tuple[list[Any], int]] = {}
    made, held = [], 0
    for call in calls:
        request, response = chat.table(call.get("request")), chat.table(call.get("response"))
        asked, previous = request.get("input"), request.get(_PREVIOUS)
        if isinstance(asked, (str, list)):
            own = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            before, size = known.get(previous, ([], 0)) if isinstance(previous, str) else ([], 0)
            if (held := held + size) > most_bytes:
                raise OverflowError
            if before:
                call = {**call, "request": {**chat.without(request, _PREVIOUS), "input": [*before, *own]}}
            if isinstance(response.get("id"), str) and isinstance(response.get("output"), list):
                said = [*own, *response["output"]]
                known[response["id"]] = [*before, *said], size + len(json.dumps(said, default=str))
        made.append(call)
    return made


def _hash(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).digest()


def _answered(response: Any) -> Mapping[str, Any] | None:
    """The message that a response holds: one in chunks, or of another API, as the core reads it."""
    if not isinstance(response, Mapping) or "choices" not in response:
        try:
            return Trace.from_dict({"request": {"messages": []}, "response": response}).messages[-1]
        except (TracegradError, IndexError):
            return None
    choices = response["choices"]
    message = chat.table(choices[0]).get("message") if isinstance(choices, list) and choices else None
    return message if isinstance(message, Mapping) else None


def _normal(message: Any) -> bytes:
    if not isinstance(message, Mapping):
        return json.dumps(message, default=str).encode() + b"\n"
    calls = message.get("tool_calls")
    told = [_call(each) for each in calls] if isinstance(calls, list) else []
    said = [message.get("role"), chat.text_of(message.get("content")) or "", told, message.get("tool_call_id")]
    return json.dumps(said, sort_keys=True, default=str).encode() + b"\n"


def _call(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return [call]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


_OF_ALL = ("group", "id", "model", "tools", "template_kwargs", "chat_template_kwargs", "metadata")
_LAST = ("reward", "rewards")
_CALL_FIELDS = (*chat.SAMPLING, "logprob_kind", "policy_version", "sampling_defaults")
_NO_CALL = (
    "Only single calls can be joined: request with response, or messages that end with the answer",
    "Leave --map.session out, or write each call as {request, response}",
)

_TOO_LONG = (
    f"what its calls go on by previous_response_id is more than {MOST_BYTES:,} bytes in all",
    "So much of one conversation is not held in memory",
    "Write one record for each call, with its whole input",
)


@dataclass(frozen=True)
class _Entry:
    """Where a record lies, and what it goes by."""

    place: int
    line: Line
    offset: int
    length: int
    order: float
    header: Mapping[str, Any]
    before: tuple[bytes, ...] = ()
    end: bytes | None = None
    silent: bool = False


_Part = tuple[_Entry, bytes, Any]
"""A record, where it lies, as it stands and as Python has it."""


Joined = tuple[int, Row]
"""What was made of the records of one session, at the place and line of its first."""


@dataclass
class Sessions:
    """Takes records, then gives sessions, in the order of their first records.

    `records` and `sessions` count them.

    Args:
        told: by what they are joined, and in which order.
        files: the name of each place. Calls of one conversation in files whose names differ by numbers alone are in the
            order of these numbers, where nothing else says their order.
    """

    told: Map
    files: Sequence[str] = ()
    records: int = 0
    sessions: int = 0
    unlike: int = 0
    silent: int = 0
    apart: int = 0
    _keyed: dict[tuple[str, int], list[_Entry]] = field(default_factory=dict)
    _free: list[_Entry] = field(default_factory=list)
    _size: int = 0
    _origin: tuple[int, Line, str] | None = None
    _choice: int = 0

    def __post_init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="tracegrad-sessions-")  # noqa: SIM115

    def take(
        self, place: int, line: Line, raw: bytes, record: Any, header: Mapping[str, Any], *, silent: bool = False
    ) -> None:
        """Lays one record down; of a `silent` one, which is no call, only what it says of its session counts.

        Raises:
            Unfit: for a value of `order` or `session` that is none.
        """
        by_prefix = self.told.session == "prefix"
        key = None if by_prefix else _key(record, self.told.session)
        if silent:
            if key is not None:
                told = {**chat.told(record, _LAST), **header}
                self._keyed.setdefault((key, 0), []).append(_Entry(place, line, self._size, 0, 0.0, told, silent=True))
                self.silent += 1
            return
        order = _order(record, self.told.order) if self.told.order else 0.0
        before, end = (), None
        if by_prefix and (calls := calls_of(record)):
            found, end = prefixes(calls[-1])
            before = tuple(prefixes(calls[0])[0] if len(calls) > 1 else found)
        if key is not None:
            # Several of one record, as the choices of a response, are no calls of one conversation.
            self._choice = self._choice + 1 if (place, line, key) == self._origin else 0
            self._origin = place, line, key
        self._file.write(raw)
        entry = _Entry(place, line, self._size, len(raw), order, header, before, end)
        self._size += len(raw)
        self.records += 1
        (self._free if key is None else self._keyed.setdefault((key, self._choice), [])).append(entry)

    def joined(self) -> Iterator[Joined]:
        """Every session as one record."""
        if self.told.session == "prefix":
            sessions: list[tuple[str | None, list[_Entry]]] = [(None, each) for each in self._chains()]
        else:
            named = ((f"{key}-{choice}" if choice else key, each) for (key, choice), each in self._keyed.items())
            sessions = [*named, *((None, [entry]) for entry in self._free)]
            sessions.sort(key=lambda each: min(entry.offset for entry in each[1]))
        for key, entries in sessions:
            if not (calls := [entry for entry in entries if not entry.silent]):
                continue
            self.sessions += 1
            beside = [entry.header for entry in entries if entry.silent]
            yield from self._joined(key, self._in_order(calls), beside)

    def _in_order(self, entries: list[_Entry], before: bool = False) -> list[_Entry]:
        """Records in the order that they say, else in that of the numbers in the names of their files, else as they
        stand; with `before`, shorter conversations first, as these may be gone on with.
        """
        keys = {
            place: json_path.in_numbers(self.files[place]) for place in {each.place for each in entries} if self.files
        }
        alike = len({words for words, _ in keys.values()}) == 1
        number = {place: numbers if alike else () for place, (_, numbers) in keys.items()}

        def key(entry: _Entry) -> tuple[Any, ...]:
            return entry.order, len(entry.before) if before else 0, number.get(entry.place, ()), entry.offset

        return sorted(entries, key=key)

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()

    def _chains(self) -> list[list[_Entry]]:
        """Sessions of calls that go on one another, each by the longest beginning that was said before."""
        sessions: list[list[_Entry]] = []
        ends: dict[bytes, list[int]] = {}
        for entry in self._in_order(self._free, before=True):
            said = next((each for each in reversed(entry.before) if each in ends), None)
            if said is None:
                number = len(sessions)
                sessions.append([])
            else:
                # Of equal conversations each is gone on with once, before one is gone on with twice.
                number = ends[said].pop(0) if len(ends[said]) > 1 else ends[said][0]
            sessions[number].append(entry)
            if entry.end is not None:
                ends.setdefault(entry.end, []).append(number)
        return sorted(sessions, key=lambda session: min(entry.offset for entry in session))

    def _joined(self, key: str | None, entries: list[_Entry], beside: list[Mapping[str, Any]]) -> Iterator[Joined]:
        """The calls of one session; one of several that is no call, or that the core refuses, is refused where it
        stands, and takes none of the others along.
        """
        texts = [(entry, self._text(entry)) for entry in entries]
        calls = [(entry, text, loads(text)) for entry, text in texts]
        apart: list[list[_Part]] = []
        if len(calls) > 1:
            calls, others = _parted(calls, lambda part: calls_of(part[2]) is not None)
            for entry, text, record in others:
                keys = ", ".join(list(map(str, record))[:8]) or "none"
                why = (f"a record with the keys {keys} among several of session {key!r:.60}", *_NO_CALL)
                yield entry.place, (entry.line, text, why)
            calls, *apart = _apart(calls) if calls and key is not None else [calls]
        if not calls:
            return
        if apart and not any(_rewards(part) for part in calls):
            beside = [*(_rewards(part) for each in apart for part in each), *beside]
        unlike = self.unlike
        try:
            joined = self._join(key, calls, beside)
        except OverflowError:
            (entry, _, _), text = calls[0], b"\n".join(text for _, text, _ in calls)
            yield entry.place, (entry.line, text, _TOO_LONG)
            return
        if len(calls) > 1 and not _is_read(joined[1][2]):
            good, bad = _parted(calls, lambda part: _is_read(add(part[1], part[0].header)))
            yield from ((entry.place, (entry.line, text, add(text, entry.header))) for entry, text, _ in bad)
            if not good:
                return
            self.unlike = unlike
            joined = self._join(key, good, beside)
        yield joined
        for number, parts in enumerate(apart, 2):
            self.apart += len(parts)
            yield self._join(f"{key}#{number}", parts, [], rewarded=False)

    def _join(
        self, key: str | None, parts: list[_Part], beside: list[Mapping[str, Any]], *, rewarded: bool = True
    ) -> Joined:
        (first, only, _), *others = parts
        origin = b"\n".join(text for _, text, _ in parts)
        if not others and rewarded:
            named = {} if key is None or "id" in first.header else {"id": key}
            header = {**named, **first.header}
            for each in beside:
                header |= each
            return first.place, (first.line, origin, add(only, header))
        calls, head = [], {} if key is None else {"id": key}
        last: dict[str, Any] = {}
        for entry, _, record in parts:
            told = {**record, **entry.header}
            calls += [{**chat.told(told, _CALL_FIELDS), **call} for call in calls_of(record) or ()]
            head = {**chat.told(told, _OF_ALL), **head}
            if "id" in entry.header:
                head["id"] = head["id"] if key is None else entry.header["id"]
            found = chat.told(told, _LAST) if rewarded else {}
            self.unlike += bool(last and found and found != last)
            last = found or last
        for each in beside:
            self.unlike += bool(last and each.keys() & last.keys() and {**last, **each} != {**each, **last})
            last |= each
        record = {**head, **last, "calls": whole_inputs(calls, MOST_BYTES)}
        return first.place, (first.line, origin, add(b"{}", record))

    def _text(self, entry: _Entry) -> bytes:
        self._file.seek(entry.offset)
        return self._file.read(entry.length)

    def lines(self) -> list[str]:
        """What was joined, for a terminal."""
        how = "go on one another" if self.told.session == "prefix" else f"share {self.told.session}"
        out = [f"map      session: {self.records:,} records are {self.sessions:,} conversations, whose calls {how}"]
        if self.silent:
            out.append(f"         {self.silent:,} records without a call say what they say of their conversations")
        if self.apart:
            out.append(
                f"         {self.apart:,} calls of another model, or with other tools, that begin otherwise than their "
                "conversation stand apart, without a reward"
            )
        if self.unlike:
            out.append(f"         {self.unlike:,} rewards of one conversation differ: its last one counts")
        return out


def _apart(parts: list[_Part]) -> list[list[_Part]]:
    """The calls of a conversation, then those that are none of it: they begin otherwise, and were asked of another
    model or with other tools, as what finds a title or guards an agent is. Those of one model and its tools together.

    The conversation is where most calls go on one another, then where there are tools. Where neither tells which it is,
    all stay together.
    """
    asked: dict[str, list[int]] = {}
    begins: list[Any] = []
    chains: list[tuple[int, bool]] = []
    ends: dict[bytes, int] = {}
    for at, (_, _, record) in enumerate(parts):
        call = next(iter(calls_of(record) or ()), {})
        request = chat.table(call.get("request"))
        tools = request.get("tools") or record.get("tools") or []
        told = [request.get("model") or record.get("model"), tools]
        asked.setdefault(json.dumps(told, sort_keys=True, default=str), []).append(at)
        before, end = prefixes(call)
        goes_on = next((ends[each] for each in reversed(before) if each in ends), None)
        system = json.dumps([request.get("system"), request.get("instructions")], sort_keys=True, default=str)
        begins.append((system, *before[:1]) if goes_on is None else begins[goes_on])
        chains.append((1 if goes_on is None else chains[goes_on][0] + 1, bool(tools)))
        if end is not None:
            ends.setdefault(end, at)
    ranks = {key: max(chains[at] for at in each) for key, each in asked.items()}
    best = [key for key, rank in ranks.items() if rank == max(ranks.values())]
    begun = {begins[at] for at in asked[best[0]]}
    if not all(begins[at] in begun for key in best for at in asked[key]):
        return [parts]
    mine = [at for at, begin in enumerate(begins) if begin in begun]
    others = [[at for at in each if begins[at] not in begun] for each in asked.values()]
    return [[parts[at] for at in each] for each in (mine, *others) if each]


def _rewards(part: _Part) -> dict[str, Any]:
    """What a record says of rewards."""
    return {key: each for key, each in chat.told({**part[2], **part[0].header}, _LAST).items() if each is not None}


def _parted(parts: list[_Part], is_good: Callable[[_Part], bool]) -> tuple[list[_Part], list[_Part]]:
    good, bad = [], []
    for part in parts:
        (good if is_good(part) else bad).append(part)
    return good, bad


def _is_read(text: Made) -> bool:
    """Whether the core reads a record."""
    try:
        return isinstance(text, bytes) and len(_core.Traces.decode([text], "<record>", 1, "auto")[0]) > 0
    except FormatError:
        return False


def _key(record: Any, path: str) -> str | None:
    value = chat.within(record, path)
    if value is None:
        return None
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise Unfit(
        (
            f"{path} is {json_path.kind(value)}",
            "--map.session takes a text or a number, which all calls of one conversation share",
            "Name another field, or prefix: calls are joined that go on one another",
        )
    )


def _order(record: Any, path: str) -> float:
    value = chat.within(record, path)
    found = None if isinstance(value, bool) else json_path.number(value)
    if found is None and isinstance(value, str):
        found = moment(value)
    if found is None:
        raise Unfit(
            (
                f"{path} is {json_path.kind(value)}",
                "--map.order takes a number or a time such as 2026-01-31T12:00:00Z",
                "Name another field, or leave it out: calls are then in the order of the file",
            )
        )
    return found


def moment(text: str) -> float | None:
    """A time as text, in seconds since 1970; of no zone it is UTC."""
    try:
        found = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
