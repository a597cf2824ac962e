"""Save and load `Sequences`, and check their columns.

A folder contains the arrays as a safetensors file, names and details as JSON, and `traces.safetensors` with one row per
trace (lengths, counts of trained tokens, alignment levels, versions, rewards, hashes of names). Planning a run reads
only `traces.safetensors`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.penalties import Penalties
from tracegrad.alignment.ragged import Ragged
from tracegrad.alignment.token_sets import TokenSets, support_of
from tracegrad.data.codes import LEVELS, MEDIA, NO_LEVEL, TEXT_ONLY
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.images import ImageRule, ImageSpans, image_files
from tracegrad.storage import manifest, safetensors_file

Array = NDArray[Any]

MISMATCH_COLUMNS = ("reason", "trace", "turn", "token", "count")
_MOST_LOGPROB = 1e-3  # tolerance for float32 rounding above 0, as in `Sequences.from_arrays`
_CHUNK = 1 << 16
_MISMATCHES = dict.fromkeys(MISMATCH_COLUMNS, np.int32) | {"reason": np.uint8}
_TOKENS = {
    "ids": np.int32,
    "source": np.uint8,
    "trainable": np.bool_,
    "rollout_logprobs": np.float32,
    "turn": np.int32,
    "version": np.int32,
    "alignment_level": np.uint8,
    "inv_temperature": np.float32,
}
_TRACES = {
    "group": np.int32,
    "rewards": np.float32,
    "logprob_kind": np.uint8,
    "temperature": np.float32,
    "reshaped": np.uint32,
    "replayed": np.uint32,
    "ending": np.uint8,
}
OFFSETS = {"cu_seqlens": np.int64, "cu_turns": np.int64}
COLUMNS: dict[str, Any] = {**_TOKENS, **_TRACES, **OFFSETS, "trace": np.int32, "turn_rewards": np.float32}


class StoredSequences(NamedTuple):
    """The fields of `Sequences` and its `AlignmentReport`, whose arrays are in `columns` as `mismatches.reason` and so
    on."""

    columns: dict[str, Array]
    extras: dict[str, Array | Ragged]
    names: dict[str, tuple[str, ...]]
    alignment_report: dict[str, Any]
    images: ImageSpans | None = None
    support: TokenSets | None = None
    penalties: Penalties | None = None


def find_problem(stored: StoredSequences) -> str | None:
    """Describe the first array with an invalid dtype, shape or value, in a sentence; None if all are valid."""
    problem = _wrong_shape(stored) or _wrong_index(stored.columns, stored.names)
    problem = problem or _wrong_value(stored.columns) or _find_report_problem(stored) or _wrong_support(stored)
    if problem or stored.images is None:
        return problem
    return image_files.find_problem(stored.images, stored.columns["ids"], stored.columns["cu_seqlens"])


def _wrong_shape(stored: StoredSequences) -> str | None:
    columns, names = stored.columns, stored.names
    tokens, branches, traces = (len(columns[name]) if columns[name].ndim else -1 for name in ("ids", "trace", "group"))
    lengths = dict.fromkeys(_TOKENS, tokens) | dict.fromkeys(_TRACES, traces)
    lengths |= {"cu_seqlens": branches + 1, "cu_turns": traces + 1}
    lengths |= {f"mismatches.{name}": len(stored.alignment_report["detail"]) for name in MISMATCH_COLUMNS}
    dtypes: Mapping[str, Any] = COLUMNS | {f"mismatches.{name}": dtype for name, dtype in _MISMATCHES.items()}
    for name, array in columns.items():
        if array.dtype != dtypes[name] or array.ndim != (2 if name == "rewards" else 1):
            return f"{name} is {array.dtype} of shape {array.shape}, not {np.dtype(dtypes[name])}."
        if len(array) != lengths.get(name, len(array)):
            return f"{name} has {len(array)} entries and not {lengths[name]}."
    for name, extra in stored.extras.items():
        if (len(extra) if isinstance(extra, Ragged) or extra.ndim else -1) != tokens:
            return f"extras[{name[:80]!r}] has not one entry for each of {tokens} tokens."
    if len(names["trace_ids"]) not in (0, traces):
        return f"there are {len(names['trace_ids'])} trace_ids for {traces} traces."
    if columns["rewards"].shape[1] != len(names["reward_names"]):
        return f"there are {len(names['reward_names'])} reward_names for {columns['rewards'].shape[1]} rewards."
    return None


def _wrong_support(stored: StoredSequences) -> str | None:
    if stored.penalties is not None and (problem := stored.penalties.find_problem(len(stored.columns["turn_rewards"]))):
        return problem
    if stored.support is None:
        return None
    try:
        stored.support.check()
        support_of(stored.support, stored.columns["ids"], stored.columns["trainable"])
    except (ArgumentError, FormatError) as error:
        return f"support: {error}"
    return None


def _wrong_index(columns: Mapping[str, Array], names: Mapping[str, tuple[str, ...]]) -> str | None:
    """Describe the first index array with values outside of the array it points into; None if there is none."""
    traces = len(columns["group"])
    for name, total in (("cu_seqlens", len(columns["ids"])), ("cu_turns", len(columns["turn_rewards"]))):
        offsets = columns[name]
        if offsets[0] != 0 or offsets[-1] != total or np.any(offsets[1:] < offsets[:-1]):
            return f"{name} does not rise from 0 to {total}."
    owners = columns["trace"]
    if len(owners) and (owners[0] != 0 or owners[-1] >= traces or not np.isin(np.diff(owners), (0, 1)).all()):
        return f"trace does not count up through {traces} traces."
    if len(names["group_names"]) and not _within(columns["group"], 0, len(names["group_names"]) - 1):
        return f"group leads out of {len(names['group_names'])} group_names."
    filled = np.flatnonzero(np.diff(columns["cu_seqlens"]))  # branches with tokens: reduceat allows no empty ones
    last = np.maximum.reduceat(columns["turn"], columns["cu_seqlens"][filled]) if len(filled) else np.zeros(0)
    if np.any(last >= np.diff(columns["cu_turns"])[owners[filled]]) or not _within(columns["turn"], -1, None):
        return "turn leads out of the generations of its trace."
    return None


def _wrong_value(columns: Mapping[str, Array]) -> str | None:
    """Describe the first array with an invalid value; None if there is none."""
    level = columns["alignment_level"]
    if columns["trainable"].size and columns["trainable"].view(np.uint8).max() > 1:
        return "trainable has bytes other than 0 and 1."
    for name, low, high in (("ids", 0, None), ("source", 0, 2), ("logprob_kind", 0, 2), ("ending", 0, 2)):
        if not _within(columns[name], low, high):
            return f"{name} has values below {low}{'' if high is None else f' or above {high}'}."
    if np.any((level >= len(LEVELS)) & (level != NO_LEVEL)):
        return f"alignment_level has values that are none (0 to {len(LEVELS) - 1}, or {NO_LEVEL})."
    if not _between(columns["inv_temperature"], 0.0):
        return "inv_temperature has values that are not above 0 and finite."
    for name in ("rewards", "turn_rewards", "temperature"):
        if np.isinf(columns[name]).any():
            return f"{name} has infinite values."
    for start in range(0, len(level), _CHUNK):  # in parts, so that the masks stay in the cache
        logprobs = columns["rollout_logprobs"][start : start + _CHUNK]
        invalid = ~((logprobs <= _MOST_LOGPROB) & (logprobs > -np.inf) | np.isnan(logprobs))
        if np.any(invalid & columns["trainable"][start : start + _CHUNK]):
            return "rollout_logprobs has positive or infinite values at trainable tokens."
    return None


def _find_report_problem(stored: StoredSequences) -> str | None:
    columns, traces = stored.columns, len(stored.columns["group"])
    if not all(re.fullmatch(r"R\d\d [a-z0-9_]{1,60}", name) for name in stored.alignment_report["reasons"]):
        return "reasons of the alignment report are not names like `R01 noncanonical_bpe`."
    highest = {"reason": len(stored.alignment_report["reasons"]) - 1, "trace": traces - 1}
    lowest = {"reason": 0, "trace": 0, "count": None}
    for name in MISMATCH_COLUMNS:
        if not _within(columns[f"mismatches.{name}"], lowest.get(name, -1), highest.get(name)):
            return f"mismatches.{name} leads out of what it points at."
    return None


def _within(codes: Array, low: int | None, high: int | None) -> bool:
    if len(codes) == 0:
        return True
    return (low is None or bool(codes.min() >= low)) and (high is None or bool(codes.max() <= high))


def _between(values: Array, low: float) -> bool:
    """Return whether all values are above `low` and finite. NaN propagates through min, so the result is False."""
    return len(values) == 0 or bool(values.min() > low and values.max() < np.inf)


NAME = "traces.safetensors"
FORMAT = "tracegrad-traces/1"
TRACE_COLUMNS: dict[str, Any] = {
    "group": np.uint64,
    "trace": np.uint64,
    "branches": np.int32,
    "tokens": np.int32,
    "longest": np.int32,
    "terms": np.int32,
    "known": np.int32,
    "turns": np.int32,
    "alignment_level": np.uint8,
    "foreign": np.bool_,
    "version_min": np.int32,
    "version_max": np.int32,
    "rewards": np.float32,
    "logprob_kind": np.uint8,
    "temperature": np.float32,
    "reshaped": np.uint32,
    "replayed": np.uint32,
    "ending": np.uint8,
    "max_id": np.int32,
    "media": np.bool_,
}


class Storable(Protocol):
    """The argument of `columns_of`: `Sequences`."""

    def stored(self) -> StoredSequences:
        """Return the fields in the form that `store` writes."""
        ...


def columns_of(sequences: Storable) -> dict[str, Array]:
    """Return the columns of traces: one row for each of R traces, in order.

    Args:
        sequences: `Sequences`.

    Returns:
        group: [R, 2] uint64: blake2b-128 of the group name as two little-endian words; of the trace id if the group has
            no name. trace: [R, 2] uint64, the same of the trace id.
        branches, tokens, longest: [R] int32: number of branches, of tokens in all branches, of tokens in the longest.
        terms, known: [R] int32: trained tokens, and trained tokens with a finite rollout logprob.
        turns: [R] int32: generations.
        alignment_level: [R] uint8: the worst level of the trained tokens, 255 if there are none.
        foreign: [R] bool: whether any token is text only (T6).
        version_min, version_max: [R] int32: of the trained tokens. version_min is -1 if one version is unknown,
            version_max if all are.
        rewards: [R, K] float32. logprob_kind, temperature, reshaped, replayed, ending: [R], as in `Sequences`.
        max_id: [R] int32: the largest token id, -1 if there are no tokens.
        media: [R] bool: whether an image, audio or video without ids comes before a turn.

    >>> from tracegrad.alignment.sequences import Sequences
    >>> one = Sequences.from_arrays([5, 6, 7], [0, 2, 3], [-1.0] * 3, [False, True, True], trace=[0, 0])
    >>> {name: columns_of(one)[name].tolist() for name in ("branches", "tokens", "longest", "terms", "max_id")}
    {'branches': [2], 'tokens': [3], 'longest': [2], 'terms': [2], 'max_id': [7]}
    """
    return of_stored(sequences.stored())


def of_stored(stored: StoredSequences) -> dict[str, Array]:
    """Return the columns of traces, as `columns_of`."""
    columns, names = stored.columns, stored.names
    ids = names["trace_ids"] or tuple(str(number) for number in range(len(columns["group"])))
    groups = hashes(names["group_names"])[columns["group"]] if names["group_names"] else hashes(ids)
    trace_columns = {"group": groups, "trace": hashes(ids), **count_traces(stored)}
    return {name: np.asarray(trace_columns[name]).astype(dtype) for name, dtype in TRACE_COLUMNS.items()}


def count_traces(stored: StoredSequences) -> dict[str, Array]:
    """Return the columns of traces, as `columns_of`, without the hashes of names."""
    columns = stored.columns
    traces = len(columns["group"])
    first = np.searchsorted(columns["trace"], np.arange(traces + 1))  # the first branch of each trace
    cut = columns["cu_seqlens"][first]  # the first token of each trace
    terms = np.flatnonzero(columns["trainable"])
    term_cut = np.searchsorted(terms, cut)
    level, version = columns["alignment_level"][terms], columns["version"][terms]
    level = np.where(level == NO_LEVEL, -1, level.astype(np.int16))
    media = np.zeros(traces, np.bool_)
    media[columns["mismatches.trace"][np.isin(columns["mismatches.reason"], MEDIA)]] = True
    counts = {
        "branches": np.diff(first),
        "tokens": np.diff(cut),
        "longest": _reduce_ranges(np.maximum, np.diff(columns["cu_seqlens"]), first, 0),
        "terms": np.diff(term_cut),
        "known": _reduce_ranges(np.add, np.isfinite(columns["rollout_logprobs"][terms]).astype(np.int64), term_cut, 0),
        "turns": np.diff(columns["cu_turns"]),
        "alignment_level": _reduce_ranges(np.maximum, level, term_cut, -1),
        "foreign": _reduce_ranges(np.logical_or, columns["alignment_level"] == TEXT_ONLY, cut, False),
        "version_min": _reduce_ranges(np.minimum, version, term_cut, -1),
        "version_max": _reduce_ranges(np.maximum, version, term_cut, -1),
        **{name: columns[name] for name in _TRACES if name != "group"},
        "max_id": _reduce_ranges(np.maximum, columns["ids"], cut, -1),
        "media": media,
    }
    counts["alignment_level"] = np.where(counts["alignment_level"] < 0, NO_LEVEL, counts["alignment_level"])
    return {name: np.asarray(column).astype(TRACE_COLUMNS[name]) for name, column in counts.items()}


def hashes(names: Sequence[str]) -> NDArray[np.uint64]:
    """Return [names, 2] uint64: blake2b-128 of each name in UTF-8, as two little-endian words.

    >>> hashes(["a", "b"]).shape
    (2, 2)
    """
    digests = [blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest() for name in names]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64).reshape(-1, 2)


def write_trace_columns(folder: Path, stored: StoredSequences) -> safetensors_file.FileChecksum:
    """Write the columns of traces to the file `NAME` in a folder, with the reward names in the metadata.

    Raises:
        ReadError: if the file cannot be written.
    """
    metadata = {"format": FORMAT, "reward_names": json.dumps(list(stored.names["reward_names"]))}
    return safetensors_file.write(folder / NAME, of_stored(stored), metadata)


def read_trace_columns(folder: Path) -> tuple[dict[str, Array], tuple[str, ...]]:
    """Read the columns of traces of a folder, memory-mapped and read-only, and the names of the rewards.

    Raises:
        ReadError: if the file does not exist, as in folders of earlier versions. Then load the sequences and call
            `columns_of`.
        FormatError: if `write` did not write the file.
    """
    arrays, metadata = safetensors_file.read(folder / NAME)
    try:
        names = json.loads(metadata["reward_names"])
        has_format = metadata["format"] == FORMAT and arrays.keys() == TRACE_COLUMNS.keys()
        fits = has_format and isinstance(names, list) and all(isinstance(name, str) for name in names)
    except (KeyError, ValueError, RecursionError):
        fits, names = False, []
    rows = next((len(array) for array in arrays.values() if array.ndim), -1)
    shapes = {"group": (rows, 2), "trace": (rows, 2), "rewards": (rows, len(names))}
    for name, dtype in TRACE_COLUMNS.items() if fits else ():
        fits &= arrays[name].dtype == dtype and arrays[name].shape == shapes.get(name, (rows,))
    if not fits:
        raise FormatError(
            f"TG-ALIGN-016: {folder / NAME}: not the columns of traces that `save` writes. A plan made from it would "
            "be of other traces. Prepare the traces again."
        )
    return {name: arrays[name] for name in TRACE_COLUMNS}, tuple(names)


def _reduce_ranges(ufunc: np.ufunc, values: Array, offsets: Array, empty: Any) -> Array:
    """Reduce values[cut[r]:cut[r+1]] for each r by a ufunc; `empty` for an empty range."""
    filled = np.flatnonzero(np.diff(offsets))  # reduceat allows no empty ranges
    result = np.full(len(offsets) - 1, empty, values.dtype)
    if len(filled):
        result[filled] = ufunc.reduceat(values, offsets[filled])
    return result


_FORMAT = "tracegrad-sequences/2"
_ARRAYS, _TABLE = "sequences.safetensors", "sequences.json"
_PENALTIES = "penalties."  # prefix of the names of their arrays
_CURE = "The files were changed; prepare the traces again."

NAMES = ("reward_names", "trace_ids", "group_names")


def save(folder: Path, stored: StoredSequences) -> None:
    """Write the sequences to a folder, which is created if needed; the manifest is written last."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReadError(
            f"TG-ALIGN-017: {folder}: cannot be written ({error.strerror}). Choose another folder."
        ) from error
    with manifest.lock(folder):
        manifest.clear_drafts(folder, _ARRAYS, _TABLE, image_files.MEDIA, NAME, manifest.NAME)
        write(folder, stored)


