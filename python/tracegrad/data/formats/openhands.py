"""Convert events of OpenHands: one trace for each conversation.

Source: openhands-sdk 1.58 `sdk/event` (events with a `kind`, saved as one file each, or dumped as a list), and
OpenHands 0.x (a list of events with `action` or `observation`; `tool_call_metadata` has the model's response). Actions
of one response are one answer. A condensation removes events from the history and adds a summary: the history before it
is a branch of the same trace.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.formats import record_fields, session_tree
from tracegrad.data.formats.record_fields import Converted

NAME = "openhands"
_RESULTS = ("ObservationEvent", "UserRejectObservation", "AgentErrorEvent")
_NO_MESSAGE = ("CondensationRequest", "CondensationSummaryEvent", "ConversationStateUpdateEvent", "PauseEvent")
_NO_MESSAGE += ("LLMCompletionLogEvent", "TokenEvent", "StreamingDeltaEvent", "HookExecutionEvent")
_NO_MESSAGE += ("ConversationErrorEvent", "InterruptEvent")


def of_session(record: Any) -> list[dict[str, Any]] | None:
    """Convert the events of a conversation; no trace without an answer, None for other records.

    Raises:
        BadValueError: if an event in the middle is not JSON, or a value has the wrong type.
    """
    if (events := session_tree.lines_of(record, NAME)) is None:
        return None
    converted = session_tree.empty_result(record, "events")
    history = _History(converted)
    for event in events:
        history.add(event) if "kind" in event else history.add_old(event)
    for message in history.tree.messages:
        message["content"] = chat.text_of(message["content"])
    header = {"id": record["name"]} if record.get("name") else {}
    if (made := history.tree.record({**header, **history.tools}, converted.left_out)) is not None:
        converted.append(made)
    return converted


class _History:
    """The messages of a conversation while its events are read.

    `last` is the index of the last message, -1 if there is none.
    """

    def __init__(self, converted: Converted) -> None:
        self.tree, self.last, self.tools = session_tree.Tree(), -1, {}
        self._converted = converted
        self._answers: dict[str, int] = {}
        self._events: dict[Any, int] = {}
        """Index of the message of each event."""
        self._parts: dict[Any, list[Any]] = {}
        """Content of each event of a user."""
        self._copied = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event of the SDK."""
        kind, identity = event["kind"], event.get("id")
        if kind == "SystemPromptEvent":
            texts = [chat.as_mapping(event.get(name)).get("text") for name in ("system_prompt", "dynamic_context")]
            self._say({"role": "system", "content": "".join(str(each) for each in texts if each)}, identity)
            if event.get("tools"):
                self._converted.left_out["tool schemas: events name the tools alone"] += 1
        elif kind == "MessageEvent":
            message = chat.as_mapping(event.get("llm_message"))
            parts = record_fields.require_list(message.get("content"), "content")
            extended = record_fields.require_list(event.get("extended_content"), "extended_content")
            parts = [*parts, *extended]
            if event.get("source") == "agent" and message.get("role") == "assistant":
                self._answer(event.get("llm_response_id") or identity, identity, chat.text_of(parts), message)
            elif message.get("role") == "user":
                self._ask(parts, identity)
            else:
                self._say({"role": message.get("role"), "content": chat.text_of(parts)}, identity)
        elif kind == "ActionEvent":
            call = chat.as_mapping(event.get("tool_call"))
            thought = chat.text_of(record_fields.require_list(event.get("thought"), "thought"))
            tool_call = chat.tool_call(call.get("name"), call.get("id"), call.get("arguments") or "{}")
            self._answer(event.get("llm_response_id") or identity, identity, thought, event, tool_call)
        elif kind in _RESULTS:
            observation = chat.as_mapping(event.get("observation"))
            texts = [*(observation.get("content") or []), *(event.get("extended_content") or [])]
            rejected = event.get("rejection_reason")
            text = event.get("error") or (f"Action rejected: {rejected}" if rejected else chat.text_of(texts))
            self._say({"role": "tool", "tool_call_id": event.get("tool_call_id"), "content": text}, identity)
        elif kind == "Condensation":
            forgotten = record_fields.require_list(event.get("forgotten_event_ids"), "forgotten_event_ids")
            self._condense(set(forgotten), event, identity)
        elif kind not in _NO_MESSAGE:
            self._converted.left_out[f"events of the kind {kind!s:.40}"] += 1

    def add_old(self, event: Mapping[str, Any]) -> None:
        """Add an event of OpenHands 0.x."""
        args, identity = chat.as_mapping(event.get("args")), event.get("id")
        metadata = chat.as_mapping(event.get("tool_call_metadata"))
        action, source = event.get("action"), event.get("source")
        response = chat.as_mapping(metadata.get("model_response"))
        choices = record_fields.require_list(response.get("choices"), "choices")
        if action == "condensation":
            start, end = args.get("forgotten_events_start_id"), args.get("forgotten_events_end_id")
            forgotten = set(args.get("forgotten_event_ids") or ())
            if not forgotten and isinstance(start, int) and isinstance(end, int):
                forgotten = {each for each in self._events if isinstance(each, int) and start <= each <= end}
            self._condense(forgotten, args, identity)
        elif action is not None and source == "agent" and choices:
            message = chat.as_mapping(chat.as_mapping(choices[0]).get("message"))
            name = str(response.get("id") or identity)
            if name not in self._answers:
                self._answer(name, identity, message.get("content"), message, model=response.get("model"))
                self.tree.messages[self.last] |= chat.pick(message, ("tool_calls",))
            self._events[identity] = self._answers[name]
        elif action == "system":
            self._say({"role": "system", "content": args.get("content")}, identity)
            self.tools = chat.tools(record_fields.require_list(args.get("tools"), "tools"))
        elif action == "message" and source == "agent":
            self._answer(str(identity), identity, args.get("content"), {})
        elif action == "message":
            self._say({"role": "user", "content": [args.get("content")]}, identity)
        elif "observation" in event and metadata.get("tool_call_id"):
            result = {"role": "tool", "tool_call_id": metadata["tool_call_id"], "content": event.get("content")}
            self._say(result, identity)
        else:
            self._converted.left_out[f"events {action or event.get('observation')!s:.40} without a message"] += 1

    def _say(self, message: dict[str, Any], identity: Any) -> None:
        self.last = self._events[identity] = self.tree.add(message, self.last)

    def _ask(self, parts: list[Any], identity: Any) -> None:
        """Add a message of a user. It is joined with a message of a user before it, as the SDK sends them."""
        self._parts[identity] = parts
        if self.last >= 0 and self.tree.messages[self.last]["role"] == "user":
            self.tree.messages[self.last]["content"].extend(parts)
            self._events[identity] = self.last
        else:
            self._say({"role": "user", "content": [*parts]}, identity)

    def _answer(
        self, name: Any, identity: Any, content: Any, fields: Mapping[str, Any], call: Any = None, model: Any = None
    ) -> None:
        """Add the answer of a response, or one more tool call to it."""
        index = self._answers.get(str(name))
        if index is None:
            message = {"role": "assistant", "content": content or ""}
            blocks = record_fields.require_list(fields.get("thinking_blocks"), "thinking_blocks")
            thoughts = "".join(str(chat.as_mapping(each).get("thinking") or "") for each in blocks)
            if text := fields.get("reasoning_content") or thoughts:
                message["reasoning_content"] = text
            elif blocks or fields.get("responses_reasoning_item"):
                self._converted.left_out["parts of answers: hidden reasoning, of which there is no text"] += 1
            self._say(message, identity)
            index = self._answers[str(name)] = self.last
            self.tree.answers.append(session_tree.Answer(index, model))
        self._events[identity] = index
        if call is not None:
            self.tree.messages[index].setdefault("tool_calls", []).append(call)

    def _condense(self, forgotten: set[Any], fields: Mapping[str, Any], identity: Any) -> None:
        """Continue with a copy of the history without the forgotten events, and with the summary at its place.

        The offset of the summary counts the events that are left.
        """
        kept: list[tuple[Any, Any]] = [each for each in self._events.items() if each[0] not in forgotten]
        summary, offset = fields.get("summary"), fields.get("summary_offset")
        if summary and isinstance(offset, int):
            kept.insert(offset, (f"{identity}-summary", None))
            self._parts[f"{identity}-summary"] = [{"type": "text", "text": summary}]
        self._copied += len(kept)
        session_tree.check_context(self._copied)
        self.last, self._events = -1, {}
        moved: dict[Any, int] = {}
        for event, index in kept:
            if event in self._parts:
                self._ask(self._parts[event], event)
                continue
            if index not in moved:
                self.last = moved[index] = self.tree.add(self.tree.messages[index], self.last)
            self._events[event] = moved[index]
        self._answers = {name: moved[index] for name, index in self._answers.items() if index in moved}
