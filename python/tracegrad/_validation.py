"""Check the arguments of public functions: arrays, integers, flags, names and choices.

An invalid argument raises an ArgumentError that names it. An array that is contiguous, aligned and of the requested
dtype is not copied. No check imports torch or numpy.ma.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tracegrad.errors import ArgumentError

Array = NDArray[Any]
_RAISED = (TypeError, ValueError, OverflowError, RecursionError, RuntimeError, AttributeError, NotImplementedError)
_NO_ARRAYS = (str, bytes, bytearray, memoryview, Mapping, Set, Iterator)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor, without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def _is_masked(value: Any) -> bool:
    """Return whether a value is a masked array. If one exists, numpy.ma is already imported."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def numbers(values: Any, name: str) -> Array:
    """Return an array of bool, integers or real floats, of any shape.

    Tensors are copied to the CPU. Floats of fewer than 32 bits in tensors become float32. None among numbers becomes
    NaN.

    Raises:
        ArgumentError: for anything else, such as strings, masked or complex arrays, generators, and lists of unequal
            lengths.
    """
    if isinstance(values, _NO_ARRAYS) or _is_masked(values) or values is None:
        _refuse(name, _kind(values))
    try:
        array = _from_tensor(values) if is_tensor(values) else np.asarray(values)
        if array.dtype == object:
            array = _unwrapped(array, name)
    except ArgumentError:
        raise
    except _RAISED as error:
        _refuse(name, f"{_kind(values)} that cannot become an array: {type(error).__name__}: {str(error)[:200]}")
    if array.dtype.kind not in "biuf":
        _refuse(name, f"an array of {str(array.dtype)[:80]}")
    if array.dtype.kind == "b":
        _check_bytes(array, name)
    return array


def floats(values: Any, name: str, dtype: DTypeLike = np.float64, *, length: int | None = None) -> Array:
    """Return numbers as a one-dimensional array of `dtype` (float32 or float64).

    Raises:
        ArgumentError: if the values are not numbers, if the shape is wrong, or if a finite number overflows `dtype`.
    """
    return as_floats(check_flat(numbers(values, name), name, length), dtype, name)


def real(values: Any, name: str) -> NDArray[np.float64]:
    """Return numbers as float64 in their own shape. Otherwise like `floats`."""
    return as_floats(numbers(values, name), np.float64, name)


def integers(values: Any, name: str, dtype: DTypeLike = np.int64, *, length: int | None = None) -> Array:
    """Return integers as a one-dimensional array of `dtype`.

    Raises:
        ArgumentError: for floats (also integral ones), for bool, for a wrong shape, or if an integer overflows `dtype`.
    """
    return as_integers(check_flat(numbers(values, name), name, length), dtype, name)


def flags(values: Any, name: str, *, length: int | None = None) -> NDArray[np.bool_]:
    """Return a one-dimensional bool array, from bool values or from numbers that are 0 or 1.

    Raises:
        ArgumentError: for other numbers, or for a wrong shape.
    """
    return as_flags(check_flat(numbers(values, name), name, length), name)


def labels(values: Any, name: str) -> Array:
    """Return a one-dimensional array of ids, either integers or strings.

    Raises:
        ArgumentError: for anything else, such as floats, None or a mixed list.
    """
    if isinstance(values, (list, tuple)) and values and all(isinstance(value, str) for value in values):
        values = np.asarray(values)
    if type(values) is np.ndarray and values.dtype.kind == "U":
        return check_flat(values, name)
    if type(values) is np.ndarray and values.dtype == object and all(isinstance(value, str) for value in values.flat):
        return check_flat(values.astype(str), name)
    array = check_flat(numbers(values, name), name)
    return array if array.size == 0 else as_integers(array, array.dtype if array.dtype.kind in "iu" else np.int64, name)


def check_flat(array: Array, name: str, length: int | None = None) -> Array:
    """Return the array if it has one dimension and `length` entries.

    Raises:
        ArgumentError: for another shape or length.
    """
    if array.ndim != 1:
        raise ArgumentError(f"TG-ARGS-001: {name} has shape {array.shape}. Pass a one-dimensional array.")
    if length is not None and len(array) != length:
        raise ArgumentError(
            f"TG-ARGS-002: {name} has {len(array)} entries, expected {length}. Pass arrays of equal length."
        )
    return array


