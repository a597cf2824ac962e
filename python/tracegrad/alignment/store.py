"""Save and load `Sequences`, and check their columns.

A folder holds the arrays as a safetensors file, names and details as JSON, and `traces.safetensors` with one row per
trace (lengths, counts of trained tokens, levels, versions, rewards, hashes of names), which is all that planning a run
reads.
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

from tracegrad.alignment.ragged import Ragged
from tracegrad.data.codes import MEDIA, NO_TIER, TEXT_ONLY
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.images import Images, Rule, image_files
from tracegrad.storage import manifest, safetensors_file

Array = NDArray[Any]

DRIFT_COLUMNS = ("reason", "trace", "turn", "token", "count")
_MOST_LOGPROB = 1e-3  # what float32 may leave above 0; as in `Sequences.from_arrays`
_CHUNK = 1 << 16
_DRIFT = dict.fromkeys(DRIFT_COLUMNS, np.int32) | {"reason": np.uint8}
_TOKENS = {
    "ids": np.int32,
    "source": np.uint8,
    "trainable": np.bool_,
    "rollout_logprobs": np.float32,
    "turn": np.int32,
    "version": np.int32,
    "tier": np.uint8,
    "inv_temperature": np.float32,
}
_TRACES = {
    "group": np.int32,
    "rewards": np.float32,
    "logprob_kind": np.uint8,
    "temperature": np.float32,
    "reshaped": np.uint32,
    "ending": np.uint8,
}
OFFSETS = {"cu_seqlens": np.int64, "cu_turns": np.int64}
COLUMNS: dict[str, Any] = {**_TOKENS, **_TRACES, **OFFSETS, "trace": np.int32, "turn_rewards": np.float32}


class Stored(NamedTuple):
    """Fields of a `Sequences` and its `Drift`, whose arrays stand in `columns` as `drift.reason` and so on."""

    columns: dict[str, Array]
    extras: dict[str, Array | Ragged]
    names: dict[str, tuple[str, ...]]
    drift: dict[str, Any]
    images: Images | None = None


def misfit(stored: Stored) -> str:
    """The first array whose dtype, shape or values are not what `Sequences` promises, as a sentence; or ""."""
    wrong = _wrong_shape(stored) or _wrong_place(stored.columns, stored.names)
    wrong = wrong or _wrong_value(stored.columns) or _wrong_drift(stored)
    if wrong or stored.images is None:
        return wrong
    return image_files.misfit(stored.images, stored.columns["ids"], stored.columns["cu_seqlens"])


def _wrong_shape(stored: Stored) -> str:
    columns, names = stored.columns, stored.names
    tokens, branches, traces = (len(columns[name]) if columns[name].ndim else -1 for name in ("ids", "trace", "group"))
    lengths = dict.fromkeys(_TOKENS, tokens) | dict.fromkeys(_TRACES, traces)
    lengths |= {"cu_seqlens": branches + 1, "cu_turns": traces + 1}
    lengths |= {f"drift.{name}": len(stored.drift["detail"]) for name in DRIFT_COLUMNS}
    kinds: Mapping[str, Any] = COLUMNS | {f"drift.{name}": kind for name, kind in _DRIFT.items()}
    for name, array in columns.items():
        if array.dtype != kinds[name] or array.ndim != (2 if name == "rewards" else 1):
            return f"{name} is {array.dtype} of shape {array.shape}, not {np.dtype(kinds[name])}."
        if len(array) != lengths.get(name, len(array)):
            return f"{name} has {len(array)} entries and not {lengths[name]}."
    for name, extra in stored.extras.items():
        if (len(extra) if isinstance(extra, Ragged) or extra.ndim else -1) != tokens:
            return f"extras[{name[:80]!r}] has not one entry for each of {tokens} tokens."
    if len(names["trace_ids"]) not in (0, traces):
        return f"there are {len(names['trace_ids'])} trace_ids for {traces} traces."
    if columns["rewards"].shape[1] != len(names["reward_names"]):
        return f"there are {len(names['reward_names'])} reward_names for {columns['rewards'].shape[1]} rewards."
    return ""


def _wrong_place(columns: Mapping[str, Array], names: Mapping[str, tuple[str, ...]]) -> str:
    """What leads out of another array."""
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
    filled = np.flatnonzero(np.diff(columns["cu_seqlens"]))  # branches with a token: reduceat takes no empty ones
    last = np.maximum.reduceat(columns["turn"], columns["cu_seqlens"][filled]) if len(filled) else np.zeros(0)
    if np.any(last >= np.diff(columns["cu_turns"])[owners[filled]]) or not _within(columns["turn"], -1, None):
        return "turn leads out of the generations of its trace."
    return ""


def _wrong_value(columns: Mapping[str, Array]) -> str:
    """What no reader or trainer could have meant."""
    tier = columns["tier"]
    if columns["trainable"].size and columns["trainable"].view(np.uint8).max() > 1:
        return "trainable has bytes other than 0 and 1."
    for name, low, high in (("ids", 0, None), ("source", 0, 2), ("logprob_kind", 0, 2), ("ending", 0, 2)):
        if not _within(columns[name], low, high):
            return f"{name} has values below {low}{'' if high is None else f' or above {high}'}."
    if np.any((tier > 6) & (tier != 255)):
        return "tier has values that are none (0 to 6, or 255)."
    if not _between(columns["inv_temperature"], 0.0):
        return "inv_temperature has values that are not above 0 and finite."
    for name in ("rewards", "turn_rewards", "temperature"):
        if np.isinf(columns[name]).any():
            return f"{name} has infinite values."
    for start in range(0, len(tier), _CHUNK):  # in parts, so that the masks stay in the cache
        logprobs = columns["rollout_logprobs"][start : start + _CHUNK]
        off = ~((logprobs <= _MOST_LOGPROB) & (logprobs > -np.inf) | np.isnan(logprobs))
        if np.any(off & columns["trainable"][start : start + _CHUNK]):
            return "rollout_logprobs has positive or infinite values at trainable tokens."
    return ""


def _wrong_drift(stored: Stored) -> str:
    columns, traces = stored.columns, len(stored.columns["group"])
    if not all(re.fullmatch(r"R\d\d [a-z0-9_]{1,60}", name) for name in stored.drift["reasons"]):
        return "drift.reasons are not names like `R01 noncanonical_bpe`."
    highest = {"reason": len(stored.drift["reasons"]) - 1, "trace": traces - 1}
    lowest = {"reason": 0, "trace": 0, "count": None}
    for name in DRIFT_COLUMNS:
        if not _within(columns[f"drift.{name}"], lowest.get(name, -1), highest.get(name)):
            return f"drift.{name} leads out of what it points at."
    return ""


def _within(codes: Array, low: int | None, high: int | None) -> bool:
    if len(codes) == 0:
        return True
    return (low is None or bool(codes.min() >= low)) and (high is None or bool(codes.max() <= high))


def _between(values: Array, low: float) -> bool:
    """Whether all are above `low` and finite; a NaN spreads through min and is not."""
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
    "tier": np.uint8,
    "foreign": np.bool_,
    "version_min": np.int32,
    "version_max": np.int32,
    "rewards": np.float32,
    "logprob_kind": np.uint8,
    "temperature": np.float32,
    "reshaped": np.uint32,
    "ending": np.uint8,
    "max_id": np.int32,
    "media": np.bool_,
}


class Storable(Protocol):
    """What `columns_of` takes: `Sequences`."""

    def stored(self) -> Stored:
        """The fields as `store` writes them."""
        ...


def columns_of(sequences: Storable) -> dict[str, Array]:
    """One row for each of R traces, in order.

    Args:
        sequences: `Sequences`.

    Returns:
        group: [R, 2] uint64: blake2b-128 of the name of its group as two little-endian words; of its own id where its
            group has no name. trace: [R, 2] uint64, the same of its id.
        branches, tokens, longest: [R] int32: branches, tokens of all of them, tokens of the longest.
        terms, known: [R] int32: trained tokens, and of these with a finite rollout logprob.
        turns: [R] int32: generations.
        tier: [R] uint8: the worst of its terms, 255 without one. foreign: [R] bool: whether any of its tokens is text
            alone (T6).
        version_min, version_max: [R] int32: of its terms; -1 where that of one, or of all of them, is not known.
        rewards: [R, K] float32. logprob_kind, temperature, reshaped, ending: [R], as in `Sequences`.
        max_id: [R] int32: its highest token id, -1 without a token.
        media: [R] bool: whether a picture, sound or video stands before a turn.

    >>> from tracegrad.alignment.sequences import Sequences
    >>> one = Sequences.from_arrays([5, 6, 7], [0, 2, 3], [-1.0] * 3, [False, True, True], trace=[0, 0])
    >>> {name: columns_of(one)[name].tolist() for name in ("branches", "tokens", "longest", "terms", "max_id")}
    {'branches': [2], 'tokens': [3], 'longest': [2], 'terms': [2], 'max_id': [7]}
    """
    return of_stored(sequences.stored())


def of_stored(stored: Stored) -> dict[str, Array]:
    """As `columns_of`."""
    of, names = stored.columns, stored.names
    ids = names["trace_ids"] or tuple(str(number) for number in range(len(of["group"])))
    groups = hashes(names["group_names"])[of["group"]] if names["group_names"] else hashes(ids)
    found = {"group": groups, "trace": hashes(ids), **counted(stored)}
    return {name: np.asarray(found[name]).astype(dtype) for name, dtype in TRACE_COLUMNS.items()}


def counted(stored: Stored) -> dict[str, Array]:
    """As `columns_of`, without the hashes of names."""
    of = stored.columns
    traces = len(of["group"])
    first = np.searchsorted(of["trace"], np.arange(traces + 1))  # the first branch of each trace
    cut = of["cu_seqlens"][first]  # and its first token
    terms = np.flatnonzero(of["trainable"])
    term_cut = np.searchsorted(terms, cut)
    tier, version = of["tier"][terms], of["version"][terms]
    tier = np.where(tier == NO_TIER, -1, tier.astype(np.int16))
    media = np.zeros(traces, np.bool_)
    media[of["drift.trace"][np.isin(of["drift.reason"], MEDIA)]] = True
    found = {
        "branches": np.diff(first),
        "tokens": np.diff(cut),
        "longest": _reduced(np.maximum, np.diff(of["cu_seqlens"]), first, 0),
        "terms": np.diff(term_cut),
        "known": _reduced(np.add, np.isfinite(of["rollout_logprobs"][terms]).astype(np.int64), term_cut, 0),
        "turns": np.diff(of["cu_turns"]),
        "tier": _reduced(np.maximum, tier, term_cut, -1),
        "foreign": _reduced(np.logical_or, of["tier"] == TEXT_ONLY, cut, False),
        "version_min": _reduced(np.minimum, version, term_cut, -1),
        "version_max": _reduced(np.maximum, version, term_cut, -1),
        **{name: of[name] for name in ("rewards", "logprob_kind", "temperature", "reshaped", "ending")},
        "max_id": _reduced(np.maximum, of["ids"], cut, -1),
        "media": media,
    }
    found["tier"] = np.where(found["tier"] < 0, NO_TIER, found["tier"])
    return {name: np.asarray(column).astype(TRACE_COLUMNS[name]) for name, column in found.items()}


def hashes(names: Sequence[str]) -> NDArray[np.uint64]:
    """[names, 2] uint64: blake2b-128 of each name in UTF-8, as two little-endian words.

    >>> hashes(["a", "b"]).shape
    (2, 2)
    """
    digests = [blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest() for name in names]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64).reshape(-1, 2)


def write_trace_columns(folder: Path, stored: Stored) -> safetensors_file.Written:
    """Writes the columns of what is stored to `NAME` in a folder, the names of its rewards among the metadata.

    Raises:
        ReadError: if it cannot be written.
    """
    told = {"format": FORMAT, "reward_names": json.dumps(list(stored.names["reward_names"]))}
    return safetensors_file.write(folder / NAME, of_stored(stored), told)


def read(folder: Path) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The columns in a folder, memory-mapped and read-only, and the names of the rewards.

    Raises:
        ReadError: if there is no such file, as in folders of earlier versions: then take `columns_of` what is loaded.
        FormatError: if it is not what `write` writes.
    """
    arrays, metadata = safetensors_file.read(folder / NAME)
    try:
        names = json.loads(metadata["reward_names"])
        told = metadata["format"] == FORMAT and arrays.keys() == TRACE_COLUMNS.keys()
        fits = told and isinstance(names, list) and all(isinstance(name, str) for name in names)
    except (KeyError, ValueError, RecursionError):
        fits, names = False, []
    rows = next((len(array) for array in arrays.values() if array.ndim), -1)
    wide = {"group": (rows, 2), "trace": (rows, 2), "rewards": (rows, len(names))}
    for name, dtype in TRACE_COLUMNS.items() if fits else ():
        fits &= arrays[name].dtype == dtype and arrays[name].shape == wide.get(name, (rows,))
    if not fits:
        raise FormatError(
            f"{folder / NAME}: not the columns of traces that `save` writes. A plan made from it would be of other "
            "traces. Prepare the traces again."
        )
    return {name: arrays[name] for name in TRACE_COLUMNS}, tuple(names)


