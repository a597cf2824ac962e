"""What did not fit between recorded tokens and the trainer's, one row per finding."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core, _html
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data.codes import SAMPLED, TIERS

REFORMATTED, INCOMPLETE = 13, 28  # R13, R28
GAP = "the listed tokens spell"
"""How the detail of an R28 begins where tokens lack a part of the message; the others are streams without an end."""
SPELLED = [TIERS.index(name) for name in ("T2", "T3")]
"""Tiers of tokens that are recorded as texts or bytes: a server may list those of the content alone."""


@dataclass(frozen=True, repr=False)
class Drift:
    """Where recorded tokens and the trainer's differ, one row per finding.

    Args:
        reason: [D] uint8, index into `REASONS`.
        trace: [D] int32, row of the trace in `Sequences`.
        turn: [D] int32, generation of the trace, -1 where the finding is not of one turn.
        token: [D] int32, first token of the turn it concerns, -1 unknown.
        count: [D] int32, tokens it concerns.
        detail: D strings, what was found.
        reasons: names of the closed list by code, `R01 noncanonical_bpe` and so on.
        recorded: tokens that the records say were sampled.
        exact: of those, how many are held with an exact id (tiers T0 to T3), a logprob, and a prompt that is known.
        errors: one line for each trace that could not be aligned and was left out.
        left_out: of each error, the row of its trace among those that `align` was given; not saved.
        server_profiles: traces with a prompt that was rendered, by the server whose rules were taken: `vllm`, or `vllm
            (assumed)` if neither the record nor the caller named one.
    """

    reason: NDArray[np.uint8]
    trace: NDArray[np.int32]
    turn: NDArray[np.int32]
    token: NDArray[np.int32]
    count: NDArray[np.int32]
    detail: tuple[str, ...]
    reasons: tuple[str, ...] = tuple(_core.DRIFT_REASONS)
    recorded: int = 0
    exact: int = 0
    errors: tuple[str, ...] = ()
    left_out: tuple[int, ...] = ()
    server_profiles: Mapping[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """1 - exact / recorded; 0 where nothing was recorded."""
        return 1.0 - self.exact / self.recorded if self.recorded else 0.0

    def __len__(self) -> int:
        return len(self.reason)

    def table(self) -> dict[str, dict[str, int]]:
        """Per reason: findings, traces with one, tokens concerned; the most frequent first."""
        rows: dict[str, dict[str, int]] = {}
        codes, totals = np.unique(self.reason, return_counts=True)
        for code in codes[np.argsort(-totals, kind="stable")]:
            here = self.reason == code
            rows[self.reasons[int(code)]] = {
                "findings": int(here.sum()),
                "traces": len(np.unique(self.trace[here])),
                "tokens": int(np.maximum(self.count[here], 0).sum()),
            }
        return rows

    def __repr__(self) -> str:
        return f"Drift({len(self)} findings, rate={self.rate:.3%}, {len(self.errors)} traces left out)"

    def _repr_html_(self) -> str:
        rows = [(name, *counts.values()) for name, counts in self.table().items()]
        return _html.table(repr(self), ("reason", "findings", "traces", "tokens"), rows)


def no_drift() -> Drift:
    """A `Drift` without rows."""
    empty = np.zeros(0, np.int32)
    return Drift(np.zeros(0, np.uint8), empty, empty, empty, empty, ())


def said(traces: _core.Traces, index: int) -> list[dict[str, Any]]:
    """The message of each turn of a trace."""
    messages = traces.messages(index)
    return [messages[each["message"]] for each in traces.generations(index)]


def without_call(message: Mapping[str, Any], text: str) -> bool:
    """Whether a turn called a tool and its tokens, which spell `text`, hold no call: a name is not in it."""
    called = [call.get("function") or call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    names = [call.get("name") for call in called if isinstance(call, dict)]
    return any(isinstance(name, str) and name not in text for name in names)


def untrained(
    traces: _core.Traces, tokenizer: Tokenizer, drift: Drift, found: Mapping[str, NDArray[Any]]
) -> NDArray[np.bool_]:
    """[T] bool: tokens that stand behind others than those they were sampled after, because the record lists a part.

    A turn with a gap and all behind it in its branch; what is behind a turn whose call is not listed, not the turn.
    """
    out = np.zeros(len(found["ids"]), bool)
    looked = np.flatnonzero(np.isin(drift.reason, (REFORMATTED, INCOMPLETE)) & (drift.turn >= 0))
    if not len(looked):
        return out
    cu, rows = found["cu_seqlens"], np.delete(np.arange(len(traces)), drift.left_out)
    messages: tuple[int, list[dict[str, Any]]] = (-1, [])
    for at in looked:
        row, turn, gap = int(drift.trace[at]), int(drift.turn[at]), drift.reason[at] == INCOMPLETE
        if gap and not drift.detail[at].startswith(GAP):
            continue
        for branch in range(*np.searchsorted(found["trace"], (row, row + 1))):
            here = slice(int(cu[branch]), int(cu[branch + 1]))
            own = np.flatnonzero((found["source"][here] == SAMPLED) & (found["turn"][here] == turn)) + cu[branch]
            behind = slice(int(own[0] if gap else own[-1] + 1), here.stop) if len(own) else slice(0, 0)
            if not (found["source"][behind] == SAMPLED).any():
                continue
            if not gap and not np.isin(found["tier"][own], SPELLED).all():
                continue
            if not gap and messages[0] != row:
                messages = row, said(traces, int(rows[row]))
            if gap or without_call(messages[1][turn], tokenizer.decode(found["ids"][own].tolist())):
                out[behind] = True
    return out
