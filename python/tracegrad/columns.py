"""The columns of `Sequences` with their dtypes, and which values they may hold.

Here is `misfit`, what is wrong with columns that come from a file. Called by `store` when it saves and when it loads.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracegrad.pictures import Images, kept
from tracegrad.ragged import Ragged

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
    return kept.misfit(stored.images, stored.columns["ids"], stored.columns["cu_seqlens"])


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
