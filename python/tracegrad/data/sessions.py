"""Join records that are single calls into conversations, by a key or because one call continues another.

Two messages are equal if their role, text, tool calls and tool call id are equal. Records are written to an unlinked
temporary file until the last one is read. Memory contains one index entry per record, so it does not grow with the size
of the records.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tracegrad import _core
from tracegrad.config import FieldMap
from tracegrad.data import chat, json_path
from tracegrad.data.batches import as_call
from tracegrad.data.field_map import BadValueError, append_fields, parse_record
from tracegrad.data.read_options import MAX_RECORD_BYTES, MOST_BYTES
from tracegrad.data.sources import JsonOrRefusal, Row
from tracegrad.data.trace import Line, Trace
from tracegrad.errors import FormatError, TracegradError

_SAMPLING = (*chat.SAMPLING, "policy_version", "logprob_kind", "choice", "sampling_defaults")
_PREVIOUS = "previous_response_id"
_RESPONSE_FIELDS = ("token_ids", "finish_reason", "stop_reason", "logprobs")


def calls_of(record: Any) -> list[dict[str, Any]] | None:
    """Return the calls in a record, or None if it contains none.

    A list of messages that ends with an assistant message is one call, whose answer is that message. Earlier assistant
    messages are part of its prompt.

    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "token_ids": [19]}]
    >>> calls_of({"messages": messages})[0]["response"]["choices"][0]["token_ids"]
    [19]
    """
    if not isinstance(record, Mapping):
        return None
    record = as_call(record)
    calls = record.get("calls")
    if isinstance(calls, list):
        return [dict(call) for call in calls] if all(isinstance(call, Mapping) for call in calls) else None
    sampling = chat.pick(record, _SAMPLING)
    response, request = (
        json_path.parse_json_string(record.get("response")),
        json_path.parse_json_string(record.get("request")),
    )
    messages = record.get("messages")
    if isinstance(response, (Mapping, list)) and isinstance(request, Mapping):
        return [{**sampling, "request": request, "response": response}]
    if isinstance(response, Mapping) and isinstance(messages, list):
        parameters = chat.as_mapping(record.get("model_parameters"))
        partial = {} if parameters else chat.PARTIAL
        return [{**partial, **sampling, "request": {**parameters, "messages": messages}, "response": response}]
    if isinstance(record.get("choices"), list) and "prompt_token_ids" in record:
        return [{**sampling, "response": record}]
    if isinstance(messages, list) and messages and chat.role(messages[-1]) == "assistant":
        tools = {"tools": record["tools"]} if record.get("tools") else {}
        request = {"messages": messages[:-1], **tools}
        sampling |= chat.pick(messages[-1].get("generation"), _SAMPLING)
        return [{**chat.PARTIAL, **sampling, "request": request, "response": _response_of(messages[-1])}]
    return None


def _response_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild the response that contained a recorded message."""
    fields = {**message, **chat.as_mapping(message.get("generation"))}
    choice = chat.pick(fields, _RESPONSE_FIELDS)
    if "logprobs" in choice and isinstance(choice["logprobs"], list) and fields.get("tokens"):
        choice["logprobs"] = {"tokens": fields["tokens"], "logprobs": choice["logprobs"]}
    plain_message = chat.without(message, *_RESPONSE_FIELDS, "generation", "prompt_token_ids")
    return {**chat.pick(fields, ["prompt_token_ids"]), "choices": [{"index": 0, **choice, "message": plain_message}]}


def prefix_hashes(call: Mapping[str, Any]) -> tuple[list[bytes], bytes | None]:
    """Return the hash of each prefix of a call's request messages, and the hash of all messages with the answer.

    The second value is None without an answer. For a call of the Responses API, the first hash is of the id of the
    response that it continues, or else of its instructions and input; the second is of its own response id.
    """
    request, response = chat.as_mapping(call.get("request")), chat.as_mapping(call.get("response"))
    messages = request.get("messages")
    if messages is None and "input" in request:
        prompt_hash = _hash(request.get(_PREVIOUS) or [request.get("instructions"), request["input"]])
        return [prompt_hash], _hash(response["id"]) if isinstance(response.get("id"), str) else None
    conversation = messages if isinstance(messages, list) else []
    digest, hashes = hashlib.blake2b(digest_size=16), []
    for message in conversation:
        digest.update(_normal(message))
        hashes.append(digest.digest())
    reply = _answer_of(call.get("response"))
    if reply is None or not conversation:
        return hashes, None
    digest.update(_normal({"role": "assistant", **reply}))
    return hashes, digest.digest()


