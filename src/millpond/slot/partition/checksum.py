"""Order-independent checksum by which two attempts at one batch are recognised as equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.columns import row_hash

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def rows_checksum(batch: pa.RecordBatch) -> int:
    """Sum a 64-bit digest of each row's values; sums of batches add up modulo 2⁶⁴."""
    return int(row_hash.total(_digests(batch.columns, batch.num_rows)))


class InputChecksum:
    """Number of rows and checksum of an attempt's input, summed up over batches."""

    def __init__(self) -> None:
        self.rows = 0
        self.value = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch."""
        self.rows += batch.num_rows
        self.value = (self.value + rows_checksum(batch)) & _MASK

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputChecksum) and (self.rows, self.value) == (other.rows, other.value)

    __hash__ = None  # type: ignore[assignment]


def _digests(columns: list[Any], count: int) -> NDArray[np.uint64]:
    state = np.zeros(count, np.uint64)
    if count:
        for column in columns:
            _mix(state, column)
    return state


def _mix(state: NDArray[np.uint64], array: Any) -> None:
    kind = array.type
    if pa.types.is_dictionary(kind):
        # Equal rows of two attempts may have different dictionaries.
        array = array.dictionary_decode()
        kind = array.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        array = array.cast(pa.large_binary())
        kind = array.type
    if pa.types.is_null(kind):
        return
    validity, *buffers = array.buffers()
    bitmap = validity.address if validity is not None and array.null_count else 0
    if pa.types.is_boolean(kind):
        row_hash.mix_bits(state, buffers[0].address, bitmap, array.offset)
    elif pa.types.is_struct(kind):
        row_hash.mix_validity(state, bitmap, array.offset)
        for index in range(kind.num_fields):
            _mix(state, array.field(index))  # `field` applies the struct's offset
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        elements = _digests([array.values.slice(first, last - first)], last - first)
        row_hash.mix_lists(
            state, buffers[0].address, pa.types.is_large_list(kind), elements, first, bitmap, array.offset
        )
    elif len(buffers) == 2:
        wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        data = buffers[1].address if buffers[1] is not None else 0
        row_hash.mix_bytes(state, buffers[0].address, wide, data, bitmap, array.offset)
    else:
        row_hash.mix_fixed(state, buffers[0].address, kind.byte_width, bitmap, array.offset)
