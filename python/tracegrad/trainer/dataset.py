"""Data sets of traces: in memory (`InMemoryDataset`) or memory-mapped from prepared folders (`PreparedDataset`).

`Dataset` is the interface that training needs: a table with one row per trace, and the tokens of selected traces.
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
from tracegrad.alignment.mismatch import empty_report
from tracegrad.alignment.penalties import Penalties
from tracegrad.alignment.sequences import Sequences
from tracegrad.alignment.token_sets import TokenSets
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.images import ImageSpans
from tracegrad.images.image_files import MEDIA
from tracegrad.storage import download, manifest
from tracegrad.trainer.token_log import subset

Array = NDArray[Any]

HASHED = (
    *("group", "branches", "tokens", "longest", "terms", "known", "turns", "alignment_level", "foreign", "version_min"),
    *(
        "version_max",
        "rewards",
        "logprob_kind",
        "temperature",
        "reshaped",
        "replayed",
        "ending",
        "max_id",
        "media",
        "source",
    ),
)
"""The columns that determine the steps of an epoch. `TraceTable.hash` covers them."""


@dataclass(frozen=True, eq=False)
class TraceTable:
    """A table with one row per trace: R traces with K rewards. `alignment.store.columns_of` defines the columns.

    Args:
        group: [R] int32, group number.
        rewards: [R, K] float32, NaN if the trace lacks a reward.
        reward_names: names of the K columns of `rewards`.
        branches, tokens, longest, terms, known, turns, version_min, version_max, max_id: [R] int32.
        alignment_level, logprob_kind, ending: [R] uint8.
        temperature: [R] float32.
        reshaped, replayed: [R] uint32.
        foreign, media: [R] bool.
        source: [R] int32, number of the input that the trace comes from.
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
    alignment_level: NDArray[np.uint8]
    foreign: NDArray[np.bool_]
    version_min: NDArray[np.int32]
    version_max: NDArray[np.int32]
    logprob_kind: NDArray[np.uint8]
    temperature: NDArray[np.float32]
    reshaped: NDArray[np.uint32]
    replayed: NDArray[np.uint32]
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
        """[R+1] offset of each trace's first token in the concatenation of all traces."""
        return _offsets(self.tokens)

    @cached_property
    def first_branch(self) -> NDArray[np.int64]:
        """[R+1] offset of each trace's first branch."""
        return _offsets(self.branches)

    @cached_property
    def first_term(self) -> NDArray[np.int64]:
        """[R+1] offset of each trace's first trained token."""
        return _offsets(self.terms)

    @property
    def all_terms(self) -> int:
        """Number of trained tokens in all traces."""
        return int(self.terms.sum(dtype=np.int64))

    @cached_property
    def hash(self) -> str:
        """Hash of the columns in `HASHED`. Ranks compare it before they plan."""
        digest = blake2b(digest_size=16)
        for name in HASHED:
            digest.update(np.ascontiguousarray(getattr(self, name)).data)
        digest.update("\0".join(self.reward_names).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def number_groups(keys: NDArray[np.uint64]) -> NDArray[np.int32]:
    """Number groups by their keys, from 0, in order of first appearance. Returns [R] int32.

    Args:
        keys: [R, 2] uint64.

    >>> number_groups(np.array([[7, 1], [7, 1], [2, 1], [7, 2], [7, 1]], np.uint64)).tolist()
    [0, 0, 1, 2, 0]
    """
    rows = len(keys)
    if not rows:
        return np.zeros(0, np.int32)
    starts_run = np.concatenate([[True], (keys[1:] != keys[:-1]).any(1)])  # Adjacent equal keys form one run.
    first = np.flatnonzero(starts_run)
    run_keys = keys[first]
    order = np.lexsort((run_keys[:, 1], run_keys[:, 0]))
    is_new_key = np.concatenate([[True], (run_keys[order[1:]] != run_keys[order[:-1]]).any(1)])
    earliest = np.minimum.reduceat(order, np.flatnonzero(is_new_key))
    number = np.empty(len(earliest), np.int32)
    number[np.argsort(earliest)] = np.arange(len(earliest), dtype=np.int32)
    run_numbers = np.empty(len(run_keys), np.int32)
    run_numbers[order] = number[np.cumsum(is_new_key) - 1]
    return np.repeat(run_numbers, np.diff(np.append(first, rows)))


def _offsets(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


PER_TOKEN = ("ids", "source", "trainable", "rollout_logprobs", "turn", "version", "alignment_level", "inv_temperature")
PER_TRACE = ("group", "rewards", "logprob_kind", "temperature", "reshaped", "replayed", "ending")


def select(sequences: Sequences, rows: NDArray[np.integer]) -> Sequences:
    """Select traces with their tokens and names, without extras and mismatch report; group numbers do not change.

    Args:
        sequences: R traces.
        rows: trace numbers, ascending and unique.

    >>> ids, cu = [5, 6, 7, 8, 9], [0, 2, 3, 5]
    >>> three = Sequences.from_arrays(ids, cu, [-1.0] * 5, [False] * 5)
    >>> select(three, np.array([0, 2])).ids.tolist()
    [5, 6, 8, 9]
    """
    return concatenate([(sequences, rows)])


def concatenate(parts: Sequence[tuple[Sequences, NDArray[np.integer]]]) -> Sequences:
    """Select traces from several `Sequences` and concatenate them, as `select` does for one.

    Args:
        parts: pairs of `Sequences` and the selected rows, at least one.
    """
    selections = [_Runs(sequences, np.asarray(rows, np.int64)) for sequences, rows in parts]
    columns: dict[str, Any] = {
        name: _end_to_end([selection.tokens(name) for selection in selections]) for name in PER_TOKEN
    }
    columns |= {
        name: _end_to_end([[getattr(selection.sequences, name)[selection.rows]] for selection in selections])
        for name in PER_TRACE
    }
    lengths = _end_to_end(
        [
            [np.diff(selection.sequences.cu_seqlens[a : b + 1]) for a, b in selection.branches]
            for selection in selections
        ]
    )
    turns = _end_to_end([[np.diff(selection.sequences.cu_turns)[selection.rows]] for selection in selections])
    counts = _end_to_end([[selection.count] for selection in selections])
    return Sequences(
        **columns,
        reward_names=selections[0].sequences.reward_names,
        turn_rewards=_end_to_end([selection.turns("turn_rewards") for selection in selections]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        cu_turns=np.concatenate([[0], np.cumsum(turns)]).astype(np.int64),
        trace=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        trace_ids=tuple(
            selection.sequences.trace_name(row) for selection in selections for row in selection.rows.tolist()
        ),
        alignment_report=empty_report(),
        images=ImageSpans.concatenate([(selection.images(), int(selection.count.sum())) for selection in selections]),
        support=TokenSets.concatenate([selection.support() for selection in selections]),
        penalties=Penalties.concatenate([selection.penalties() for selection in selections]),
    )


class _Runs:
    """Selected rows of `Sequences` as runs of adjacent traces, with the offsets of their branches."""

    def __init__(self, sequences: Sequences, rows: NDArray[np.int64]) -> None:
        self.sequences, self.rows = sequences, rows
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        runs = [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, cuts) if len(part)]
        kind = sequences.trace.dtype  # With another integer type, searchsorted would copy the whole column.
        ends = np.searchsorted(sequences.trace, np.array(runs, kind).reshape(-1, 2))
        self.traces, self.branches = runs, [(int(a), int(b)) for a, b in ends]
        first = np.searchsorted(sequences.trace, np.stack([rows, rows + 1], 1).astype(kind))
        self.count: NDArray[np.int64] = first[:, 1] - first[:, 0]

    def tokens(self, name: str) -> list[Array]:
        column, cu = getattr(self.sequences, name), self.sequences.cu_seqlens
        return [column[cu[a] : cu[b]] for a, b in self.branches] or [column[:0]]

    def images(self) -> ImageSpans | None:
        images = self.sequences.images
        if images is None:
            return None
        numbers = [np.arange(a, b) for a, b in self.branches]
        return images.take(np.concatenate(numbers) if numbers else np.zeros(0, np.int64))

    def support(self) -> tuple[TokenSets | None, NDArray[np.int64]]:
        cu = self.sequences.cu_seqlens
        tokens = [np.arange(cu[a], cu[b]) for a, b in self.branches]
        return self.sequences.support, np.concatenate(tokens) if tokens else np.zeros(0, np.int64)

    def penalties(self) -> tuple[Penalties | None, NDArray[np.int64]]:
        cu = self.sequences.cu_turns
        turns = [np.arange(cu[a], cu[b]) for a, b in self.traces]
        return self.sequences.penalties, np.concatenate(turns) if turns else np.zeros(0, np.int64)

    def turns(self, name: str) -> list[Array]:
        column, cu = getattr(self.sequences, name), self.sequences.cu_turns
        return [column[cu[a] : cu[b]] for a, b in self.traces] or [column[:0]]


def _end_to_end(parts: list[list[Array]]) -> Array:
    arrays = [array for group in parts for array in group]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


class Dataset(Protocol):
    """The interface of a data set: R traces, numbered 0 to R-1."""

    @property
    def catalog(self) -> TraceTable:
        """The table of all traces."""
        ...

    @property
    def in_memory(self) -> bool:
        """Whether all tokens are in memory."""
        ...

    @property
    def has_images(self) -> bool:
        """Whether any trace has an image among its tokens, found without reading tokens."""
        ...

    @property
    def inputs(self) -> int:
        """Number of inputs; `catalog.source` has their numbers."""
        ...

    def take(self, rows: NDArray[np.integer]) -> Sequences:
        """Return traces with their tokens and names, without extras and mismatch report; `group` is as in the catalog.

        Args:
            rows: trace numbers, ascending and unique.
        """
        ...

    def take_with_details(self, rows: NDArray[np.integer]) -> Sequences:
        """Return traces as `take` does, with group names and the mismatch report, for writing or display."""
        ...

    def parts(self) -> Iterator[Sequences]:
        """Yield all traces in pieces that fit in memory."""
        ...

    def trace_name(self, row: int) -> str:
        """Return the name of a trace for messages."""
        ...

    def group_hash(self) -> NDArray[np.float64]:
        """Return [R] a hash in [0, 1) of each trace's group name. Equal names hash equally in every data set."""
        ...

    def fingerprint(self, rewards: NDArray[np.float32]) -> str:
        """Return a hash of the trained tokens, the groups and the [R] rewards."""
        ...


class InMemoryDataset:
    """A data set of `Sequences` in memory.

    Args:
        sequences: R traces, from `align` or `Sequences.from_arrays`.
    """

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self._catalog: TraceTable | None = None

    @property
    def catalog(self) -> TraceTable:
        """The table of all traces; group numbers are those of the sequences."""
        if self._catalog is None:
            s = self.sequences
            columns: dict[str, Any] = store.count_traces(s.stored())
            columns |= {"group": np.asarray(s.group, np.int32), "reward_names": s.reward_names}
            self._catalog = TraceTable(**columns, source=np.zeros(s.traces, np.int32))
        return self._catalog

    @property
    def in_memory(self) -> bool:
        """Always True."""
        return True

    @property
    def has_images(self) -> bool:
        """As `Dataset.has_images`."""
        return self.sequences.images is not None

    @property
    def inputs(self) -> int:
        """Always 1."""
        return 1

    def take(self, rows: NDArray[np.integer]) -> Sequences:
        """Return traces as `Dataset.take`; the sequences themselves if all rows are selected."""
        if len(rows) == self.sequences.traces:
            return self.sequences
        return select(self.sequences, rows)

    def take_with_details(self, rows: NDArray[np.integer]) -> Sequences:
        """Return traces as `Dataset.take_with_details`."""
        return subset(self.sequences, rows)[0]

    def parts(self) -> Iterator[Sequences]:
        """Yield the sequences themselves."""
        yield self.sequences

    def trace_name(self, row: int) -> str:
        """Return the trace's id, or its number if it has none."""
        return self.sequences.trace_name(row)

    def group_hash(self) -> NDArray[np.float64]:
        """Return hashes as `Dataset.group_hash`; a group without a name is hashed by its number."""
        group = self.sequences.group
        names = self.sequences.group_names or tuple(map(str, range(int(group.max(initial=-1)) + 1)))
        return group_hashes(names)[group]

    def fingerprint(self, rewards: NDArray[np.float32]) -> str:
        """Return a hash as `Dataset.fingerprint`, of every token."""
        s, digest = self.sequences, hashlib.sha256()
        for part in (s.ids, s.trainable, s.rollout_logprobs, s.cu_seqlens, s.trace, s.group, rewards):
            digest.update(np.ascontiguousarray(part).tobytes())
        sampling = [] if s.support is None else [s.support.data]
        for part in (*sampling, *(vars(s.penalties).values() if s.penalties else ())):
            digest.update(np.ascontiguousarray(part).tobytes())
        if (images := s.images) is not None:
            for part in (images.position, images.cu_features, images.pictures.digest[images.image]):
                digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()


def group_hashes(names: tuple[str, ...]) -> NDArray[np.float64]:
    """Return [names] float64 hashes in [0, 1) of group names."""
    return np.array([zlib.crc32(name.encode("utf-8", "replace")) / 2**32 for name in names], np.float64)


def as_dataset(data: Sequences | Dataset) -> Dataset:
    """Wrap `Sequences` in a data set; return any other data set unchanged."""
    return InMemoryDataset(data) if isinstance(data, Sequences) else data


_MAX_MAPPED = 64
"""Maximum number of mapped shards. A mapping costs address space; its pages are released after each use."""
_ADVICE = "The files were changed; prepare the traces again."


class Shard(NamedTuple):
    """One shard: its folder, its manifest, and the number of its input (`source`)."""

    folder: Path
    manifest: manifest.FolderManifest
    source: int


class PreparedDataset:
    """A data set of prepared folders. Only the traces of the current step are in memory; accepted like `Sequences`.

    Groups with equal names are one group, also across folders. Traces are numbered by folder, shard and row.

    Attributes:
        folders: the folders as passed to `open`.
        shards: the shards of all folders, in order.
        catalog: the table of all traces.

    >>> from tempfile import TemporaryDirectory
    >>> from tracegrad import Sequences
    >>> nan = float("nan")
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [nan, -0.5, -0.1], [False, True, True], rewards=[1.0])
    >>> with TemporaryDirectory() as folder:
    ...     sequences.save(folder)  # one shard, as `tracegrad prepare` writes many
    ...     dataset = PreparedDataset.open(folder)
    ...     dataset.traces, dataset.take(np.array([0])).ids.tolist()
    (1, [5, 6, 7])
    """

    def __init__(self, folders: tuple[str, ...], shards: Sequence[Shard], catalog: TraceTable) -> None:
        self.folders, self.shards, self.catalog = folders, tuple(shards), catalog
        counts = [shard.manifest.counts["traces"] for shard in shards]
        self._first: NDArray[np.int64] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._mapped: OrderedDict[int, Sequences] = OrderedDict()
        self._checked: set[int] = set()
        self._lock = Lock()
        self.model: Path | None = None
        """Folder of the model whose image processor preprocesses the images."""

    @classmethod
    def open(
        cls, folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, verify: bool = False
    ) -> "PreparedDataset":
        """Read the manifests and the trace columns, but no tokens.

        Args:
            folders: one or several folders that `tracegrad prepare` or `Sequences.save` wrote, by path or address.
                Remote folders are downloaded (`storage.download.local`).
            verify: compare the checksum of every file, which reads each file once; `tracegrad train` sets it.

        Raises:
            ReadError: if a folder is incomplete or has no traces.
            FormatError: if a file is not in the format that `save` writes.
            ArgumentError: if a folder is passed twice.
        """
        paths = [folders] if isinstance(folders, (str, os.PathLike)) else list(folders)
        names = tuple(os.fspath(folder) for folder in paths)
        if not names or len({os.path.realpath(name) for name in names}) < len(names):
            raise ArgumentError(
                f"TG-TRAIN-016: {', '.join(names[:8]) or 'no folder'}: pass at least one folder that tracegrad prepare "
                "wrote, and pass each folder once."
            )
        shards = [
            shard
            for number, name in enumerate(names)
            for shard in _shards_of(download.local_path(name), number, verify)
        ]
        return cls(names, shards, _catalog(shards))

    @property
    def in_memory(self) -> bool:
        """Always False."""
        return False

    @property
    def has_images(self) -> bool:
        """As `Dataset.has_images`, from the manifests."""
        return any(MEDIA in shard.manifest.files for shard in self.shards)

    @property
    def inputs(self) -> int:
        """Number of folders."""
        return len(self.folders)

    @property
    def traces(self) -> int:
        """Number of traces R."""
        return self.catalog.traces

    def __repr__(self) -> str:
        tokens = int(self.catalog.tokens.sum(dtype=np.int64))
        return (
            f"PreparedDataset({self.traces} traces, {tokens} tokens, {len(self.shards)} shards of "
            f"{len(self.folders)} folders)"
        )

    def take(self, rows: NDArray[np.integer]) -> Sequences:
        """Return traces as `Dataset.take`, read from their shards."""
        rows = np.asarray(rows, np.int64)
        parts = [select(sequences, shard_rows) for sequences, shard_rows in self._by_shard(rows)]
        result = parts[0] if len(parts) == 1 else concatenate([(part, np.arange(part.traces)) for part in parts])
        result = result.with_image_processor(self.model) if self.model else result
        return replace(result, group=self.catalog.group[rows])

    def take_with_details(self, rows: NDArray[np.integer]) -> Sequences:
        """Return traces as `Dataset.take_with_details`, read from their shards."""
        parts = [
            subset(sequences, shard_rows)[0].stored()
            for sequences, shard_rows in self._by_shard(np.asarray(rows, np.int64))
        ]
        return Sequences.of_stored(store.concatenate(parts))

    def parts(self) -> Iterator[Sequences]:
        """Yield the shards, one at a time."""
        for number in range(len(self.shards)):
            sequences = self._open_shard(number)
            yield sequences
            _release_pages(sequences)

    def trace_name(self, row: int) -> str:
        """Return the trace's id."""
        number = int(np.searchsorted(self._first, row, side="right")) - 1
        return self._open_shard(number).trace_name(row - int(self._first[number]))

    def group_hash(self) -> NDArray[np.float64]:
        """Return hashes as `Dataset.group_hash`."""
        parts = [np.zeros(0)]
        for sequences in self.parts():
            names = sequences.group_names or sequences.trace_ids
            parts.append(group_hashes(names)[sequences.group])
        return np.concatenate(parts)

    def fingerprint(self, rewards: NDArray[np.float32]) -> str:
        """Return a hash as `Dataset.fingerprint`, of the columns and of the checksums in the manifests."""
        digest = blake2b(self.catalog.hash.encode(), digest_size=32)
        for shard in self.shards:
            digest.update(repr(sorted((name, tuple(file)) for name, file in shard.manifest.files.items())).encode())
        digest.update(np.ascontiguousarray(rewards).tobytes())
        return digest.hexdigest()

    def _by_shard(self, rows: NDArray[np.int64]) -> Iterator[tuple[Sequences, NDArray[np.int64]]]:
        """Yield each shard that has some of the traces, with their rows in it. Pages are released after each shard."""
        shard_numbers = np.searchsorted(self._first, rows, side="right") - 1
        for shard_number in np.unique(shard_numbers).tolist():
            sequences = self._open_shard(shard_number)
            yield sequences, rows[shard_numbers == shard_number] - self._first[shard_number]
            _release_pages(sequences)

    def _open_shard(self, number: int) -> Sequences:
        """Return a mapped shard. The first time, all its values are checked."""
        with self._lock:
            if number in self._mapped:
                self._mapped.move_to_end(number)
                return self._mapped[number]
            shard, is_new = self.shards[number], number not in self._checked
            sequences = Sequences.of_stored(store.load_shard(shard.folder, shard.manifest, check=is_new))
            if is_new:
                self._check_columns(number, sequences)
                self._checked.add(number)
                _release_pages(sequences)
            self._mapped[number] = sequences
            while len(self._mapped) > _MAX_MAPPED:
                self._mapped.popitem(last=False)
            return sequences

    def _check_columns(self, number: int, sequences: Sequences) -> None:
        """Check that the columns of the catalog agree with the shard's tokens."""
        here = slice(self._first[number], self._first[number + 1])
        counted = store.count_traces(sequences.stored())
        for name in ("branches", "tokens", "longest", "terms", "max_id"):
            if not np.array_equal(counted[name], getattr(self.catalog, name)[here]):
                raise FormatError(
                    f"TG-TRAIN-017: {self.shards[number].folder}: column {name} of {store.NAME} does not match the "
                    f"tokens. {_ADVICE}"
                )


def _shards_of(folder: Path, source: int, verify: bool) -> list[Shard]:
    contents = manifest.read(folder)
    if verify:
        manifest.verify(folder, contents)
    if not contents.files and not contents.shards:
        raise ReadError(
            f"TG-TRAIN-018: {folder}: the folder has no traces, so there is nothing to train on. Prepare other traces."
        )
    if contents.files:
        return [Shard(folder, contents, source)]
    return [Shard(folder / name, entry, source) for name, entry in contents.shards.items()]


def _catalog(shards: Sequence[Shard]) -> TraceTable:
    """Concatenate the columns of all shards. Columns that older folders lack are counted from the tokens."""
    rows = sum(shard.manifest.counts["traces"] for shard in shards)
    columns: dict[str, Any] = {}
    names: tuple[str, ...] = ()
    end = 0
    for number, shard in enumerate(shards):
        shard_columns, shard_names = _columns(shard)
        if not number:
            names = shard_names
            arrays = {name: column for name, column in shard_columns.items() if name != "trace"}
            columns = {name: np.empty((rows, *column.shape[1:]), column.dtype) for name, column in arrays.items()}
            columns["source"] = np.empty(rows, np.int32)
        if shard_names != names:
            raise FormatError(
                f"TG-TRAIN-019: {shard.folder}: its rewards are {', '.join(shard_names)[:80]!r}, but the first shard "
                f"has {', '.join(names)[:80]!r}. Prepare all shards with the same options."
            )
        here = slice(end, end + shard.manifest.counts["traces"])
        _check_shard_counts(shard, shard_columns)
        for name, column in columns.items():
            column[here] = shard.source if name == "source" else shard_columns[name]
        end = here.stop
    columns["group"] = number_groups(columns["group"])
    return TraceTable(**columns, reward_names=names)


def _columns(shard: Shard) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    if store.NAME in shard.manifest.files:
        return store.read_trace_columns(shard.folder)
    stored = store.load_shard(shard.folder, shard.manifest)
    return store.of_stored(stored), stored.names["reward_names"]


def _check_shard_counts(shard: Shard, columns: dict[str, NDArray[Any]]) -> None:
    """Check that the numbers of traces, branches, tokens and trained tokens agree with the manifest."""
    counted = {name: int(columns[name].sum(dtype=np.int64)) for name in ("branches", "tokens", "terms")}
    low = min((int(columns[name].min(initial=0)) for name in counted), default=0)
    if {"traces": len(columns["terms"]), **counted} != dict(shard.manifest.counts) or low < 0:
        raise FormatError(
            f"TG-TRAIN-020: {shard.folder}: the counts in its manifest do not match {store.NAME}. {_ADVICE}"
        )


def _release_pages(sequences: Sequences) -> None:
    """Release the pages of a mapped shard. The next access reads them again, or finds them in the page cache."""
    base: Any = sequences.ids
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    memory_map = getattr(base, "_mmap", None)
    if memory_map is not None and hasattr(mmap, "MADV_DONTNEED"):
        memory_map.madvise(mmap.MADV_DONTNEED)
