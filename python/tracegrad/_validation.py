"""Check the arguments of public functions: arrays, integers, flags, names and choices.

A wrong one is an ArgumentError that names it. An array that is contiguous, aligned and of the wanted dtype is not
copied. Neither torch nor numpy.ma is imported for a check.
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
    """Whether it is torch's; torch is not imported for the question."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def _is_masked(value: Any) -> bool:
    """Whether it is a masked array; who has made one has imported numpy.ma."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def numbers(values: Any, name: str) -> Array:
    """An array of bool, integers or real floats, of any shape; tensors come to the CPU, small floats as float32.

    None among numbers is NaN.

    Raises:
        ArgumentError: for anything else: strings, masked or complex arrays, generators, lists of unequal length.
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
        _refuse(name, f"{_kind(values)} that is no array: {type(error).__name__}: {str(error)[:200]}")
    if array.dtype.kind not in "biuf":
        _refuse(name, f"an array of {str(array.dtype)[:80]}")
    if array.dtype.kind == "b":
        _check_bytes(array, name)
    return array


def floats(values: Any, name: str, dtype: DTypeLike = np.float64, *, length: int | None = None) -> Array:
    """A flat array of `dtype`, float32 or float64, from numbers.

    Raises:
        ArgumentError: for no numbers, another shape, or a finite number that `dtype` cannot hold.
    """
    return narrowed(flat(numbers(values, name), name, length), dtype, name)


def real(values: Any, name: str) -> NDArray[np.float64]:
    """As `floats`, of any shape, in float64."""
    return narrowed(numbers(values, name), np.float64, name)


def integers(values: Any, name: str, dtype: DTypeLike = np.int64, *, length: int | None = None) -> Array:
    """A flat array of `dtype` from integers.

    Raises:
        ArgumentError: for floats, however whole, for bool, another shape, or an integer that `dtype` cannot hold.
    """
    return whole(flat(numbers(values, name), name, length), dtype, name)


def flags(values: Any, name: str, *, length: int | None = None) -> NDArray[np.bool_]:
    """A flat array of bool, from bool or from numbers that are 0 or 1.

    Raises:
        ArgumentError: for other numbers, or another shape.
    """
    return as_flags(flat(numbers(values, name), name, length), name)


def labels(values: Any, name: str) -> Array:
    """A flat array of ids: integers or strings.

    Raises:
        ArgumentError: for anything else, such as floats, None or a list of both.
    """
    if isinstance(values, (list, tuple)) and values and all(isinstance(value, str) for value in values):
        values = np.asarray(values)
    if type(values) is np.ndarray and values.dtype.kind == "U":
        return flat(values, name)
    if type(values) is np.ndarray and values.dtype == object and all(isinstance(value, str) for value in values.flat):
        return flat(values.astype(str), name)
    array = flat(numbers(values, name), name)
    return array if array.size == 0 else whole(array, array.dtype if array.dtype.kind in "iu" else np.int64, name)


def flat(array: Array, name: str, length: int | None = None) -> Array:
    """The array, if it has one dimension and `length` entries."""
    if array.ndim != 1:
        raise ArgumentError(f"{name} has shape {array.shape}. It must be flat: one entry per element.")
    if length is not None and len(array) != length:
        raise ArgumentError(f"{name} has {len(array)} entries but {length} are needed. Pass arrays of equal length.")
    return array


def narrowed(array: Array, dtype: DTypeLike, name: str) -> Array:
    """The numbers as floats of `dtype`."""
    with np.errstate(over="ignore"):
        made = np.require(array, dtype, ["C", "A"])
    if array.dtype.kind == "f" and array.dtype.itemsize > made.dtype.itemsize:
        lost = np.isinf(made) & np.isfinite(array)
        if lost.any():
            raise ArgumentError(
                f"{name} holds {array[lost].flat[0]:.6g}, which {made.dtype} cannot hold. It would become infinite. "
                "Pass numbers below 3.4e38, or NaN where one is not known."
            )
    return made


def whole(array: Array, dtype: DTypeLike, name: str) -> Array:
    """The integers as `dtype`."""
    if array.dtype.kind not in "iu" and array.size:
        _refuse(name, f"an array of {array.dtype}", "Pass integers; a float is no id, however whole.")
    made = np.require(array, dtype, ["C", "A"])
    if array.dtype != made.dtype and array.size:
        limits = np.iinfo(made.dtype)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            found = low if low < limits.min else high
            raise ArgumentError(
                f"{name} holds {found}, beyond {limits.min} to {limits.max}. It would become another number. "
                f"Pass integers that {made.dtype} holds."
            )
    return made


def as_flags(array: Array, name: str) -> NDArray[np.bool_]:
    """The numbers as bool, if each is 0 or 1."""
    if array.dtype.kind != "b" and not np.isin(array, (0, 1)).all():
        _refuse(name, f"an array of {array.dtype} with other numbers than 0 and 1", "Pass True and False.")
    return np.require(array, np.bool_, ["C", "A"])


