"""Folders that `prepare` wrote as one source of traces: columns in memory, tokens in shards mapped when needed.

Here is `Shards`. What makes a folder whole is in `manifest`, what its arrays are in `store` and `trace_columns`.
"""

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracegrad import bucket, manifest, store, trace_columns
from tracegrad.catalog.select import joined, selected
from tracegrad.catalog.source import lots_of
from tracegrad.catalog.table import Catalog, numbered
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.pictures.kept import MEDIA
from tracegrad.sequence import Sequences
from tracegrad.terms import subset

_MAPPED = 64
"""Shards that stay mapped: address space and names; their pages are let go after each use."""
_CURE = "The files were changed; prepare the traces again."


class Shard(NamedTuple):
    """One shard: its folder, what its manifest says, and the number of the input that it is of."""

    folder: Path
    told: manifest.Folder
    source: int


class Shards:
    """Traces of prepared folders, of which no more is in memory than a step needs; wherever `Sequences` are trained on.

    Groups are one where their names are equal, also over folders. Traces are numbered in the order of folders, shards
    and rows.

    Attributes:
        folders: as they were given.
        shards: of all folders, in order.
        catalog: the columns of all traces.
    """

    def __init__(self, folders: tuple[str, ...], shards: Sequence[Shard], catalog: Catalog) -> None:
        self.folders, self.shards, self.catalog = folders, tuple(shards), catalog
        counts = [shard.told.counts["traces"] for shard in shards]
        self._first: NDArray[np.int64] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._mapped: OrderedDict[int, Sequences] = OrderedDict()
        self._checked: set[int] = set()
        self._lock = Lock()
        self.model: Path | None = None
        """Folder of the model whose image processor makes pictures ready."""

    @classmethod
    def open(
        cls, folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, verify: bool = False
    ) -> "Shards":
        """Reads the manifests and the columns of traces, and no token.

        Args:
            folders: what `tracegrad prepare` or `Sequences.save` wrote, one or several, by path or address; what is at
                an address is brought to this machine (`bucket.local`).
            verify: compare the checksum of every file, which reads all of them once; `tracegrad train` does.

        Raises:
            ReadError: if a folder is not whole, or holds no trace.
            FormatError: if a file is not what `save` writes.
            ArgumentError: if a folder is given twice.
        """
        given = [folders] if isinstance(folders, (str, os.PathLike)) else list(folders)
        names = tuple(os.fspath(folder) for folder in given)
        if not names or len({os.path.realpath(name) for name in names}) < len(names):
            raise ArgumentError(
                f"{', '.join(names[:8]) or 'no folder'}: each trace is trained on once an epoch. "
                "Give folders that prepare wrote, each once."
            )
        shards = [shard for number, name in enumerate(names) for shard in _shards_of(bucket.here(name), number, verify)]
        return cls(names, shards, _catalog(shards))

    @property
    def in_memory(self) -> bool:
        """False."""
        return False

    @property
    def shows_pictures(self) -> bool:
        """As `Source.shows_pictures`, by the manifests."""
        return any(MEDIA in shard.told.files for shard in self.shards)

    @property
    def inputs(self) -> int:
        """How many folders there are."""
        return len(self.folders)

    @property
    def traces(self) -> int:
        """Number of traces R."""
        return self.catalog.traces

    def __repr__(self) -> str:
        tokens = int(self.catalog.tokens.sum(dtype=np.int64))
        return (
            f"Shards({self.traces} traces, {tokens} tokens, {len(self.shards)} shards of {len(self.folders)} folders)"
        )

    def take(self, rows: NDArray[np.integer]) -> Sequences:
        """As `Source.take`."""
        rows = np.asarray(rows, np.int64)
        parts = [selected(sequences, here) for sequences, here in self._of(rows)]
        found = parts[0] if len(parts) == 1 else joined([(part, np.arange(part.traces)) for part in parts])
        found = found.of_model(self.model) if self.model else found
        return replace(found, group=self.catalog.group[rows])

    def kept(self, rows: NDArray[np.integer]) -> Sequences:
        """As `Source.kept`."""
        parts = [subset(sequences, here)[0].stored() for sequences, here in self._of(np.asarray(rows, np.int64))]
        return Sequences.of_stored(store.joined(parts))

    def parts(self) -> Iterator[Sequences]:
        """Shard by shard."""
        for number in range(len(self.shards)):
            sequences = self._opened(number)
            yield sequences
            _let_go(sequences)

    def trace_name(self, row: int) -> str:
        """The trace's id."""
        number = int(np.searchsorted(self._first, row, side="right")) - 1
        return self._opened(number).trace_name(row - int(self._first[number]))

    def lots(self) -> NDArray[np.float64]:
        """As `Source.lots`."""
        found = [np.zeros(0)]
        for sequences in self.parts():
            names = sequences.group_names or sequences.trace_ids
            found.append(lots_of(names)[sequences.group])
        return np.concatenate(found)

    def fingerprint(self, rewards: NDArray[np.float32]) -> str:
        """As `Source.fingerprint`, by the columns and the checksums of the manifests."""
        digest = blake2b(self.catalog.hash.encode(), digest_size=32)
        for shard in self.shards:
            digest.update(repr(sorted((name, tuple(file)) for name, file in shard.told.files.items())).encode())
        digest.update(np.ascontiguousarray(rewards).tobytes())
        return digest.hexdigest()

    def _of(self, rows: NDArray[np.int64]) -> Iterator[tuple[Sequences, NDArray[np.int64]]]:
        """The shards that hold some traces, with the rows there; their pages are let go when the next is asked for."""
        number = np.searchsorted(self._first, rows, side="right") - 1
        for each in np.unique(number).tolist():
            sequences = self._opened(each)
            yield sequences, rows[number == each] - self._first[each]
            _let_go(sequences)

    def _opened(self, number: int) -> Sequences:
        """A shard, mapped; the first time every value of it is checked."""
        with self._lock:
            if number in self._mapped:
                self._mapped.move_to_end(number)
                return self._mapped[number]
            shard, new = self.shards[number], number not in self._checked
            found = Sequences.of_stored(store.opened(shard.folder, shard.told, checked=new))
            if new:
                self._check(number, found)
                self._checked.add(number)
                _let_go(found)
            self._mapped[number] = found
            while len(self._mapped) > _MAPPED:
                self._mapped.popitem(last=False)
            return found

    def _check(self, number: int, found: Sequences) -> None:
        """That the columns which the plan was made from are those of the tokens."""
        here = slice(self._first[number], self._first[number + 1])
        counted = trace_columns.counted(found.stored())
        for name in ("branches", "tokens", "longest", "terms", "max_id"):
            if not np.array_equal(counted[name], getattr(self.catalog, name)[here]):
                raise FormatError(
                    f"{self.shards[number].folder}: {trace_columns.NAME} is not of its tokens, by the column {name}. "
                    f"The plan would be of other traces. {_CURE}"
                )