def as_floats(array: Array, dtype: DTypeLike, name: str) -> Array:
    """Return the numbers as floats of `dtype`.

    Raises:
        ArgumentError: if a finite number would become infinite.
    """
    with np.errstate(over="ignore"):
        cast = np.require(array, dtype, ["C", "A"])
    if array.dtype.kind == "f" and array.dtype.itemsize > cast.dtype.itemsize:
        is_inf = np.isinf(cast) & np.isfinite(array)
        if is_inf.any():
            raise ArgumentError(
                f"TG-ARGS-003: {name} contains {array[is_inf].flat[0]:.6g}, which overflows {cast.dtype}. "
                "Pass numbers below 3.4e38, or NaN for unknown numbers."
            )
    return cast


def as_integers(array: Array, dtype: DTypeLike, name: str) -> Array:
    """Return the integers as `dtype`.

    Raises:
        ArgumentError: for an array of another kind, or if an integer overflows `dtype`.
    """
    if array.dtype.kind not in "iu" and array.size:
        _refuse(name, f"an array of {array.dtype}", "Pass integers: floats are not valid, even if they are integral.")
    result = np.require(array, dtype, ["C", "A"])
    if array.dtype != result.dtype and array.size:
        limits = np.iinfo(result.dtype)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            extreme = low if low < limits.min else high
            raise ArgumentError(
                f"TG-ARGS-004: {name} contains {extreme}, which is outside the range {limits.min} to {limits.max} of "
                f"{result.dtype}. Pass integers in this range."
            )
    return result


def as_flags(array: Array, name: str) -> NDArray[np.bool_]:
    """Return the numbers as bool if each is 0 or 1.

    Raises:
        ArgumentError: for other numbers.
    """
    if array.dtype.kind != "b" and not np.isin(array, (0, 1)).all():
        _refuse(name, f"an array of {array.dtype} with numbers other than 0 and 1", "Pass True and False.")
    return np.require(array, np.bool_, ["C", "A"])


def integer(value: Any, name: str, *, least: int, most: int = (1 << 63) - 1) -> int:
    """Return the value as an int if it is an integer from `least` to `most`.

    Raises:
        ArgumentError: for another type (also bool) or an integer out of bounds.
    """
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
    if not is_integer or not least <= value <= most:
        bounds = f"at least {least}" if most >= (1 << 31) else f"from {least} to {most}"
        raise ArgumentError(f"TG-ARGS-005: {name} is {describe(value)}. It must be an integer of {bounds}.")
    return int(value)


def number(value: Any, name: str, *, least: float = -np.inf, most: float = np.inf) -> float:
    """Return the value as a float if it is a finite number from `least` to `most`.

    Raises:
        ArgumentError: for another type (also bool) or a number out of bounds.
    """
    is_real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_real or not abs(value) < 1e300 or not least <= value <= most:
        raise ArgumentError(
            f"TG-ARGS-006: {name} is {describe(value)}. It must be a finite number from {least} to {most}."
        )
    return float(value)


