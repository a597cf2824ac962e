"""Convert rollouts of Codex: one trace for each session file.

Source: openai/codex `protocol/src/protocol.rs` (RolloutLine) and `models.rs` (ResponseItem), `rollout/src/policy.rs`
(the items that are kept) and `core/src/session/rollout_reconstruction.rs` (how a history is rebuilt). Items of the
model that follow one another are one answer. A compaction replaces the history, and a rollback removes its last turns:
the history before it is a branch of the same trace. Reasoning is encrypted or summarized, so its text is unknown.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.formats import record_fields, session_tree
from tracegrad.data.formats.record_fields import Converted

NAME = "codex"
KEYS = (*session_tree.KEYS, "payload")
_CALLS = ("function_call", "custom_tool_call", "local_shell_call", "tool_search_call", "web_search_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "tool_search_output")
_CONTEXT = ("<environment_context>", "# AGENTS.md instructions", "<user_instructions>", "<user_shell_command>")
_CONTEXT += ("<turn_aborted>", "<skill>", "<subagent_notification>", "<permissions instructions>")
"""Starts of user messages that Codex adds itself: they do not begin a turn."""
_LINES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_NOT_MESSAGES = ("ghost_snapshot", "compaction_trigger", "other")


def of_session(record: Any) -> list[dict[str, Any]] | None:
    """Convert the lines of a rollout; no trace without an answer, None for other records.

    Raises:
        BadValueError: if a line in the middle of the file is not JSON, a value has the wrong type, or the record is a
            single line.
    """
    if (
        lines := session_tree.lines_of(
            record, NAME, chat.as_mapping(record).get("type") in _LINES and "payload" in record
        )
    ) is None:
        return None
    converted = session_tree.empty_result(record)
    session = _Session(converted)
    for line in lines:
        session.add(line)
    if (made := session.tree.record(session.header(), converted.left_out)) is not None:
        converted.append(made)
        converted.left_out["tool schemas: a rollout does not have them"] += 1
    return converted


class _Session:
    """The state of a session while its lines are read.

    `last` is the index of the last message of the history, -1 if it is empty. `open` is the answer that the next item
    of the model belongs to.
    """

    def __init__(self, converted: Converted) -> None:
        self.tree, self.last = session_tree.Tree(), -1
        self._converted, self._open = converted, None
        self._metas: list[Mapping[str, Any]] = []
        self._model: Any = None
        self._is_rebuilt = False
        self._turn_of: list[int] = []
        """For each message the index of the one that began its turn, -1 for none."""

    def header(self) -> dict[str, Any]:
        """Return the id of the trace."""
        return {"id": str(self._metas[0].get("id") or self._metas[0].get("session_id"))} if self._metas else {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Add one line."""
        payload, kind = chat.as_mapping(line.get("payload")), line.get("type")
        if kind == "session_meta":
            # Further ones are those of the session that this one was forked from.
            if not self._metas:
                text = chat.as_mapping(payload.get("base_instructions")).get("text") or payload.get("instructions")
                if isinstance(text, str) and text:
                    self._add({"role": "system", "content": text})
                else:
                    self._count("system prompts that are not recorded")
            self._metas.append(payload)
        elif kind == "turn_context":
            self._model = payload.get("model", self._model)
        elif kind == "compacted":
            self._compact(payload)
        elif kind == "event_msg" and payload.get("type") == "thread_rolled_back":
            self._roll_back(int(payload["num_turns"]))
        elif kind == "response_item":
            self._item(payload, is_new=True)
        elif kind != "event_msg":
            self._count(f"lines of the type {kind!r:.40}: later answers may have seen them")

    def _count(self, reason: str) -> None:
        self._converted.left_out[reason] += 1

    def _add(self, message: dict[str, Any]) -> None:
        turn = self._turn_of[self.last] if self.last >= 0 else -1
        self.last, self._open = self.tree.add(message, self.last), None
        self._turn_of.append(self.last if self._begins_turn(message) else turn)

    def _item(self, item: Mapping[str, Any], is_new: bool) -> None:
        kind = item.get("type")
        if kind in _NOT_MESSAGES:
            return
        if kind in _OUTPUTS:
            output = item.get("output", item.get("tools"))
            text = chat.text_of(output) if isinstance(output, (str, list)) else chat.arguments_json(output)
            self._add({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind == "message" and item.get("role") != "assistant":
            self._add({"role": item.get("role"), "content": chat.text_of(item.get("content"))})
        elif kind in ("message", "reasoning", *_CALLS):
            self._answer(item, is_new)
        elif kind in ("compaction", "compaction_summary", "context_compaction"):
            self._count("summaries of compactions that are encrypted: later answers saw them")
        else:
            self._count(f"items of the type {kind!r:.40}")

    def _answer(self, item: Mapping[str, Any], is_new: bool) -> None:
        if self._open is None:
            self._add({"role": "assistant", "content": ""})
            self._open = self.last
            if not is_new:
                pass  # A copy in a replaced history.
            elif len(self._metas) > 1 and self._metas[0].get("forked_from_id"):
                self._count("answers copied from the session that this one was forked from: they are context")
            elif self._is_rebuilt:
                self._count("answers after a compaction that does not record its history: they are context")
            else:
                self.tree.answers.append(session_tree.Answer(self.last, self._model))
        message = self.tree.messages[self._open]
        kind = item.get("type")
        if kind == "reasoning":
            content = record_fields.require_list(item.get("content"), "reasoning.content")
            text = "".join(str(chat.as_mapping(each).get("text", "")) for each in content)
            if text:
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            elif is_new:
                self._count("reasoning that is encrypted or a summary: its text is unknown")
        elif kind == "message":
            message["content"] += str(chat.text_of(item.get("content")) or "")
        else:
            name = item.get("name") or str(kind).removesuffix("_call")
            arguments = next((item[key] for key in ("arguments", "input", "action") if item.get(key) is not None), {})
            identity = item.get("call_id") or item.get("id")
            message.setdefault("tool_calls", []).append(chat.tool_call(name, identity, arguments))

    def _compact(self, payload: Mapping[str, Any]) -> None:
        """Replace the history. Without a recorded one, Codex rebuilt it from parts of the old one and the summary."""
        items = payload.get("replacement_history")
        system = self.tree.path(self.last)[:1] if self.last >= 0 else []
        is_system = system and chat.role(self.tree.messages[system[0]]) == "system"
        self.last, self._open = system[0] if is_system else -1, None
        self._is_rebuilt = items is None
        if items is None:
            self._add({"role": "user", "content": str(payload.get("message"))})
        for item in record_fields.require_list(items, "replacement_history"):
            self._item(chat.as_mapping(item), is_new=False)
        self._open = None

    def _roll_back(self, turns: int) -> None:
        """Remove the last turns of the history: from the user message that began them, and what Codex put before it."""
        before = self.last
        while turns > 0 and before >= 0 and (begin := self._turn_of[before]) >= 0:
            before, turns = self.tree.before[begin], turns - 1
        if before == self.last:
            return
        # The context of the first turn stays, and that of a removed one goes with it.
        while before >= 0 and self._turn_of[before] not in (-1, before):
            if chat.role(self.tree.messages[before]) not in ("user", "developer"):
                break
            before = self.tree.before[before]
        self.last, self._open = before, None

    def _begins_turn(self, message: Mapping[str, Any]) -> bool:
        text = message.get("content")
        return chat.role(message) == "user" and not (isinstance(text, str) and text.lstrip().startswith(_CONTEXT))
