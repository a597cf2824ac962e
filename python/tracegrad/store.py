"""What of `Sequences` is kept in a folder: arrays in a safetensors file, names and details in a JSON file beside it,
and one row a trace in a third.

Here are saving, loading, and the joining of shards. `Sequences.save` and `.load` call it, and `prepare`; what the
columns are is in `columns`, the file format in `shards`, what makes a folder whole in `manifest`.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import manifest, shards, trace_columns
from tracegrad.columns import COLUMNS, DRIFT_COLUMNS, OFFSETS, Stored, misfit
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.pictures import Images, Rule, kept
from tracegrad.ragged import Ragged

Array = NDArray[Any]

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
        manifest.clear_drafts(folder, _ARRAYS, _TABLE, kept.MEDIA, trace_columns.NAME, manifest.NAME)
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
        images = kept.used(stored.images)
        table["pictures"] = images.rule.as_dict()
        ends: list[int] = []
        files[kept.MEDIA] = shards.write_bytes(folder / kept.MEDIA, _ending(kept.media_of(images), ends))
        arrays |= kept.arrays_of(images, np.array(ends, np.int64))
    text = json.dumps(table, ensure_ascii=False)
    files |= {
        _ARRAYS: shards.write(folder / _ARRAYS, arrays, {"format": _FORMAT}),
        _TABLE: shards.write_bytes(folder / _TABLE, [text.encode("utf-8", "surrogatepass")]),
        trace_columns.NAME: trace_columns.write(folder, stored),
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
    if set(told.files) - {trace_columns.NAME, kept.MEDIA} != {_ARRAYS, _TABLE}:
        raise FormatError(f"{folder}: its manifest does not name {_ARRAYS} and {_TABLE} alone. {_CURE}")
    arrays, _ = shards.read(folder / _ARRAYS)
    try:
        text = shards.read_text(folder / _TABLE, told.files[_TABLE].bytes).decode("utf-8", "surrogatepass")
        table = json.loads(text)
        names = {name: _names(table[name]) for name in NAMES}
        drift: dict[str, Any] = {name: _strings(table["drift"][name]) for name in ("detail", "reasons", "errors")}
        drift |= {name: manifest.count(table["drift"][name]) for name in ("recorded", "exact")}
        drift["server_profiles"] = _counts(table["drift"].get("server_profiles", {}))  # earlier versions lack it
        arrays.setdefault("ending", np.zeros(len(arrays["group"]), np.uint8))  # unknown, where it was not yet written
        columns = {name: arrays.pop(name) for name in (*COLUMNS, *(f"drift.{name}" for name in DRIFT_COLUMNS))}
        images = None
        if kept.MEDIA in told.files:
            images = kept.images_of(arrays, Rule.of_dict(table["pictures"]), folder)
            arrays = {name: array for name, array in arrays.items() if not name.startswith(kept.PREFIX)}
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
