"""Arrow columns into machine form: operands for the accumulators, key rows for the tables. No loop over rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.kernels.columns import arrow_words
from millpond.layout import NULLS, Bytes, Rows, Words
from millpond.spec.types import DataType

Mask = NDArray[np.uint8]
"""One byte per row: 1 counts, 0 does not. An empty mask means that every row counts."""

ALL: Mask = np.empty(0, dtype=np.uint8)
NO_HEAP: Bytes = np.empty(0, dtype=np.uint8)

_LEAST_ROWS = 4096

_NUMPY = {
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


class Operand(NamedTuple):
    """A column in machine form.

    Attributes:
        values: int64[n], float64[n], or uint64[n, 2] (128-bit decimals; byte strings as the row layout packs them).
        valid: the rows that are not null.
        heap: what long byte strings point into.
    """

    values: NDArray[Any]
    valid: Mask
    heap: Bytes = NO_HEAP


@dataclass(frozen=True)
class Place:
    """Where a column stands in a row: its first word, and the word and bit that say that it is null."""

    offset: int
    null_word: int
    null_bit: np.uint64

    @staticmethod
    def of(offset: int, index: int) -> Place:
        """The place of column `index` (keys first) whose first word is `offset`."""
        return Place(offset, NULLS + index // 64, np.uint64(1 << (index % 64)))


class Leaf(NamedTuple):
    """An atomic column of a key after flattening its structs."""

    array: pa.Array | None  # None: a struct's null flag, all there is is in `valid`
    dtype: DataType
    valid: Mask


def portions(batch: pa.RecordBatch, size: int, most: int) -> Iterator[pa.RecordBatch]:
    """A batch in parts of about `size` bytes and at most `most` rows, so that what is made of one stays small."""
    if batch.num_rows:
        rows = max(_LEAST_ROWS, min(most, batch.num_rows * size // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


def both(left: Mask, right: Mask) -> Mask:
    """The rows that count in both masks."""
    if not left.size:
        return right
    return left & right if right.size else left


def one_after_other(masks: Sequence[Mask], sizes: Sequence[int]) -> Mask:
    """The masks of so many rows each as one."""
    if not any(mask.size for mask in masks):
        return ALL
    return np.concatenate(
        [mask if mask.size else np.ones(size, np.uint8) for mask, size in zip(masks, sizes, strict=True)]
    )


def validity(array: pa.Array) -> Mask:
    """The rows of an Arrow array that are not null."""
    if array.null_count == 0:
        return ALL
    bitmap = array.buffers()[0]
    if bitmap is None:  # the null type has no bitmap
        return np.zeros(len(array), dtype=np.uint8)
    return _bits(bitmap, array.offset, len(array))


def _bits(bitmap: pa.Buffer, offset: int, length: int) -> Mask:
    packed = np.frombuffer(bitmap, dtype=np.uint8)[offset // 8 : (offset + length + 7) // 8]
    start = offset % 8
    return np.unpackbits(packed, bitorder="little")[start : start + length]


def plain(array: pa.Array) -> pa.Array:
    """The array without chunks, dictionaries and views, which the kernels do not read."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    kind = array.type
    if pa.types.is_dictionary(kind):
        return plain(array.cast(kind.value_type))
    if pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    if pa.types.is_binary_view(kind):
        return array.cast(pa.large_binary())
    return array


def _fixed(array: pa.Array, dtype: Any, width: int = 1) -> NDArray[Any]:
    buffer = array.buffers()[1]
    start, stop = array.offset * width, (array.offset + len(array)) * width
    values = np.frombuffer(buffer, dtype=dtype)[start:stop]
    return values if values.flags.aligned else values.copy()


def numbers(array: pa.Array, dtype: DataType) -> NDArray[Any]:
    """The values of a fixed-width column as int64[n], float64[n] or uint64[n, 2]; nulls hold anything."""
    if dtype.name == "boolean":
        return _bits(array.buffers()[1], array.offset, len(array)).astype(np.int64)
    if dtype.name == "decimal":
        if not pa.types.is_decimal128(array.type):
            array = array.cast(dtype.arrow)
        pairs = _fixed(array, np.uint64, 2).reshape(-1, 2)
        return np.ascontiguousarray(pairs[:, 0]).view(np.int64) if dtype.machine == "int" else pairs
    values = _fixed(array, _NUMPY[dtype.name])
    return values.astype(np.float64 if dtype.machine == "float" else np.int64, copy=False)


def byte_offsets(array: pa.Array) -> tuple[NDArray[Any], Bytes]:
    """The offsets and the bytes of a column of byte strings."""
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64 if large else np.int32)
    offsets = offsets[array.offset : array.offset + len(array) + 1]
    data = NO_HEAP if data_buffer is None else np.frombuffer(data_buffer, dtype=np.uint8)
    return offsets, data[: int(offsets[-1])]


