"""Sums along the terms of each trace, flat: no padded rows, and no loop over traces or terms.

Terms of a trace stand in the order given, side by side or not. Called by `tokens`, `turns` and `token_baseline`.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays
from tracegrad.advantage.groups import Floats
from tracegrad.errors import ArgumentError


def discounted(values: Floats, owner: NDArray[np.int64], gamma: float) -> Floats:
    """[M] S_t = v_t + gamma * S_(t+1) within each trace, by doubling: after k rounds S_t holds 2**k terms."""
    order = np.argsort(owner, kind="stable")
    ids, total = owner[order], values[order]
    longest = int(np.bincount(np.cumsum(np.diff(ids, prepend=ids[:1]) != 0)).max()) if len(ids) else 0
    reach = 1
    while reach < longest and gamma**reach:
        total[:-reach] += np.where(ids[reach:] == ids[:-reach], gamma**reach * total[reach:], 0.0)
        reach *= 2
    return _back(total, order)


def following(values: Floats, owner: NDArray[np.int64]) -> Floats:
    """[M] the value at the next term of the same trace, 0 after the last."""
    order = np.argsort(owner, kind="stable")
    ids, given = owner[order], values[order]
    after = np.zeros_like(given)
    after[:-1] = np.where(ids[1:] == ids[:-1], given[1:], 0.0)
    return _back(after, order)


def accumulated(values: Floats, owner: NDArray[np.int64]) -> Floats:
    """[M] the sum from the first term of the trace to this one."""
    return discounted(values[::-1], owner[::-1], 1.0)[::-1]


def terms(trace: ArrayLike, **values: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    """One [M] float64 array and the [M] ids of traces, checked."""
    ((name, given),) = values.items()
    array, owner = arrays.real(given, name), arrays.numbers(trace, "trace")
    if array.ndim != 1 or owner.shape != array.shape or (owner.dtype.kind not in "iu" and owner.size):
        raise ArgumentError(
            f"{name} have shape {array.shape}, trace has shape {owner.shape} of {owner.dtype}. Each term has one value "
            "and the number of its trace. Pass flat arrays of equal length, trace as integers."
        )
    bad = np.flatnonzero(np.isinf(array))
    if len(bad):
        raise ArgumentError(
            f"term {bad[0]} of trace {owner[bad[0]]}: {name} hold {array[bad[0]]}. It would make the whole trace "
            "infinite. Pass NaN where it is not known."
        )
    return array, owner.astype(np.int64)


def rows(trace: ArrayLike, total: int) -> NDArray[np.int64]:
    """[M] rows of traces, checked against the number of traces."""
    owner = arrays.integers(trace, "trace")
    if len(owner) and not 0 <= owner.min() <= owner.max() < total:
        raise ArgumentError(
            f"trace runs from {owner.min()} to {owner.max()}, of {total} traces. "
            "A term would have another trace's reward. Pass the row, from 0, of each term's trace."
        )
    return owner


def check_share(value: float, name: str) -> None:
    """Raises ArgumentError unless 0 <= value <= 1."""
    if not 0 <= value <= 1:
        raise ArgumentError(f"{name} is {value}. Beyond 0 to 1 far rewards count more than near ones. Pass a share.")


def _back(values: Floats, order: NDArray[np.intp]) -> Floats:
    out = np.empty_like(values)
    out[order] = values
    return out