def write(folder: Path, stored: StoredSequences) -> None:
    """Write the sequences to an existing folder that no other process uses; the manifest is written last."""
    if problem := find_problem(stored):
        raise ArgumentError(
            f"TG-ALIGN-018: {problem} These sequences cannot be trained on, so they are not saved. Correct the array."
        )
    try:
        (folder / manifest.NAME).unlink(missing_ok=True)
    except OSError as error:
        raise ReadError(
            f"TG-ALIGN-019: {folder}: cannot be written ({error.strerror}). Choose another folder."
        ) from error
    arrays = dict(stored.columns)
    for name, extra in stored.extras.items():
        if isinstance(extra, Ragged):
            arrays |= {f"ragged.{name}": extra.values, f"ragged.{name}.offsets": extra.offsets}
        else:
            arrays[f"extra.{name}"] = extra
    if stored.support is not None:
        arrays |= {"support.starts": stored.support.starts, "support.data": stored.support.data}
    if stored.penalties is not None:
        arrays |= {f"{_PENALTIES}{name}": array for name, array in vars(stored.penalties).items()}
    table: dict[str, Any] = {"format": _FORMAT, **stored.names, "alignment_report": stored.alignment_report}
    files = {}
    if stored.images is not None:
        images = image_files.drop_unused(stored.images)
        table["pictures"] = images.rule.as_dict()
        ends: list[int] = []
        files[image_files.MEDIA] = safetensors_file.write_bytes(
            folder / image_files.MEDIA, _with_ends(image_files.media_of(images), ends)
        )
        arrays |= image_files.arrays_of(images, np.array(ends, np.int64))
    text = json.dumps(table, ensure_ascii=False)
    files |= {
        _ARRAYS: safetensors_file.write(folder / _ARRAYS, arrays, {"format": _FORMAT}),
        _TABLE: safetensors_file.write_bytes(folder / _TABLE, [text.encode("utf-8", "surrogatepass")]),
        NAME: write_trace_columns(folder, stored),
    }
    manifest.write(folder, counts(stored), files)


