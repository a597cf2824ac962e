"""The alignment report: mismatches between recorded tokens and the trainer's tokens, one row per finding."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core, _html
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.codes import FILLED, LEVELS, SAMPLED

REFORMATTED, INCOMPLETE = 13, 28  # R13, R28
GAP = "the listed tokens spell"
"""Start of the detail of an R28 whose tokens lack a part of the message. Other R28 are streams without an end."""
SPELLED = [LEVELS.index(name) for name in ("T2", "T3")]
"""Levels of tokens that are recorded as texts or bytes: a server may list only the tokens of the content."""


@dataclass(frozen=True, repr=False)
class AlignmentReport:
    """The alignment report: differences between recorded tokens and the trainer's tokens, one row per finding.

    Args:
        reason: [D] uint8, index into `reasons`.
        trace: [D] int32, row of the trace in `Sequences`.
        turn: [D] int32, generation of the trace, -1 if the finding does not concern one turn.
        token: [D] int32, first affected token of the turn, -1 unknown.
        count: [D] int32, number of affected tokens.
        detail: D strings, a description of each finding.
        reasons: all reasons by code, `R01 noncanonical_bpe` and so on.
        recorded: number of sampled tokens in the records.
        exact: number of these with an exact id (levels T0 to T3), a logprob, and a known prompt.
        errors: one line for each trace that could not be aligned and was left out.
        left_out: the row of the trace of each error, among the traces that `align` got; not saved.
        server_profiles: number of traces with a rendered prompt, by the server whose rules were used: `vllm`, or `vllm
            (assumed)` if neither the record nor the caller named a server.

    >>> from tracegrad import Tokenizer, align, read
    >>> sampled = {"role": "assistant", "content": "or", "token_ids": [81, 84, 2], "logprobs": [-0.5, -0.1, -0.1]}
    >>> traces = read([{"messages": [{"role": "user", "content": "2+2?"}, sampled]}])
    >>> tokenizer = Tokenizer.from_pretrained("examples/quickstart/model")
    >>> tokenizer.encode("or").tolist()  # one token, but the policy sampled "o" and "r"
    [361]
    >>> align(traces, tokenizer, mode="align").alignment_report.table()
    {'R01 noncanonical_bpe': {'findings': 1, 'traces': 1, 'tokens': 1}}
    """

    reason: NDArray[np.uint8]
    trace: NDArray[np.int32]
    turn: NDArray[np.int32]
    token: NDArray[np.int32]
    count: NDArray[np.int32]
    detail: tuple[str, ...]
    reasons: tuple[str, ...] = tuple(_core.MISMATCH_REASONS)
    recorded: int = 0
    exact: int = 0
    errors: tuple[str, ...] = ()
    left_out: tuple[int, ...] = ()
    server_profiles: Mapping[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """1 - exact / recorded; 0 if nothing was recorded."""
        return 1.0 - self.exact / self.recorded if self.recorded else 0.0

    def __len__(self) -> int:
        return len(self.reason)

    def table(self) -> dict[str, dict[str, int]]:
        """Return for each reason the number of findings, traces and tokens; the most frequent reason first."""
        rows: dict[str, dict[str, int]] = {}
        codes, totals = np.unique(self.reason, return_counts=True)
        for code in codes[np.argsort(-totals, kind="stable")]:
            mask = self.reason == code
            rows[self.reasons[int(code)]] = {
                "findings": int(mask.sum()),
                "traces": len(np.unique(self.trace[mask])),
                "tokens": int(np.maximum(self.count[mask], 0).sum()),
            }
        return rows

    def __repr__(self) -> str:
        return f"AlignmentReport({len(self)} findings, rate={self.rate:.3%}, {len(self.errors)} traces left out)"

    def _repr_html_(self) -> str:
        rows = [(name, *counts.values()) for name, counts in self.table().items()]
        return _html.table(repr(self), ("reason", "findings", "traces", "tokens"), rows)


def empty_report() -> AlignmentReport:
    """Return a report without findings."""
    empty = np.zeros(0, np.int32)
    return AlignmentReport(np.zeros(0, np.uint8), empty, empty, empty, empty, ())


def turn_messages(traces: _core.Traces, index: int) -> list[dict[str, Any]]:
    """Return the message of each turn of a trace."""
    messages = traces.messages(index)
    return [messages[generation["message"]] for generation in traces.generations(index)]


def lacks_tool_call(message: Mapping[str, Any], text: str) -> bool:
    """Return whether a turn has a tool call that its tokens lack: the name of a function is not in their `text`."""
    functions = [call.get("function") or call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    names = [call.get("name") for call in functions if isinstance(call, dict)]
    return any(isinstance(name, str) and name not in text for name in names)


def find_wrong_context(
    traces: _core.Traces, tokenizer: Tokenizer, report: AlignmentReport, columns: Mapping[str, NDArray[Any]]
) -> NDArray[np.bool_]:
    """Return [T] bool: tokens with another context than at sampling, because the record lists only a part of a turn.

    These are a turn with a gap and all later tokens of its branch. After a turn whose tool call is not listed, they are
    all later tokens of its branch, without the turn.
    """
    mask = np.zeros(len(columns["ids"]), bool)
    rows_to_check = np.flatnonzero(np.isin(report.reason, (REFORMATTED, INCOMPLETE)) & (report.turn >= 0))
    if not len(rows_to_check):
        return mask
    cu, trace_rows = columns["cu_seqlens"], np.delete(np.arange(len(traces)), report.left_out)
    messages: tuple[int, list[dict[str, Any]]] = (-1, [])
    for finding in rows_to_check:
        row, turn, has_gap = int(report.trace[finding]), int(report.turn[finding]), report.reason[finding] == INCOMPLETE
        if has_gap and not report.detail[finding].startswith(GAP):
            continue
        for branch in range(*np.searchsorted(columns["trace"], (row, row + 1))):
            tokens = slice(int(cu[branch]), int(cu[branch + 1]))
            turn_tokens = (
                np.flatnonzero((columns["source"][tokens] == SAMPLED) & (columns["turn"][tokens] == turn)) + cu[branch]
            )
            later = (
                slice(int(turn_tokens[0] if has_gap else turn_tokens[-1] + 1), tokens.stop)
                if len(turn_tokens)
                else slice(0, 0)
            )
            if not (columns["source"][later] == SAMPLED).any():
                continue
            level = columns["alignment_level"][turn_tokens]
            if not has_gap and not np.isin(level, SPELLED).all():
                # The level of a filled token does not show whether its id is recorded.
                generation = traces.generations(int(trace_rows[row]))[turn]
                is_spelled = generation["token_ids"] is None and (generation["has_bytes"] or generation["has_texts"])
                if not is_spelled or not np.isin(level, [*SPELLED, FILLED]).all():
                    continue
            if not has_gap and messages[0] != row:
                messages = row, turn_messages(traces, int(trace_rows[row]))
            if has_gap or lacks_tool_call(messages[1][turn], tokenizer.decode(columns["ids"][turn_tokens].tolist())):
                mask[later] = True
    return mask


def count_inexact(recorded: int, exact: int, levels: Mapping[str, Mapping[str, int]]) -> tuple[int, int]:
    """Return the number of recorded tokens without an exact id and a logprob, and of those with a filled logprob.

    Args:
        recorded, exact: as in `AlignmentReport`.
        levels: alignment level to counts, as `Sequences.levels` returns them.

    >>> count_inexact(10, 6, {"T0": {"tokens": 6}, "T7": {"tokens": 3}})  # 3 logprobs were measured afterwards
    (1, 3)
    """
    filled = min(levels.get(LEVELS[FILLED], {}).get("tokens", 0), recorded - exact)
    return recorded - exact - filled, filled


def describe_inexact(recorded: int, exact: int, levels: Mapping[str, Mapping[str, int]]) -> str:
    """Return a sentence about the recorded tokens of `count_inexact`, and one about those with a filled logprob.

    >>> describe_inexact(10, 6, {"T0": {"tokens": 6}, "T7": {"tokens": 3}})
    '10 % of 10 recorded tokens have no exact id and logprob. The logprobs of 3 are filled: they were measured later.'
    """
    if levels.keys() == {"T6"}:
        return "No id and logprob of this model is recorded: the traces are trained as text."
    inexact, filled = count_inexact(recorded, exact, levels)
    sentence = f"{_html.percent(inexact / recorded)} of {recorded:,} recorded tokens have no exact id and logprob."
    return f"{sentence} The logprobs of {filled:,} are filled: they were measured later." if filled else sentence
