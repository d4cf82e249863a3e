"""Byte strings that compare, byte by byte, as Spark orders the encoded values.

Structs are ordered field by field, arrays element by element and then by length. Within them null comes first, NaN
after all numbers, and −0.0 equals 0.0. Values that Spark takes for equal have the same byte string.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.columns import byte_strings
from millpond.layout import Bytes, Ints
from millpond.operators.columns.buffers import byte_ranges, clear_nulls, list_ranges, validity_bytes
from millpond.operators.columns.nested import Content, Valid, cast_exact, fixed_values, interleave, normalised
from millpond.spec.types import DataType

ORDER_KEY = DataType("binary")
"""The type of the byte strings."""

_END, _NULL, _VALUE = 0, 1, 2
"""The byte before an element of an array, or a field: the array ends, the value is null, or it follows."""

_SIGNED = ("tinyint", "smallint", "int", "bigint", "date", "timestamp", "timestamp_ntz")


def order_keys(array: pa.Array, dtype: DataType) -> tuple[Ints, Bytes]:
    """Encode the values of an array, each as a byte string; nulls become any.

    Returns:
        The ends of the concatenated byte strings (string `i` ends at `ends[i + 1]`), and their bytes.
    """
    array = cast_exact(array, dtype)
    return _values(array, dtype, validity_bytes(array))


def _nullable(array: pa.Array, dtype: DataType, parent_valid: Valid) -> tuple[Ints, Bytes]:
    valid = validity_bytes(array) & parent_valid
    count = len(array)
    marks = Content(np.where(valid != 0, np.uint8(_VALUE), np.uint8(_NULL)), np.arange(count + 1))
    return interleave([marks, _as_content(_values(array, dtype, valid))], count)


def _values(array: pa.Array, dtype: DataType, valid: Valid) -> tuple[Ints, Bytes]:
    """Encode values; all nulls have the same byte string."""
    count = len(array)
    if dtype.name == "struct":
        fields = [_nullable(array.field(number), inner, valid) for number, (_, inner) in enumerate(dtype.fields)]
        return interleave([_as_content(field) for field in fields], count)
    if dtype.name == "array":
        array = clear_nulls(array, valid, list_ranges(array))
        offsets = list_ranges(array)
        part = array.values.slice(offsets[0], offsets[-1] - offsets[0])
        ends, data = _nullable(part, dtype.fields[0][1], np.ones(len(part), np.uint8))
        # The end compares lower than any element, so an array comes before its extensions.
        stops = Content(np.full(count, _END, np.uint8), np.arange(count + 1))
        return interleave([Content(data, ends[offsets - offsets[0]]), stops], count)
    if dtype.machine == "bytes":
        offsets, _ = byte_ranges(array)
        offsets, data = byte_ranges(clear_nulls(array, valid, offsets))
        ends = np.empty(count + 1, np.int64)
        byte_strings.escaped_ends(offsets, data, ends)
        out: Bytes = np.empty(int(ends[-1]), np.uint8)
        byte_strings.escape(offsets, data, ends, out)
        return ends, out
    words = _unsigned(fixed_values(array, dtype, valid), dtype)
    data = words.astype(words.dtype.newbyteorder(">"), order="C").view(np.uint8).reshape(-1)
    return np.arange(count + 1) * (data.size // count if count else 1), data


def _as_content(strings: tuple[Ints, Bytes]) -> Content:
    ends, data = strings
    return Content(data, ends)


def _unsigned(values: NDArray[Any], dtype: DataType) -> NDArray[Any]:
    """Return unsigned numbers that order as the values do: one each, or for decimals two, the high word first."""
    if dtype.name == "boolean":
        return values
    if dtype.name == "decimal":
        high = values[:, 1] ^ np.uint64(1 << 63)
        return np.stack([high, values[:, 0]], 1)
    size = 8 * values.dtype.itemsize
    kind = np.dtype(f"u{values.dtype.itemsize}")
    sign = kind.type(1 << (size - 1))
    if dtype.name in _SIGNED:
        signed: NDArray[Any] = values.view(kind) ^ sign
        return signed
    plain = normalised(values).view(kind)
    # Negative floats order in reverse, so all their bits are flipped; of others only the sign.
    flipped: NDArray[Any] = np.where(plain & sign != 0, ~plain, plain | sign)
    return flipped
