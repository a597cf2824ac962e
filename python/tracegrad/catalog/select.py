"""Some traces of `Sequences`, in order, as `Sequences` of their own. Runs of neighbours are copied as one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.drift import no_drift
from tracegrad.pictures import Images
from tracegrad.sequence import Sequences

Array = NDArray[Any]

PER_TOKEN = ("ids", "source", "trainable", "rollout_logprobs", "turn", "version", "tier", "inv_temperature")
PER_TRACE = ("group", "rewards", "logprob_kind", "temperature", "reshaped", "ending")


def selected(sequences: Sequences, rows: NDArray[np.integer]) -> Sequences:
    """The traces of some rows with their tokens and names, without extras and drift; groups keep their numbers.

    Args:
        sequences: R traces.
        rows: ascending, each once.

    >>> ids, cu = [5, 6, 7, 8, 9], [0, 2, 3, 5]
    >>> three = Sequences.from_arrays(ids, cu, [-1.0] * 5, [False] * 5)
    >>> selected(three, np.array([0, 2])).ids.tolist()
    [5, 6, 8, 9]
    """
    return joined([(sequences, rows)])


def joined(parts: Sequence[tuple[Sequences, NDArray[np.integer]]]) -> Sequences:
    """The same of several `Sequences`, end to end.

    Args:
        parts: at least one, with the rows that are taken of each.
    """
    taken = [_Runs(sequences, np.asarray(rows, np.int64)) for sequences, rows in parts]
    columns: dict[str, Any] = {name: _end_to_end([each.tokens(name) for each in taken]) for name in PER_TOKEN}
    columns |= {name: _end_to_end([[getattr(each.of, name)[each.rows]] for each in taken]) for name in PER_TRACE}
    lengths = _end_to_end([[np.diff(each.of.cu_seqlens[a : b + 1]) for a, b in each.branches] for each in taken])
    turns = _end_to_end([[np.diff(each.of.cu_turns)[each.rows]] for each in taken])
    counts = _end_to_end([[each.count] for each in taken])
    return Sequences(
        **columns,
        reward_names=taken[0].of.reward_names,
        turn_rewards=_end_to_end([each.turns("turn_rewards") for each in taken]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        cu_turns=np.concatenate([[0], np.cumsum(turns)]).astype(np.int64),
        trace=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        trace_ids=tuple(each.of.trace_name(row) for each in taken for row in each.rows.tolist()),
        drift=no_drift(),
        images=Images.joined([(each.images(), int(each.count.sum())) for each in taken]),
    )


class _Runs:
    """Rows of `Sequences` as runs of neighbours: where their branches, tokens and turns begin and end."""

    def __init__(self, of: Sequences, rows: NDArray[np.int64]) -> None:
        self.of, self.rows = of, rows
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        runs = [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, cuts) if len(part)]
        kind = of.trace.dtype  # of other integers the whole column would be copied to be searched
        ends = np.searchsorted(of.trace, np.array(runs, kind).reshape(-1, 2))
        self.traces, self.branches = runs, [(int(a), int(b)) for a, b in ends]
        first = np.searchsorted(of.trace, np.stack([rows, rows + 1], 1).astype(kind))
        self.count: NDArray[np.int64] = first[:, 1] - first[:, 0]

    def tokens(self, name: str) -> list[Array]:
        column, cu = getattr(self.of, name), self.of.cu_seqlens
        return [column[cu[a] : cu[b]] for a, b in self.branches] or [column[:0]]

    def images(self) -> Images | None:
        of = self.of.images
        if of is None:
            return None
        numbers = [np.arange(a, b) for a, b in self.branches]
        return of.take(np.concatenate(numbers) if numbers else np.zeros(0, np.int64))

    def turns(self, name: str) -> list[Array]:
        column, cu = getattr(self.of, name), self.of.cu_turns
        return [column[cu[a] : cu[b]] for a, b in self.traces] or [column[:0]]


def _end_to_end(parts: list[list[Array]]) -> Array:
    whole = [part for each in parts for part in each]
    return np.concatenate(whole) if whole else np.zeros(0, np.int64)
