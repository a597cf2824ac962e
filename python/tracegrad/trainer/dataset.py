"""Give the traces that are trained on: from memory or from prepared folders, as a table and by step.

`Source` is what training needs of either. `Shards` memory-maps prepared folders.
"""

import hashlib
import mmap
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment import store
from tracegrad.alignment.mismatch import no_drift
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.images import Images
from tracegrad.images.image_files import MEDIA
from tracegrad.storage import download, manifest
from tracegrad.trainer.token_log import subset

Array = NDArray[Any]

HASHED = (
    *("group", "branches", "tokens", "longest", "terms", "known", "turns", "tier", "foreign", "version_min"),
    *("version_max", "rewards", "logprob_kind", "temperature", "reshaped", "ending", "max_id", "media", "source"),
)
"""The columns that a plan is made from."""


@dataclass(frozen=True, eq=False)
class Catalog:
    """One row a trace, of R traces with K rewards; the columns as `alignment.store.columns_of` counts them.

    Args:
        group: [R] int32: the number of its group.
        rewards: [R, K] float32, NaN where a trace lacks one; `reward_names` gives the columns.
        branches, tokens, longest, terms, known, turns, version_min, version_max, max_id: [R] int32.
        tier, logprob_kind, ending: [R] uint8.
        temperature: [R] float32.
        reshaped: [R] uint32.
        foreign, media: [R] bool.
        source: [R] int32: the number of the input that it is of.
    """

    group: NDArray[np.int32]
    rewards: NDArray[np.float32]
    reward_names: tuple[str, ...]
    branches: NDArray[np.int32]
    tokens: NDArray[np.int32]
    longest: NDArray[np.int32]
    terms: NDArray[np.int32]
    known: NDArray[np.int32]
    turns: NDArray[np.int32]
    tier: NDArray[np.uint8]
    foreign: NDArray[np.bool_]
    version_min: NDArray[np.int32]
    version_max: NDArray[np.int32]
    logprob_kind: NDArray[np.uint8]
    temperature: NDArray[np.float32]
    reshaped: NDArray[np.uint32]
    ending: NDArray[np.uint8]
    max_id: NDArray[np.int32]
    media: NDArray[np.bool_]
    source: NDArray[np.int32]

    @property
    def traces(self) -> int:
        """Number of traces R."""
        return len(self.group)

    @cached_property
    def first_token(self) -> NDArray[np.int64]:
        """[R+1]: where the tokens of each trace begin among those of all."""
        return _offsets(self.tokens)

    @cached_property
    def first_branch(self) -> NDArray[np.int64]:
        """[R+1]: where its branches begin."""
        return _offsets(self.branches)

    @cached_property
    def first_term(self) -> NDArray[np.int64]:
        """[R+1]: where its terms begin."""
        return _offsets(self.terms)

    @property
    def all_terms(self) -> int:
        """Terms of all traces."""
        return int(self.terms.sum(dtype=np.int64))

    @cached_property
    def hash(self) -> str:
        """The same where every column is: what ranks compare before they plan."""
        digest = blake2b(digest_size=16)
        for name in HASHED:
            digest.update(np.ascontiguousarray(getattr(self, name)).data)
        digest.update("\0".join(self.reward_names).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def numbered(keys: NDArray[np.uint64]) -> NDArray[np.int32]:
    """[R] int32: groups by their keys, numbered from 0 in the order in which they first appear.

    Args:
        keys: [R, 2] uint64.

    >>> numbered(np.array([[7, 1], [7, 1], [2, 1], [7, 2], [7, 1]], np.uint64)).tolist()
    [0, 0, 1, 2, 0]
    """
    rows = len(keys)
    if not rows:
        return np.zeros(0, np.int32)
    new = np.concatenate([[True], (keys[1:] != keys[:-1]).any(1)])  # neighbours of one group are one run
    first = np.flatnonzero(new)
    runs = keys[first]
    order = np.lexsort((runs[:, 1], runs[:, 0]))
    apart = np.concatenate([[True], (runs[order[1:]] != runs[order[:-1]]).any(1)])
    earliest = np.minimum.reduceat(order, np.flatnonzero(apart))
    number = np.empty(len(earliest), np.int32)
    number[np.argsort(earliest)] = np.arange(len(earliest), dtype=np.int32)
    of_run = np.empty(len(runs), np.int32)
    of_run[order] = number[np.cumsum(apart) - 1]
    return np.repeat(of_run, np.diff(np.append(first, rows)))


def _offsets(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


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


class Source(Protocol):
    """Traces of a run, by their numbers 0 to R-1."""

    @property
    def catalog(self) -> Catalog:
        """The columns of all of them."""
        ...

    @property
    def in_memory(self) -> bool:
        """Whether all tokens are in memory."""
        ...

    @property
    def shows_pictures(self) -> bool:
        """Whether a trace has a picture at a place among its tokens; no token is read to know it."""
        ...

    @property
    def inputs(self) -> int:
        """How many inputs there are; `catalog.source` has their numbers."""
        ...

    def take(self, rows: NDArray[np.integer]) -> Sequences:
        """Traces with their tokens and names, without extras and drift; `group` has the catalog's numbers.

        Args:
            rows: ascending, each once.
        """
        ...

    def kept(self, rows: NDArray[np.integer]) -> Sequences:
        """The same with the names of their groups and what did not fit, to be written or shown."""
        ...

    def parts(self) -> Iterator[Sequences]:
        """All traces, in pieces that memory holds."""
        ...

    def trace_name(self, row: int) -> str:
        """What a trace is called for those who read of it."""
        ...

    def lots(self) -> NDArray[np.float64]:
        """[R] a number in [0, 1) of the name of each trace's group, the same wherever that name stands."""
        ...

    def fingerprint(self, rewards: NDArray[np.float32]) -> str:
        """The same for the same terms, groups and [R] rewards."""
        ...


class InMemory:
    """Sequences as a source.

    Args:
        sequences: R traces, from `align` or `Sequences.from_arrays`.
    """

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self._catalog: Catalog | None = None

    @property
    def catalog(self) -> Catalog:
        """The columns of all traces; groups have the numbers that the sequences give them."""
        if self._catalog is None:
            s = self.sequences
            columns: dict[str, Any] = store.counted(s.stored())
            columns |= {"group": np.asarray(s.group, np.int32), "reward_names": s.reward_names}
            self._catalog = Catalog(**columns, source=np.zeros(s.traces, np.int32))
        return self._catalog

    @property
    def in_memory(self) -> bool:
        """True."""
        return True

    @property
    def shows_pictures(self) -> bool:
        """As `Source.shows_pictures`."""
        return self.sequences.images is not None

    @property
    def inputs(self) -> int:
        """One."""
        return 1

    def take(self, rows: NDArray[np.integer]) -> Sequences:
        """As `Source.take`; all of them are the sequences themselves."""
        if len(rows) == self.sequences.traces:
            return self.sequences
        return selected(self.sequences, rows)

    def kept(self, rows: NDArray[np.integer]) -> Sequences:
        """As `Source.kept`."""
        return subset(self.sequences, rows)[0]

    def parts(self) -> Iterator[Sequences]:
        """All of them at once."""
        yield self.sequences

    def trace_name(self, row: int) -> str:
        """The trace's id, else its number."""
        return self.sequences.trace_name(row)

    def lots(self) -> NDArray[np.float64]:
        """As `Source.lots`; a group without a name has its number."""
        group = self.sequences.group
        names = self.sequences.group_names or tuple(map(str, range(int(group.max(initial=-1)) + 1)))
        return lots_of(names)[group]

    def fingerprint(self, rewards: NDArray[np.float32]) -> str:
        """As `Source.fingerprint`, of every token."""
        s, digest = self.sequences, hashlib.sha256()
        for part in (s.ids, s.trainable, s.rollout_logprobs, s.cu_seqlens, s.trace, s.group, rewards):
            digest.update(np.ascontiguousarray(part).tobytes())
        if (images := s.images) is not None:
            for part in (images.at, images.cu_features, images.pictures.digest[images.picture]):
                digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()


def lots_of(names: tuple[str, ...]) -> NDArray[np.float64]:
    """[names] numbers in [0, 1), each a function of its name alone."""
    return np.array([zlib.crc32(name.encode("utf-8", "replace")) / 2**32 for name in names], np.float64)


def source_of(data: Sequences | Source) -> Source:
    """Sequences as a source; a source as it is."""
    return InMemory(data) if isinstance(data, Sequences) else data


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
                an address is brought to this machine (`storage.download.local`).
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
        shards = [
            shard for number, name in enumerate(names) for shard in _shards_of(download.here(name), number, verify)
        ]
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
        counted = store.counted(found.stored())
        for name in ("branches", "tokens", "longest", "terms", "max_id"):
            if not np.array_equal(counted[name], getattr(self.catalog, name)[here]):
                raise FormatError(
                    f"{self.shards[number].folder}: {store.NAME} is not of its tokens, by the column {name}. "
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
    if store.NAME in shard.told.files:
        return store.read(shard.folder)
    stored = store.opened(shard.folder, shard.told)
    return store.of_stored(stored), stored.names["reward_names"]


def _check_counts(shard: Shard, found: dict[str, NDArray[Any]]) -> None:
    """That the columns are as many as the manifest says, of as many branches, tokens and terms."""
    counted = {name: int(found[name].sum(dtype=np.int64)) for name in ("branches", "tokens", "terms")}
    low = min((int(found[name].min(initial=0)) for name in counted), default=0)
    if {"traces": len(found["terms"]), **counted} != dict(shard.told.counts) or low < 0:
        raise FormatError(f"{shard.folder}: the counts of its manifest are not those of {store.NAME}. {_CURE}")


def _let_go(sequences: Sequences) -> None:
    """Gives the pages of a mapped shard back; they are read again, or found in the page cache, when they are needed."""
    base: Any = sequences.ids
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    mapped = getattr(base, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