def operand(array: pa.Array, dtype: DataType) -> Operand:
    """Bring one input column of at least one row into machine form."""
    array = plain(array)
    valid = validity(array)
    if dtype.machine is None:  # only whether it is null is ever asked
        return Operand(np.empty(0, dtype=np.int64), valid)
    if dtype.machine != "bytes":
        return Operand(numbers(array, dtype), valid)
    offsets, data = byte_offsets(array)
    values = np.empty((len(array), 2), dtype=np.uint64)
    arrow_words.pack_bytes(values, 0, 0, np.uint64(0), offsets, data, 0, valid)
    return Operand(values, valid, data)


def normalised(column: Operand) -> Operand:
    """The values of a column as grouping shows them (no −0.0, one NaN), without regard to nulls."""
    values = column.values
    if values.dtype == np.float64:
        values = np.where(np.isnan(values), np.nan, values + 0.0)
    return Operand(values, ALL, column.heap)


def flatten(array: pa.Array, dtype: DataType, outer: Mask = ALL) -> list[Leaf]:
    """The stored columns of a key: the array itself, or for a struct a null flag and its fields, recursively."""
    array = plain(array)
    valid = both(outer, validity(array))
    if dtype.name != "struct":
        return [Leaf(array, dtype, valid)]
    flat = [Leaf(None, DataType("boolean"), valid)]
    for position, (_, inner) in enumerate(dtype.fields):
        flat += flatten(array.field(position), inner, valid)
    return flat


def as_it_is(leaf: Leaf) -> Leaf:
    """A column such that its values are not normalised as those of keys are."""
    if leaf.array is None or leaf.dtype.machine != "float":
        return leaf
    bits = np.ascontiguousarray(numbers(leaf.array, leaf.dtype)).view(np.int64)
    return Leaf(pa.array(bits), DataType("bigint"), leaf.valid)


def key_rows(hashes: NDArray[np.int64], leaves: Sequence[Leaf], places: Sequence[Place], width: int) -> Rows:
    """Rows that hold a hash and the key columns, normalised as Spark groups: no −0.0, one NaN.

    Args:
        hashes: the rows' 64-bit hashes.
        leaves: the flattened key columns.
        places: where each of them goes.
        width: words per row; those before the first key column are cleared.
    """
    words: Words = np.empty((len(hashes), width), dtype=np.uint64)
    arrow_words.put_header(words, hashes, places[0].offset if places else width)
    return Rows(words, put_columns(words, leaves, places, NO_HEAP, normal=True))


def put_columns(
    words: Words, leaves: Sequence[Leaf], places: Sequence[Place], heap: Bytes, *, normal: bool = False
) -> Bytes:
    """Write columns into rows, whose null bits are clear.

    Args:
        words: the rows. leaves, places: flattened columns, and where each of them goes.
        heap: what the rows point into already.
        normal: write floats as grouping shows them (no −0.0, one NaN) instead of bit by bit.

    Returns:
        The heap that the rows point into now.
    """
    count = len(words)
    heaps: list[Bytes] = [heap] if len(heap) else []
    base = len(heap)
    for leaf, place in zip(leaves, places, strict=True):
        at = (words, place.offset, place.null_word, place.null_bit)
        machine = leaf.dtype.machine
        if leaf.array is None:
            arrow_words.put_ints(*at, np.zeros(count, dtype=np.int64), leaf.valid)
        elif machine == "int":
            arrow_words.put_ints(*at, numbers(leaf.array, leaf.dtype), leaf.valid)
        elif machine == "float" and normal:
            arrow_words.put_floats(*at, numbers(leaf.array, leaf.dtype), leaf.valid)
        elif machine == "float":
            arrow_words.put_ints(*at, numbers(leaf.array, leaf.dtype).view(np.int64), leaf.valid)
        elif machine == "wide":
            arrow_words.put_pairs(*at, numbers(leaf.array, leaf.dtype), leaf.valid)
        elif machine == "bytes":
            offsets, data = byte_offsets(leaf.array)
            arrow_words.pack_bytes(*at, offsets, data, base, leaf.valid)
            heaps.append(data)
            base += len(data)
        else:
            raise UsageError(
                f"The state cannot hold the type {leaf.dtype.name}.", action="Leave this operator on Spark."
            )
    return NO_HEAP if not heaps else heaps[0] if len(heaps) == 1 else np.concatenate(heaps)


def hashes_of(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """The `__hash` column."""
    array = plain(batch.column("__hash"))
    return _fixed(array, np.int64)
