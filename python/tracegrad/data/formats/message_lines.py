"""Convert files whose records are each one message: lines of JSON or one array, as gptme and Open Interpreter write.

The file is one conversation, in its order. `session_files` makes one record of it. A call that gptme wrote into the
text of an answer becomes a call again if a later line has its id.
"""

import re
from collections.abc import Mapping
from json import JSONDecodeError, JSONDecoder
from typing import Any

from tracegrad.data import chat
from tracegrad.data.field_map import BadValueError
from tracegrad.data.formats import generic, message_parts, session_files, session_tree

NAME = session_files.MESSAGES
_KINDS = {"message", "text", "chat", "thread.message", "input_text", "output_text"}
_CONVERSATION = re.compile(
    r"(conversation|session|thread|chat|dialog|dialogue|tree|trace|run|episode|sample|task|conv|group|problem|question)"
    r"_?(id|uuid|index|idx|number)?",
    re.I,
)
"""Names of fields that tell which conversation a message belongs to."""
_PARENTS = ("parent_id", "parentId", "parent", "in_reply_to", "parent_message_id")
_IDS = ("id", "message_id", "messageId", "uuid")
_TIMES = ("timestamp", "created_at", "createdAt", "time", "date")
_WRITTEN_CALL = re.compile(r"(?:\A|\n)@([^\r\n(]+?)\(([\w\-:.]+)\):[ \t]*(?=\{)")
"""Start of a call in the text of an answer, as gptme writes it: `@name(id): {arguments}`."""


def of_session(record: Any) -> list[dict[str, Any]] | None:
    """Convert the messages of a file to one trace; None for other records.

    Raises:
        BadValueError: if a line is no message, or if the lines are not one conversation in its order.
    """
    lines = session_tree.lines_of(record, NAME)
    if lines is None:
        return None
    if record.get("broken"):
        raise _refusal("its last message is cut off", "The rest of the conversation is unknown")
    if odd := [number for number, line in enumerate(lines, 1) if not session_files.is_message(line)]:
        raise _refusal(f"record {odd[0]:,} is no message, but the first records are", "It would be left out")
    _check_one_conversation(lines)
    for number, line in enumerate(lines, 1):
        kind = line.get("type")
        if isinstance(kind, str) and kind not in _KINDS and kind != line["role"]:
            raise _refusal(
                f"message {number:,} is of the type {kind!r}", "Its text is not what the model wrote or read"
            )
    messages = _with_written_calls([generic.message(line) for line in lines])
    if not chat.has_answer(messages):
        raise _refusal("none of its messages is of the assistant", "There is no answer to train")
    return [{"messages": message_parts.convert(messages)}]


def _check_one_conversation(lines: list[Mapping[str, Any]]) -> None:
    """Check that no field says that the lines are of several conversations, or in another order."""
    why = "They would be read as one conversation in the order of the file"
    for key in lines[0]:
        values = {str(line.get(key)) for line in lines if isinstance(line.get(key), (str, int))}
        if len(values) > 1 and _CONVERSATION.fullmatch(key):
            raise _refusal(f"its messages are of several conversations: `{key}` has {len(values):,} values", why)
    ids = [next((line[key] for key in _IDS if line.get(key) is not None), None) for line in lines]
    for before, line in zip(ids, lines[1:], strict=False):
        parent = next((line[key] for key in _PARENTS if line.get(key) is not None), before)
        if parent != before:
            raise _refusal("a message answers another one than that before it", why)
    first, last = (
        next((line[key] for key in _TIMES if isinstance(line.get(key), (str, int, float))), "")
        for line in (lines[0], lines[-1])
    )
    if type(first) is type(last) and sorted((first, last)) != [first, last]:
        raise _refusal("its last message is older than its first", why)
    start = [line for line in lines[:1] if line["role"] in ("system", "developer")]
    if any(chat.prompt_key([line]) == chat.prompt_key(start) for line in lines[1:] if start):
        raise _refusal("its first message, a system prompt, occurs a second time", why)


def _with_written_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move the calls in the text of answers to `tool_calls`, and mark the messages with their ids as results.

    Raises:
        BadValueError: if a result has no call before it, or a call cannot be separated from the text.
    """
    results = {each["call_id"] for each in messages if isinstance(each.get("call_id"), str)}
    if not results:
        return messages
    converted, calls = [], {}
    for number, message in enumerate(messages, 1):
        content, identity = message.get("content"), message.get("call_id")
        if message["role"] == "assistant" and isinstance(content, str) and not message.get("tool_calls"):
            text, written = _written_calls(number, content, results)
            message = {**message, "content": text, "tool_calls": written} if written else message
            calls |= {each["id"]: each["function"]["name"] for each in written}
        elif isinstance(identity, str):
            if identity not in calls:
                raise _refusal(
                    f"message {number:,} is the result of a call that none has", "It would be another message"
                )
            fields = {"role": "tool", "tool_call_id": identity, "name": calls[identity]}
            message = {**chat.without(message, "call_id"), **fields}
        converted.append(message)
    return converted


def _written_calls(number: int, content: str, results: set[str]) -> tuple[str, list[dict[str, Any]]]:
    """Return the text before the calls of an answer, and the calls."""
    first = next((match for match in _WRITTEN_CALL.finditer(content) if match[2] in results), None)
    if first is None:
        return content, []
    calls, at = [], first.start()
    while at < len(content):
        match = _WRITTEN_CALL.match(content, at)
        try:
            end = JSONDecoder().raw_decode(content, match.end())[1] if match else -1
        except JSONDecodeError:
            end = -1
        if match is None or end < 0:
            raise _refusal(f"message {number:,} has text after a call", "What was sampled would be guessed")
        calls.append(chat.tool_call(match[1], match[2], content[match.end() : end]))
        at = end if content[end:].strip() else len(content)
    return content[: first.start()], calls


def _refusal(problem: str, why: str) -> BadValueError:
    fix = 'Write each conversation as {"messages": [...]}, or as a file of its own'
    return BadValueError((f"each record of the file is one message, and {problem}", why, fix))
