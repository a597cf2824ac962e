"""Penalties and biases with which generations were sampled (`Penalties`), for the trainer to replay."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from tracegrad import _validation
from tracegrad.errors import ArgumentError


@dataclass(frozen=True, eq=False, repr=False)
class Penalties:
    """The penalties of P generations whose recorded logprobs include them; other generations have none.

    vLLM changes the logit x of an id, in this order: x + bias; then, if the id is in the prompt or in the answer so
    far, x / repetition if x is positive and x * repetition otherwise; then x - frequency * count - presence, for an id
    that occurs `count` times in the answer so far. The temperature follows.

    Args:
        generation: [P] int64: the generations, ascending, numbered as in `Sequences.turn_rewards`.
        repetition: [P] float32, above 0; 1 is off.
        presence, frequency: [P] float32; 0 is off.
        bias_ends: [P] int64: the end of each generation's biases in `bias_ids` and `bias`.
        bias_ids: int32, ascending for each generation.
        bias: float32.

    >>> one = np.ones(1, np.float32)
    >>> Penalties(np.array([2]), 1.1 * one, 0 * one, 0 * one, np.array([1]), np.array([7], np.int32), -3 * one)
    Penalties(1 generations)
    """

    generation: NDArray[np.int64]
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    bias_ends: NDArray[np.int64]
    bias_ids: NDArray[np.int32]
    bias: NDArray[np.float32]

    def __repr__(self) -> str:
        return f"Penalties({len(self.generation)} generations)"

    def settings(self) -> NDArray[np.int32]:
        """Return [P] int32: a number for each generation, the same for equal penalties."""
        starts = np.concatenate([[0], self.bias_ends[:-1]]).astype(np.int64)
        codes: dict[bytes, int] = {}
        columns = np.stack([self.repetition, self.presence, self.frequency], 1)
        keys = [
            columns[row].tobytes() + self.bias_ids[start:end].tobytes() + b"|" + self.bias[start:end].tobytes()
            for row, (start, end) in enumerate(zip(starts.tolist(), self.bias_ends.tolist(), strict=True))
        ]
        return np.array([codes.setdefault(key, len(codes)) for key in keys], np.int32)

    def rows_of(self, generations: NDArray[np.integer]) -> NDArray[np.int32]:
        """Return [M] int32: the row of each generation in these arrays, -1 without penalties."""
        row = np.searchsorted(self.generation, generations).astype(np.int32)
        row[row == len(self.generation)] = -1
        return np.where((row >= 0) & (self.generation[row] == generations), row, -1).astype(np.int32)

    @classmethod
    def concatenate(cls, parts: "list[tuple[Penalties | None, NDArray[np.int64]]]") -> "Penalties | None":
        """Return the penalties of generations of several parts, numbered in this order; None if there are none.

        Args:
            parts: the penalties of a part, or None; and the generations to take from it.
        """
        columns: dict[str, list[NDArray]] = {field.name: [] for field in fields(cls)}
        first = bias_end = 0
        for penalties, generations in parts:
            if penalties is not None:
                rows = penalties.rows_of(generations)
                here = np.flatnonzero(rows >= 0)
                rows = rows[here].astype(np.int64)
                starts = np.concatenate([[0], penalties.bias_ends[:-1]]).astype(np.int64)[rows]
                lengths = penalties.bias_ends[rows] - starts
                ends = np.cumsum(lengths)
                biases = np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())
                columns["generation"].append(here + first)
                columns["bias_ends"].append(ends + bias_end)
                bias_end += int(lengths.sum())
                for name in ("repetition", "presence", "frequency"):
                    columns[name].append(getattr(penalties, name)[rows])
                for name in ("bias_ids", "bias"):
                    columns[name].append(getattr(penalties, name)[biases])
            first += len(generations)
        if not any(len(part) for part in columns["generation"]):
            return None
        return cls(**{name: np.concatenate(arrays) for name, arrays in columns.items()})

    def find_problem(self, generations: int) -> str | None:
        """Describe the first array with an invalid dtype, length or value, in a sentence; None if all are valid."""
        count, biases = len(self.generation), len(self.bias)
        wanted = {"generation": np.int64, "bias_ends": np.int64, "bias_ids": np.int32}
        lengths = {"bias_ids": biases, "bias": biases}
        for field in fields(self):
            array, dtype = np.asarray(getattr(self, field.name)), wanted.get(field.name, np.float32)
            if array.dtype != dtype or array.shape != (lengths.get(field.name, count),):
                return f"penalties.{field.name} is {array.dtype} of shape {array.shape}."
        in_range = count == 0 or (self.generation[0] >= 0 and self.generation[-1] < generations)
        if not in_range or np.any(np.diff(self.generation) <= 0):
            return f"penalties.generation does not rise within {generations} generations."
        ends = np.concatenate([[0], self.bias_ends])
        if np.any(np.diff(ends) < 0) or ends[-1] != biases or (biases and self.bias_ids.min() < 0):
            return "penalties.bias_ends does not rise to the number of biases."
        inner = np.setdiff1d(np.arange(1, biases), self.bias_ends)
        if np.any(np.diff(self.bias_ids)[inner - 1] <= 0):
            return "penalties.bias_ids does not rise in each generation."
        numbers = np.concatenate([self.repetition, self.presence, self.frequency, self.bias])
        if not np.isfinite(numbers).all() or np.any(self.repetition <= 0):
            return "penalties has values that are not finite, or a repetition that is not above 0."
        return None


def check_penalties(penalties: Penalties | None, generations: int) -> Penalties | None:
    """Return the penalties that a caller passes.

    Raises:
        ArgumentError: if an array is not as `Penalties` says.
    """
    if penalties is None:
        return None
    _validation.instance(penalties, "penalties", Penalties, "Pass Penalties, or None.")
    if problem := penalties.find_problem(generations):
        raise ArgumentError(f"TG-ALIGN-042: {problem} Pass arrays as Penalties describes.")
    return penalties
