"""Structs as elements of lists: byte strings that hold the words of a row. Fields are atomic, or structs of such."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.columns import arrow_words, structs
from millpond.layout import Bytes, Column, RowLayout, Rows, TableSchema, Words
from millpond.operators.columns.decode import key_column
from millpond.operators.columns.encode import Operand, Place, as_it_is, flatten, key_rows, operand, plain, validity
from millpond.spec.types import DataType, leaves

_SPARE = 8


@lru_cache(maxsize=256)
def _layout(dtype: DataType) -> tuple[RowLayout, tuple[Place, ...], NDArray[np.int64]]:
    columns = tuple(Column(str(number), leaf.kind) for number, leaf in enumerate(leaves(dtype)))
    layout = RowLayout(TableSchema((), columns))
    places = tuple(Place.of(offset, index) for index, offset in enumerate(layout.offsets))
    return layout, places, np.array(layout.bytes_columns, np.int64)


def element(array: pa.Array, dtype: DataType) -> Operand:
    """A column of what lists are collected from, in machine form; structs as byte strings."""
    return _packed(array, dtype) if dtype.name == "struct" else operand(array, dtype)


def _packed(array: pa.Array, dtype: DataType) -> Operand:
    array = plain(array)
    layout, places, blobs = _layout(dtype)
    count = len(array)
    parts = [as_it_is(leaf) for leaf in flatten(array, dtype)]
    rows = key_rows(np.zeros(count, np.int64), parts, places, layout.width)
    ends = np.empty(count + 1, np.int64)
    structs.packed_ends(rows.words, blobs, ends)
    data: Bytes = np.empty(int(ends[-1]) + _SPARE, np.uint8)
    structs.pack(rows.words, rows.heap, blobs, ends, data)
    data = data[: int(ends[-1])]
    values: Words = np.empty((count, 2), np.uint64)
    valid = validity(array)
    arrow_words.pack_bytes(values, 0, 0, np.uint64(0), ends, data, 0, valid)
    return Operand(values, valid, data)


def unpacked(data: Bytes, ends: NDArray[np.int64], dtype: DataType) -> pa.Array:
    """The structs of byte strings that lie one after the other (`ends[i + 1]`: where string i ends)."""
    layout, places, blobs = _layout(dtype)
    words: Words = np.empty((len(ends) - 1, layout.width), np.uint64)
    heap = np.concatenate([data, np.zeros(_SPARE, np.uint8)])
    structs.unpack(heap, ends, blobs, words)
    return key_column(Rows(words, heap), iter(places), dtype)
