"""How many bytes the rows of an Arrow batch become as records, before one of them is made.

Arrow writes once what several rows or items share: by dictionaries, runs, views and unions. Nested in each other they
multiply, so that a few bytes stand for more rows than any memory holds. Called by `tables`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Sizes = NDArray[np.int64]

# Bytes of a value beside its text, and of the longest number or date.
_VALUE, _NUMBER = 8, 16


def row_sizes(batch: Any) -> Sizes:
    """Return about how many bytes each row of a record batch becomes as JSON.

    >>> import pyarrow as pa
    >>> text = pa.DictionaryArray.from_arrays(pa.array([0, 0, 1], pa.int8()), pa.array(["x" * 1000, "y"]))
    >>> row_sizes(pa.record_batch({"a": text})).tolist()
    [1017, 1017, 18]
    """
    return _of_fields(batch.schema.names, batch.columns, batch.num_rows)


def _of_fields(names: list[str], columns: list[Any], rows: int) -> Sizes:
    total = np.full(rows, _VALUE, np.int64)
    for name, column in zip(names, columns, strict=True):
        total += _capped(_sizes(column) + len(name.encode()), len(names) + 1)
    return total


def _sizes(column: Any) -> Sizes:
    """Bytes of each value of an array; a null may count as much as another value."""
    import pyarrow as pa

    types, kind, rows = pa.types, column.type, len(column)
    if isinstance(column, pa.ExtensionArray):
        return _sizes(column.storage)
    if types.is_dictionary(kind):
        places = column.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        return _taken(_sizes(column.dictionary), places)
    if types.is_struct(kind):
        fields = [column.field(at) for at in range(kind.num_fields)]
        return _of_fields([kind.field(at).name for at in range(kind.num_fields)], fields, rows)
    if types.is_union(kind):
        return _of_union(column)
    if _is(kind, "run_end_encoded"):
        ends = column.run_ends.to_numpy(zero_copy_only=False)
        return _taken(_sizes(column.values), np.searchsorted(ends, column.offset + np.arange(rows), side="right"))
    if _is(kind, "list_view") or _is(kind, "large_list_view"):
        start = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        length = column.sizes.to_numpy(zero_copy_only=False).astype(np.int64)
        return _between(lambda first, last: [column.values.slice(first, last - first)], start, start + length)
    if types.is_map(kind) or types.is_list(kind) or types.is_large_list(kind):
        bounds = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        inner = [column.keys, column.items] if types.is_map(kind) else [column.values]
        if len(inner) == 1 and types.is_primitive(inner[0].type):
            return _VALUE + _NUMBER * (bounds[1:] - bounds[:-1])
        return _between(
            lambda first, last: [each.slice(first, last - first) for each in inner], bounds[:-1], bounds[1:]
        )
    if types.is_fixed_size_list(kind):
        width = kind.list_size
        start = (column.offset + np.arange(rows)) * width
        return _between(lambda first, last: [column.values.slice(first, last - first)], start, start + width)
    return _of_plain(column)


def _of_plain(column: Any) -> Sizes:
    import pyarrow as pa
    import pyarrow.compute as pc

    types, kind, rows = pa.types, column.type, len(column)
    if _is(kind, "string_view") or _is(kind, "binary_view"):
        # A view is 16 bytes, and the first four are the length.
        views = np.frombuffer(column.buffers()[1], np.int32)[: 4 * (column.offset + rows)]
        return np.maximum(views[4 * column.offset :: 4], 0).astype(np.int64) + _VALUE
    if types.is_binary(kind) or types.is_string(kind) or types.is_large_binary(kind) or types.is_large_string(kind):
        lengths = pc.call_function("binary_length", [column]).fill_null(0).to_numpy(zero_copy_only=False)
        return lengths.astype(np.int64) + _VALUE
    if types.is_fixed_size_binary(kind):
        return np.full(rows, kind.byte_width + _VALUE, np.int64)
    return np.full(rows, _VALUE if types.is_null(kind) else _NUMBER, np.int64)


def _of_union(column: Any) -> Sizes:
    """Of a dense union several values may be the same item of a child; of a sparse one each child has all rows."""
    kind, rows = column.type, len(column)
    codes = column.type_codes.to_numpy(zero_copy_only=False)
    dense = kind.mode == "dense"
    places = column.offsets.to_numpy(zero_copy_only=False) if dense else np.arange(rows)
    total = np.zeros(rows, np.int64)
    for at, code in enumerate(kind.type_codes):
        here = codes == code
        total[here] = _taken(_sizes(column.field(at)), places[here])
    return total + _VALUE


def _between(inner: Any, start: Sizes, end: Sizes) -> Sizes:
    """Bytes of lists from the bytes of their items, which may be shared; `inner` gives the items of a span."""
    full = end > start
    if not full.any():
        return np.full(len(start), _VALUE, np.int64)
    first, last = int(start[full].min()), int(end[full].max())
    sizes = np.zeros(last - first, np.int64)
    children = inner(first, last)
    for child in children:
        sizes += _capped(_sizes(child), 2 * (last - first) + 2)
    until = np.concatenate([[0], np.cumsum(sizes)])
    total = np.full(len(start), _VALUE, np.int64)
    total[full] += until[end[full] - first] - until[start[full] - first]
    return total


def _taken(sizes: Sizes, places: Any) -> Sizes:
    return sizes[places] if len(sizes) else np.full(len(places), _VALUE, np.int64)


def _capped(sizes: Sizes, terms: int) -> Sizes:
    """Sizes of which so many can be summed in 63 bits; what is cut is beyond every limit."""
    return np.minimum(sizes, (1 << 62) // terms)


def _is(kind: Any, name: str) -> bool:
    """Whether it is of a type that an older pyarrow does not have."""
    import pyarrow as pa

    check = getattr(pa.types, f"is_{name}", None)
    return check is not None and check(kind)