def _shards_of(folder: Path, source: int, verify: bool) -> list[Shard]:
    whole = manifest.read(folder)
    if verify:
        manifest.verify(folder, whole)
    if not whole.files and not whole.shards:
        raise ReadError(f"{folder}: no trace was prepared into it. There is nothing to train on. Prepare other traces.")
    if whole.files:
        return [Shard(folder, whole, source)]
    return [Shard(folder / name, told, source) for name, told in whole.shards.items()]


def _catalog(shards: Sequence[Shard]) -> Catalog:
    """The columns of all shards; those of folders of before, which have none, are counted from their tokens."""
    rows = sum(shard.told.counts["traces"] for shard in shards)
    columns: dict[str, Any] = {}
    names: tuple[str, ...] = ()
    end = 0
    for number, shard in enumerate(shards):
        found, told = _columns(shard)
        if not number:
            names = told
            kept = {name: column for name, column in found.items() if name != "trace"}
            columns = {name: np.empty((rows, *column.shape[1:]), column.dtype) for name, column in kept.items()}
            columns["source"] = np.empty(rows, np.int32)
        if told != names:
            raise FormatError(
                f"{shard.folder}: its rewards are {', '.join(told)[:80]!r} and not {', '.join(names)[:80]!r} as in the "
                "first shard. Prepare all with the same options."
            )
        here = slice(end, end + shard.told.counts["traces"])
        _check_counts(shard, found)
        for name, column in columns.items():
            column[here] = shard.source if name == "source" else found[name]
        end = here.stop
    columns["group"] = numbered(columns["group"])
    return Catalog(**columns, reward_names=names)


def _columns(shard: Shard) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    if trace_columns.NAME in shard.told.files:
        return trace_columns.read(shard.folder)
    stored = store.opened(shard.folder, shard.told)
    return trace_columns.of_stored(stored), stored.names["reward_names"]


def _check_counts(shard: Shard, found: dict[str, NDArray[Any]]) -> None:
    """That the columns are as many as the manifest says, of as many branches, tokens and terms."""
    counted = {name: int(found[name].sum(dtype=np.int64)) for name in ("branches", "tokens", "terms")}
    low = min((int(found[name].min(initial=0)) for name in counted), default=0)
    if {"traces": len(found["terms"]), **counted} != dict(shard.told.counts) or low < 0:
        raise FormatError(f"{shard.folder}: the counts of its manifest are not those of {trace_columns.NAME}. {_CURE}")


def _let_go(sequences: Sequences) -> None:
    """Gives the pages of a mapped shard back; they are read again, or found in the page cache, when they are needed."""
    base: Any = sequences.ids
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    mapped = getattr(base, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
