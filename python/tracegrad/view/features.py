"""Extract index entries from traces: numbers, tags and text, from the record alone.

`rows_of` returns rows for `database` from a batch of `Traces`. With a tokenizer, they include the level and the
mismatches of `align`.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.align import align
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.codes import FILLED, LEVELS, NO_LEVEL, SAMPLED
from tracegrad.data.trace import Traces
from tracegrad.view.database import Row
from tracegrad.view.meanings import NOT_ALIGNABLE

_HANDLE = re.compile("blake3:([0-9a-f]{64})")  # Reading replaces an image by this handle.
_HEAD = 160  # Characters of the line in the list.
_LONG_START = 40  # A shared start of a message is cut if it is at least this long.
_MOST_COMPARED = 1 << 16  # Characters of user messages that are compared for a title.
_NEXT = "\x1f"  # Between two user messages.
_MOST_TEXT = 4 << 20  # Searchable characters per trace.


class Codes:
    """Integer codes for names, in order of first use."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._codes = {name: code for code, name in enumerate(names)}

    def of(self, name: str) -> int:
        """Return the code of a name. A new name gets the next code."""
        return self._codes.setdefault(name, len(self._codes))


class Titles:
    """Titles of traces: the first user message that differs between them, without the start that all share.

    The shared start is that of the traces so far, so a file of one prompt has the prompt as title.

    >>> titles = Titles()
    >>> titles.of([["What is 4+4?", "And 6+6?"], ["What is 1+1?"]])
    ['What is 4+4?', 'What is 1+1?']
    >>> task = "You fix a bug in a repository, and you run its tests. The issue is: "
    >>> Titles().of([["Hi", task + "a crash"], ["Hi", task + "the wrong date"]])
    ['… a crash', '… the wrong date']
    """

    def __init__(self) -> None:
        self._shared: str | None = None

    def of(self, user_messages: list[list[str]]) -> list[str]:
        """Return the titles of a batch of traces from the texts of their user messages."""
        texts = ["".join(message + _NEXT for message in messages)[:_MOST_COMPARED] for messages in user_messages]
        earlier = [] if self._shared is None else [self._shared]
        shared = os.path.commonprefix([*filter(None, texts), *earlier])  # noqa: RUF071
        self._shared = shared
        start = shared.rfind(_NEXT) + 1
        word = max(shared.rfind(space) for space in " \n" + _NEXT) + 1
        mark, start = ("… ", word) if word - start >= _LONG_START else ("", start)
        titles = []
        for text, messages in zip(texts, user_messages, strict=True):
            # Nothing differs if all have the same messages, or if the others continue.
            title = "" if text == shared else text[start:].split(_NEXT)[0]
            title = mark + title if title else messages[0] if messages else ""
            titles.append(" ".join(title[: 4 * _HEAD].split())[:_HEAD])
        return titles


def rows_of(
    traces: Traces, source: int, first: int, groups: Codes, tokenizer: Tokenizer | None, titles: Titles
) -> list[Row]:
    """Return the rows of a batch of traces.

    Args:
        source: number of their source.
        first: index of the first one in the source.
        groups: assigns codes to group names. A trace without a group gets a group of its own.
        tokenizer: used for alignment. Without one, `level` and `length` follow from the recorded fields, and
            `mismatches` is NaN.
        titles: makes the titles.
    """
    table = _Generations(traces)
    levels, lengths, reasons = _aligned(traces, tokenizer) if tokenizer is not None else (table.level, table.tokens, {})
    out: list[Row] = []
    pools = [trace.pool for trace in traces]
    for row, head in enumerate(titles.of([_user_texts(pool) for pool in pools])):
        trace = traces[row]
        text, tools, calls = _text_features(pools[row])
        group = trace.group
        name = f"{source}:{first + row} alone" if group is None else group
        trace_reasons = reasons.get(row, ())
        level = levels[row]
        numbers = (
            math.nan if trace.reward is None else trace.reward,
            lengths[row],
            table.turns[row],
            len(trace.pool),
            calls,
            len(text),
            level,
            math.nan if tokenizer is None else len(trace_reasons),
            table.version[row],
            groups.of(name),
            source,
        )
        tags = {f"tool:{tool}" for tool in tools} | {f"mismatch:{reason}" for reason in trace_reasons}
        if not math.isnan(level):
            tags.add(f"level:{LEVELS[int(level)]}")
        out.append(Row(trace.id, group or "", head, first + row, text[:_MOST_TEXT], numbers, tuple(tags), trace.record))
    return out


