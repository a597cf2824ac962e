"""Join the input lines of a batch API with the lines of its output, by `custom_id`, in any order of the files.

Lines are written to an unlinked temporary file until all inputs are read; memory contains one index entry per line.
Sources: OpenAI's batch API ({"custom_id", "method", "url", "body"}, {"custom_id", "response", "error"}) and Anthropic's
message batches ({"custom_id", "params"}, {"custom_id", "result"}).
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracegrad.data import chat
from tracegrad.data.field_map import BadValueError, append_fields, parse_record
from tracegrad.data.trace import Line, format_location

_REQUESTS, _ANSWERS = ("body", "params"), ("response", "result", "error")


def is_batch_line(record: Any) -> bool:
    """Return whether a record is a line of a batch's input or output, and not both.

    >>> is_batch_line({"custom_id": "a", "body": {}}), is_batch_line({"custom_id": "a", "body": {}, "response": {}})
    (True, False)
    """
    fields = chat.as_mapping(record)
    if not isinstance(fields.get("custom_id"), str) or "messages" in fields:
        return False
    return _is_request(fields) != any(name in fields for name in _ANSWERS)


def as_call(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a joined line as {"request", "response"} with its other fields; another record is returned unchanged."""
    if "custom_id" not in record or not isinstance(record.get("body"), Mapping):
        return record
    response, result = chat.as_mapping(record.get("response")), chat.as_mapping(record.get("result"))
    answer = response.get("body", result.get("message"))
    return {**record, "request": record["body"], "response": answer} if isinstance(answer, Mapping) else record


def _is_request(record: Mapping[str, Any]) -> bool:
    return any(isinstance(record.get(name), Mapping) for name in _REQUESTS)


@dataclass(frozen=True)
class BatchLine:
    """One line to read: its place and line number, and its JSON.

    Args:
        place: index of its file.
        line: its line.
        raw: JSON of the line, with the fields of its request if there is one.
    """

    place: int
    line: Line
    raw: bytes


_Entry = tuple[int, Line, int, int]
"""(place, line, offset in the temporary file, length)."""


@dataclass
class Batches:
    """Collects lines with `add`, then yields the answers with their requests, in the order of the answers.

    Args:
        files: the name of each place.
    """

    files: Sequence[str]
    _requests: dict[str, _Entry] = field(default_factory=dict)
    _answers: dict[str, _Entry] = field(default_factory=dict)
    _ambiguous: set[str] = field(default_factory=set)
    _size: int = 0

    def __post_init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="tracegrad-batch-")  # noqa: SIM115

    def add(self, place: int, line: Line, raw: bytes, record: Mapping[str, Any]) -> None:
        """Add a line.

        Raises:
            BadValueError: if an earlier line on the same side has the same `custom_id`.
        """
        side, name = (self._requests, "request") if _is_request(record) else (self._answers, "answer")
        key = record["custom_id"]
        if key in side:
            self._ambiguous.add(key)
            place_of_first, line_of_first, *_ = side[key]
            first = format_location(self.files[place_of_first] if self.files else "", line_of_first)
            raise BadValueError(
                (
                    f"a second {name} with custom_id {key!r:.60}; the first is at {first}",
                    "Which request belongs to which answer would be guessed",
                    "Read each batch on its own: name one input file and its output file",
                )
            )
        self._file.write(raw)
        side[key] = place, line, self._size, len(raw)
        self._size += len(raw)

    def join(self) -> Iterator[BatchLine]:
        """Yield each answer, with its request if there is one; without any answer, each request.

        A request without an answer is left out, and so are the lines of an id that one side has twice. An answer
        without a request has no prompt.
        """
        for key, (place, line, *span) in (self._answers or self._requests).items():
            raw = self._text(*span)
            if key in self._ambiguous:
                continue
            if self._answers and (entry := self._requests.get(key)):
                request = parse_record(self._text(*entry[2:]))
                body = next(request[name] for name in _REQUESTS if isinstance(request.get(name), Mapping))
                raw = append_fields(raw, {**chat.without(request, *_REQUESTS, *parse_record(raw)), "body": body})
            yield BatchLine(place, line, raw)
        self._file.close()

    def _text(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(length)

    def unjoined(self) -> dict[str, int]:
        """Return the numbers of lines that are left out: requests without an answer, and lines of ambiguous ids."""
        requests, answers = self._requests.keys(), self._answers.keys()
        return {
            "requests without an answer": len(requests - answers - self._ambiguous) if answers else 0,
            "lines whose custom_id occurs again": sum((key in requests) + (key in answers) for key in self._ambiguous),
        }

    def lines(self) -> list[str]:
        """Return the counts as lines for a terminal."""
        if not self._answers:
            return []
        joined = len((self._requests.keys() & self._answers.keys()) - self._ambiguous)
        lines = [f"batch    {joined:,} answers have their request, by custom_id"]
        lines += [f"         {count:,} {name} are left out" for name, count in self.unjoined().items() if count]
        if alone := len(self._answers.keys() - self._requests.keys() - self._ambiguous):
            lines.append(f"         {alone:,} answers have no request: their prompt is unknown")
        return lines
