"""Convert logs and results of AutoGen, and chat histories of AG2.

Source: autogen-core 0.7.5 `logging.py` (lines of events, of which LLMCallEvent is a call), autogen-agentchat 0.7.5
`base/_task.py` and `messages.py` (TaskResult); ag2 0.14 `agentchat/chat.py` (ChatResult), `conversable_agent.py`
(roles) and `logger/file_logger.py`. In a TaskResult each agent sees its own events and the messages of others. In
a chat history of AG2 the role is that of the agent that began the chat: it is "assistant" for its own messages, so the
name counts.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.field_map import BadValueError
from tracegrad.data.formats import record_fields
from tracegrad.data.formats.record_fields import Converted

EVENT_KEYS, RESULT_KEYS, AG2_KEYS = ("agent_id", "sender", "handling_agent"), ("models_usage",), ("chat_history",)
AG2_LOG_KEYS = ("invocation_id", "wrapper_id")
_EVENTS = ("LLMStreamStart", "ToolCall", "Message", "MessageDropped", "MessageHandlerException")
_EVENTS += ("AgentConstructionException",)
_CHAT = ("TextMessage", "MultiModalMessage", "StopMessage", "HandoffMessage", "ToolCallSummaryMessage")
_OWN = ("ToolCallRequestEvent", "ToolCallExecutionEvent", "ThoughtEvent")
_UNKNOWN = ("CodeGenerationEvent", "CodeExecutionEvent", "MemoryQueryEvent", "StructuredMessage")
_SKIPPED = ("UserInputRequestedEvent", "ModelClientStreamingChunkEvent", "SelectSpeakerEvent", "SelectorEvent")


def of_event(record: Any) -> list[dict[str, Any]] | None:
    """Convert an event of autogen-core: a call, or no trace for the other events; None for other records."""
    fields = chat.as_mapping(record)
    kind, converted = fields.get("type"), Converted()
    if kind == "LLMCall" and "messages" in fields and "response" in fields:
        tools = chat.tools(record_fields.require_list(fields.get("tools"), "tools"))
        request = {"messages": fields["messages"], **tools}
        converted.append({**chat.PARTIAL, "request": request, "response": fields["response"]})
        return converted
    if kind == "LLMStreamEnd" and "response" in fields and "prompt_tokens" in fields:
        converted.left_out["answers of streamed calls: their prompts are in other lines (LLMStreamStart)"] += 1
        return converted
    return converted if kind in _EVENTS and not {"agent_id", "sender", "handling_agent"}.isdisjoint(fields) else None


def of_task_result(record: Any) -> list[dict[str, Any]] | None:
    """Convert a TaskResult to one trace for each agent with a model; None for other records.

    A message was sampled if it has `models_usage`.
    """
    talk = chat.as_mapping(record).get("messages")
    if not isinstance(talk, list) or not talk or not all(map(_is_message, talk)):
        return None
    converted = Converted()
    agents = dict.fromkeys(each["source"] for each in talk if each.get("models_usage"))
    for agent in agents:
        if any(each["source"] == agent and each["type"] not in (*_CHAT, *_OWN, *_SKIPPED) for each in talk):
            converted.left_out["agents with code or memory: what they saw is not recorded"] += 1
            continue
        messages = _as_seen(talk, agent)
        name = {"id": f"{record['id']}-{agent}"} if len(agents) > 1 and isinstance(record.get("id"), str) else {}
        if chat.has_answer(messages):
            converted.append({**chat.PARTIAL, **chat.without(record, "messages"), **name, "messages": messages})
            converted.left_out["system prompts and tool schemas: a result does not have them"] += 1
    return converted


def _is_message(value: Any) -> bool:
    fields = chat.as_mapping(value)
    return isinstance(fields.get("source"), str) and fields.get("type") in (*_CHAT, *_OWN, *_UNKNOWN, *_SKIPPED)


def _as_seen(talk: list[Mapping[str, Any]], agent: str) -> list[dict[str, Any]]:
    """Return a conversation as one agent saw it: its own calls and answers, and the messages of others."""
    messages: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}
    for each in talk:
        kind, content = each["type"], each.get("content")
        if each["source"] != agent:
            if kind in _CHAT:
                messages.append({"role": "user", "name": each["source"], "content": _text(content)})
        elif kind == "ThoughtEvent":
            thought = {"reasoning_content": str(content)}
        elif kind == "ToolCallRequestEvent":
            requests = record_fields.require_list(content, "content")
            calls = [chat.tool_call(call.get("name"), call.get("id"), call.get("arguments")) for call in requests]
            messages.append({"role": "assistant", "content": None, **thought, "tool_calls": calls})
            thought = {}
        elif kind == "ToolCallExecutionEvent":
            messages += [
                {"role": "tool", "tool_call_id": result["call_id"], "content": result["content"]}
                for result in record_fields.require_list(content, "content")
            ]
        elif each.get("models_usage") and kind in _CHAT:
            messages.append({"role": "assistant", "content": _text(content), **thought})
            thought = {}
    return messages


def _text(content: Any) -> Any:
    parts = content if isinstance(content, list) else [content]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else content


def of_ag2(record: Any) -> list[dict[str, Any]] | None:
    """Convert a ChatResult of AG2 to the conversation as its model saw it; None for other records.

    Raises:
        BadValueError: if there are not exactly two named speakers, or both or the human may be the model.
    """
    talk = chat.as_mapping(record).get("chat_history")
    if not isinstance(talk, list) or not talk or not {"chat_id", "human_input", "cost"} & record.keys():
        return None
    turns = list(map(chat.as_mapping, talk))
    # A message with tool calls has no name: the other agent is the one that executes them.
    speakers = list(dict.fromkeys(each.get("name") for each in turns if not each.get("tool_calls")))
    executors = {each.get("name") for each in turns if each.get("role") == "tool"}
    if len(speakers) != 2 or len(executors) == 2 or not all(isinstance(name, str) for name in speakers):
        described = ", ".join(map(str, speakers))
        problem = f"the chat has the speakers {described:.80}, and {len(executors)} of them execute tools"
        raise BadValueError((problem, "Which of them is the model would be guessed", _FIX_AG2))
    model = speakers[0] if speakers[1] in executors else speakers[1]
    converted = Converted()
    human = record_fields.require_list(record.get("human_input"), "human_input")
    messages: list[dict[str, Any]] = []
    for at, each in enumerate(turns):
        content = each.get("content")
        if each.get("role") == "tool":
            responses = record_fields.require_list(each.get("tool_responses"), "tool_responses")
            messages += [
                {"role": "tool", "tool_call_id": part.get("tool_call_id"), "content": part.get("content")}
                for part in responses or [each]
            ]
        elif (each.get("name") or model) != model:
            messages.append({"role": "user", "content": content})
        else:
            said = {"role": "assistant", "content": content, **chat.pick(each, ("tool_calls", "reasoning_content"))}
            if at == 0 or content in human:
                said["sampled"] = False
                converted.left_out["messages that a person wrote or that began the chat: they are context"] += 1
            messages.append(said)
    others = chat.without(record, "chat_history", "chat_id", "human_input", "cost", "summary")
    converted.append({**chat.PARTIAL, "id": str(record.get("chat_id")), **others, "messages": messages})
    converted.left_out["system prompts, tool schemas and models: a chat history does not have them"] += 1
    return converted


_FIX_AG2 = "Log the calls instead (autogen.runtime_logging with sqlite), and read their request and response"


def of_ag2_log(record: Any) -> list[dict[str, Any]] | None:
    """Return no records for a line of AG2's file logger without a call; None for other records.

    Raises:
        BadValueError: if the line is a call, whose response is the text of Python's `repr`.
    """
    fields = chat.as_mapping(record)
    if "wrapper_id" not in fields or "thread_id" not in fields:
        return None
    if "invocation_id" not in fields:
        return Converted()
    problem = "its response is Python's text of an object (`str(response)`), as the file logger of AG2 writes it"
    raise BadValueError((problem, "The answer cannot be read from it with certainty", _FIX_AG2))
