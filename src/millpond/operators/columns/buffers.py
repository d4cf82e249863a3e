"""The buffers of Arrow arrays as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.layout import Bytes, Ints

NUMPY = {
    "tinyint": np.int8,
    "smallint": np.int16,
    "int": np.int32,
    "bigint": np.int64,
    "date": np.int32,
    "timestamp": np.int64,
    "timestamp_ntz": np.int64,
    "float": np.float32,
    "double": np.float64,
}
"""NumPy types of fixed-width values, by the names of Spark's types."""


def bits(buffer: pa.Buffer, offset: int, length: int) -> NDArray[np.uint8]:
    """Unpack a buffer of bits into one byte per bit."""
    packed = np.frombuffer(buffer, dtype=np.uint8)[offset // 8 : (offset + length + 7) // 8]
    start = offset % 8
    return np.unpackbits(packed, bitorder="little")[start : start + length]


def bitmap(valid: NDArray[np.uint8]) -> pa.Buffer | None:
    """Return an Arrow validity bitmap; None if all rows are valid."""
    return pa.py_buffer(np.packbits(valid, bitorder="little")) if valid.size and not valid.all() else None


def fixed(array: pa.Array, dtype: Any, width: int = 1) -> NDArray[Any]:
    """Return the values of a fixed-width array, each `width` numbers of a NumPy type; nulls hold any value."""
    buffer = array.buffers()[1]
    start, stop = array.offset * width, (array.offset + len(array)) * width
    values = np.frombuffer(buffer, dtype=dtype)[start:stop]
    # Kernels require aligned arrays.
    return values if values.flags.aligned else values.copy()


def validity_bytes(array: pa.Array) -> NDArray[np.uint8]:
    """Return one byte per row: 0 where it is null."""
    bitmap_ = array.buffers()[0] if array.null_count else None
    return np.ones(len(array), np.uint8) if bitmap_ is None else bits(bitmap_, array.offset, len(array))


def byte_ranges(array: pa.Array) -> tuple[Ints, Bytes]:
    """Return the 64-bit offsets and the bytes of an array of byte strings with 32-bit offsets."""
    _, offsets, data = array.buffers()
    if not len(array) or offsets is None:
        return np.zeros(len(array) + 1, np.int64), np.empty(0, np.uint8)
    starts = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return starts, np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)


def list_ranges(array: pa.Array) -> Ints:
    """Return the 64-bit offsets of an array of lists or maps."""
    if not len(array):
        return np.zeros(1, np.int64)
    return np.asarray(array.offsets, np.int64)


def clear_nulls(array: pa.Array, valid: NDArray[np.uint8], offsets: Ints) -> pa.Array:
    """Return the array with no bytes or elements in rows that are not valid."""
    # Arrow allows content below nulls; with it, equal values would have different byte strings.
    if valid.all() or not np.diff(offsets)[valid == 0].any():
        return array
    return array.take(pa.array(np.arange(len(array)), mask=valid == 0))
