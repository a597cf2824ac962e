"""Detect calls and conversations by their structure in records of unknown producers, and in rows of tracers.

The search finds lists of messages, responses and single answers, also in JSON strings and in server-sent events. An
ambiguous record is not converted. Rows of a tracer form a tree, and most of them are not model calls. A row without a
call may contain the reward of its trace. Sources: OpenTelemetry's and OpenInference's JSON (`context.trace_id`,
`parent_id`), OpenAI Agents (`trace.span`), LlamaIndex events (`span_id`).
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tracegrad.data import chat, json_path
from tracegrad.data.field_map import BadValueError
from tracegrad.data.formats import langchain, message_parts, prompt_prefix, record_fields
from tracegrad.data.formats.openai import (
    ERRORS,
    REQUESTS,
    RESPONSES,
    is_list,
    is_response_part,
    normalize_name,
    parse_json_or_events,
)
from tracegrad.data.formats.prompt_response import ANSWERS, PROMPTS

DEEPEST, MOST_LOOKED, _MOST_COPIES = 8, 4096, 16
ROLES = {"tool-call": "assistant", "tool-response": "user", "model": "assistant"}
"""Roles of smolagents with the roles that it sends to the server for them, and of Gemini."""
PARENTS = ("parent_id", "parent_span_id", "parentSpanId", "parentId")
"""Keys under which a span names its parent."""
_MESSAGE_KEYS = {"content", "tool_calls", "blocks"}
_PARAMETERS = (*chat.SAMPLING, "model", "tools", "max_tokens")
_EXPECTED = re.compile(r"expect|reference|ideal|gold|target|ground|truth|label|example", re.I)
"""Names of fields that contain the expected answer instead of a sampled one."""
_NOT_KEPT = ("messages", "calls", "choices", "request", "response", "prompt_token_ids")


@dataclass
class _Matches:
    """Results of a search in a record, with their top-level keys; talks and answers also have their parent object.

    `unread` has the names and values of fields in which a response should be, and nothing was found.
    """

    talks: list[tuple[str, Any, list[Any]]] = field(default_factory=list)
    responses: list[tuple[str, Any]] = field(default_factory=list)
    answers: list[tuple[str, Any, Mapping[str, Any]]] = field(default_factory=list)
    lists: list[tuple[str, list[Any]]] = field(default_factory=list)
    unread: list[tuple[str, Any]] = field(default_factory=list)
    looked: int = 0


def of_record(record: Any) -> list[dict[str, Any]] | None:
    """Convert a record with a call, the calls of one conversation, or one list of messages to a trace.

    None if the record contains none of them, or if it is ambiguous. The record is searched once.
    """
    if not isinstance(record, Mapping):
        return None
    matches = _look(record)
    traces = _of_call(record, matches)
    return _of_talk(record, matches) if traces is None else traces


def has_call(record: Mapping[str, Any]) -> bool:
    """Return whether a record contains a call, or the calls of one conversation."""
    return _of_call(record, _look(record)) is not None


def _of_call(record: Mapping[str, Any], matches: _Matches) -> list[dict[str, Any]] | None:
    """Convert a call, or the calls of one conversation, with the other fields of the record."""
    if (call := _call(matches)) is not None:
        partial = _partial(matches.talks[0][1], record)
        return [{**partial, **_other_fields(record, call[0]), "request": call[1], "response": call[2]}]
    if (steps := _steps(matches)) is None:
        return None
    key, rows, calls = steps
    # A list with one element may be an export of a single record, whose reward is inside that element.
    row_fields = _other_fields(rows[0], set()) if len(rows) == 1 else {}
    return [{**row_fields, **_other_fields(record, {key}), "calls": calls}]


def _of_talk(record: Mapping[str, Any], matches: _Matches) -> list[dict[str, Any]] | None:
    """Rename the record's only list of messages with an assistant turn to `messages`."""
    if any(normalize_name(str(key)) in ERRORS and value for key, value in record.items()):
        # The call failed, so the messages of its request are not a conversation.
        is_conversation = (
            each[1] is record or "model" not in each[1] or _role(each[2][-1]) == "assistant" for each in matches.talks
        )
        matches.talks = [*itertools.compress(matches.talks, is_conversation)]
    if "messages" in record or (talk := _talk(matches)) is None:
        return None
    key, parent, messages = talk
    has_request = normalize_name(key) in (*REQUESTS, *map(normalize_name, PROMPTS)) or (
        parent is not record and "model" in parent
    )
    if unread := _unread(matches, has_request=has_request):
        raise record_fields.unread_refusal(*unread)
    parents = [record] if parent is record else [parent, record]
    converted = prompt_prefix.with_prefix(parents, key, _converted(messages), messages)
    return [{**_other_fields(record, {key}), "messages": converted}]


