"""Arrow columns into machine form, as operands of accumulators and key rows of tables, without loops over rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.kernels.columns import arrow_words
from millpond.layout import NULLS, Bytes, Ints, Rows, Words
from millpond.operators.columns.buffers import NUMPY, bits, fixed
from millpond.operators.columns.nested import pack
from millpond.operators.columns.order_keys import ORDER_KEY, order_keys
from millpond.spec.types import DataType

Mask = NDArray[np.uint8]
"""One byte per row: 1 counts, 0 does not. An empty mask means that every row counts."""

ALL: Mask = np.empty(0, dtype=np.uint8)
NO_HEAP: Bytes = np.empty(0, dtype=np.uint8)

_MIN_ROWS = 4096


class Operand(NamedTuple):
    """A column in machine form.

    Attributes:
        values: int64[n], float64[n], or uint64[n, 2] (128-bit decimals; byte strings as the row layout packs them).
        valid: a mask of the rows that are not null.
        heap: the heap that long byte strings point into.
        array: for a nested type, the Arrow array that the byte strings encode.
    """

    values: NDArray[Any]
    valid: Mask
    heap: Bytes = NO_HEAP
    array: pa.Array | None = None


class Place(NamedTuple):
    """The position of a column in a row: its first word, and the word and bit of its null flag."""

    offset: int
    null_word: int
    null_bit: np.uint64

    @staticmethod
    def of(offset: int, index: int) -> Place:
        """Return the place of column `index` (keys first) whose first word is `offset`."""
        return Place(offset, NULLS + index // 64, np.uint64(1 << (index % 64)))


class Leaf(NamedTuple):
    """An atomic column of a key after flattening its structs."""

    array: pa.Array | None  # None for the null flag of a struct, which has only `valid`
    dtype: DataType
    valid: Mask


def portions(batch: pa.RecordBatch, size: int, max_rows: int) -> Iterator[pa.RecordBatch]:
    """Split a batch into parts of about `size` bytes and at most `max_rows` rows, to bound the memory of each."""
    if batch.num_rows:
        rows = max(_MIN_ROWS, min(max_rows, batch.num_rows * size // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


def and_masks(*masks: Mask) -> Mask:
    """Combine masks: rows that count in all of them."""
    return reduce(np.bitwise_and, [mask for mask in masks if mask.size] or [ALL])


def is_true(column: Operand) -> Mask:
    """Return a mask of the rows in which a boolean column is true."""
    return and_masks(column.valid, column.values.astype(np.uint8))


def concatenate_masks(masks: Sequence[Mask], sizes: Sequence[int]) -> Mask:
    """Concatenate masks of the given numbers of rows."""
    if not any(mask.size for mask in masks):
        return ALL
    return np.concatenate(
        [mask if mask.size else np.ones(size, np.uint8) for mask, size in zip(masks, sizes, strict=True)]
    )


def validity(array: pa.Array) -> Mask:
    """Return a mask of the rows of an Arrow array that are not null."""
    if array.null_count == 0:
        return ALL
    bitmap = array.buffers()[0]
    if bitmap is None:  # the null type has no bitmap
        return np.zeros(len(array), dtype=np.uint8)
    return bits(bitmap, array.offset, len(array))


def plain(array: pa.Array) -> pa.Array:
    """Convert chunks, dictionaries and views, which kernels do not read, to a plain array."""
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


def numbers(array: pa.Array, dtype: DataType) -> NDArray[Any]:
    """Return a fixed-width column as int64[n], float64[n] or uint64[n, 2]; nulls hold any value."""
    if dtype.name == "boolean":
        return bits(array.buffers()[1], array.offset, len(array)).astype(np.int64)
    if dtype.name == "decimal":
        if not pa.types.is_decimal128(array.type):
            array = array.cast(dtype.arrow)
        pairs = fixed(array, np.uint64, 2).reshape(-1, 2)
        return np.ascontiguousarray(pairs[:, 0]).view(np.int64) if dtype.machine == "int" else pairs
    values = fixed(array, NUMPY[dtype.name])
    return values.astype(np.float64 if dtype.machine == "float" else np.int64, copy=False)


def byte_offsets(array: pa.Array) -> tuple[NDArray[Any], Bytes]:
    """Return the offsets and the bytes of a column of byte strings."""
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int64 if large else np.int32)
    offsets = offsets[array.offset : array.offset + len(array) + 1]
    data = NO_HEAP if data_buffer is None else np.frombuffer(data_buffer, dtype=np.uint8)
    return offsets, data[: int(offsets[-1])]


def operand(array: pa.Array, dtype: DataType, *, nulls_only: bool = False) -> Operand:
    """Convert one input column of at least one row to machine form; nested values become byte strings.

    Args:
        array: the column.
        dtype: its type.
        nulls_only: for nested values, whether only their nulls matter.
    """
    array = plain(array)
    valid = validity(array)
    if dtype.nested and not nulls_only:
        return strings(*pack(array, dtype), valid)._replace(array=array)
    if dtype.machine is None:  # only its nulls matter
        return Operand(np.empty(0, dtype=np.int64), valid)
    if dtype.machine != "bytes":
        return Operand(numbers(array, dtype), valid)
    return strings(*byte_offsets(array), valid)


def strings(offsets: NDArray[Any], data: Bytes, valid: Mask) -> Operand:
    """Pack concatenated byte strings into machine form."""
    values = np.empty((len(offsets) - 1, 2), dtype=np.uint64)
    arrow_words.pack_bytes(values, 0, 0, np.uint64(0), offsets, data, 0, valid)
    return Operand(values, valid, data)


def order_key_operand(column: Operand, dtype: DataType) -> Operand:
    """Return byte strings that order as the values of a nested column do."""
    return strings(*order_keys(column.array, dtype), column.valid)


def normalised(column: Operand, dtype: DataType) -> Operand:
    """Normalise values as Spark does for grouping (no −0.0, one NaN), without regard to nulls."""
    if column.array is not None:
        packed = strings(*pack(column.array, dtype, normal=True), column.valid)
        # Order keys are made from the array; they are the same for values that group together.
        return packed._replace(valid=ALL, array=column.array)
    values = column.values
    if values.dtype == np.float64:
        # −0.0 + 0.0 is 0.0, and one NaN stands for all: keys are compared word by word.
        values = np.where(np.isnan(values), np.nan, values + 0.0)
    return Operand(values, ALL, column.heap)


def flatten(array: pa.Array, dtype: DataType, outer: Mask = ALL) -> list[Leaf]:
    """Return the stored columns of a key: the array itself, or for a struct a null flag and its fields, recursively.

    Arrays and maps are not flattened.
    """
    array = plain(array)
    # Fields below a null struct are null, whatever their own buffers say.
    valid = and_masks(outer, validity(array))
    if dtype.name != "struct":
        return [Leaf(array, dtype, valid)]
    flat = [Leaf(None, DataType("boolean"), valid)]
    for position, (_, inner) in enumerate(dtype.fields):
        flat += flatten(array.field(position), inner, valid)
    return flat


def flatten_all(columns: Iterable[pa.Array], types: Iterable[DataType]) -> list[Leaf]:
    """Return the stored columns of several key columns in turn (see `flatten`)."""
    return [leaf for column, dtype in zip(columns, types, strict=True) for leaf in flatten(column, dtype)]


def leaf_bytes(leaf: Leaf, *, normal: bool = False) -> tuple[NDArray[Any], Bytes]:
    """Return the offsets and the bytes of a column of byte strings, arrays or maps; `normal` as for `nested.pack`."""
    return pack(leaf.array, leaf.dtype, normal=normal) if leaf.dtype.nested else byte_offsets(leaf.array)


def _binary(ends: Ints, data: Bytes) -> pa.Array:
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(ends) - 1, buffers)


def order_leaf(array: pa.Array, dtype: DataType) -> Leaf:
    """Return byte strings that order as the values of a nested column do, as a stored column."""
    array = plain(array)
    return Leaf(_binary(*order_keys(array, dtype)), ORDER_KEY, validity(array))


def bitwise_leaf(leaf: Leaf) -> Leaf:
    """Convert a column so that its values are stored bit by bit, not normalised as keys."""
    if leaf.array is None:
        return leaf
    if leaf.dtype.nested:
        return Leaf(_binary(*pack(leaf.array, leaf.dtype)), DataType("binary"), leaf.valid)
    if leaf.dtype.machine != "float":
        return leaf
    # As integers, floats escape normalisation: rows come back with the bits that they had.
    bits = numbers(leaf.array, leaf.dtype).view(np.int64)
    return Leaf(pa.array(bits), DataType("bigint"), leaf.valid)


def zero_normalised_leaf(leaf: Leaf) -> Leaf:
    """Convert a column so that 0.0 equals −0.0, and NaNs are equal only if their bits are.

    Nested values are normalised as in grouping.
    """
    if leaf.array is None or leaf.dtype.machine != "float":
        return leaf
    values = numbers(leaf.array, leaf.dtype)
    return Leaf(pa.array(np.where(values == 0, 0.0, values).view(np.int64)), DataType("bigint"), leaf.valid)


def key_rows(hashes: NDArray[np.int64], leaves: Sequence[Leaf], places: Sequence[Place], width: int) -> Rows:
    """Build rows with a hash and key columns, normalised as Spark does for grouping: no −0.0, one NaN.

    Args:
        hashes: the rows' 64-bit hashes.
        leaves: the flattened key columns.
        places: their places in the row.
        width: words per row; those before the first key column are cleared.
    """
    words: Words = np.empty((len(hashes), width), dtype=np.uint64)
    arrow_words.put_header(words, hashes, places[0].offset if places else width)
    return Rows(words, put_columns(words, leaves, places, NO_HEAP, normal=True))


def put_columns(
    words: Words, leaves: Sequence[Leaf], places: Sequence[Place], heap: Bytes, *, normal: bool = False
) -> Bytes:
    """Write columns into rows whose null bits are clear.

    Args:
        words: the rows.
        leaves: the flattened columns.
        places: their places in the row.
        heap: the heap that the rows already point into.
        normal: normalise floats as Spark does for grouping (no −0.0, one NaN), instead of writing them bit by bit.

    Returns:
        The new heap that the rows point into.
    """
    count = len(words)
    heaps: list[Bytes] = [heap] if len(heap) else []
    base = len(heap)
    for leaf, place in zip(leaves, places, strict=True):
        place_args = (words, *place)
        machine = leaf.dtype.machine
        if leaf.array is None:
            arrow_words.put_ints(*place_args, np.zeros(count, dtype=np.int64), leaf.valid)
        elif machine == "int":
            arrow_words.put_ints(*place_args, numbers(leaf.array, leaf.dtype), leaf.valid)
        elif machine == "float" and normal:
            arrow_words.put_floats(*place_args, numbers(leaf.array, leaf.dtype), leaf.valid)
        elif machine == "float":
            arrow_words.put_ints(*place_args, numbers(leaf.array, leaf.dtype).view(np.int64), leaf.valid)
        elif machine == "wide":
            arrow_words.put_pairs(*place_args, numbers(leaf.array, leaf.dtype), leaf.valid)
        elif machine == "bytes" or leaf.dtype.nested:
            offsets, data = leaf_bytes(leaf, normal=normal)
            arrow_words.pack_bytes(*place_args, offsets, data, base, leaf.valid)
            heaps.append(data)
            base += len(data)
        else:
            raise UsageError(
                f"The state cannot hold the type {leaf.dtype.name}.", action="Leave this operator on Spark."
            )
    return NO_HEAP if not heaps else heaps[0] if len(heaps) == 1 else np.concatenate(heaps)


def hashes_of(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Return the `__hash` column as int64[n]."""
    array = plain(batch.column("__hash"))
    return fixed(array, np.int64)