class _Generations:
    """Values aggregated over the generations of each trace, [R] each."""

    def __init__(self, traces: Traces) -> None:
        columns, count = traces.core.columns(), len(traces)
        owner = np.asarray(columns["trace"])
        self.turns = np.bincount(owner, minlength=count).astype(float)
        tokens = np.asarray(columns["tokens"], float)
        is_text = (tokens <= 0) & (np.asarray(columns["ids"]) < 0) & (np.asarray(columns["logprobs"]) < 0)
        self.tokens = np.bincount(owner, np.where(is_text, math.nan, tokens), minlength=count)
        version = np.asarray(columns["version"], float)
        self.version = _least(owner, np.where(version < 0, math.nan, version), count)
        has_ids, has_prompt = np.asarray(columns["ids"]) > 0, np.asarray(columns["prompt_ids"]) > 0
        has_logprobs = np.asarray(columns["logprobs"]) > 0
        level = np.where(has_ids & has_prompt, 0.0, np.where(has_ids, 1.0, np.where(has_logprobs, 2.0, 6.0)))
        level = np.where(np.asarray(columns["filled"]) > 0, float(FILLED), level)
        self.level = -_least(owner, -level, count)


def _least(owner: NDArray[Any], values: NDArray[Any], count: int) -> NDArray[np.float64]:
    """Return [count] the minimum of each owner's values, NaN without any."""
    out = np.full(count, np.inf)
    valid = ~np.isnan(values)
    np.minimum.at(out, owner[valid], values[valid])
    return np.where(np.isinf(out), math.nan, out)


def _aligned(
    traces: Traces, tokenizer: Tokenizer
) -> tuple[NDArray[np.float64], NDArray[np.float64], dict[int, set[str]]]:
    """Return the worst level of each trace, its number of sampled tokens, and the names of its mismatch reasons.

    A trace that cannot be aligned has level and length NaN.
    """
    sequences = align(traces, tokenizer, on_error="skip", allow_unknown_ids=True)
    lost = set(sequences.alignment_report.left_out)
    kept = [row for row in range(len(traces)) if row not in lost]
    levels, reasons = of_sequences(sequences)
    out, lengths = np.full((2, len(traces)), math.nan)
    out[kept], lengths[kept] = levels, sampled_tokens(sequences)
    reasons_by_row = {kept[row]: names for row, names in reasons.items()}
    return out, lengths, reasons_by_row | {row: {NOT_ALIGNABLE} for row in lost}


def sampled_tokens(sequences: Sequences) -> NDArray[np.float64]:
    """Return [R] the number of sampled tokens. A turn counts once, although later branches repeat it."""
    position = np.flatnonzero(sequences.source == SAMPLED)
    branch = np.searchsorted(sequences.cu_seqlens, position, side="right") - 1
    turns = int(sequences.turn.max(initial=0)) + 2
    in_branch, count = np.unique(branch * turns + sequences.turn[position] + 1, return_counts=True)
    turn, first = np.unique(sequences.trace[in_branch // turns] * turns + in_branch % turns, return_inverse=True)
    longest = np.zeros(len(turn))
    np.maximum.at(longest, first, count)
    return np.bincount(turn // turns, longest, minlength=sequences.traces).astype(np.float64)


def of_sequences(sequences: Sequences) -> tuple[NDArray[np.float64], dict[int, set[str]]]:
    """Return [R] the worst level (NaN without a sampled token), and the names of each trace's mismatch reasons."""
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    level = np.where(sequences.alignment_level == NO_LEVEL, math.nan, sequences.alignment_level.astype(float))
    reasons: dict[int, set[str]] = {}
    for row, code in zip(
        sequences.alignment_report.trace.tolist(), sequences.alignment_report.reason.tolist(), strict=True
    ):
        reasons.setdefault(row, set()).add(sequences.alignment_report.reasons[code])
    return -_least(owner, -level, sequences.traces), reasons


def _user_texts(messages: list[dict[str, Any]]) -> list[str]:
    """Return the texts of the user messages, or of all messages if there is none."""
    users = [message_text(message) for message in messages if message.get("role") == "user"]
    return [text for text in users if text] or [text for message in messages if (text := message_text(message))]


def _text_features(messages: list[dict[str, Any]]) -> tuple[str, set[str], int]:
    """Return the joined text, names of called tools, and number of calls."""
    parts: list[str] = []
    tools, calls = set(), 0
    for message in messages:
        parts.append(message_text(message))
        for name, arguments in tool_calls(message):
            tools.add(name[:80])
            calls += 1
            parts.append(f"{name}({arguments})")
    return "\n".join(parts), tools, calls


def message_text(message: Mapping[str, Any]) -> str:
    """Return reasoning and content of a message as text. Parts that are not text are named by their type."""
    return "\n".join(text for text, _ in message_parts(message))


def message_parts(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the parts of `message_text`, each with the digest of its image (64 hexadecimal digits) or ""."""
    reasoning = [message.get(name) for name in ("reasoning_content", "reasoning")]
    parts = [(next((text for text in reasoning if isinstance(text, str) and text), ""), "")]
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
    """Return (name, arguments as recorded) of the tool calls of a message."""
    result = []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        function = function if isinstance(function, Mapping) else {}
        arguments = function.get("arguments", "")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        result.append((str(function.get("name", "")), text))
    return result
