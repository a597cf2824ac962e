"""Convert calls that clients of OpenAI's API logged: under other names, as stream chunks, or inside a message.

Sources: model dumps of openai 3 next to the arguments of the call; litellm's logger callbacks (`kwargs`,
`response_obj`); proxies that store `request_body` and `response_body`; mini-swe-agent 2's trajectories
(`extra.response`). Case, `_` and `-` in names are ignored: `requestBody` equals `request_body`. Chunks are joined by
their id.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tracegrad import _core
from tracegrad.data import chat, json_path
from tracegrad.data.arrow import to_json
from tracegrad.data.trace import Line, Trace, Traces, format_location
from tracegrad.errors import FormatError

_KINDS = ("chat.completion.chunk", "text_completion.chunk")
MOST_CHUNKS = 1_000_000
Gathered = tuple[Line, bytes, bytes, dict[str, Any]]
"""(line and bytes of the first chunk, JSON of the joined call, the joined call)."""


def is_chunk(record: Any) -> bool:
    """Return whether a record is one chunk of an OpenAI-compatible stream."""
    if not isinstance(record, Mapping) or "messages" in record or "request" in record:
        return False
    choices = record.get("choices")
    is_delta = isinstance(choices, list) and bool(choices) and "delta" in chat.as_mapping(choices[0])
    return is_delta or record.get("object") in _KINDS or _is_filter_chunk(record)


def _is_filter_chunk(chunk: Any) -> bool:
    """Return whether a chunk is the one with which Azure begins a stream: the filter's results, often without an id."""
    fields = chat.as_mapping(chunk)
    return fields.get("choices") == [] and "prompt_filter_results" in fields


def is_list(record: Any) -> bool:
    """Return whether a record is a list of chunks. Chunks without a choice may come first."""
    if not isinstance(record, list):
        return False
    return is_chunk(next((each for each in record if chat.as_mapping(each).get("choices") != []), None))


def of_list(record: Any) -> list[dict[str, Any]] | None:
    """Convert a list of chunks to one call for each id, in the order of their first chunks; None for other records."""
    if not is_list(record):
        return None
    calls: dict[Any, list[Any]] = {}
    for chunk in record:
        name = chat.as_mapping(chunk).get("id")
        if name or not _is_filter_chunk(chunk):
            calls.setdefault(name, []).append(chunk)
    # There is no request. The prompt is recorded only if the first chunk contains its ids.
    return [{"response": chunks} for chunks in calls.values()]


class ChunkJoiner:
    """Joins chunks on separate lines: consecutive chunks with the same id are one call."""

    def __init__(self) -> None:
        self._chunks: list[Any] = []
        self._line: Line = 0
        self._raw = b""

    def add(self, line: Line, raw: bytes, chunk: Mapping[str, Any]) -> Iterator[Gathered]:
        """Add a chunk, and yield the previous call if this chunk starts another one.

        Raises:
            FormatError: if a call has more than `MOST_CHUNKS` chunks.
        """
        is_first = _is_filter_chunk(chunk)
        if self._chunks and chunk.get("id") != self._chunks[-1].get("id"):
            is_first = is_first or not _is_filter_chunk(self._chunks[-1])
        if self._chunks and is_first:
            yield from self.flush()
        if not self._chunks:
            self._line, self._raw = line, raw
        if len(self._chunks) >= MOST_CHUNKS:
            raise FormatError(
                f"TG-DATA-022: {format_location('line', line)}: a stream of more than {MOST_CHUNKS:,} chunks. "
                f"It would have to "
                "be in memory completely. Split it."
            )
        self._chunks.append(chunk)

    def flush(self) -> Iterator[Gathered]:
        """Yield the current call, if there is one."""
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            call = {"response": chunks}
            yield self._line, self._raw, to_json(call), call


