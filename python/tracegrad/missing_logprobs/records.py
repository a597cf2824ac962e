"""Write the records of traces with their filled logprobs: each record unchanged, and one key more."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tracegrad.data.trace import Trace, Traces, parse_json
from tracegrad.errors import FormatError

KEY = "tracegrad_filled"
"""The key of a record that has what was filled."""
_KEY_IN_RECORD = f'"{KEY}":'.encode()


@dataclass(frozen=True)
class FilledCall:
    """The filled logprobs of one generation.

    Args:
        ids: its sampled ids.
        logprobs: of each, nats; NaN where none was filled.
        kind: "raw" or "processed".
        temperature: at which they were measured.
        kept: for each token the ids from which the sampler drew it, None for the whole vocabulary; None if there is no
            such token.
        truncation: the top_p, top_k and min_p that were assumed, by name; without those that have no effect.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    kind: str
    temperature: float
    kept: Sequence[Sequence[int] | None] | None = None
    truncation: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as the record has it, with null for NaN."""
        logprobs = [None if math.isnan(value) else value for value in self.logprobs]
        value = {"ids": list(self.ids), "logprobs": logprobs, "kind": self.kind, "temperature": self.temperature}
        value |= self.truncation
        return value if self.kept is None else {**value, "kept": self.kept}


def filled_record(trace: Trace, calls: Mapping[int, FilledCall], provenance: Mapping[str, Any]) -> bytes:
    """Return the record of a trace as one line, with the key `tracegrad_filled`; without a call, the record as it is.

    Args:
        trace: the trace. Its record is copied byte for byte, except for line breaks between tokens.
        calls: filled logprobs by the number of the generation.
        provenance: of the values: model, dtype, engine.

    Raises:
        FormatError: if the record is not a JSON object.

    >>> trace = Trace.from_messages([{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}])
    >>> line = filled_record(trace, {0: FilledCall([7, 2], [-0.5, float("nan")], "processed", 1.0)}, {"model": "ab12"})
    >>> json.loads(line)["tracegrad_filled"]["calls"][0]["logprobs"]
    [-0.5, None]
    """
    raw = one_line(trace.record)
    if not calls:
        return raw
    if not raw.startswith(b"{") or not raw.endswith(b"}"):
        raise FormatError(
            f"TG-FILL-001: {trace.id}: the record is not a JSON object, so that it cannot get the key {KEY!r}. Write "
            'its messages as {"messages": [...]}.'
        )
    listed = [calls[number].as_dict() if number in calls else None for number in range(max(calls) + 1)]
    value = json.dumps({**provenance, "calls": listed}, separators=(",", ":")).encode()
    inside = raw[:-1].rstrip()
    return inside + (b"" if inside == b"{" else b",") + _KEY_IN_RECORD + value + b"}"


def one_line(record: bytes) -> bytes:
    """Return a record on one line. Line breaks are only between its tokens, because JSON escapes them in strings."""
    return record.replace(b"\r", b" ").replace(b"\n", b" ").strip()


def without_filled(trace: Trace) -> Trace:
    """Return the trace without the logprobs of an earlier fill, which are then measured again."""
    raw = trace.record
    start = raw.rfind(_KEY_IN_RECORD)
    if start < 0:
        return trace
    rest = one_line(raw[:start]).removesuffix(b",") + b"}"
    try:
        is_last = isinstance(parse_json(raw[start + len(_KEY_IN_RECORD) :].rstrip()[:-1]), dict)
        parse_json(rest)
    except (ValueError, RecursionError):
        is_last = False
    if not is_last:  # The key is within another object, or stands before others.
        record = parse_json(raw)
        if not isinstance(record, dict) or KEY not in record:
            return trace
        rest = json.dumps({key: value for key, value in record.items() if key != KEY}).encode()
    return Traces.from_records([rest])[0]