def flag(value: Any, name: str) -> bool:
    """Return the value as a bool if it is True or False.

    Raises:
        ArgumentError: for any other value.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"TG-ARGS-007: {name} is {describe(value)}. It must be True or False.")
    return bool(value)


def one_of(value: Any, name: str, choices: Iterable[str | None]) -> Any:
    """Return the value if it is one of the choices.

    Raises:
        ArgumentError: for any other value.
    """
    if not (value is None or isinstance(value, str)) or value not in (choices := tuple(choices)):
        raise ArgumentError(
            f"TG-ARGS-008: {name} is {describe(value)}. It must be one of {', '.join(map(repr, choices))}."
        )
    return value


def instance(value: Any, name: str, kinds: type | tuple[type, ...], fix: str) -> Any:
    """Return the value if it is an instance of one of `kinds`.

    Raises:
        ArgumentError: for another type. The message ends with `fix`.
    """
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise ArgumentError(f"TG-ARGS-018: {name} is {describe(value)}, expected {expected}. {fix}")
    return value


def instances(values: Any, name: str, kinds: type | tuple[type, ...]) -> tuple[Any, ...]:
    """Return a list or tuple of values as a tuple if each is an instance of one of `kinds`.

    Raises:
        ArgumentError: for another container, or for an entry of another type.
    """
    instance(values, name, (list, tuple), "Pass a list.")
    return tuple(
        instance(value, f"{name}[{index}]", kinds, "See the documentation.") for index, value in enumerate(values)
    )


def check_rows(values: Any, name: str, not_these: tuple[type, ...]) -> None:
    """Raise if a value has no rows, or is itself of a type in `not_these` that a single row should have.

    Raises:
        ArgumentError: if the value cannot be iterated over or is one of `not_these`.
    """
    has_rows = isinstance(values, Iterable) and not (isinstance(values, np.ndarray) and values.ndim == 0)
    if not has_rows or isinstance(values, not_these):
        raise ArgumentError(f"TG-ARGS-009: {name} is {describe(values)}. Pass a list with one entry per row.")


def describe(value: Any) -> str:
    """Return a short description of any value, on one line, for an error message."""
    if isinstance(value, (str, bytes, int, float, complex, type(None))):
        text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 200 else "a very large integer"
        return text if len(text) <= 60 else f"{text[:57]}..."
    return _kind(value)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if _is_masked(value):
        return "a masked array"
    name = type(value).__name__[:60]
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _refuse(name: str, problem: str, fix: str = "Pass a list, a numpy array or a tensor of real numbers.") -> NoReturn:
    raise ArgumentError(f"TG-ARGS-010: {name} is {problem}, which cannot be converted to numbers. {fix}")


def _from_tensor(tensor: Any) -> Array:
    tensor = tensor.detach().cpu()
    small = tensor.is_floating_point() and tensor.element_size() < 4
    return (tensor.float() if small else tensor).numpy()


def _unwrapped(array: Array, name: str) -> Array:
    """Return an object array of numbers and None as float64."""
    real = (int, float, np.integer, np.floating)
    items = array.reshape(-1).tolist()
    if not all(item is None or (isinstance(item, real) and not isinstance(item, bool)) for item in items):
        _refuse(name, "an array of objects that are not numbers")
    if None not in items:  # Without None, numpy makes an object array only for integers beyond 64 bits.
        _refuse(name, "an array of integers beyond 64 bits")
    return array.astype(np.float64)


def _check_bytes(array: Array, name: str) -> None:
    """Raise if a bool array has bytes other than 0 and 1. Readers disagree about the meaning of such bytes."""
    contiguous = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    if contiguous.size and int(contiguous.reshape(-1).view(np.uint8).max()) > 1:
        _refuse(name, "an array of bool whose bytes are not 0 and 1", "Create a valid array: array.view('u1') != 0.")


def check_choice(name: str, value: object, valid: tuple[object, ...]) -> None:
    if value not in valid:
        raise ArgumentError(f"TG-ARGS-011: {name} is {value!r}. It must be one of {', '.join(map(repr, valid))}.")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise if a value is not an instance of `kind`, because no evaluator has a formula for it.

    Raises:
        ArgumentError: for another type.
    """
    if not isinstance(value, kind):
        raise ArgumentError(
            f"TG-ARGS-012: {name} is a {type(value).__name__}, and no evaluator has a formula for it. "
            f"Pass a {kind.__name__}, or your own frozen dataclass that subclasses it (docs/how-to/extend.md)."
        )


def refuse_without_effect(idle: bool, name: str, why: str) -> None:
    if idle:
        raise ArgumentError(f"TG-ARGS-013: {name} has no effect here: {why}. Leave it out.")


def check_order(name: str, low: float, high: float) -> None:
    if not low <= high:
        raise ArgumentError(f"TG-ARGS-014: {name} has low {low} above high {high}. Set low to at most high.")


def check_bounds_around(name: str, low: float, high: float, centre: float, fix: str) -> None:
    """Raise if the bounds do not include `centre`, the value of the quantity if both policies agree.

    Raises:
        ArgumentError: if the bounds are out of order or exclude `centre`. The message ends with `fix`.
    """
    check_order(name, low, high)
    if not low <= centre <= high:
        raise ArgumentError(
            f"TG-ARGS-015: {name} has bounds [{low:g}, {high:g}], which exclude {centre:g}, the value of tokens on "
            f"which the policies agree. {fix}"
        )


def check_ratio_bounds(name: str, low: float, high: float) -> None:
    """Raise if the bounds of a ratio are negative or do not include 1.

    Raises:
        ArgumentError: if `low` is negative, or if the bounds are out of order or exclude 1.
    """
    if low < 0:
        raise ArgumentError(
            f"TG-ARGS-016: {name}.low is {low:g}, and a ratio cannot be negative. Bounds are ratios, not distances "
            f"from 1: write 0.8 for 0.2."
        )
    check_bounds_around(
        name, low, high, 1.0, "Bounds are ratios, not distances from 1: write 0.8 and 1.28 for 0.2 and 0.28."
    )


def check_positive(name: str, value: float, fix: str = "") -> None:
    if not 0 < value < float("inf"):
        raise ArgumentError(f"TG-ARGS-017: {name} is {value}. It must be positive{'; ' + fix if fix else ''}.")
