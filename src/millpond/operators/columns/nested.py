"""Nested values as self-contained byte strings: structs, arrays and maps of any depth.

A byte string holds its value's content of each type in turn, as in Arrow. Nullable types begin with one validity byte
per value. Fixed-width values follow as they are. Other values follow as their lengths (32 bits), then all their bytes
or elements. So columns are packed and unpacked without loops over single values.

A value of a type with `versions` holds the number of its version, and the value as a byte string.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.columns import byte_strings
from millpond.layout import Bytes, Ints
from millpond.operators.columns.buffers import (
    NUMPY,
    bitmap,
    bits,
    byte_ranges,
    clear_nulls,
    fixed,
    list_ranges,
    validity_bytes,
)
from millpond.operators.columns.evolution import evolve_values
from millpond.spec.types import DataType

Valid = NDArray[np.uint8]
"""One byte per value: 0 where it is null."""


class Content(NamedTuple):
    """The content of rows of one type: row `i` has the bytes from `bounds[i]` to `bounds[i + 1]`."""

    data: Bytes
    bounds: Ints


def pack(array: pa.Array, dtype: DataType, *, normal: bool = False) -> tuple[Ints, Bytes]:
    """Pack the values of an array into concatenated byte strings; nulls become any.

    Args:
        array: the values.
        dtype: their type.
        normal: normalise floats as Spark does for grouping (no −0.0, one NaN), instead of writing them bit by bit. Then
            two values have the same byte string if and only if grouping takes them for equal.

    Returns:
        Their ends (string `i` ends at `ends[i + 1]`), and their bytes.
    """
    array = cast_exact(array, dtype)
    count = len(array)
    return interleave(list(_values(array, dtype, np.arange(count + 1), validity_bytes(array), normal)), count)


def cast_exact(array: pa.Array, dtype: DataType) -> pa.Array:
    """Cast the array to the Arrow type of `dtype`, because Spark names fields that are never null differently."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array if array.type == dtype.arrow else array.cast(dtype.arrow)


def interleave(columns: list[Content], count: int) -> tuple[Ints, Bytes]:
    """Concatenate the columns of `count` rows row by row.

    Returns:
        The ends of the rows, and the bytes.
    """
    ends = np.zeros(count + 1, np.int64)
    for column in columns:
        ends += column.bounds
        ends -= column.bounds[0]
    out = np.empty(int(ends[-1]), np.uint8)
    positions = ends[:-1].copy()
    for column in columns:
        byte_strings.spread(*column, positions, out)
    return ends, out


def _nullable(array: pa.Array, dtype: DataType, bounds: Ints, parent_valid: Valid, normal: bool) -> Iterator[Content]:
    """Yield the content of nullable values; row `i` has those from `bounds[i]` to `bounds[i + 1]`."""
    valid = validity_bytes(array) & parent_valid
    yield Content(valid, bounds)
    yield from _values(array, dtype, bounds, valid, normal)


def _values(array: pa.Array, dtype: DataType, bounds: Ints, valid: Valid, normal: bool) -> Iterator[Content]:
    if dtype.name == "struct":
        for number, (_, inner) in enumerate(dtype.fields):
            yield from _nullable(array.field(number), inner, bounds, valid, normal)
    elif dtype.name == "versions":
        ends, data = pack(array, dtype.fields[-1][1], normal=normal)
        yield Content(np.full(len(array), len(dtype.fields) - 1, np.uint16).view(np.uint8), bounds * 2)
        yield _lengths(ends, bounds)
        yield Content(data, ends[bounds])
    elif dtype.machine == "bytes":
        offsets, data = byte_ranges(array)
        offsets, data = byte_ranges(clear_nulls(array, valid, offsets))
        yield _lengths(offsets, bounds)
        yield Content(data, offsets[bounds])
    elif dtype.nested:
        array = clear_nulls(array, valid, list_ranges(array))
        offsets = list_ranges(array)
        yield _lengths(offsets, bounds)
        inside = offsets[bounds] - offsets[0]
        parts = [array.values] if dtype.name == "array" else [array.keys, array.items]
        for part, (_, inner) in zip(parts, dtype.fields, strict=True):
            part = part.slice(offsets[0], offsets[-1] - offsets[0])
            yield from _nullable(part, inner, inside, np.ones(len(part), np.uint8), normal)
    else:
        yield Content(_fixed(array, dtype, valid, normal), bounds * byte_width(dtype))


def _lengths(offsets: Ints, bounds: Ints) -> Content:
    return Content(np.diff(offsets).astype(np.uint32).view(np.uint8), bounds * 4)


def byte_width(dtype: DataType) -> int:
    """Return the bytes of a value of a fixed-width type."""
    return 1 if dtype.name == "boolean" else int(dtype.arrow.bit_width) // 8


