"""Arrays of which a caller makes `Sequences`, checked: their shapes, how they count, what they may hold."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays
from tracegrad.errors import ArgumentError
from tracegrad.ragged import Ragged

Array = NDArray[Any]


def integers(values: ArrayLike, name: str, length: int) -> NDArray[np.int32]:
    return arrays.integers(values, name, np.int32, length=length)


def check_numbers(values: NDArray[np.int32], name: str, least: int, count: int) -> None:
    """Refuses numbers that do not count from 0, as tables are as long as the largest."""
    most = max(count, 1 << 16)
    if len(values) and not least <= values.min() <= values.max() <= most:
        raise ArgumentError(
            f"{name} runs from {values.min()} to {values.max()}. A table would have as many rows. "
            f"Number them from 0: at least {least}, at most {most}."
        )


def check_offsets(cu: Array, count: int) -> None:
    if len(cu) < 2 or cu[0] != 0 or cu[-1] != count or np.any(cu[1:] < cu[:-1]):
        raise ArgumentError(
            f"cu_seqlens must rise from 0 to the {count} ids, with an end for at least one sequence. "
            f"It is {cu[:8].tolist()}... Pass where each sequence begins, and the number of ids."
        )


def check_logprobs(logprobs: Array, keep: Array) -> None:
    bad = np.flatnonzero(keep & (logprobs > 1e-3))
    if len(bad):
        raise ArgumentError(
            f"token {bad[0]}: the rollout logprob {logprobs[bad[0]]:.4g} is positive, and {len(bad)} are. "
            "A logprob is at most 0, so these are something else. Pass NaN where a logprob is not known."
        )


def rewards_of(rewards: ArrayLike | None, total: int, names: Sequence[str]) -> Array:
    """[R, K] float32."""
    arrays.instances(names, "reward_names", str)
    if rewards is None:
        return np.full((total, max(len(names), 1)), np.nan, np.float32)
    table = arrays.narrowed(arrays.numbers(rewards, "rewards"), np.float32, "rewards")
    if table.shape != (total, len(names)) and not (table.shape == (total,) and len(names) == 1):
        raise ArgumentError(
            f"rewards has shape {table.shape} for {total} traces and the names {names!r}. "
            "Each trace has one number a name. Pass [R], or [R, K] with K reward_names."
        )
    return table.reshape(total, -1)


def extras_of(extras: Mapping[str, Array | Ragged] | None, count: int) -> dict[str, Any]:
    """Named arrays of one row a token."""
    given = dict(arrays.instance({} if extras is None else extras, "extras", Mapping, "Pass names and arrays."))
    for name, values in given.items():
        arrays.instance(name, "a name of extras", str, "Name each array.")
        column = given[name] = values if isinstance(values, Ragged) else arrays.numbers(values, f"extras[{name!r}]")
        if (not isinstance(column, Ragged) and column.ndim == 0) or len(column) != count:
            raise ArgumentError(f"extras[{name!r}] has not one row for each of the {count} ids. Pass [T, ...].")
    return given


def check_traces(trace: Array) -> None:
    steps = np.diff(trace.astype(np.int64))
    if len(trace) and (trace[0] != 0 or np.any((steps != 0) & (steps != 1))):
        raise ArgumentError("trace must count up from 0 without gaps, branches of a trace side by side.")