def _reduced(way: np.ufunc, values: Array, cut: Array, empty: Any) -> Array:
    """What `way` makes of values[cut[r]:cut[r+1]] for each r; `empty` where there are none."""
    filled = np.flatnonzero(np.diff(cut))  # reduceat takes no empty ones
    found = np.full(len(cut) - 1, empty, values.dtype)
    if len(filled):
        found[filled] = way.reduceat(values, cut[filled])
    return found


_FORMAT = "tracegrad-sequences/1"
_ARRAYS, _TABLE = "sequences.safetensors", "sequences.json"
_CURE = "The files were changed; prepare the traces again."

NAMES = ("reward_names", "trace_ids", "group_names")


def save(folder: Path, stored: Stored) -> None:
    """Writes the arrays, the table, and the manifest last."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReadError(f"{folder}: cannot be written ({error.strerror}). Choose another folder.") from error
    with manifest.lock(folder):
        manifest.clear_drafts(folder, _ARRAYS, _TABLE, image_files.MEDIA, NAME, manifest.NAME)
        write(folder, stored)


def write(folder: Path, stored: Stored) -> None:
    """The same for a folder that is there and nobody else's."""
    if wrong := misfit(stored):
        raise ArgumentError(f"{wrong} These sequences cannot be trained on, so they are not saved. Correct the array.")
    try:
        (folder / manifest.NAME).unlink(missing_ok=True)
    except OSError as error:
        raise ReadError(f"{folder}: cannot be written ({error.strerror}). Choose another folder.") from error
    arrays = dict(stored.columns)
    for name, extra in stored.extras.items():
        if isinstance(extra, Ragged):
            arrays |= {f"ragged.{name}": extra.values, f"ragged.{name}.offsets": extra.offsets}
        else:
            arrays[f"extra.{name}"] = extra
    table: dict[str, Any] = {"format": _FORMAT, **stored.names, "drift": stored.drift}
    files = {}
    if stored.images is not None:
        images = image_files.used(stored.images)
        table["pictures"] = images.rule.as_dict()
        ends: list[int] = []
        files[image_files.MEDIA] = safetensors_file.write_bytes(
            folder / image_files.MEDIA, _ending(image_files.media_of(images), ends)
        )
        arrays |= image_files.arrays_of(images, np.array(ends, np.int64))
    text = json.dumps(table, ensure_ascii=False)
    files |= {
        _ARRAYS: safetensors_file.write(folder / _ARRAYS, arrays, {"format": _FORMAT}),
        _TABLE: safetensors_file.write_bytes(folder / _TABLE, [text.encode("utf-8", "surrogatepass")]),
        NAME: write_trace_columns(folder, stored),
    }
    manifest.write(folder, counts(stored), files)