def fixed_values(array: pa.Array, dtype: DataType, valid: Valid) -> NDArray[Any]:
    """Return the values of a fixed-width type, zero where they are null; decimals as pairs of words."""
    if not len(array):
        shape, kind = ((0, 2), np.uint64) if dtype.name == "decimal" else ((0,), NUMPY.get(dtype.name, np.uint8))
        return np.empty(shape, kind)
    if dtype.name == "boolean":
        values = bits(array.buffers()[1], array.offset, len(array))
    elif dtype.name == "decimal":
        values = fixed(array, np.uint64, 2).reshape(-1, 2)
    else:
        values = fixed(array, NUMPY[dtype.name])
    if valid.all():
        return values
    values = values.copy()
    values[valid == 0] = 0
    return values


def normalised(values: NDArray[Any]) -> NDArray[Any]:
    """Normalise floats as Spark does for grouping: no −0.0, one NaN."""
    # Equal values must have the same bytes, because keys are compared as byte strings.
    return np.where(np.isnan(values), np.array(np.nan, values.dtype), values + values.dtype.type(0))


def _fixed(array: pa.Array, dtype: DataType, valid: Valid, normal: bool) -> Bytes:
    values = fixed_values(array, dtype, valid)
    if normal and dtype.machine == "float":
        values = normalised(values)
    return values.view(np.uint8).reshape(-1)


def unpack(data: Bytes, ends: Ints, dtype: DataType) -> pa.Array:
    """Unpack concatenated byte strings (string `i` ends at `ends[i + 1]`) into an array of `dtype`."""
    strings = _Strings(data, ends[:-1].copy())
    count = len(ends) - 1
    return strings.values(dtype, np.arange(count + 1), np.ones(count, np.uint8))


class _Strings(NamedTuple):
    """Byte strings that are read from front to back; `positions` holds the position in each."""

    data: Bytes
    positions: Ints

    def values(self, dtype: DataType, bounds: Ints, valid: Valid) -> pa.Array:
        """Read the content of a type; row `i` has the values from `bounds[i]` to `bounds[i + 1]`."""
        if dtype.name == "struct":
            fields = [self._nullable(inner, bounds) for _, inner in dtype.fields]
            return pa.Array.from_buffers(dtype.arrow, len(valid), [bitmap(valid)], children=fields)
        if dtype.name == "versions":
            return self._versions(dtype, bounds, valid)
        if dtype.machine == "bytes":
            offsets = self._offsets(bounds)
            data = self._read(offsets[bounds])
            return pa.Array.from_buffers(
                dtype.arrow, len(valid), [bitmap(valid), _buffer32(offsets), pa.py_buffer(data)]
            )
        if dtype.nested:
            offsets = self._offsets(bounds)
            parts = [self._nullable(inner, offsets[bounds]) for _, inner in dtype.fields]
            kind = dtype.arrow
            if dtype.name == "map":
                entries = pa.struct([kind.key_field, kind.item_field])
                parts = [pa.Array.from_buffers(entries, len(parts[0]), [None], children=parts)]
            return pa.Array.from_buffers(kind, len(valid), [bitmap(valid), _buffer32(offsets)], children=parts)
        data = self._read(bounds * byte_width(dtype))
        if dtype.name == "boolean":
            data = np.packbits(data, bitorder="little")
        return pa.Array.from_buffers(dtype.arrow, len(valid), [bitmap(valid), pa.py_buffer(data)])

    def _versions(self, dtype: DataType, bounds: Ints, valid: Valid) -> pa.Array:
        """Read values of several type versions as values of the newest."""
        numbers = self._read(bounds * 2).view(np.uint16)
        offsets = self._offsets(bounds)
        data = self._read(offsets[bounds])
        newest = dtype.fields[-1][1]
        parts = [pa.nulls(0, newest.arrow)]
        order = np.argsort(numbers, kind="stable")
        for number, chosen in zip(*_group_by_number(numbers, order), strict=True):
            version = dtype.fields[number][1]
            count = len(chosen)
            strings = _Strings(data, offsets[chosen])
            parts.append(
                evolve_values(strings.values(version, np.arange(count + 1), np.ones(count, np.uint8)), version, newest)
            )
        if len(parts) == 2 and valid.all():
            return parts[1]
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        return pa.concat_arrays(parts).take(pa.array(places, mask=valid == 0))

    def _nullable(self, dtype: DataType, bounds: Ints) -> pa.Array:
        return self.values(dtype, bounds, self._read(bounds))

    def _offsets(self, bounds: Ints) -> Ints:
        lengths = self._read(bounds * 4).view(np.uint32)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])

    def _read(self, bounds: Ints) -> Bytes:
        out: Bytes = np.empty(int(bounds[-1]), np.uint8)
        byte_strings.collect(self.data, self.positions, bounds, out)
        return out


def _group_by_number(numbers: NDArray[np.uint16], order: Ints) -> tuple[list[int], list[Ints]]:
    """Return the distinct numbers, and the positions of each; `order` sorts the numbers."""
    distinct, starts = np.unique(numbers[order], return_index=True)
    return distinct.tolist(), np.split(order, starts[1:]) if len(distinct) else []


def _buffer32(offsets: Ints) -> pa.Buffer:
    return pa.py_buffer(offsets.astype(np.int32))
