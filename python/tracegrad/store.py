"""What of `Sequences` is kept in a folder: arrays in a safetensors file, names and details in a JSON file beside it.

Here are the columns with their dtypes, the checks of what is loaded, and the joining of shards. `Sequences.save` and
`.load` call it; the file format is in `shards`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracegrad import shards
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.ragged import Ragged

Array = NDArray[Any]

_FORMAT = "tracegrad-sequences/1"
_ARRAYS, _TABLE = "sequences.safetensors", "sequences.json"

NAMES = ("reward_names", "trace_ids", "group_names")
DRIFT_COLUMNS = ("reason", "trace", "turn", "token", "count")
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
_TRACES = {"group": np.int32, "rewards": np.float32, "logprob_kind": np.uint8, "temperature": np.float32}
_OFFSETS = {"cu_seqlens": np.int64, "cu_turns": np.int64}
COLUMNS = {**_TOKENS, **_TRACES, **_OFFSETS, "trace": np.int32, "turn_rewards": np.float32}


class Stored(NamedTuple):
    """Fields of a `Sequences` and its `Drift`, whose arrays stand in `columns` as `drift.reason` and so on."""

    columns: dict[str, Array]
    extras: dict[str, Array | Ragged]
    names: dict[str, tuple[str, ...]]
    drift: dict[str, Any]


def save(folder: Path, stored: Stored) -> None:
    """Writes the arrays and, when they are whole, the table.

    Raises:
        ReadError: if that is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _TABLE).unlink(missing_ok=True)
    except OSError as error:
        raise ReadError(f"{folder}: cannot be written ({error.strerror}). Choose another folder.") from error
    arrays = dict(stored.columns)
    for name, extra in stored.extras.items():
        if isinstance(extra, Ragged):
            arrays |= {f"ragged.{name}": extra.values, f"ragged.{name}.offsets": extra.offsets}
        else:
            arrays[f"extra.{name}"] = extra
    shards.write(folder / _ARRAYS, arrays, {"format": _FORMAT})
    text = json.dumps({"format": _FORMAT, **stored.names, "drift": stored.drift}, ensure_ascii=False)
    shards.write_bytes(folder / _TABLE, [text.encode("utf-8", "surrogatepass")])


def load(folder: Path) -> Stored:
    """What `save` wrote, memory-mapped, or all `shard-*` folders within it, joined in memory.

    Raises:
        ReadError: if nothing is there.
        FormatError: if the files are not what `save` writes.
    """
    if (folder / _TABLE).exists():
        return _loaded(folder)
    parts = [_loaded(part) for part in sorted(folder.glob("shard-*"))]
    if not parts:
        raise ReadError(f"{folder}: holds neither {_TABLE} nor shards. Give a folder that `prepare` or `save` wrote.")
    return parts[0] if len(parts) == 1 else _joined(parts)


def _loaded(folder: Path) -> Stored:
    arrays, _ = shards.read(folder / _ARRAYS)
    try:
        table = json.loads((folder / _TABLE).read_bytes().decode("utf-8", "surrogatepass"))
        names = {name: tuple(map(str, table[name])) for name in NAMES}
        drift: dict[str, Any] = {
            name: tuple(map(str, table["drift"][name])) for name in ("detail", "reasons", "errors")
        }
        drift |= {name: int(table["drift"][name]) for name in ("recorded", "exact")}
        columns = {name: arrays.pop(name) for name in (*COLUMNS, *(f"drift.{name}" for name in DRIFT_COLUMNS))}
    except OSError as error:
        raise ReadError(f"{folder / _TABLE}: cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{folder}: not what `save` writes ({str(error)[:80]}). Prepare the traces again.") from error
    try:
        extras = _extras(arrays)
    except ArgumentError as error:
        raise FormatError(f"{folder}: {error} The files were changed; prepare the traces again.") from error
    wrong = _misfit(columns, extras, names, drift)
    if wrong:
        raise FormatError(f"{folder}: {wrong} does not fit the rest. The files were changed; prepare the traces again.")
    return Stored(columns, extras, names, drift)


def _extras(arrays: dict[str, Array]) -> dict[str, Array | Ragged]:
    """What stands under `extra.NAME`, and under `ragged.NAME` with `ragged.NAME.offsets`."""
    extras: dict[str, Array | Ragged] = {}
    for name, array in arrays.items():
        if not name.startswith("ragged."):
            extras[name.removeprefix("extra.")] = array
        elif f"{name}.offsets" in arrays:
            extras[name.removeprefix("ragged.")] = Ragged(arrays[f"{name}.offsets"], array)
    return extras


def _misfit(columns: dict[str, Array], extras: Mapping[str, Any], names: dict[str, Any], drift: dict[str, Any]) -> str:
    """The first array whose dtype, shape or values do not fit the others, or ""."""
    tokens, branches, traces = (len(columns[name]) if columns[name].ndim else -1 for name in ("ids", "trace", "group"))
    lengths = dict.fromkeys(_TOKENS, tokens) | dict.fromkeys(_TRACES, traces)
    lengths |= {"cu_seqlens": branches + 1, "cu_turns": traces + 1}
    lengths |= dict.fromkeys([f"drift.{name}" for name in DRIFT_COLUMNS], len(drift["detail"]))
    for name, array in columns.items():
        if array.dtype != COLUMNS.get(name, array.dtype) or array.ndim != (2 if name == "rewards" else 1):
            return name
        if len(array) != lengths.get(name, len(array)):
            return name
    for name, array in extras.items():
        if (len(array) if isinstance(array, Ragged) or array.ndim else -1) != tokens:
            return name
    if len(names["trace_ids"]) not in (0, traces):
        return "trace_ids"
    if columns["rewards"].shape[1] != len(names["reward_names"]):
        return "reward_names"
    for name, total in (("cu_seqlens", tokens), ("cu_turns", len(columns["turn_rewards"]))):
        offsets = columns[name]
        if offsets[0] != 0 or offsets[-1] != total or np.any(np.diff(offsets) < 0):
            return name
    owners = columns["trace"]
    if len(owners) and (owners[0] != 0 or owners[-1] >= traces or not np.isin(np.diff(owners), (0, 1)).all()):
        return "trace"
    groups = columns["group"]
    return "group" if len(names["group_names"]) and not _within(groups, len(names["group_names"])) else ""


def _within(codes: Array, count: int) -> bool:
    return len(codes) == 0 or bool(codes.min() >= 0 and codes.max() < count)


def _joined(parts: Sequence[Stored]) -> Stored:
    """All traces of the parts, in order; groups are one where their names are equal."""
    first = parts[0]
    names = {name: sum((part.names[name] for part in parts), ()) for name in ("trace_ids", "group_names")}
    if any(part.names["reward_names"] != first.names["reward_names"] for part in parts):
        raise FormatError("the shards have different rewards. Prepare them with the same options.")
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns}
    rows = np.cumsum([0, *(len(part.columns["group"]) for part in parts)]).astype(np.int32)
    for name in ("trace", "drift.trace"):
        columns[name] = np.concatenate([part.columns[name] + row for part, row in zip(parts, rows, strict=False)])
    for name in _OFFSETS:
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
            **{name: sum((part.drift[name] for part in parts), ()) for name in ("detail", "errors")},
            **{name: sum(part.drift[name] for part in parts) for name in ("recorded", "exact")},
        },
    )


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
    shapes = {None if isinstance(column, Ragged) else column.shape[1:] for column in columns}
    if len(shapes) > 1:
        raise FormatError(f"the shards have rows of unlike shapes in {name}. Prepare the traces at once.")
    return np.concatenate(columns)
