"""State words into Arrow columns of Spark's exact types, without loops over rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.columns import arrow_words
from millpond.layout import Bytes, Ints, Rows
from millpond.operators.columns.buffers import NUMPY, bitmap
from millpond.operators.columns.encode import ALL, Mask, Operand, Place
from millpond.operators.columns.nested import unpack
from millpond.spec.types import DataType

LIMIT = 2**31 - 1
"""The largest 32-bit offset of Arrow."""


class OversizeError(Exception):
    """A column exceeds Arrow's 32-bit offsets; the caller halves its rows and tries again."""


def not_null(rows: Rows, place: Place) -> Mask:
    """Return a mask of the rows whose column at `place` is not null."""
    bits = rows.words[:, place.null_word] & place.null_bit
    return (bits == 0).view(np.uint8) if bits.any() else ALL


def stored_operand(rows: Rows, place: Place, machine: str | None) -> Operand:
    """Read a stored column, given the kind of its machine values (see `DataType.machine`)."""
    valid = not_null(rows, place)
    if machine in ("bytes", "wide"):
        return Operand(rows.span(place.offset, 2), valid, rows.heap)
    return Operand(rows.floats(place.offset) if machine == "float" else rows.ints(place.offset), valid)


def to_arrow(values: NDArray[Any], valid: Mask, dtype: DataType) -> pa.Array:
    """Build an Arrow array of `dtype` from machine values: int64[n], float64[n], or uint64[n, 2] for decimals."""
    data: NDArray[Any]
    if dtype.name == "boolean":
        data = np.packbits(values.astype(np.bool_), bitorder="little")
    elif dtype.name == "decimal":
        data = widen(values) if values.ndim == 1 else values
    else:
        data = values.astype(NUMPY[dtype.name], copy=False)
    return pa.Array.from_buffers(dtype.arrow, len(values), [bitmap(valid), pa.py_buffer(np.ascontiguousarray(data))])


def widen(values: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Sign-extend int64[n] to 128-bit pairs uint64[n, 2]."""
    pairs = np.empty((len(values), 2), dtype=np.int64)
    pairs[:, 0] = values
    np.right_shift(values, 63, out=pairs[:, 1])
    return pairs.view(np.uint64)


def bytes_column(rows: Rows, offset: int, valid: Mask, dtype: DataType) -> pa.Array:
    """Decode a bytes column as an Arrow string or binary array.

    Args:
        rows: the rows.
        offset: the first word of the column.
        valid: a mask of the rows that are not null.
        dtype: the type of the column.

    Raises:
        OversizeError: the values take more than 2 GiB.
    """
    offsets, data = byte_strings(rows, offset)
    buffers = [bitmap(valid), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(dtype.arrow, rows.count, buffers)


def byte_strings(rows: Rows, offset: int) -> tuple[Ints, Bytes]:
    """Decode a bytes column as concatenated byte strings.

    Returns:
        The offsets (int64[n + 1]) and the bytes.

    Raises:
        OversizeError: they take more than 2 GiB.
    """
    offsets = np.empty(rows.count + 1, dtype=np.int64)
    arrow_words.byte_offsets(rows.words, offset, offsets)
    total = int(offsets[-1])
    if total > LIMIT:
        raise OversizeError
    # The kernel copies whole words, so it may write beyond the last byte.
    data = np.empty(total + 8, dtype=np.uint8)
    arrow_words.unpack_bytes(rows.words, offset, rows.heap, offsets, data)
    return offsets, data[:total]


def nested_column(rows: Rows, offset: int, valid: Mask, dtype: DataType) -> pa.Array:
    """Decode a bytes column that holds nested values as an Arrow array.

    Raises:
        OversizeError: the values take more than 2 GiB.
    """
    ends, data = byte_strings(rows, offset)
    if not valid.size or valid.all():
        return unpack(data, ends, dtype)
    present = np.flatnonzero(valid)  # a null has no bytes
    values = unpack(data, ends[np.append(present, rows.count)], dtype)
    return values.take(pa.array(np.cumsum(valid, dtype=np.int64) - 1, mask=valid == 0))


def atom(rows: Rows, place: Place, dtype: DataType) -> pa.Array:
    """Decode one stored column as Arrow."""
    valid = not_null(rows, place)
    machine = dtype.machine
    if dtype.nested:
        return nested_column(rows, place.offset, valid, dtype)
    if machine == "bytes":
        return bytes_column(rows, place.offset, valid, dtype)
    if machine == "wide":
        return to_arrow(rows.span(place.offset, 2), valid, dtype)
    return to_arrow(rows.floats(place.offset) if machine == "float" else rows.ints(place.offset), valid, dtype)


def key_column(rows: Rows, places: Iterator[Place], dtype: DataType) -> pa.Array:
    """Rebuild a key column from its flattened places, which the iterator yields in the order of `types.leaves`."""
    place = next(places)
    if dtype.name != "struct":
        return atom(rows, place, dtype)
    valid = not_null(rows, place)
    fields = [key_column(rows, places, inner) for _, inner in dtype.fields]
    return pa.Array.from_buffers(dtype.arrow, rows.count, [bitmap(valid)], children=fields)


def key_columns(rows: Rows, places: Sequence[Place], dtypes: Sequence[DataType]) -> list[pa.Array]:
    """Rebuild all key columns of the rows."""
    remaining = iter(places)
    return [key_column(rows, remaining, dtype) for dtype in dtypes]