def _ending(files: Iterator[bytes], ends: list[int]) -> Iterator[bytes]:
    """The files, and in `ends` where each ends."""
    total = 0
    for file in files:
        total += len(file)
        ends.append(total)
        yield file


def counts(stored: Stored) -> dict[str, int]:
    """What a manifest says of it."""
    columns = stored.columns
    found = (len(columns["group"]), len(columns["trace"]), len(columns["ids"]), np.count_nonzero(columns["trainable"]))
    return {name: int(count) for name, count in zip(manifest.COUNTS, found, strict=True)}


def load(folder: Path, verify: bool = False) -> Stored:
    """What `save` wrote, memory-mapped, or all shards of a folder that `prepare` wrote, joined in memory.

    Raises:
        ReadError: if nothing whole is there.
        FormatError: if the files are not what `save` writes, or, with `verify`, not the bytes that were written.
    """
    whole = manifest.read(folder)
    if verify:
        manifest.verify(folder, whole)
    if whole.files:
        return opened(folder, whole)
    if not whole.shards:
        raise ReadError(f"{folder}: no trace was prepared into it. There is nothing to train on. Prepare other traces.")
    return joined([opened(folder / name, shard) for name, shard in whole.shards.items()])


def opened(folder: Path, told: manifest.Folder, *, checked: bool = True) -> Stored:
    """One folder that `save` wrote, memory-mapped.

    Args:
        folder: that holds the arrays.
        told: what its manifest says.
        checked: read every value, and refuse what `save` does not write; False for what this process has checked.

    Raises:
        FormatError: if it is not what `save` writes.
    """
    # The columns of traces were not written by earlier versions, and pictures are where there are any.
    if set(told.files) - {NAME, image_files.MEDIA} != {_ARRAYS, _TABLE}:
        raise FormatError(f"{folder}: its manifest does not name {_ARRAYS} and {_TABLE} alone. {_CURE}")
    arrays, _ = safetensors_file.read(folder / _ARRAYS)
    try:
        text = safetensors_file.read_text(folder / _TABLE, told.files[_TABLE].bytes).decode("utf-8", "surrogatepass")
        table = json.loads(text)
        names = {name: _names(table[name]) for name in NAMES}
        drift: dict[str, Any] = {name: _strings(table["drift"][name]) for name in ("detail", "reasons", "errors")}
        drift |= {name: manifest.count(table["drift"][name]) for name in ("recorded", "exact")}
        drift["server_profiles"] = _counts(table["drift"].get("server_profiles", {}))  # earlier versions lack it
        arrays.setdefault("ending", np.zeros(len(arrays["group"]), np.uint8))  # unknown, where it was not yet written
        columns = {name: arrays.pop(name) for name in (*COLUMNS, *(f"drift.{name}" for name in DRIFT_COLUMNS))}
        images = None
        if image_files.MEDIA in told.files:
            images = image_files.images_of(arrays, Rule.of_dict(table["pictures"]), folder)
            arrays = {name: array for name, array in arrays.items() if not name.startswith(image_files.PREFIX)}
        stored = Stored(columns, _extras(arrays), names, drift, images)
    except (ReadError, FormatError):
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{folder}: not what `save` writes ({str(error)[:80]!r}). {_CURE}") from error
    wrong = misfit(stored) if checked else ""
    if not wrong and checked and counts(stored) != dict(told.counts):
        wrong = "the counts of its manifest are not those of its arrays."
    if wrong:
        raise FormatError(f"{folder}: {wrong} {_CURE}")
    return stored