def integer(value: Any, name: str, *, least: int, most: int = (1 << 63) - 1) -> int:
    """An integer within bounds."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
    if not is_whole or not least <= value <= most:
        bounds = f"at least {least}" if most >= (1 << 31) else f"from {least} to {most}"
        raise ArgumentError(f"{name} is {described(value)}. It must be an integer of {bounds}.")
    return int(value)


def number(value: Any, name: str, *, least: float = -np.inf, most: float = np.inf) -> float:
    """A finite number within bounds."""
    is_real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_real or not abs(value) < 1e300 or not least <= value <= most:
        raise ArgumentError(f"{name} is {described(value)}. It must be a finite number from {least} to {most}.")
    return float(value)


def flag(value: Any, name: str) -> bool:
    """True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentError(f"{name} is {described(value)}. It must be True or False.")
    return bool(value)


def one_of(value: Any, name: str, choices: Iterable[str | None]) -> Any:
    """One of some names."""
    if not (value is None or isinstance(value, str)) or value not in (choices := tuple(choices)):
        raise ArgumentError(f"{name} is {described(value)}. It must be one of {', '.join(map(repr, choices))}.")
    return value


def instance(value: Any, name: str, kinds: type | tuple[type, ...], cure: str) -> Any:
    """A value of some class."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        raise ArgumentError(f"{name} is {described(value)}, no {wanted}. {cure}")
    return value


def instances(values: Any, name: str, kinds: type | tuple[type, ...]) -> tuple[Any, ...]:
    """A list or tuple of values of some class."""
    instance(values, name, (list, tuple), "Pass a list of them.")
    return tuple(instance(value, f"{name}[{at}]", kinds, "See its documentation.") for at, value in enumerate(values))


def rows(values: Any, name: str, not_these: tuple[type, ...]) -> None:
    """Refuses what has no rows, or is itself what one of them should be."""
    has_rows = isinstance(values, Iterable) and not (isinstance(values, np.ndarray) and values.ndim == 0)
    if not has_rows or isinstance(values, not_these):
        raise ArgumentError(f"{name} is {described(values)}. Pass a list, with one entry for each.")


def described(value: Any) -> str:
    """A value for an error: short, on one line, whatever it is."""
    if isinstance(value, (str, bytes, int, float, complex, type(None))):
        text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 200 else "an integer of many digits"
        return text if len(text) <= 60 else f"{text[:57]}..."
    return _kind(value)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if _is_masked(value):
        return "a masked array"
    name = type(value).__name__[:60]
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _refuse(name: str, found: str, cure: str = "Pass a list, a numpy array or a tensor of real numbers.") -> NoReturn:
    raise ArgumentError(f"{name} is {found}. What it means as numbers would have to be guessed. {cure}")


def _from_tensor(tensor: Any) -> Array:
    tensor = tensor.detach().cpu()
    small = tensor.is_floating_point() and tensor.element_size() < 4
    return (tensor.float() if small else tensor).numpy()


def _unwrapped(array: Array, name: str) -> Array:
    """Floats of an array of objects that are numbers or None."""
    real = (int, float, np.integer, np.floating)
    items = array.reshape(-1).tolist()
    if not all(item is None or (isinstance(item, real) and not isinstance(item, bool)) for item in items):
        _refuse(name, "an array of objects that are no numbers")
    if None not in items:  # integers beyond 64 bits
        _refuse(name, "an array of integers beyond 64 bits")
    return array.astype(np.float64)


def _check_bytes(array: Array, name: str) -> None:
    """Refuses bytes that bool does not have: what they say depends on who reads them."""
    whole_array = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    if whole_array.size and int(whole_array.reshape(-1).view(np.uint8).max()) > 1:
        _refuse(name, "an array of bool whose bytes are not 0 and 1", "Make it anew: array.view('u1') != 0.")


def check_choice(name: str, value: object, valid: tuple[object, ...]) -> None:
    if value not in valid:
        raise ArgumentError(f"{name} is {value!r}. It must be one of {', '.join(map(repr, valid))}.")


def kind_of(name: str, value: object, kind: type) -> None:
    """Refuses a value of another type: no evaluator knows its formula."""
    if not isinstance(value, kind):
        raise ArgumentError(
            f"{name} is a {type(value).__name__}, and no evaluator knows its formula. Another would be computed in its "
            f"place, or none. Take a {kind.__name__}, or a frozen dataclass of your own below it (docs/extending.md)."
        )


def no_effect(idle: bool, name: str, why: str) -> None:
    if idle:
        raise ArgumentError(f"{name} has no effect here: {why}. Leave it out.")


def rising(name: str, low: float, high: float) -> None:
    if not low <= high:
        raise ArgumentError(f"{name} has low {low} above high {high}. Nothing lies between.")


def around(name: str, low: float, high: float, centre: float, cure: str) -> None:
    """Bounds of a quantity that is `centre` where two policies agree."""
    rising(name, low, high)
    if not low <= centre <= high:
        raise ArgumentError(
            f"{name} has bounds [{low:g}, {high:g}], and terms on which the policies agree lie at {centre:g}, outside. "
            f"{cure}"
        )


def around_one(name: str, low: float, high: float) -> None:
    """Bounds of a ratio: not negative, and 1 lies between them."""
    if low < 0:
        raise ArgumentError(
            f"{name}.low is {low:g}, and no ratio is negative. Bounds are ratios, not distances from 1: write 1 - 0.2."
        )
    around(name, low, high, 1.0, "Bounds are ratios, not distances from 1: write 0.8 and 1.28 for 0.2 and 0.28.")


def positive(name: str, value: float, cure: str = "") -> None:
    if not 0 < value < float("inf"):
        raise ArgumentError(f"{name} is {value}. It must be positive{'; ' + cure if cure else ''}.")