def _with_ends(files: Iterator[bytes], ends: list[int]) -> Iterator[bytes]:
    """Yield the files, and append the end of each, in bytes, to `ends`."""
    total = 0
    for file in files:
        total += len(file)
        ends.append(total)
        yield file


def counts(stored: StoredSequences) -> dict[str, int]:
    """Return the counts for the manifest."""
    columns = stored.columns
    values = (len(columns["group"]), len(columns["trace"]), len(columns["ids"]), np.count_nonzero(columns["trainable"]))
    return {name: int(count) for name, count in zip(manifest.COUNTS, values, strict=True)}


def load(folder: Path, verify: bool = False) -> StoredSequences:
    """Load a folder that `save` wrote, memory-mapped, or all shards that `prepare` wrote, concatenated in memory.

    Raises:
        ReadError: if there is no complete data in the folder.
        FormatError: if `save` did not write the files, or if `verify` is set and the bytes have changed.
    """
    contents = manifest.read(folder)
    if verify:
        manifest.verify(folder, contents)
    if contents.files:
        return load_shard(folder, contents)
    if not contents.shards:
        raise ReadError(
            f"TG-ALIGN-020: {folder}: no trace was prepared into it. There is nothing to train on. Prepare "
            f"other traces."
        )
    return concatenate([load_shard(folder / name, shard) for name, shard in contents.shards.items()])