def _names(values: Any) -> tuple[str, ...]:
    """Names that any stream and database takes: records hold no others."""
    for name in (names := _strings(values)):
        if not name.isascii():
            name.encode("utf-8")  # half a character is a ValueError
    return names


def _strings(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("a list of names holds something else")
    return tuple(values)


def _counts(values: Any) -> dict[str, int]:
    if not isinstance(values, dict):
        raise TypeError("counts stand under no names")
    return {name: manifest.count(each) for name, each in values.items()}


def _extras(arrays: dict[str, Array]) -> dict[str, Array | Ragged]:
    """What stands under `extra.NAME`, and under `ragged.NAME` with `ragged.NAME.offsets`."""
    extras: dict[str, Array | Ragged] = {}
    for name, array in arrays.items():
        if not name.startswith("ragged."):
            extras[name.removeprefix("extra.")] = array
        elif f"{name}.offsets" in arrays:
            extras[name.removeprefix("ragged.")] = Ragged(arrays[f"{name}.offsets"], array)
    return extras


def joined(parts: Sequence[Stored]) -> Stored:
    """All traces of the parts, in order; groups are one where their names are equal."""
    first = parts[0]
    if len(parts) == 1:
        return first
    names = {name: tuple(chain(*(part.names[name] for part in parts))) for name in ("trace_ids", "group_names")}
    for name in ("trace_ids", "group_names"):
        if len({bool(part.names[name]) for part in parts if len(part.columns["group"])}) > 1:
            raise FormatError(f"some shards have {name} and others have none. {_CURE}")
    if any(part.names["reward_names"] != first.names["reward_names"] for part in parts):
        raise FormatError("the shards have different rewards. Prepare them with the same options.")
    if any(part.drift["reasons"] != first.drift["reasons"] for part in parts):
        raise FormatError("the shards were written by different versions. Prepare them with one.")
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns}
    rows = np.cumsum([0, *(len(part.columns["group"]) for part in parts)]).astype(np.int32)
    for name in ("trace", "drift.trace"):
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
    return Stored(
        columns,
        {name: _extra_of(name, parts) for name in dict.fromkeys(name for part in parts for name in part.extras)},
        {**names, "group_names": tuple(number), "reward_names": first.names["reward_names"]},
        {
            "reasons": first.drift["reasons"],
            **{name: tuple(chain(*(part.drift[name] for part in parts))) for name in ("detail", "errors")},
            **{name: sum(part.drift[name] for part in parts) for name in ("recorded", "exact")},
            "server_profiles": _summed([part.drift["server_profiles"] for part in parts]),
        },
        Images.joined([(part.images, len(part.columns["trace"])) for part in parts]),
    )


def _summed(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(chain.from_iterable(counts))
    return {name: sum(each.get(name, 0) for each in counts) for name in names}


def _extra_of(name: str, parts: Sequence[Stored]) -> Array | Ragged:
    """One extra of all parts; the tokens of a part that lacks it have -1, or an empty row."""
    found: Any = next(part.extras[name] for part in parts if name in part.extras)
    columns: list[Any] = []
    for part in parts:
        tokens = len(part.columns["ids"])
        if name in part.extras:
            columns.append(part.extras[name])
        elif isinstance(found, Ragged):
            columns.append(Ragged(np.zeros(tokens + 1, np.int64), found.values[:0]))
        else:
            columns.append(np.full((tokens, *found.shape[1:]), -1, found.dtype))
    if all(isinstance(column, Ragged) for column in columns):
        return Ragged.concatenate(columns)
    if len({None if isinstance(column, Ragged) else column.shape[1:] for column in columns}) > 1:
        raise FormatError(f"the shards have rows of unlike shapes in {name}. Prepare the traces at once.")
    return np.concatenate(columns)
