"""Build the traces of agents' sessions: a tree of messages, since a history may be rewritten or continued twice.

`session_files` makes one record of a session: {"session_file": producer, "name": ..., "lines": [...]}.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tracegrad.data import chat
from tracegrad.data.field_map import BadValueError
from tracegrad.data.formats import record_fields

KEYS = ("session_file",)
MOST_CONTEXT = 4_000_000
"""Most messages in the histories of all answers outside the last conversation of a session."""


def lines_of(record: Any, producer: str, is_line: bool = False) -> list[Mapping[str, Any]] | None:
    """Return the lines of a session record of a producer, None for other records.

    Args:
        record: the parsed record.
        producer: the name under `session_file`.
        is_line: whether the record is a single line of such a session, read without its file.

    Raises:
        BadValueError: if a line in the middle of the file is not JSON, so that a part of the conversation is unknown,
            or if the record is a single line.
    """
    if is_line:
        problem = f"it is one line of a session of {producer}"
        why = "The lines of a session are one conversation, and only a file (not a stream) is read as one"
        raise BadValueError((problem, why, "Pass the path of the session's file or of its folder"))
    if chat.as_mapping(record).get("session_file") != producer or not isinstance(record.get("lines"), list):
        return None
    broken = record.get("broken") or []
    total = len(record["lines"]) + len(broken)
    if lost := [each for each in broken if each != total]:
        problem = f"line {lost[0]:,} of the session is not JSON"
        raise BadValueError((problem, "Later answers may have seen it", "Repair the line, or leave the file out"))
    return [chat.as_mapping(line) for line in record["lines"]]


def empty_result(record: Mapping[str, Any], things: str = "lines") -> record_fields.Converted:
    """Return a result without records. It counts the last line of a session (or other `things`) if it is cut off."""
    converted = record_fields.Converted()
    if record.get("broken"):
        converted.left_out[f"last {things} that are cut off"] += 1
    return converted


def check_context(count: int) -> None:
    """Check the number of messages that the histories of a session repeat.

    Raises:
        BadValueError: if there are more than `MOST_CONTEXT`.
    """
    if count > MOST_CONTEXT:
        raise record_fields.size_refusal(f"branches that repeat more than {MOST_CONTEXT:,} messages in all")


@dataclass
class Answer:
    """An answer of the model: the index of its message, the model, and the finish reason if it is known."""

    message: int
    model: Any = None
    finish_reason: Any = None


@dataclass
class Tree:
    """Messages of a session, each with the index of the one before it (-1 for none), and the answers among them.

    A rewritten or twice continued history is a branch.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def add(self, message: dict[str, Any], before: int) -> int:
        """Add a message after the one with the index `before`, and return its index."""
        self.messages.append(message)
        self.before.append(before)
        return len(self.messages) - 1

    def path(self, index: int) -> list[int]:
        """Return the indices of the messages up to one, which is included."""
        path = []
        while index >= 0:
            path.append(index)
            index = self.before[index]
        return path[::-1]

    def record(self, header: Mapping[str, Any], left_out: dict[str, int]) -> dict[str, Any] | None:
        """Return the native record of the session; None without answers.

        The conversation is the path of the last answer. Answers of other models than the most frequent are context.

        Raises:
            BadValueError: if the branches have too many messages in all.
        """
        if not self.answers:
            return None
        models = Counter(each.model for each in self.answers if each.model is not None)
        model = max(models, key=models.__getitem__, default=None)
        answers = [each for each in self.answers if each.model in (model, None)]
        if others := len(self.answers) - len(answers):
            key = "answers of other models than the most frequent one of their session: they are context"
            left_out[key] = left_out.get(key, 0) + others
        main = self.path(answers[-1].message)
        is_main = set(main)
        paths: dict[int, list[int]] = {}
        count = 0
        for each in answers:
            if each.message not in is_main:
                paths[each.message] = self.path(each.message)
                check_context(count := count + len(paths[each.message]))
        outside = sorted({index for path in paths.values() for index in path} - is_main)
        place = {index: at for at, index in enumerate([*main, *outside])}
        converted = chat.mark_not_sampled([self.messages[index] for index in (*main, *outside)])
        for call, each in enumerate(answers):
            at = place[each.message]
            finish = {"finish_reason": each.finish_reason} if isinstance(each.finish_reason, str) else {}
            context = {"context": [place[index] for index in paths[each.message][:-1]]} if each.message in paths else {}
            generation = {"call": call, **finish, **context}
            converted[at] = {**chat.without(converted[at], "sampled"), "generation": generation}
        extra = {"extra_messages": converted[len(main) :]} if outside else {}
        named = {"model": model} if isinstance(model, str) else {}
        return {"format": "tracegrad/1", **chat.PARTIAL, **header, **named, "messages": converted[: len(main)], **extra}
