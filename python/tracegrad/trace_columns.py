"""One row a trace, of what planning and filters ask: lengths, terms, tiers, versions, rewards, and names as hashes.

Here are the columns, how they are counted from the arrays of `Sequences`, and the file that holds them beside these in
a folder (`traces.safetensors`). `store` writes it; who plans a run reads it and needs none of the tokens. numpy only.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad import shards
from tracegrad.codes import MEDIA, NO_TIER, TEXT_ONLY
from tracegrad.columns import Stored
from tracegrad.errors import FormatError

Array = NDArray[Any]

NAME = "traces.safetensors"
FORMAT = "tracegrad-traces/1"
COLUMNS: dict[str, Any] = {
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

    >>> from tracegrad.sequence import Sequences
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
    return {name: np.asarray(found[name]).astype(dtype) for name, dtype in COLUMNS.items()}


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
    return {name: np.asarray(column).astype(COLUMNS[name]) for name, column in found.items()}


def hashes(names: Sequence[str]) -> NDArray[np.uint64]:
    """[names, 2] uint64: blake2b-128 of each name in UTF-8, as two little-endian words.

    >>> hashes(["a", "b"]).shape
    (2, 2)
    """
    digests = [blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest() for name in names]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64).reshape(-1, 2)


def write(folder: Path, stored: Stored) -> shards.Written:
    """Writes the columns of what is stored to `NAME` in a folder, the names of its rewards among the metadata.

    Raises:
        ReadError: if it cannot be written.
    """
    told = {"format": FORMAT, "reward_names": json.dumps(list(stored.names["reward_names"]))}
    return shards.write(folder / NAME, of_stored(stored), told)


def read(folder: Path) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The columns in a folder, memory-mapped and read-only, and the names of the rewards.

    Raises:
        ReadError: if there is no such file, as in folders of earlier versions: then take `columns_of` what is loaded.
        FormatError: if it is not what `write` writes.
    """
    arrays, metadata = shards.read(folder / NAME)
    try:
        names = json.loads(metadata["reward_names"])
        told = metadata["format"] == FORMAT and arrays.keys() == COLUMNS.keys()
        fits = told and isinstance(names, list) and all(isinstance(name, str) for name in names)
    except (KeyError, ValueError, RecursionError):
        fits, names = False, []
    rows = next((len(array) for array in arrays.values() if array.ndim), -1)
    wide = {"group": (rows, 2), "trace": (rows, 2), "rewards": (rows, len(names))}
    for name, dtype in COLUMNS.items() if fits else ():
        fits &= arrays[name].dtype == dtype and arrays[name].shape == wide.get(name, (rows,))
    if not fits:
        raise FormatError(
            f"{folder / NAME}: not the columns of traces that `save` writes. A plan made from it would be of other "
            "traces. Prepare the traces again."
        )
    return {name: arrays[name] for name in COLUMNS}, tuple(names)


def _reduced(way: np.ufunc, values: Array, cut: Array, empty: Any) -> Array:
    """What `way` makes of values[cut[r]:cut[r+1]] for each r; `empty` where there are none."""
    filled = np.flatnonzero(np.diff(cut))  # reduceat takes no empty ones
    found = np.full(len(cut) - 1, empty, values.dtype)
    if len(filled):
        found[filled] = way.reduceat(values, cut[filled])
    return found
