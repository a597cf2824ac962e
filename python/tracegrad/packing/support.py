"""How the sampler changed the distribution of each logit row: its support, and penalties (`Support`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core
from tracegrad.alignment.ragged import Ragged
from tracegrad.packing.device_copy import to_device

if TYPE_CHECKING:
    from tracegrad.alignment.sequences import Sequences


class LogitChanges(NamedTuple):
    """How penalties and biases change the logit x of each of K ids.

    y = x + before; then y / factor if y is positive, else y * factor; then + after. All are [K] float32, and tensors
    after `Support.to`.
    """

    before: Any
    factor: Any
    after: Any


@dataclass(frozen=True, eq=False, repr=False)
class Support:
    """The ids of each of U logit rows that the sampler kept, or whose logits it changed, concatenated.

    Args:
        ids: [K] int32: the ids of all rows. An int64 tensor after `to`.
        offsets: [U+1] int64: row u has ids[offsets[u]:offsets[u+1]]. It stays numpy, because chunks are cut by it.
        restricted: [U] bool, numpy: whether the row was sampled from its ids alone (top_p, top_k, min_p); its target is
            among them. If not, it was sampled from the whole vocabulary. None: every row that has ids.
        changes: of the logits of the ids, by penalties and logit_bias; None if there are none.
        row: [K] int64 tensor: the row of each id; None until `to`.

    >>> support = Support(np.array([5, 9, 6], np.int32), np.array([0, 2, 2, 3]))
    >>> support, support.take(np.array([2, 0])).ids.tolist()
    (Support(3 ids for 2 of 3 rows), [6, 5, 9])
    """

    ids: Any
    offsets: NDArray[np.int64]
    restricted: NDArray[np.bool_] = None  # pyright: ignore[reportAssignmentType]
    changes: LogitChanges | None = None
    row: Any = None

    def __post_init__(self) -> None:
        if self.restricted is None:
            object.__setattr__(self, "restricted", np.diff(self.offsets) > 0)

    def __repr__(self) -> str:
        some = int(np.count_nonzero(np.diff(self.offsets)))
        return f"Support({int(self.offsets[-1])} ids for {some} of {len(self.offsets) - 1} rows)"

    def take(self, rows: NDArray[np.integer]) -> Support:
        """Return the support of some rows, before it is moved to a device."""
        index = Ragged(self.offsets, np.arange(len(self.ids))).take(rows)
        changes = self.changes and LogitChanges(*(column[index.values] for column in self.changes))
        return Support(self.ids[index.values], index.offsets, self.restricted[rows], changes)

    def at(self, rows: slice) -> Support | None:
        """Return the support of the rows of a chunk, on the device; None if the sampler changed none of them."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        first, end = int(offsets[0]), int(offsets[-1])
        if first == end:
            return None
        here = slice(first, end)
        return Support(
            ids=self.ids[here],
            offsets=offsets - first,
            restricted=self.restricted[rows],
            changes=self.changes and LogitChanges(*(column[here] for column in self.changes)),
            row=self.row[here] - rows.start,
        )

    def spread(self, rows: NDArray[np.integer], count: int) -> Support:
        """Return the support of `count` rows: these are the ones in `rows`, ascending, and the others have none."""
        lengths, restricted = np.zeros(count, np.int64), np.zeros(count, np.bool_)
        lengths[rows], restricted[rows] = np.diff(self.offsets), self.restricted
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return replace(self, offsets=offsets, restricted=restricted)

    def to(self, device: Any) -> Support:
        """Return the support with `ids`, `row` and `changes` as tensors on `device`, integers as int64."""
        row = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets)) if self.row is None else self.row
        changes = self.changes and LogitChanges(*(to_device(column, device) for column in self.changes))
        return replace(self, ids=to_device(self.ids, device), row=to_device(row, device), changes=changes)

    def tensors(self) -> list[Any]:
        """Return what `to` has moved to the device."""
        return [self.ids, self.row, *(self.changes or ())]

    @property
    def unrestricted_rows(self) -> NDArray[np.int64]:
        """The rows, ascending, that were sampled from the whole vocabulary with changed logits."""
        return np.flatnonzero(~self.restricted & (np.diff(self.offsets) > 0))

    @property
    def has_changed_vocabulary(self) -> bool:
        """Whether a row was sampled from the whole vocabulary with changed logits."""
        return len(self.unrestricted_rows) > 0


class RecordedSampling:
    """The support and the penalties of the tokens of sequences, from which rows get theirs.

    Args:
        sequences: with `support`, `penalties` or both.
    """

    def __init__(self, sequences: Sequences) -> None:
        self._support, self._penalties = sequences.support, sequences.penalties
        self._ids = np.require(sequences.ids, np.int32, ["C", "A"])
        self._turn = np.require(sequences.turn, np.int32, ["C", "A"])
        self._cu = np.require(sequences.cu_seqlens, np.int64, ["C", "A"])
        self._first_generation = np.repeat(sequences.cu_turns[sequences.trace], np.diff(self._cu))

    @classmethod
    def of(cls, sequences: Sequences) -> RecordedSampling | None:
        """Return the sampling of sequences; None if all tokens were sampled from the whole vocabulary, unchanged."""
        return None if sequences.support is None and sequences.penalties is None else cls(sequences)

    def keys(self, tokens: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return arrays [M] that are all equal for two tokens with equal ids before them and the same sampling.

        A token that was sampled from the whole vocabulary without penalties has 0 in each.
        """
        keys = [] if self._support is None else [self._support.keys(tokens)]
        if self._penalties is not None:
            rows = self._penalties.rows_of(self._first_generation[tokens] + self._turn[tokens])
            settings = np.where(rows < 0, 0, self._settings[rows] + 1).astype(np.int64)
            keys += [settings, np.where(settings > 0, self._answer_start[tokens] + 1, 0)]
        return keys

    def support_of(self, tokens: NDArray[np.int64]) -> Support:
        """Return the support of one logit row for each of some tokens."""
        if self._support is None:
            sets = Ragged(np.zeros(len(tokens) + 1, np.int64), np.zeros(0, np.int32))
        else:
            sets = self._support.rows(tokens)
        restricted = np.diff(sets.offsets) > 0
        if self._penalties is None:
            return Support(sets.values, sets.offsets, restricted)
        rows = self._penalties.rows_of(self._first_generation[tokens] + self._turn[tokens])
        if (rows < 0).all():
            return Support(sets.values, sets.offsets, restricted)
        arrays = (self._ids, self._cu, self._turn, self._penalties)
        changed = _core.pack_penalties(*arrays, np.ascontiguousarray(tokens), rows, sets.offsets, sets.values)
        changes = LogitChanges(changed["before"], changed["factor"], changed["after"])
        return Support(changed["ids"], changed["offsets"], restricted, changes)

    @cached_property
    def _settings(self) -> NDArray[np.int32]:
        """[P] `Penalties.settings`."""
        assert self._penalties is not None
        return self._penalties.settings()

    @cached_property
    def _answer_start(self) -> NDArray[np.int64]:
        """[T]: the position in its branch of the first token of each token's answer."""
        is_new = np.r_[True, self._turn[1:] != self._turn[:-1]]
        is_new[self._cu[:-1][self._cu[:-1] < len(is_new)]] = True
        run_start = np.maximum.accumulate(np.where(is_new, np.arange(len(is_new)), 0))
        return run_start - np.repeat(self._cu[:-1], np.diff(self._cu))