REQUESTS = (
    *("request", "requestbody", "kwargs", "inputs", "input", "params", "parameters"),
    *("body", "req", "payload", "sent"),
)
RESPONSES = (
    *("response", "responseobj", "responsebody", "outputs", "output", "completion", "result"),
    *("res", "resp", "llmresponse", "rawresponse", "got", "received", "chunks", "responsechunks"),
)

ERRORS = ("error", "errorstr", "errormessage", "exception", "err")


def of_call(record: Any) -> list[dict[str, Any]] | None:
    """Convert a request and response under names that the core does not read, with the other fields of the record.

    None if the record has no such names.
    """
    if not isinstance(record, Mapping) or "calls" in record or "call_type" in record:
        return None
    if isinstance(record.get("request"), Mapping) and isinstance(record.get("response"), Mapping):
        return None
    if (names := _names(record)) is None:
        return None
    request_key, response_key = names
    if not request_key and not _is_response(record[response_key]):
        return [_of_other(record, response_key)]
    request = parse_json_or_events(record[request_key]) if request_key else {"messages": record["messages"]}
    response = parse_json_or_events(record[response_key])
    if not request_key:
        request |= chat.pick(record, (*chat.SAMPLING, "tools", "model"))
        answer = _first_message(response)
        if request["messages"] and answer is not None and _same(request["messages"][-1], answer):
            request["messages"] = request["messages"][:-1]
    other_fields = chat.without(record, request_key, response_key, "messages")
    return [{**({} if request_key else chat.PARTIAL), **other_fields, "request": request, "response": response}]