def load_shard(folder: Path, folder_manifest: manifest.FolderManifest, *, check: bool = True) -> StoredSequences:
    """Load one folder that `save` wrote, memory-mapped.

    Args:
        folder: with the arrays.
        folder_manifest: its manifest.
        check: check every value; False if this process has checked the folder already.

    Raises:
        FormatError: if `save` did not write the files.
    """
    # Earlier versions did not write the columns of traces, and media.bin exists only if there are images.
    if set(folder_manifest.files) - {NAME, image_files.MEDIA} != {_ARRAYS, _TABLE}:
        raise FormatError(f"TG-ALIGN-021: {folder}: its manifest does not name {_ARRAYS} and {_TABLE} alone. {_CURE}")
    arrays, _ = safetensors_file.read(folder / _ARRAYS)
    try:
        text = safetensors_file.read_text(folder / _TABLE, folder_manifest.files[_TABLE].bytes).decode(
            "utf-8", "surrogatepass"
        )
        table = json.loads(text)
        names = {name: _names(table[name]) for name in NAMES}
        stored_report = table["alignment_report"]
        report: dict[str, Any] = {name: _strings(stored_report[name]) for name in ("detail", "reasons", "errors")}
        report |= {name: manifest.count(stored_report[name]) for name in ("recorded", "exact")}
        report["server_profiles"] = _counts(stored_report.get("server_profiles", {}))  # earlier versions lack it
        arrays.setdefault("ending", np.zeros(len(arrays["group"]), np.uint8))  # unknown; earlier versions lack it
        arrays.setdefault("replayed", np.zeros(len(arrays["group"]), np.uint32))
        support = penalties = None
        if f"{_PENALTIES}generation" in arrays:
            names_of_penalties = [name for name in arrays if name.startswith(_PENALTIES)]
            penalties = Penalties(**{name.removeprefix(_PENALTIES): arrays.pop(name) for name in names_of_penalties})
        if "support.data" in arrays:
            support = TokenSets(arrays.pop("support.starts"), arrays.pop("support.data"), len(arrays["ids"]))
        columns = {name: arrays.pop(name) for name in (*COLUMNS, *(f"mismatches.{name}" for name in MISMATCH_COLUMNS))}
        images = None
        if image_files.MEDIA in folder_manifest.files:
            images = image_files.images_of(arrays, ImageRule.of_dict(table["pictures"]), folder)
            arrays = {name: array for name, array in arrays.items() if not name.startswith(image_files.PREFIX)}
        stored = StoredSequences(columns, _extras(arrays), names, report, images, support, penalties)
    except (ReadError, FormatError):
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"TG-ALIGN-022: {folder}: not what `save` writes ({str(error)[:80]!r}). {_CURE}") from error
    problem = find_problem(stored) if check else None
    if not problem and check and counts(stored) != dict(folder_manifest.counts):
        problem = "the counts of its folder_manifest are not those of its arrays."
    if problem:
        raise FormatError(f"TG-ALIGN-029: {folder}: {problem} {_CURE}")
    return stored