def _converted(talk: list[Any]) -> list[dict[str, Any]]:
    return message_parts.convert([message(each) for each in talk])


def message(told: Any) -> dict[str, Any]:
    """Return a message of any supported producer in the form that chat templates expect.

    >>> message({"role": "tool-response", "content": [{"type": "text", "text": "4"}]})
    {'role': 'user', 'content': '4'}
    """
    if langchain.is_message(told):
        return langchain.message(told)
    if "content" not in told and "parts" in told:
        told = {**chat.without(told, "parts"), "content": chat.text_of(told["parts"])}
    fields = chat.pick(told, [key for key in told if key != "blocks"])
    content = told.get("blocks") if told.get("content") is None else told["content"]
    return {**fields, "role": ROLES.get(fields["role"], fields["role"]), "content": langchain.text_of(content)}


def _other_fields(record: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    return chat.without(record, *used, *_NOT_KEPT)


def _call(matches: _Matches) -> tuple[set[str], dict[str, Any], Any] | None:
    """Return the top-level keys, request and response of the only call; None if there is not exactly one."""
    if len(matches.talks) != 1:
        return None
    key, parent, talk = matches.talks[0]
    used = {key}
    if len(matches.responses) == 1:
        response_key, response = matches.responses[0]
    elif _unread(matches):
        return None
    elif not matches.responses and len(matches.answers) == 1 and _role(talk[-1]) != "assistant":
        response_key, answer, siblings = matches.answers[0]
        response = langchain.of_message(message(answer), _sampled(siblings))
        if _is_choice(siblings):
            used.add("usage")  # This counts all choices of the original response.
    else:
        return None
    messages = _converted(talk)
    if messages[0].get("role") != "system":
        messages = chat.with_system_prompt(chat.text_of(parent.get("system")), messages)
    return {*used, response_key}, {**_parameters(parent), "messages": messages}, response


def _partial(parent: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mark of a partial request, or {} if the messages are in a complete one.

    A complete request is a nested object that names a model.
    """
    return {} if parent is not record and "model" in parent and "messages" in parent else dict(chat.PARTIAL)


def _sampled(siblings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logprobs, finish reason and token ids next to an answer, as a separate choice has them."""
    kinds = {"logprobs": Mapping, "finish_reason": str, "token_ids": list}
    return {key: siblings[key] for key, kind in kinds.items() if isinstance(siblings.get(key), kind)}


def _parameters(parent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a call, from its request or from an object next to the messages."""
    if isinstance(parent.get("messages"), list):
        # Bedrock's Converse has its options in an object, without `_` in their names.
        options = chat.as_mapping(parent.get("inferenceConfig"))
        top_p = {} if options.get("topP") is None else {"top_p": options["topP"]}
        return {**chat.pick(options, ["temperature"]), **top_p, **chat.pick(parent, _PARAMETERS)}
    parameters: dict[str, Any] = {}
    for each in (*parent.values(), parent):
        parameters |= chat.sampling(each)
    return parameters


def _steps(matches: _Matches) -> tuple[str, list[Any], list[dict[str, Any]]] | None:
    """Return the key, rows and calls of the only list with calls; None if they are not one conversation.

    Calls are one conversation if each continues the messages of the first. In a tree of spans, only the calls of one
    parent must satisfy this, and these are used: calls of a tool or a guard do not belong to the conversation.
    """
    if matches.talks or matches.responses:
        return None
    candidates = []
    for key, rows in matches.lists:
        searched = [(each, _look(each)) for each in rows if isinstance(each, Mapping)]
        row_calls = [(row, inside, _call(inside)) for row, inside in searched]
        calls_of_parents = [
            (_parent_of(row), {**_partial(inside.talks[0][1], row), "request": call[1], "response": call[2]})
            for row, inside, call in row_calls
            if call
        ]
        if calls_of_parents:
            candidates.append((key, rows, calls_of_parents))
    if len(candidates) != 1:
        return None
    key, rows, calls_of_parents = candidates[0]
    if _go_on(calls := [call for _, call in calls_of_parents]):
        return key, rows, calls
    of_parents: dict[Any, list[dict[str, Any]]] = {}
    for parent, call in calls_of_parents:
        of_parents.setdefault(parent, []).append(call)
    longer = [calls for parent, calls in of_parents.items() if parent and len(calls) > 1 and _go_on(calls)]
    return (key, rows, longer[0]) if len(longer) == 1 else None


def _go_on(calls: list[dict[str, Any]]) -> bool:
    """Return whether each call continues the messages of the first."""
    prompts = [call["request"]["messages"] for call in calls]
    return all(len(prompt) > len(prompts[0]) and prompt[: len(prompts[0])] == prompts[0] for prompt in prompts[1:])


def _parent_of(span: Mapping[str, Any]) -> Any:
    """Return the id of the parent of a span, None if it names none."""
    return next((span[key] for key in PARENTS if isinstance(span.get(key), str)), None)


def refuse_ambiguous(record: Any) -> None:
    """Refuse a record with one answer and several different prompts. Return None for other records.

    Raises:
        BadValueError: naming the paths of two of the prompts.
    """
    if not isinstance(record, Mapping) or "messages" in record:
        return
    matches = _look(record)
    if len(matches.talks) < 2 or len(matches.responses) != 1:
        return
    first, second = (_path_to(record, talk) or key for key, _, talk in matches.talks[:2])
    problem = f"it has one response, and different messages in {first} and in {second}"
    fix = "Keep the messages that were sent with the response, and remove the others"
    raise BadValueError((problem, "The prompt of the response is not known", fix))


def _path_to(value: Any, wanted: Any, depth: int = 0) -> str | None:
    """Return the path of an object inside another one; None if it is not found, as in JSON text."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs if depth < DEEPEST else ():
        if each is wanted:
            return str(key)
        if (path := _path_to(each, wanted, depth + 1)) is not None:
            return f"{key}.{path}"
    return None


def _talk(matches: _Matches) -> tuple[str, Any, list[Any]] | None:
    """Return the top-level key, parent and messages of the only conversation; None if there is not exactly one."""
    talks = [each for each in matches.talks if any(_role(item) == "assistant" for item in each[2])]
    talks = [each for each in talks if not _asks(each[0], each[2])]
    if len(talks) != 1 or matches.responses:
        return None
    return talks[0] if all(answer == talks[0][2][-1] for _, answer, _ in matches.answers) else None


def _asks(key: str, messages: list[Any]) -> bool:
    """Return whether messages are a prompt, whose assistant turns were not sampled by this call."""
    return key in (*PROMPTS, "prompts") and _role(messages[-1]) != "assistant"


def _look(record: Mapping[str, Any]) -> _Matches:
    matches = _Matches()
    for key, value in record.items():
        if not _EXPECTED.search(str(key)):
            _into_field(matches, str(key), str(key), value, record, 1)
    matches.talks = _distinct(matches.talks)
    if 1 < len(matches.responses) <= _MOST_COPIES and all(
        each == matches.responses[0][1] for _, each in matches.responses
    ):
        del matches.responses[1:]
    return matches


def _distinct(talks: list[tuple[str, Any, list[Any]]]) -> list[tuple[str, Any, list[Any]]]:
    """Leave out lists of messages that repeat another one, unless the two have different sampling parameters.

    The list with the most parameters next to it is kept.
    """
    kept: list[tuple[str, Any, list[Any]]] = []
    for talk in talks if len(talks) <= _MOST_COPIES else ():
        found = next((index for index, each in enumerate(kept) if _is_copy(each, talk)), None)
        if found is None:
            kept.append(talk)
        elif len(_parameters(talk[1])) > len(_parameters(kept[found][1])):
            kept[found] = talk
    return kept or talks


def _is_copy(one: tuple[str, Any, list[Any]], other: tuple[str, Any, list[Any]]) -> bool:
    """Return whether two lists have the same messages, and no parameter next to them differs."""
    first, second = (_parameters(each[1]) for each in (one, other))
    if len(one[2]) != len(other[2]) or any(first[key] != second[key] for key in first.keys() & second.keys()):
        return False
    pairs = zip(map(message, one[2]), map(message, other[2]), strict=True)
    return all(_without_nulls(left) == _without_nulls(right) for left, right in pairs)


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _unread(matches: _Matches, *, has_request: bool = False) -> tuple[str, Any] | None:
    """Return the first unread field that is a response."""
    return next((each for each in matches.unread if is_response_part(*each, has_request=has_request)), None)


def _into_field(matches: _Matches, key: str, name: str, value: Any, parent: Mapping[str, Any], depth: int) -> None:
    """Search a field, and note it as unread if its name is that of a response and nothing is found in it."""
    before, unread = (len(matches.talks), len(matches.responses), len(matches.answers)), len(matches.unread)
    _into(matches, key, value, parent, depth)
    is_empty = before == (len(matches.talks), len(matches.responses), len(matches.answers))
    if is_empty and is_response_part(name, value, has_request=True):
        matches.unread[unread:] = [(name, value)]


def _into(matches: _Matches, key: str, value: Any, parent: Mapping[str, Any], depth: int) -> None:
    """Classify a value below a top-level key, and search its items unless it is messages or a response."""
    matches.looked += 1
    if matches.looked > MOST_LOOKED or depth > DEEPEST or not isinstance(value, (str, Mapping, list)):
        return
    value = parse_json_or_events(value)
    if _is_response(value):
        matches.responses.append((key, value))
    elif isinstance(value, Mapping):
        before = len(matches.responses)
        for name, each in value.items():
            if not _EXPECTED.search(str(name)):
                _into_field(matches, key, str(name), each, value, depth + 1)
        if is_message(value) and _role(value) == "assistant" and len(matches.responses) == before:
            matches.answers.append((key, value, parent))
    elif isinstance(value, list) and value:
        if all(map(is_message, value)):
            if len(value) == 1 and _role(value[0]) == "assistant":
                matches.answers.append((key, value[0], parent))
            else:
                matches.talks.append((key, parent, value))
        elif all(map(_is_choice, value)):
            matches.responses.append((key, {"choices": value}))
        elif isinstance(value[0], Mapping):
            matches.lists.append((key, value))
        elif len(value) == 1:
            _into(matches, key, value[0], parent, depth + 1)


def _is_response(value: Any) -> bool:
    choices = chat.as_mapping(value).get("choices")
    if not isinstance(choices, list) or not choices:
        return is_list(value)
    return all(isinstance(chat.as_mapping(each).get("message"), Mapping) for each in choices)


def _is_choice(value: Any) -> bool:
    content = chat.as_mapping(value).get("message")
    return is_message(content) and _role(content) == "assistant"


def is_message(value: Any) -> bool:
    if langchain.is_message(value):
        return True
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    # Parts are content only if all of them are text: those of function calls have other keys.
    has_text_parts = isinstance(value.get("parts"), list) and isinstance(chat.text_of(value["parts"]), str)
    return bool(_MESSAGE_KEYS & value.keys()) or has_text_parts or message_parts.needs_conversion(value)


def _role(value: Any) -> Any:
    return message(value)["role"]


_CALL_KEYS = {
    *(*REQUESTS, *RESPONSES, *map(normalize_name, (*PROMPTS, *ANSWERS)), "messages", "choices", "calls"),
    *("user", "human", "assistant", "bot", "text", "content", "reply", "solution"),
}
"""Names of fields that may contain a call or text of a conversation, in lower case and without `_` and `-`."""
_LABEL_MAX = 200
_TRACES = ("trace_id", "traceId")


def of_span(record: Any) -> list[dict[str, Any]] | None:
    """Return no records for a span or trace object, because it contains no call; None for other records."""
    if not isinstance(record, Mapping):
        return None
    if record.get("object") == "trace" or isinstance(record.get("span_id"), str):
        return []
    traced = {*record, *chat.as_mapping(record.get("context"))}.intersection(_TRACES)
    return [] if traced and not record.keys().isdisjoint(PARENTS) else None


_ROW_IDS = {"traceid", "runid", "spanid", "observationid", "parentrunid", "parentobservationid"}
_KIND_KEYS = ("type", "kind", "span_kind", "spanKind", "span_type", "observation_type", "run_type")
_KINDS_WITHOUT_CALL = {
    *("chain", "agent", "tool", "span", "event", "retriever", "reranker", "embedding", "parser", "guardrail"),
    *("evaluator", "workflow", "task", "root", "run", "trace", "summary"),
}


def of_observation(record: Any) -> list[dict[str, Any]] | None:
    """Return no records for an observation of Langfuse that is not a generation; None for other records.

    Its input and output may repeat the messages of a generation below it.
    """
    fields = chat.as_mapping(record)
    kind = fields.get("type")
    if not isinstance(kind, str) or not isinstance(fields.get("traceId"), str) or "output" not in fields:
        return None
    return [] if kind.lower() in _KINDS_WITHOUT_CALL else None


def of_parent_row(record: Any) -> list[dict[str, Any]] | None:
    """Return no records for a row above or next to calls, because it contains no call; None for other records.

    Such a row names a trace or a run, and either its kind (chain, tool, ...) is none of a model call, or it has no text
    of a conversation. A row of the kind `summary` needs no name.
    """
    if not isinstance(record, Mapping):
        return None
    kind = next((record[key].lower() for key in _KIND_KEYS if isinstance(record.get(key), str)), "")
    names = {normalize_name(str(key)) for key in record}
    is_silent = not any(map(_may_say, record.values())) and names.isdisjoint(_CALL_KEYS)
    if kind == "summary" or names == {"summary"}:
        return [] if is_silent else None
    return [] if names & _ROW_IDS and (kind in _KINDS_WITHOUT_CALL or is_silent) else None


def is_reward_row(record: Any, path: str = "") -> bool:
    """Return whether a row contains only the reward of a conversation that is recorded elsewhere.

    Such a row has a reward and no text of a conversation. `path` is where a reward is, in addition to the usual names.
    """
    if not isinstance(record, Mapping) or any(map(_may_say, record.values())):
        return False
    if not _CALL_KEYS.isdisjoint(normalize_name(str(key)) for key in record):
        return False
    values = [value for key, value in record.items() if json_path.REWARD.search(str(key))]
    mapped = chat.get_path(record, path) if path else None
    values += mapped.values() if isinstance(mapped, Mapping) else [mapped]
    rewards = [json_path.reward_value(value) for value in values]
    return any(reward is not None and reward == reward for reward in rewards)


def _may_say(value: Any) -> bool:
    """Return whether a value may contain text of a conversation: a list, or a long or multi-line string."""
    if isinstance(value, Mapping):
        return any(map(_may_say, value.values()))
    return isinstance(value, list) or (isinstance(value, str) and (len(value) > _LABEL_MAX or "\n" in value))
