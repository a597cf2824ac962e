"""Converts a trainer's arrays to the flat ones that the core takes, and back: padded or flat, numpy or torch.

Nothing is copied that is contiguous and of a type that the core reads. torch is touched only where tensors are passed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import arrays
from tracegrad.arrays import is_tensor
from tracegrad.errors import ArgumentError


@dataclass(frozen=True)
class Layout:
    """Where the terms stand in the arrays given, and how results go back there.

    Args:
        shape: of the logprobs.
        mask: flat, True at the terms; None where every position is one.
        dtype: float32 or float64, which all floats are computed in.
        like: the logprobs, which results resemble.
    """

    shape: tuple[int, ...]
    mask: NDArray[np.bool_] | None
    dtype: type[np.float32] | type[np.float64]
    like: Any

    @classmethod
    def of(cls, like: Any, mask: Any, trace: Any) -> "Layout":
        """The layout of logprobs and their mask."""
        if like is None:
            raise ArgumentError("old and rollout are both None. Pass the logprobs that are known.")
        array = arrays.numbers(like, "the logprobs")
        flags = None if mask is None else arrays.as_flags(arrays.numbers(mask, "mask"), "mask")
        if flags is not None and flags.shape != array.shape:
            raise ArgumentError(
                f"mask is {flags.shape} but the logprobs are {array.shape}. Pass one flag per position."
            )
        if array.ndim == 0:
            raise ArgumentError("the logprobs are one number, no array. Pass one entry per term.")
        if array.ndim > 1 and flags is None:
            raise ArgumentError(
                f"logprobs of shape {array.shape} need mask=. Which positions are terms is not in them."
            )
        if array.ndim == 1 and trace is None:
            raise ArgumentError(
                "flat logprobs need trace=, one id per term. Which terms belong together is not in them."
            )
        flat = None if flags is None else flags.reshape(-1)
        return cls(array.shape, flat, np.float64 if array.dtype == np.float64 else np.float32, like)

    @property
    def width(self) -> int:
        """Positions to a row."""
        return self.shape[-1]

    def floats(self, values: Any, name: str) -> NDArray[np.floating] | None:
        """One number per position, flat."""
        if values is None:
            return None
        array = arrays.numbers(values, name)
        if self._by_row(array):
            array = np.broadcast_to(array[..., None], self.shape)
        self._check(array, name)
        return arrays.narrowed(array, self.dtype, name).reshape(-1)

    def ids(self, values: Any, name: str) -> NDArray[np.integer] | None:
        """One integer per position or per row, flat; int32 and int64 as they are."""
        if values is None:
            return None
        array = arrays.numbers(values, name)
        if not self._by_row(array):
            self._check(array, name)
        kind = array.dtype if array.dtype in (np.int32, np.int64) else np.int64
        return arrays.whole(array, kind, name).reshape(-1)

    def back(self, values: NDArray[Any] | float) -> Any:
        """Flat results in the shape, kind and device of what was given; a number as a view of itself everywhere."""
        tensor = is_tensor(self.like)
        if not isinstance(values, np.ndarray):
            if not tensor:
                return np.broadcast_to(self.dtype(values), self.shape)
            import torch

            kind = torch.float64 if self.dtype == np.float64 else torch.float32
            return torch.tensor(values, dtype=kind, device=self.like.device).expand(self.shape)
        values = values.reshape(self.shape)
        if not tensor:
            return values
        import torch

        return torch.from_numpy(values).to(self.like.device)

    def _by_row(self, array: NDArray[Any]) -> bool:
        return len(self.shape) > 1 and array.shape == self.shape[:-1]

    def _check(self, array: NDArray[Any], name: str) -> None:
        if array.shape != self.shape:
            raise ArgumentError(f"{name} is {array.shape} but the logprobs are {self.shape}. Pass one entry per term.")