def _names(values: Any) -> tuple[str, ...]:
    """Check that names can be encoded as UTF-8; names from records always can."""
    for name in (names := _strings(values)):
        if not name.isascii():
            name.encode("utf-8")  # a lone surrogate raises a ValueError
    return names


def _strings(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("a list of names holds something else")
    return tuple(values)


def _counts(values: Any) -> dict[str, int]:
    if not isinstance(values, dict):
        raise TypeError("counts stand under no names")
    return {name: manifest.count(value) for name, value in values.items()}


def _extras(arrays: dict[str, Array]) -> dict[str, Array | Ragged]:
    """Return the extras from the arrays `extra.NAME`, and `ragged.NAME` with `ragged.NAME.offsets`."""
    extras: dict[str, Array | Ragged] = {}
    for name, array in arrays.items():
        if not name.startswith("ragged."):
            extras[name.removeprefix("extra.")] = array
        elif f"{name}.offsets" in arrays:
            extras[name.removeprefix("ragged.")] = Ragged(arrays[f"{name}.offsets"], array)
    return extras


def concatenate(parts: Sequence[StoredSequences]) -> StoredSequences:
    """Concatenate the traces of all parts, in order. Groups with equal names are merged."""
    first = parts[0]
    if len(parts) == 1:
        return first
    names = {name: tuple(chain(*(part.names[name] for part in parts))) for name in ("trace_ids", "group_names")}
    for name in ("trace_ids", "group_names"):
        if len({bool(part.names[name]) for part in parts if len(part.columns["group"])}) > 1:
            raise FormatError(f"TG-ALIGN-023: some shards have {name} and others have none. {_CURE}")
    if any(part.names["reward_names"] != first.names["reward_names"] for part in parts):
        raise FormatError("TG-ALIGN-024: the shards have different rewards. Prepare them with the same options.")
    if any(part.alignment_report["reasons"] != first.alignment_report["reasons"] for part in parts):
        raise FormatError("TG-ALIGN-025: the shards were written by different versions. Prepare them with one.")
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns}
    rows = np.cumsum([0, *(len(part.columns["group"]) for part in parts)]).astype(np.int32)
    for name in ("trace", "mismatches.trace"):
        columns[name] = np.concatenate([part.columns[name] + row for part, row in zip(parts, rows, strict=False)])
    for name in OFFSETS:
        lengths = np.concatenate([np.diff(part.columns[name]) for part in parts])
        columns[name] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    number = {name: code for code, name in enumerate(dict.fromkeys(names["group_names"]))}
    codes = [np.array([number[name] for name in part.names["group_names"]], np.int32) for part in parts]
    if number:
        columns["group"] = np.concatenate(
            [code[part.columns["group"]] for code, part in zip(codes, parts, strict=True)]
        )
    return StoredSequences(
        columns,
        {
            name: _concatenate_extra(name, parts)
            for name in dict.fromkeys(name for part in parts for name in part.extras)
        },
        {**names, "group_names": tuple(number), "reward_names": first.names["reward_names"]},
        {
            "reasons": first.alignment_report["reasons"],
            **{name: tuple(chain(*(part.alignment_report[name] for part in parts))) for name in ("detail", "errors")},
            **{name: sum(part.alignment_report[name] for part in parts) for name in ("recorded", "exact")},
            "server_profiles": _sum_counts([part.alignment_report["server_profiles"] for part in parts]),
        },
        ImageSpans.concatenate([(part.images, len(part.columns["trace"])) for part in parts]),
        TokenSets.concatenate([(part.support, np.arange(len(part.columns["ids"]))) for part in parts]),
        Penalties.concatenate([(part.penalties, np.arange(len(part.columns["turn_rewards"]))) for part in parts]),
    )


def _sum_counts(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(chain.from_iterable(counts))
    return {name: sum(part.get(name, 0) for part in counts) for name in names}


def _concatenate_extra(name: str, parts: Sequence[StoredSequences]) -> Array | Ragged:
    """Concatenate one extra of all parts. Tokens of a part that lacks it get -1, or an empty row."""
    template: Any = next(part.extras[name] for part in parts if name in part.extras)
    columns: list[Any] = []
    for part in parts:
        tokens = len(part.columns["ids"])
        if name in part.extras:
            columns.append(part.extras[name])
        elif isinstance(template, Ragged):
            columns.append(Ragged(np.zeros(tokens + 1, np.int64), template.values[:0]))
        else:
            columns.append(np.full((tokens, *template.shape[1:]), -1, template.dtype))
    if all(isinstance(column, Ragged) for column in columns):
        return Ragged.concatenate(columns)
    if len({None if isinstance(column, Ragged) else column.shape[1:] for column in columns}) > 1:
        raise FormatError(f"TG-ALIGN-026: the shards have rows of unlike shapes in {name}. Prepare the traces at once.")
    return np.concatenate(columns)