def _names(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the keys of the request and the response; the first is "" if the request is the record's `messages`."""
    keys = {normalize_name(str(key)): key for key in reversed(list(record))}
    response_keys = [keys[key] for key in RESPONSES if key in keys]
    response_key = next((key for key in response_keys if _is_response(record[key])), None)
    if response_key is None:
        if (other_api := _of_other_api(record, keys, response_keys)) is not None:
            return other_api
        messages = record.get("messages")
        asks = (
            isinstance(messages, list)
            and messages
            and isinstance(messages[-1], Mapping)
            and messages[-1].get("role") != "assistant"
        )
        response_key = next(
            (key for key in response_keys if asks and _read({}, parse_json_or_events(record[key]))), None
        )
        return None if response_key is None else ("", response_key)
    request_keys = [keys[key] for key in REQUESTS if key in keys and keys[key] != response_key]
    request_key = next((key for key in request_keys if _is_request(record[key])), None)
    if request_key is None:
        return ("", response_key) if isinstance(record.get("messages"), list) else None
    return request_key, response_key


def _of_other_api(record: Mapping[str, Any], keys: dict[str, str], response_keys: list[str]) -> tuple[str, str] | None:
    """Return the keys of a request of another API and of its response, if the core reads that response."""
    for request_key in (keys[key] for key in REQUESTS if key in keys):
        request = parse_json_or_events(record[request_key])
        if isinstance(request, Mapping) and not request.keys().isdisjoint(("input", "contents", "system")):
            response_key = next(
                (
                    key
                    for key in response_keys
                    if key != request_key and _read(request, parse_json_or_events(record[key]))
                ),
                None,
            )
            if response_key is not None:
                return request_key, response_key
    return None


def normalize_name(name: str) -> str:
    """Return a name in lower case without `_` and `-`.

    >>> normalize_name("requestBody"), normalize_name("request_body")
    ('requestbody', 'requestbody')
    """
    return name.replace("_", "").replace("-", "").lower()


def parse_json_or_events(value: Any) -> Any:
    """Parse a string of JSON or of stream events, and return the fields of serialized objects; else unchanged.

    >>> parse_json_or_events('data: {"choices": []}\\n\\ndata: [DONE]\\n')
    [{'choices': []}]
    >>> parse_json_or_events([{"__type__": "openai.types.ChatCompletionChunk", "__data__": {"choices": []}}])
    [{'choices': []}]
    """
    parsed = dict(value) if isinstance(value, Mapping) else json_path.parse_json_string(value)
    if isinstance(parsed, str) and parsed.lstrip("\ufeff\r\n").startswith(_EVENTS):
        parsed = _events(parsed)
    parsed = _fields_of(parsed)
    if isinstance(parsed, list) and parsed and _fields_of(parsed[0]) is not parsed[0]:
        return [_fields_of(each) for each in parsed]
    return parsed


def _fields_of(value: Any) -> Any:
    """Return the fields of a serialized object: of {a name of its class, its fields}; other values unchanged.

    The key of the class is `__type__`, `__class__`, `_type`, `$type` or similar.
    """
    while isinstance(value, Mapping) and len(value) == 2:
        key = next((key for key in value if str(key).lstrip("_$@") != key and str(key).strip("_$@") in _CLASS), None)
        fields = next(each for name, each in value.items() if name != key)
        if key is None or not isinstance(value[key], str) or not isinstance(fields, (Mapping, list)):
            break
        value = fields
    return value


_CLASS = ("type", "class", "model", "kind")


_EVENTS = ("data:", "event:", "id:", "retry:", ":", "{")
"""Starts of the lines of a stream: fields of server-sent events, or a chunk."""


def _events(text: str) -> Any:
    """Parse the chunks of a stream: lines of JSON, with or without `data:`. Return the text if one is not JSON."""
    event_lines = [line for line in json_path.split_lines(text.lstrip("\ufeff")) if line.startswith(("data:", "{"))]
    data = [line.removeprefix("data:").strip() for line in event_lines]
    try:
        return [json.loads(each) for each in data if each and each != "[DONE]"]
    except (ValueError, RecursionError):
        return text


def _is_request(value: Any) -> bool:
    request = parse_json_or_events(value)
    return isinstance(request, Mapping) and isinstance(request.get("messages"), list)


def _is_response(value: Any) -> bool:
    response = parse_json_or_events(value)
    choices = chat.as_mapping(response).get("choices")
    return is_list(response) or (isinstance(choices, list) and bool(choices))


def _of_other(record: Mapping[str, Any], response_key: str) -> dict[str, Any]:
    """Convert messages next to the response of another API.

    The result is a call if the core reads the response with these messages as its request. Otherwise the response's
    message is appended to the messages.
    """
    other_fields = chat.without(record, response_key, "messages")
    messages, response = record["messages"], parse_json_or_events(record[response_key])
    request = {**chat.pick(record, chat.SAMPLING), "messages": messages}
    trace = _read(request, response)
    if trace is not None and len(trace.messages) == len(messages) + 1:
        return {**chat.PARTIAL, **other_fields, "request": request, "response": response}
    return {**other_fields, "messages": [*chat.mark_not_sampled(messages), *(trace.messages[-1:] if trace else [])]}


def _read(request: Any, response: Any) -> Trace | None:
    """Return the trace that the core reads from a request and response; None if it has no sampled turn."""
    if not isinstance(response, (Mapping, list)) or not response:
        return None
    try:
        core, _ = _core.Traces.decode([to_json({"request": request, "response": response})], "<record>", 1, "auto")
    except FormatError:
        return None
    return next((trace for trace in Traces(core) if trace.generations), None)


def of_http(record: Any) -> list[dict[str, Any]] | None:
    """Convert a call whose request and response are HTTP messages, if the core reads their bodies.

    None for other records, and for responses with choices: `generic` finds these at any depth.
    """
    keys = {normalize_name(str(key)): key for key in reversed(list(chat.as_mapping(record)))}
    names = [*(keys[name] for name in REQUESTS if name in keys)][:1]
    names += [*(keys[name] for name in RESPONSES if name in keys)][:1]
    if len(names) < 2:
        return None
    request, response = (_body(record[name]) for name in names)
    if not isinstance(request, Mapping) or _is_response(response) or _read(request, response) is None:
        return None
    partial = {} if "model" in request else chat.PARTIAL
    return [{**partial, **chat.without(record, *names), "request": request, "response": response}]


def _body(value: Any) -> Any:
    part = parse_json_or_events(value)
    body = parse_json_or_events(part.get("body")) if isinstance(part, Mapping) else None
    return body if body and isinstance(body, (Mapping, list)) else part


_ALWAYS_RESPONSES = {
    *("response", "responseobj", "responsebody", "llmresponse", "rawresponse", "resp", "responses", "completion"),
    *("completions", "choices", "chunks", "responsechunks"),
}
_RESULTS = {
    *("output", "outputs", "result", "res", "got", "received", "answer", "answers", "generation", "generations"),
    *("candidates", "samples"),
}
"""Names of answers that are also those of results of a task."""
_RESPONSE_KEYS = {
    *("choices", "delta", "candidates", "chunks", "content", "logprobs", "finish_reason", "stop_reason"),
    *("finishReason", "is_streaming", "body"),
}


def is_response_part(name: str, value: Any, *, has_request: bool = False) -> bool:
    """Return whether a field is the response of a call, by its name and kind, whether it can be read or not.

    Args:
        name: name of the field.
        value: its value.
        has_request: whether a request is next to it. A result is then a response whatever its keys are.
    """
    name = normalize_name(name)
    if name not in _ALWAYS_RESPONSES | _RESULTS:
        return False
    parsed = parse_json_or_events(value)
    first = parsed[0] if isinstance(parsed, list) and parsed else parsed
    if not isinstance(first, Mapping) or not first:
        return is_python_repr(value)
    return name in _ALWAYS_RESPONSES or has_request or not _RESPONSE_KEYS.isdisjoint(first)


def unread_response(record: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the key and value of the first response next to messages that end before an answer; None without one."""
    messages = record.get("messages")
    if not chat.has_answer(messages) or not messages or chat.was_sampled(messages[-1]):
        return None
    parts = ((str(key), value) for key, value in record.items() if key != "messages")
    return next(((key, value) for key, value in parts if is_response_part(key, value)), None)


_PYTHON_REPR = re.compile(r"[A-Z]\w*\(\s*\w+=")


def is_python_repr(value: Any) -> bool:
    """Return whether a value is Python's text of an object.

    >>> is_python_repr("ChatCompletion(id='1')")
    True
    """
    return isinstance(value, str) and _PYTHON_REPR.match(value) is not None


def _first_message(response: Any) -> Any:
    """Return the message of the first choice of a response that is not a stream."""
    return chat.as_mapping(response["choices"][0]).get("message") if "choices" in chat.as_mapping(response) else None


def _same(message: Any, answer: Any) -> bool:
    if not isinstance(message, Mapping) or not isinstance(answer, Mapping):
        return False
    return all((message.get(key) or "") == (answer.get(key) or "") for key in ("role", "content", "tool_calls"))


_TOKEN_FIELDS = ("token_ids", "logprobs")


def of_talk(record: Any) -> list[dict[str, Any]] | None:
    """Replace messages by the responses stored in them; None if no such response has token ids or logprobs."""
    talk = chat.as_mapping(record).get("messages")
    if not isinstance(talk, list):
        return None
    responses = [_response(each) for each in talk]
    if not any(each["choices"][0].get(key) for each in responses if each for key in _TOKEN_FIELDS):
        return None
    # Chat templates do not read the notes that the agent stores in `extra`.
    without_notes = [chat.without(each, "extra") if isinstance(each, Mapping) else each for each in talk]
    messages = [each if response is None else response for each, response in zip(without_notes, responses, strict=True)]
    # mini-swe-agent stores the model's configuration here.
    sampling = chat.sampling(chat.get_path(record, "info.config.model.model_kwargs"))
    return [{**sampling, **record, "messages": messages}]


def _response(message: Any) -> Mapping[str, Any] | None:
    """Return the response with one choice that an assistant message stores in `extra`, None if there is none."""
    response = chat.as_mapping(message.get("extra")).get("response") if chat.role(message) == "assistant" else None
    choices = chat.as_mapping(response).get("choices")
    has_one_choice = isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], Mapping)
    return response if has_one_choice else None
