"""Convert sessions of Claude Code: one trace for the conversation, and one for each subagent (sidechain).

Source: no package writes these files; the schema is that of claude-code-log 1.7 (`models.py`, `dag.py`) and
claude-agent-sdk 0.2. A line names the line that it continues (`parentUuid`). The blocks of one answer are on several
lines with one `message.id`, and results of parallel tools continue different ones of them. After a compaction the lines
start again from a summary, and after a rewind a line continues an earlier one: these are branches of the same trace.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tracegrad.data import chat
from tracegrad.data.formats import anthropic, session_tree
from tracegrad.data.formats.record_fields import Converted

NAME = "claude_code"
KEYS = (*session_tree.KEYS, "parentUuid")
_SYNTHETIC = "<synthetic>"
_FINISH = {"max_tokens": "length", "model_context_window_exceeded": "length"}


def of_session(record: Any) -> list[dict[str, Any]] | None:
    """Convert the lines of a session; no trace without an answer, None for other records.

    Raises:
        BadValueError: if a line in the middle of the file is not JSON, or the record is a single line.
    """
    if (
        lines := session_tree.lines_of(record, NAME, {"parentUuid", "sessionId"} <= chat.as_mapping(record).keys())
    ) is None:
        return None
    converted = session_tree.empty_result(record)
    threads: dict[Any, _Thread] = {}
    thread_of: dict[str, Any] = {}
    own = next((line["sessionId"] for line in reversed(lines) if line.get("sessionId")), None)
    for line in lines:
        uuid, parent = line.get("uuid"), line.get("parentUuid")
        if not isinstance(uuid, str) or uuid in thread_of:
            continue
        key = None
        if line.get("isSidechain"):
            key = line.get("agentId") or thread_of.get(str(parent)) or uuid
        thread_of[uuid] = key
        threads.setdefault(key, _Thread()).add(line, line.get("sessionId") == own, converted)
    for key, thread in threads.items():
        name = f"{own}-{key}" if key else own
        if (made := thread.tree(converted).record({"id": name}, converted.left_out)) is not None:
            converted.append(made)
            converted.left_out["system prompts and tool schemas: these sessions do not have them"] += 1
    return converted


@dataclass
class _Node:
    """A line, or the lines of one answer or of the results of its tools.

    `before` is the node that it continues. `is_known` is false if the file does not have all lines before it.
    """

    before: "_Node | None"
    is_known: bool = True
    messages: list[dict[str, Any]] = field(default_factory=list)
    answer: Mapping[str, Any] | None = None
    results: "_Node | None" = None
    blocks: list[Any] = field(default_factory=list)
    calls: set[Any] = field(default_factory=set)
    last: int = -1


_MOST_BETWEEN = 64
"""Most nodes between two lines of one answer, such as results of its tools."""


def _follows(node: _Node | None, earlier: _Node) -> bool:
    """Return whether a node is another one, or continues it after at most `_MOST_BETWEEN` others."""
    for _ in range(_MOST_BETWEEN):
        if node is None or node is earlier:
            break
        node = node.before
    return node is earlier


class _Thread:
    """The lines of the conversation or of one subagent."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._node_of: dict[str, _Node] = {}
        self._answers: dict[str, _Node] = {}

    def add(self, line: Mapping[str, Any], is_own: bool, converted: Converted) -> None:
        """Add a line after the one that it continues."""
        parent, message = line.get("parentUuid"), chat.as_mapping(line.get("message"))
        before = self._node_of.get(str(parent))
        if before is None and parent is not None:
            before = self._new(None)
            before.is_known = False
        kind, node = line.get("type"), None
        if kind == "assistant" and message and line.get("isApiErrorMessage"):
            converted.left_out["messages of errors of the API"] += 1
        elif kind == "assistant" and message:
            node = self._answer(line, message, before, is_own, converted)
        elif kind == "user" and message and (line.get("isCompactSummary") or not line.get("isVisibleInTranscriptOnly")):
            node = self._input(anthropic.convert_message({**chat.pick(message, ("content",)), "role": "user"}), before)
        elif kind == "attachment":
            converted.left_out["attachments (files, reminders, hooks): their text in the prompt is not recorded"] += 1
        # A line without a message is passed through: what continues it continues the line before it.
        self._node_of[line["uuid"]] = node or before or self._new(None)

    def tree(self, converted: Converted) -> session_tree.Tree:
        """Return the messages of all nodes, and the answers."""
        tree = session_tree.Tree()
        for node in self._nodes:
            index = -1 if node.before is None else node.before.last
            if node.answer is not None:
                [said] = anthropic.convert_message({"role": "assistant", "content": node.blocks})
                node.messages = [said]
                kinds = [each.get("type") for each in map(chat.as_mapping, node.blocks)]
                thoughts = [each for each in map(chat.as_mapping, node.blocks) if each.get("type") == "thinking"]
                if "redacted_thinking" in kinds or any(not each.get("thinking") for each in thoughts):
                    converted.left_out["parts of answers: hidden reasoning, of which there is no text"] += 1
            for each in node.messages:
                index = tree.add(each, index)
            node.last = index
            node.is_known &= node.before.is_known if node.before else not node.answer
            if node.answer and not node.is_known:
                converted.left_out["answers whose earlier lines are not in the file: they are context"] += 1
            elif node.answer:
                reason = node.answer.get("stop_reason")
                finish = _FINISH.get(str(reason), reason)
                tree.answers.append(session_tree.Answer(index, node.answer.get("model"), finish))
        return tree

    def _new(self, before: _Node | None) -> _Node:
        self._nodes.append(_Node(before))
        return self._nodes[-1]

    def _answer(
        self, line: Mapping[str, Any], message: Mapping[str, Any], before: Any, is_own: bool, converted: Converted
    ) -> _Node:
        """Return the node of an answer, with the blocks of this line. An empty `answer` means that it is context."""
        name, content = str(message.get("id") or line["uuid"]), message.get("content")
        node = self._answers.get(name)
        is_copy = node is not None and before is not None and before.is_known and not _follows(before, node)
        if node is None or is_copy:
            node = self._answers[name] = self._new(before)
            if is_copy:
                converted.left_out["answers that an earlier branch has too: they are context"] += 1
            elif not is_own:
                converted.left_out["answers copied from an earlier session: they are context"] += 1
            elif message.get("model") == _SYNTHETIC:
                converted.left_out["messages that Claude Code wrote in the model's place: they are context"] += 1
            is_sampled = is_own and not is_copy and message.get("model") != _SYNTHETIC
            node.answer = {"model": message.get("model")} if is_sampled else {}
        node.blocks += content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        if node.answer and message.get("stop_reason"):
            node.answer = {**node.answer, "stop_reason": message["stop_reason"]}
        return node

    def _input(self, messages: list[dict[str, Any]], before: _Node | None) -> _Node:
        """Return the node of a message of a user or a tool. The results of the tools of one answer are one node."""
        if before is not None and before.answer is not None and any(chat.role(each) == "tool" for each in messages):
            calls = {each.get("tool_call_id") for each in messages if chat.role(each) == "tool"}
            known = before.results
            if known is None:
                known = before.results = self._new(before)
            if calls.isdisjoint(known.calls):
                known.calls |= calls
                known.messages += messages
                return known
        node = self._new(before)
        node.messages = messages
        return node
