"""Convert traces of Langfuse whose observations are not in the record: the trace's own input and output.

Source: langfuse 3.15 `api/resources/commons/types` (Trace, TraceWithDetails), as `langfuse.api.trace.list` returns
them. `observations` and `scores` are ids there. Traces with their observations are read by the core.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat, json_path
from tracegrad.data.field_map import BadValueError
from tracegrad.data.formats import generic

NAME = "langfuse_trace"
KEYS = ("public", "htmlPath")
_SIGNS = ("id", "timestamp", "input", "output")
_FIX = "Export the traces with their observations, or the observations of type GENERATION"


def of_trace(record: Any) -> list[dict[str, Any]] | None:
    """Convert a trace to its input messages and the answer in its output; None for other records.

    If the output repeats the input, only the messages after it are answers. Scores by value are rewards.

    Raises:
        BadValueError: if the input has no messages, or the output is not an answer to them.
    """
    if not isinstance(record, Mapping) or any(key not in record for key in _SIGNS):
        return None
    observations = record.get("observations") or []
    is_trace = isinstance(record.get("htmlPath"), str) or ("tags" in record and isinstance(record.get("public"), bool))
    if "type" in record or "traceId" in record or not is_trace:
        return None
    if not isinstance(observations, list) or any(isinstance(each, Mapping) for each in observations):
        return None
    given, output = (json_path.parse_json_string(record[key]) for key in ("input", "output"))
    fields = chat.as_mapping(given)
    prompt = _messages(given)
    if prompt is None:
        why = "What the model was asked is not known from the input of an application"
        raise BadValueError((f"the input of a Langfuse trace is {_describe(given)}, without messages", why, _FIX))
    shared = {"id": record["id"], **_rewards(record.get("scores"))}
    if (choices := chat.as_mapping(output).get("choices")) and isinstance(choices, list):
        request = {"messages": prompt, **chat.pick(fields, ("tools",))}
        return [{**shared, **chat.PARTIAL, "request": request, "response": output}]
    answers = _answers(output, prompt)
    if answers is None or not any(map(chat.was_sampled, answers)):
        why = "Which text the model answered would be guessed"
        raise BadValueError((f"the output of a Langfuse trace is {_describe(output)}, not an answer", why, _FIX))
    tools = chat.tools(fields["tools"]) if isinstance(fields.get("tools"), list) else {}
    return [{**shared, **tools, "messages": [*chat.mark_not_sampled(prompt), *answers]}]


def _describe(value: Any) -> str:
    keys = ", ".join(list(map(str, value))[:6]) if isinstance(value, Mapping) else ""
    return f"{json_path.describe_type(value)} with the keys {keys}" if keys else json_path.describe_type(value)


def _messages(value: Any) -> list[dict[str, Any]] | None:
    """Return a list of messages, or that of an object with `messages`, in OpenAI's form; None for other values."""
    messages = value.get("messages") if isinstance(value, Mapping) else value
    if not isinstance(messages, list) or not messages or not all(map(generic.is_message, messages)):
        return None
    return [generic.message(each) for each in messages]


def _answers(output: Any, prompt: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the messages of an output that follow the prompt; None if the output is not an answer.

    Other messages than answers and results of tools must be those of the prompt.
    """
    if isinstance(output, str):
        return [{"role": "assistant", "content": output}] if output else None
    if isinstance(output, Mapping) and "messages" not in output:
        output = [output]
    if (messages := _messages(output)) is None:
        return None
    if chat.prompt_key(messages[: len(prompt)]) == chat.prompt_key(prompt):
        return messages[len(prompt) :]
    return messages if all(each["role"] in ("assistant", "tool") for each in messages) else None


def _rewards(scores: Any) -> dict[str, Any]:
    """Return scores with a name and a number, if a trace has them instead of their ids."""
    rewards: dict[str, float] = {}
    for score in scores if isinstance(scores, list) else ():
        name, value = (chat.as_mapping(score).get(key) for key in ("name", "value"))
        if isinstance(name, str) and isinstance(value, (int, float)):
            rewards[name] = float(value)
    total = {"reward": rewards.pop("reward")} if "reward" in rewards else {}
    return {**total, **({"rewards": rewards} if rewards else {})}
