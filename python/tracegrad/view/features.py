"""What the list shows of a trace, and what its search reads: numbers, tags and text, from its record alone.

Here are rows for `database` from a batch of `Traces`; with a tokenizer also the tier and the drift of `align`. Called
by `indexer`.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.align import align
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.codes import NO_TIER, TIERS
from tracegrad.data.trace import Traces
from tracegrad.view.database import Row

_HANDLE = re.compile("blake3:([0-9a-f]{64})")  # what reading puts in the place of a picture
_HEAD = 160  # characters of the line in the list
_MOST_TEXT = 4 << 20  # characters of one trace that are searched


class Codes:
    """Numbers for names, in the order in which they come."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._codes = {name: code for code, name in enumerate(names)}

    def of(self, name: str) -> int:
        """The number of a name, a new one where it was not seen before."""
        return self._codes.setdefault(name, len(self._codes))


def rows_of(traces: Traces, source: int, first: int, groups: Codes, tokenizer: Tokenizer | None) -> list[Row]:
    """Rows of a batch of traces.

    Args:
        source: number of the file that they are of.
        first: place of the first one in it.
        groups: gives group names their codes; a trace without a group is one of its own.
        tokenizer: to align with; without one `tier` says what is recorded, and `drift` is not known.
    """
    table = _Generations(traces)
    tiers, reasons = _aligned(traces, tokenizer) if tokenizer is not None else (table.tier, {})
    out: list[Row] = []
    for row in range(len(traces)):
        trace = traces[row]
        text, head, tools, calls = _said(trace.pool)
        group = trace.group
        name = f"{source}:{first + row} alone" if group is None else group
        found = reasons.get(row, ())
        tier = tiers[row]
        numbers = (
            math.nan if trace.reward is None else trace.reward,
            table.tokens[row],
            table.turns[row],
            len(trace.pool),
            calls,
            len(text),
            tier,
            math.nan if tokenizer is None else len(found),
            table.version[row],
            groups.of(name),
            source,
        )
        tags = {f"tool:{tool}" for tool in tools} | {f"drift:{reason}" for reason in found}
        if not math.isnan(tier):
            tags.add(f"tier:{TIERS[int(tier)]}")
        out.append(Row(trace.id, group or "", head, first + row, text[:_MOST_TEXT], numbers, tuple(tags), trace.record))
    return out


class _Generations:
    """What the generations of each trace have together, [R] each."""

    def __init__(self, traces: Traces) -> None:
        found, count = traces.core.columns(), len(traces)
        owner = np.asarray(found["trace"])
        self.turns = np.bincount(owner, minlength=count).astype(float)
        self.tokens = np.bincount(owner, np.asarray(found["tokens"], float), minlength=count)
        version = np.asarray(found["version"], float)
        self.version = _least(owner, np.where(version < 0, math.nan, version), count)
        has_ids, has_prompt = np.asarray(found["ids"]) > 0, np.asarray(found["prompt_ids"]) > 0
        listed = np.asarray(found["logprobs"]) > 0
        tier = np.where(has_ids & has_prompt, 0.0, np.where(has_ids, 1.0, np.where(listed, 2.0, 6.0)))
        self.tier = -_least(owner, -tier, count)


def _least(owner: NDArray[Any], values: NDArray[Any], count: int) -> NDArray[np.float64]:
    """[count] the least of each owner's values, NaN without any."""
    out = np.full(count, np.inf)
    known = ~np.isnan(values)
    np.minimum.at(out, owner[known], values[known])
    return np.where(np.isinf(out), math.nan, out)


def _aligned(traces: Traces, tokenizer: Tokenizer) -> tuple[NDArray[np.float64], dict[int, set[str]]]:
    """Worst tier of each trace, and names of its drift reasons; a trace that cannot be aligned has no tier."""
    sequences = align(traces, tokenizer, on_error="skip", lenient=True)
    lost = set(sequences.drift.left_out)
    kept = [row for row in range(len(traces)) if row not in lost]
    tier, reasons = of_sequences(sequences)
    out = np.full(len(traces), math.nan)
    out[kept] = tier
    named = {kept[row]: found for row, found in reasons.items()}
    return out, named | {row: {"could not be aligned"} for row in lost}


def of_sequences(sequences: Sequences) -> tuple[NDArray[np.float64], dict[int, set[str]]]:
    """[R] worst tier, NaN without a sampled token, and the names of each trace's drift reasons."""
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    tier = np.where(sequences.tier == NO_TIER, math.nan, sequences.tier.astype(float))
    reasons: dict[int, set[str]] = {}
    for row, code in zip(sequences.drift.trace.tolist(), sequences.drift.reason.tolist(), strict=True):
        reasons.setdefault(row, set()).add(sequences.drift.reasons[code])
    return -_least(owner, -tier, sequences.traces), reasons


def _said(messages: list[dict[str, Any]]) -> tuple[str, str, set[str], int]:
    """All that is said, the beginning of the last user message, the names of called tools, and how many calls."""
    parts: list[str] = []
    head, tools, calls = "", set(), 0
    for message in messages:
        content = message_text(message)
        if message.get("role") == "user" or not head:
            head = content or head
        parts.append(content)
        for name, arguments in tool_calls(message):
            tools.add(name[:80])
            calls += 1
            parts.append(f"{name}({arguments})")
    return "\n".join(parts), " ".join(head[: 4 * _HEAD].split())[:_HEAD], tools, calls


def message_text(message: Mapping[str, Any]) -> str:
    """Reasoning and content of a message as text; parts that are no text by their kind."""
    return "\n".join(text for text, _ in message_parts(message))


def message_parts(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The texts of `message_text`, each with the digest (64 hexadecimal digits) of the picture that it stands for."""
    said = [message.get(name) for name in ("reasoning_content", "reasoning")]
    parts = [(next((text for text in said if isinstance(text, str) and text), ""), "")]
    content = message.get("content")
    if isinstance(content, str):
        parts.append((content, ""))
    elif isinstance(content, list):
        for part in content:
            fields = part if isinstance(part, Mapping) else {"text": part}
            text, handle = fields.get("text"), _HANDLE.fullmatch(str(fields.get("image")))
            kind = fields.get("type", "a part")
            parts.append((text, "") if isinstance(text, str) else (f"[{kind}]", handle[1] if handle else ""))
    elif content is not None:
        parts.append((json.dumps(content, ensure_ascii=False), ""))
    return [part for part in parts if part[0]]


def tool_calls(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, arguments as they were written) of the calls of a message."""
    found = []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        inner = call.get("function", call) if isinstance(call, Mapping) else {}
        inner = inner if isinstance(inner, Mapping) else {}
        arguments = inner.get("arguments", "")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found.append((str(inner.get("name", "")), text))
    return found