def complete_inputs(calls: list[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """Return calls of the Responses API with complete inputs.

    `previous_response_id` is replaced by the items that it refers to, if an earlier call in `calls` returned that
    response.

    Args:
        calls: calls in order.
        most_bytes: limit of the bytes of all inserted items.

    Raises:
        OverflowError: if the inserted items have more than `most_bytes`.
    """
    responses: dict[str, tuple[list[Any], int]] = {}
    complete, inserted_bytes = [], 0
    for call in calls:
        request, response = chat.as_mapping(call.get("request")), chat.as_mapping(call.get("response"))
        input_items, previous_id = request.get("input"), request.get(_PREVIOUS)
        if isinstance(input_items, (str, list)):
            items = [{"role": "user", "content": input_items}] if isinstance(input_items, str) else input_items
            earlier, size = responses.get(previous_id, ([], 0)) if isinstance(previous_id, str) else ([], 0)
            if (inserted_bytes := inserted_bytes + size) > most_bytes:
                raise OverflowError
            if earlier:
                call = {**call, "request": {**chat.without(request, _PREVIOUS), "input": [*earlier, *items]}}
            if isinstance(response.get("id"), str) and isinstance(response.get("output"), list):
                turn = [*items, *response["output"]]
                responses[response["id"]] = [*earlier, *turn], size + len(json.dumps(turn, default=str))
        complete.append(call)
    return complete


def _hash(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).digest()


def _answer_of(response: Any) -> Mapping[str, Any] | None:
    """Return the answer in a response, None if there is none. The core reads stream chunks and other APIs."""
    if not isinstance(response, Mapping) or "choices" not in response:
        try:
            return Trace.from_dict({"request": {"messages": []}, "response": response}).messages[-1]
        except (TracegradError, IndexError):
            return None
    choices = response["choices"]
    message = chat.as_mapping(choices[0]).get("message") if isinstance(choices, list) and choices else None
    return message if isinstance(message, Mapping) else None


def _normal(message: Any) -> bytes:
    if not isinstance(message, Mapping):
        return json.dumps(message, default=str).encode() + b"\n"
    calls = message.get("tool_calls")
    tool_calls = [_call(call) for call in calls] if isinstance(calls, list) else []
    fields = [message.get("role"), chat.text_of(message.get("content")) or "", tool_calls, message.get("tool_call_id")]
    return json.dumps(fields, sort_keys=True, default=str).encode() + b"\n"


def _call(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return [call]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


_SHARED_FIELDS = ("group", "id", "model", "tools", "template_kwargs", "chat_template_kwargs", "metadata")
REWARD_FIELDS = ("reward", "rewards")
_CALL_FIELDS = (*chat.SAMPLING, "logprob_kind", "policy_version", "sampling_defaults")
_NO_CALL = (
    "Only single calls can be joined: a request with its response, or messages that end with the answer",
    "Leave map.session out, or write each call as {request, response}",
)
_UNRELATED = (
    "Records of messages with one key must be states of one conversation, or end with its answers in one file",
    "If several files use the same keys for other conversations, read them one by one. Else name another field",
)

_TOO_LONG = (
    f"the items that its calls continue by previous_response_id have more than {MOST_BYTES:,} bytes",
    "This is the memory limit of one conversation",
    "Write one record for each call, with its complete input",
)


_TOO_LARGE = (
    f"A conversation is joined in memory, and has at most {MAX_RECORD_BYTES:,} bytes, as a record",
    "Name a field with another value for each conversation",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """Index entry of a record: its position in the temporary file, and the values by which it is joined.

    `trace`, `span`, `choice` and `response` are those of a span; `response` is the id of the response.
    `state` is the hash of all messages of a record that has only their text: the state of a conversation, which a later
    record may repeat. None for other records.
    """

    place: int
    line: Line
    offset: int
    length: int
    order: float
    header: Mapping[str, Any]
    before: tuple[bytes, ...] = ()
    end: bytes | None = None
    state: bytes | None = None
    silent: bool = False
    trace: str = ""
    span: str = ""
    choice: int = 0
    response: str | None = None


Part = tuple[Entry, bytes, Any]
"""(index entry, JSON bytes, parsed record)."""


Joined = tuple[int, Row]
"""(place, row) of one joined session; the place and line are those of its first record."""


@dataclass
class Sessions:
    """Collects records with `take`, then yields sessions with `joined`, in the order of their first records.

    Args:
        field_map: the field map, with `session` and `order`.
        files: the name of each place. If the names differ only in numbers and the field map has no `order`, the calls
            of one conversation are sorted by these numbers.
        records: number of records taken.
        sessions: number of sessions yielded.
        differing_rewards: number of sessions whose rewards differ.
        records_without_call: number of records without a call, which only add values such as a reward to their session.
        split_off: number of calls of another model or other tools, which were split off their session.
        repeated: number of records with only messages that other records have too, and which are not calls.
        lone_rewards: number of records without a call that have a reward, and whose key no call has.
        unrelated_files: number of sessions with calls of several files that do not continue one another.
    """

    field_map: FieldMap
    files: Sequence[str] = ()
    records: int = 0
    sessions: int = 0
    differing_rewards: int = 0
    records_without_call: int = 0
    split_off: int = 0
    repeated: int = 0
    lone_rewards: int = 0
    unrelated_files: int = 0
    _keyed: dict[tuple[str, int], list[Entry]] = field(default_factory=dict)
    _free: list[Entry] = field(default_factory=list)
    _size: int = 0
    _origin: tuple[int, Line, str] | None = None
    _choice: int = 0

    def __post_init__(self) -> None:
        self.by = self.field_map.session
        self._file = tempfile.TemporaryFile(prefix="tracegrad-sessions-")  # noqa: SIM115

    def add(
        self, place: int, line: Line, raw: bytes, record: Any, header: Mapping[str, Any], *, silent: bool = False
    ) -> None:
        """Add one record.

        Args:
            place: index of its file in `files`.
            line: its line.
            raw: its JSON.
            record: the parsed record.
            header: mapped values.
            silent: whether the record is not a call. Then only its rewards and its `header` are added to its session.

        Raises:
            BadValueError: if a value of `order` or `session` has the wrong type.
        """
        by_prefix = self.field_map.session == "prefix"
        key = None if by_prefix else key_of(record, self.field_map.session)
        if silent:
            if key is not None:
                values = {**chat.pick(record, REWARD_FIELDS), **header}
                self._keyed.setdefault((key, 0), []).append(Entry(place, line, self._size, 0, 0.0, values, silent=True))
                self.records_without_call += 1
            return
        order = order_of(record, self.field_map.order) if self.field_map.order else 0.0
        if key is not None:
            # Several rows of one record, such as the choices of a response, belong to separate conversations.
            self._choice = self._choice + 1 if (place, line, key) == self._origin else 0
            self._origin = place, line, key
        self._file.write(raw)
        entry = Entry(place, line, self._size, len(raw), order, header)
        entry = self._with_hashes(entry, record) if by_prefix else entry
        self._size += len(raw)
        self.records += 1
        (self._free if key is None else self._keyed.setdefault((key, self._choice), [])).append(entry)

    def join(self) -> Iterator[Joined]:
        """Yield every session as one record."""
        if self.field_map.session == "prefix":
            sessions: list[tuple[str | None, list[Entry]]] = [(None, group) for group in self._chains()]
        else:
            keyed = ((f"{key}-{choice}" if choice else key, group) for (key, choice), group in self._keyed.items())
            sessions = [*keyed, *((None, [entry]) for entry in self._free)]
            sessions.sort(key=lambda group: min(entry.offset for entry in group[1]))
        for key, entries in sessions:
            if not (calls := [entry for entry in entries if not entry.silent]):
                self.lone_rewards += sum(not entry.header.keys().isdisjoint(REWARD_FIELDS) for entry in entries)
                continue
            if (size := sum(entry.length for entry in calls)) > MAX_RECORD_BYTES:
                name = "a conversation" if key is None else f"conversation {key!r:.60}"
                problem = f"the calls of {name} have {size:,} bytes in all"
                yield calls[0].place, (calls[0].line, b"", (problem, *_TOO_LARGE))
                continue
            self.sessions += 1
            yield from self._joined(key, self._in_order(calls), [entry for entry in entries if entry.silent])

    def _in_order(self, entries: list[Entry], before: bool = False) -> list[Entry]:
        """Sort records by the field map's `order`, then by the numbers in their file names, then by position.

        With `before`, shorter conversations come before longer ones that may continue them.
        """
        keys = {
            place: json_path.natural_sort_key(self.files[place])
            for place in {entry.place for entry in entries}
            if self.files
        }
        is_numbered = len({words for words, _ in keys.values()}) == 1
        number = {place: numbers if is_numbered else () for place, (_, numbers) in keys.items()}

        def key(entry: Entry) -> tuple[Any, ...]:
            return entry.order, len(entry.before) if before else 0, number.get(entry.place, ()), entry.offset

        return sorted(entries, key=key)

    def owner(self, entry: Entry) -> str | None:
        """Return what a call belongs to if that is not the main conversation, such as a tool; None if it is unknown."""
        return None

    def close(self) -> None:
        """Close the temporary file."""
        self._file.close()

    def _chains(self) -> list[list[Entry]]:
        """Join the calls without a key that continue one another."""
        return self._chain(self._free)

    def _chain(self, entries: list[Entry], key: str | None = None) -> list[list[Entry]]:
        """Join each call to the session whose end is the longest prefix of its messages.

        A state of a conversation that another record repeats or continues is no call. It only adds its values, such as
        a reward, to the conversation that has its messages. Without a key, this requires that its values do not differ
        from those of the other record, and that both are in the same file.
        """
        sessions: list[list[Entry]] = []
        ends: dict[bytes, list[int]] = {}
        states: dict[bytes, tuple[int, Entry]] = {}
        entries = self._in_order(entries, before=True)
        continued = _continued_states(entries)
        holders: dict[bytes, set[int]] = {digest: set() for digest in continued}
        waiting = []
        for entry in entries:
            earlier = None if entry.state is None else states.get(entry.state)
            if entry.end is None and entry.state in continued:
                waiting.append(entry)
                continue
            if earlier is not None and (key is not None or _repeats(entry, earlier[1])):
                sessions[earlier[0]].append(replace(entry, silent=True))
                self.repeated += 1
                continue
            prefix = next((digest for digest in reversed(entry.before) if digest in ends), None)
            if prefix is None:
                number = len(sessions)
                sessions.append([])
            else:
                # If several sessions end alike, each is continued once before one is continued twice.
                number = ends[prefix].pop(0) if len(ends[prefix]) > 1 else ends[prefix][0]
            sessions[number].append(entry)
            if entry.end is not None:
                ends.setdefault(entry.end, []).append(number)
            if entry.state is not None:
                states.setdefault(entry.state, (number, entry))
            for digest in continued.intersection(entry.before):
                holders[digest].add(number)
        for entry in waiting:
            numbers = holders[entry.state] if entry.state else set()
            if not numbers or (entry.header and len(numbers) > 1 and key is None):
                sessions.append([entry])
                continue
            self.repeated += 1
            if entry.header:
                sessions[min(numbers)].append(replace(entry, silent=True))
        return sorted(sessions, key=lambda session: min(entry.offset for entry in session if not entry.silent))

    def _with_hashes(self, entry: Entry, record: Any) -> Entry:
        """Return an entry with the hashes of its messages. The header of a state has its own rewards too."""
        calls, is_state = self._calls(record), is_text_state(record)
        before, end, state = (), None, None
        if calls:
            hashes, end = prefix_hashes(calls[-1])
            before = tuple(prefix_hashes(calls[0])[0] if len(calls) > 1 else hashes)
            state = end if is_state else None
        elif is_state:
            before = tuple(prefix_hashes({"request": record})[0])
            state = before[-1]
        header = {**chat.pick(record, REWARD_FIELDS), **entry.header} if is_state else entry.header
        return replace(entry, before=before, end=end, state=state, header=header)

    def _without_copies(self, key: str, parts: list[Part]) -> tuple[list[Part], list[Entry]] | None:
        """Return the calls of one session, and the records that only repeat messages of others.

        None if states of a conversation do not continue one another. Records of one file that end with an answer are
        calls, which may fork.
        """
        has_states = any(is_text_state(record) for _, _, record in parts)
        if not has_states and (len({entry.place for entry, _, _ in parts}) == 1 or self.by != self.field_map.session):
            return parts, []
        entries = {entry.offset: self._with_hashes(entry, record) for entry, _, record in parts}
        recorded = set[bytes | None]()
        for entry, _, record in parts:
            if has_states and entries[entry.offset].state is None and (calls := self._calls(record)):
                hashes, end = prefix_hashes(calls[-1])
                recorded |= {*hashes, end} - {None}
        copies, others = [], list[Entry]()
        for entry in entries.values():
            (copies if entry.state in recorded else others).append(entry)
        repeated, chains = self.repeated, self._chain(others, key)
        self.repeated += len(copies)
        copies += [entry for chain in chains for entry in chain if entry.silent]
        kept = [entry for chain in chains for entry in chain if not entry.silent]
        if len(chains) > 1:
            kept, is_one_file = self._in_order(kept), len({entry.place for entry in kept}) == 1
            is_call = {entry.offset: calls_of(record) is not None for entry, _, record in parts}
            if any(entry.state is not None and not (is_one_file and is_call[entry.offset]) for entry in kept):
                self.repeated = repeated
                return None
            self.unrelated_files += not is_one_file
        by_offset = {part[0].offset: part for part in parts}
        return [by_offset[entry.offset] for entry in kept], [replace(entry, silent=True) for entry in copies]

    def _joined(self, key: str | None, entries: list[Entry], silent: list[Entry]) -> Iterator[Joined]:
        """Join the calls of one session, and add the values of its records that are not calls.

        A record that is not a call, or that the core refuses, is refused at its own line; the others are still joined.
        """
        texts = [(entry, self._text(entry)) for entry in entries]
        calls = [(entry, text, parse_record(text)) for entry, text in texts]
        side_calls: list[list[Part]] = []
        if len(calls) > 1 and key is not None:
            if (related := self._without_copies(key, calls)) is None:
                problem = f"its messages do not continue those of the other records with {self.by} {key!r:.60}"
                reason = (problem, *_UNRELATED)
                yield from ((entry.place, (entry.line, text, reason)) for entry, text, _ in calls)
                return
            calls, copies = related
            silent = [*copies, *silent]
        if len(calls) > 1:
            calls, others = _partition(calls, lambda part: self._calls(part[2]) is not None)
            for entry, text, record in others:
                keys = ", ".join(list(map(str, record))[:8]) or "none"
                reason = (f"a record with the keys {keys} among several of session {key!r:.60}", *_NO_CALL)
                yield entry.place, (entry.line, text, reason)
            owners = [self.owner(entry) for entry, _, _ in calls]
            calls, *side_calls = _without_side_calls(calls, owners) if calls and key is not None else [calls]
        if not calls:
            return
        early, late = self._side_headers([entry for entry, _, _ in calls], silent)
        if side_calls and not any(_rewards(part) for part in calls):
            late = [*(_rewards(part) for group in side_calls for part in group), *late]
        unlike = self.differing_rewards
        try:
            joined = self._join(key, calls, early, late)
        except OverflowError:
            (entry, _, _), text = calls[0], b"\n".join(text for _, text, _ in calls)
            yield entry.place, (entry.line, text, _TOO_LONG)
            return
        if len(calls) > 1 and not _is_decodable(joined[1][2]):
            readable, unreadable = _partition(calls, lambda part: _is_decodable(append_fields(part[1], part[0].header)))
            yield from (
                (entry.place, (entry.line, text, append_fields(text, entry.header))) for entry, text, _ in unreadable
            )
            if not readable:
                return
            self.differing_rewards = unlike
            joined = self._join(key, readable, early, late)
        yield joined
        for number, parts in enumerate(side_calls, 2):
            self.split_off += len(parts)
            yield self._join(f"{key}#{number}", parts, rewarded=False)

    def _side_headers(self, calls: list[Entry], silent: list[Entry]) -> tuple[list[Mapping[str, Any]], ...]:
        """Return the values of the states before the last call, and of all other records that are not calls."""
        states = [entry for entry in silent if entry.state is not None]
        in_order = self._in_order([*calls, *states])
        last = max(index for index, entry in enumerate(in_order) if not entry.silent)
        early = [entry for entry in in_order[:last] if entry.silent]
        late = [*in_order[last + 1 :], *(entry for entry in silent if entry.state is None)]
        return [entry.header for entry in early], [entry.header for entry in late]

    def _join(
        self,
        key: str | None,
        parts: list[Part],
        early: Sequence[Mapping[str, Any]] = (),
        late: Sequence[Mapping[str, Any]] = (),
        *,
        rewarded: bool = True,
    ) -> Joined:
        """Join calls to one record. Of several rewards the last one counts: `early`, then the calls, then `late`."""
        (first, raw, _), *others = parts
        origin = b"\n".join(text for _, text, _ in parts)
        if not others and rewarded:
            name = {} if key is None or "id" in first.header else {"id": key}
            header, last = {**name, **first.header}, dict[str, Any]()
            for each in (*early, {**_rewards(parts[0]), **first.header}, *late):
                self.differing_rewards += _differ(last, each)
                last |= each
            header |= last if early or late else {}
            return first.place, (first.line, origin, append_fields(raw, header))
        calls, shared = [], {} if key is None else {"id": key}
        first_values: dict[str, Any] = {}
        for each in early:
            self.differing_rewards += _differ(first_values, each)
            first_values |= each
        last_rewards = chat.pick(first_values, REWARD_FIELDS)
        for entry, _, record in parts:
            fields = {**record, **entry.header}
            calls += [{**chat.pick(fields, _CALL_FIELDS), **call} for call in self._calls(record) or ()]
            shared = {**chat.pick(fields, _SHARED_FIELDS), **shared}
            if "id" in entry.header:
                shared["id"] = shared["id"] if key is None else entry.header["id"]
            rewards = chat.pick(fields, REWARD_FIELDS) if rewarded else {}
            self.differing_rewards += bool(last_rewards and rewards and rewards != last_rewards)
            last_rewards = rewards or last_rewards
        for each in late:
            self.differing_rewards += _differ(last_rewards, each)
            last_rewards |= each
        values = {**chat.without(first_values, *REWARD_FIELDS), **last_rewards}
        record = {**shared, **values, "calls": complete_inputs(calls, MOST_BYTES)}
        return first.place, (first.line, origin, append_fields(b"{}", record))

    def _calls(self, record: Any) -> list[dict[str, Any]] | None:
        """Return the calls of a record. The call of a state is its last answer, without messages that follow it."""
        if (calls := calls_of(record)) or not is_text_state(record):
            return calls
        messages = record["messages"]
        counts = range(len(messages), 0, -1)
        count = next((count for count in counts if chat.was_sampled(messages[count - 1])), 0)
        return calls_of({**record, "messages": messages[:count]})

    def _text(self, entry: Entry) -> bytes:
        self._file.seek(entry.offset)
        return self._file.read(entry.length)

    def lines(self) -> list[str]:
        """Return the counts as lines for a terminal."""
        relation = "continue one another" if self.field_map.session == "prefix" else f"share {self.by}"
        lines = [
            f"map      session: {self.records:,} records are {self.sessions:,} conversations, whose calls {relation}"
        ]
        if self.records_without_call:
            lines.append(
                f"         {self.records_without_call:,} records without a call add their values, such as scores, "
                "to their conversations"
            )
        if self.lone_rewards:
            lines.append(f"         {self.lone_rewards:,} rewards are left out, because no call has their {self.by}")
        if self.unrelated_files:
            lines.append(
                f"         {self.unrelated_files:,} conversations have calls of several files that do not continue one "
                f"another. If the files use the same {self.by} for other conversations, read them one by one"
            )
        if self.repeated:
            lines.append(
                f"         {self.repeated:,} records are not calls, because another record has all their messages"
            )
        if self.split_off:
            lines.append(
                f"         {self.split_off:,} calls are split off their conversation: their model or tools differ, and "
                "so do their first messages. They have no reward"
            )
        if self.differing_rewards:
            lines.append(
                f"         {self.differing_rewards:,} rewards differ from an earlier one of their conversation: the "
                "last one counts"
            )
        return lines


def is_text_state(record: Any) -> bool:
    """Return whether a record has only the text of messages: no request or response, and nothing about their tokens."""
    if not isinstance(record, Mapping) or not record.keys().isdisjoint(("request", "response", "calls", "choices")):
        return False
    messages = record.get("messages")
    return chat.is_messages(messages) and not any(
        chat.pick(each, chat.ANSWER_FIELDS[:2]) or chat.pick(each, ["generation"]) for each in messages
    )


def _continued_states(entries: Sequence[Entry]) -> set[bytes]:
    """Return the states with which the messages of another record begin."""
    states = {entry.state for entry in entries if entry.state is not None}
    return {digest for entry in entries for digest in entry.before if digest in states and digest != entry.state}


def _repeats(entry: Entry, earlier: Entry) -> bool:
    """Return whether a record is another copy of the same state: from the same file, with values that do not differ."""
    shared = entry.header.keys() & earlier.header.keys()
    return entry.place == earlier.place and all(entry.header[key] == earlier.header[key] for key in shared)


def _without_side_calls(parts: list[Part], owners: Sequence[str | None]) -> list[list[Part]]:
    """Split calls that do not belong to a conversation from those that do; return the conversation first.

    Calls are split off if they start with other messages and have another owner, another model or other tools: for
    example calls that write a title or guard an agent. Split calls with the same owner, model and tools form one list.

    The conversation has no owner, and among these the longest chain of calls that continue one another; ties are
    resolved by whether the calls have tools. If a tie remains, nothing is split.
    """
    calls_by_model: dict[str, list[int]] = {}
    starts: list[Any] = []
    chains: list[tuple[bool, int, bool]] = []
    ends: dict[bytes, int] = {}
    for index, (_, _, record) in enumerate(parts):
        call = next(iter(calls_of(record) or ()), {})
        request = chat.as_mapping(call.get("request"))
        tools = request.get("tools") or record.get("tools") or []
        model_and_tools = [request.get("model") or record.get("model"), tools, owners[index]]
        calls_by_model.setdefault(json.dumps(model_and_tools, sort_keys=True, default=str), []).append(index)
        before, end = prefix_hashes(call)
        continued = next((ends[digest] for digest in reversed(before) if digest in ends), None)
        system = json.dumps([request.get("system"), request.get("instructions")], sort_keys=True, default=str)
        starts.append((system, *before[:1]) if continued is None else starts[continued])
        chains.append((owners[index] is None, 1 if continued is None else chains[continued][1] + 1, bool(tools)))
        if end is not None:
            ends.setdefault(end, index)
    ranks = {key: max(chains[index] for index in indices) for key, indices in calls_by_model.items()}
    best_models = [key for key, rank in ranks.items() if rank == max(ranks.values())]
    main_starts = {starts[index] for index in calls_by_model[best_models[0]]}
    if not all(starts[index] in main_starts for key in best_models for index in calls_by_model[key]):
        return [parts]
    main = [index for index, start in enumerate(starts) if start in main_starts]
    others = [[index for index in indices if starts[index] not in main_starts] for indices in calls_by_model.values()]
    return [[parts[index] for index in indices] for indices in (main, *others) if indices]


def _rewards(part: Part) -> dict[str, Any]:
    """Return the rewards of a record that are not null."""
    return {
        key: value
        for key, value in chat.pick({**part[2], **part[0].header}, REWARD_FIELDS).items()
        if value is not None
    }


def _differ(values: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return whether two records have different values of one field."""
    return any(values[name] != others[name] for name in values.keys() & others.keys())


def _partition(parts: list[Part], predicate: Callable[[Part], bool]) -> tuple[list[Part], list[Part]]:
    accepted, rejected = [], []
    for part in parts:
        (accepted if predicate(part) else rejected).append(part)
    return accepted, rejected


def _is_decodable(text: JsonOrRefusal) -> bool:
    """Return whether the core can decode a record."""
    try:
        return isinstance(text, bytes) and len(_core.Traces.decode([text], "<record>", 1, "auto")[0]) > 0
    except FormatError:
        return False


def key_of(record: Any, path: str) -> str | None:
    value = chat.get_path(record, path)
    if value is None:
        return None
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise BadValueError(
        (
            f"{path} is {json_path.describe_type(value)}",
            "map.session must name a text or a number that all calls of one conversation share",
            "Name another field, or use prefix, which joins calls that continue one another",
        )
    )


def order_of(record: Any, path: str) -> float:
    value = chat.get_path(record, path)
    order = None if isinstance(value, bool) else json_path.number(value)
    if order is None and isinstance(value, str):
        order = json_path.parse_time(value)
    if order is None:
        raise BadValueError(
            (
                f"{path} is {json_path.describe_type(value)}",
                "map.order must name a number or a time such as 2026-01-31T12:00:00Z",
                "Name another field, or leave it out: calls are then in the order of the file",
            )
        )
    return order
