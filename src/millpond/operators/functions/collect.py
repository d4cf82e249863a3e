"""Accumulators over blobs: lists of all values, and sketches of their cardinality."""

# ruff: noqa: D102 (the methods are documented in `Accumulator`)

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.kernels.aggregate import collect as kernels
from millpond.layout import LENGTH, Bytes, Rows, Words
from millpond.operators.columns.decode import LIMIT, OversizeError, to_arrow
from millpond.operators.columns.encode import ALL, NO_HEAP, Mask, Operand, and_masks
from millpond.operators.columns.nested import byte_width, unpack
from millpond.operators.functions.accumulators import BLOCK, Accumulator, StateColumn
from millpond.spec.functions import sketch_precision, sketch_words
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable

_NO_PAIRS: Words = np.empty((0, 2), dtype=np.uint64)


class GrowingBytes:
    """Growing blobs: a byte column, followed by a word with the number of bytes in use."""

    columns = (StateColumn("bytes"), StateColumn("word"))

    def __init__(self) -> None:
        self._rows = np.empty(BLOCK, dtype=np.int64)
        self._sizes = np.empty(BLOCK, dtype=np.int64)

    def make_room(
        self,
        table: Writable,
        rows: NDArray[np.int64],
        start: int,
        offset: int,
        *,
        width: int,
        valid: Mask,
        values: Words = _NO_PAIRS,
    ) -> None:
        """Grow the blobs of a block's rows where the block's values do not fit.

        Args:
            table: the table.
            rows: the row ids of the block.
            start: the block's first row in the batch.
            offset: the first word of the blob column.
            width: bytes of a value; 0 if `values` are byte strings.
            valid: a mask of the batch's rows that have a value.
            values: packed byte strings, if `width` is 0.

        Raises:
            UsageError: a blob would take 4 GiB or more.
        """
        count = kernels.find_short(table.words, rows, start, offset, values, valid, width, self._rows, self._sizes)
        self._grow_short(table, offset, count)

    def make_room_for(self, table: Writable, rows: NDArray[np.int64], offset: int, sizes: NDArray[np.int64]) -> None:
        """Grow the blobs of a block's rows where `sizes` more bytes each do not fit.

        Raises:
            UsageError: a blob would take 4 GiB or more.
        """
        count = kernels.find_short_by(table.words, rows, offset, sizes, self._rows, self._sizes)
        self._grow_short(table, offset, count)

    def _grow_short(self, table: Writable, offset: int, count: int) -> None:
        """Grow the first `count` blobs that the kernel has found too short."""
        if count < 0:
            raise _blob_too_large()
        if count:
            self.grow(table, self._rows[:count], offset, self._sizes[:count])

    def append(self, table: Writable, rows: NDArray[np.int64], offset: int, source: Rows) -> None:
        """Append the blobs of other rows of the same layout, one for each row."""
        sizes, starts = source.ints(offset + 2), source.ints(offset + 1)
        self.make_room_for(table, rows, offset, sizes)
        kernels.append_blobs(table.words, table.heap.data, rows, offset, sizes, starts, source.heap)

    @staticmethod
    def grow(table: Writable, rows: NDArray[np.int64], offset: int, sizes: NDArray[np.int64]) -> None:
        """Reallocate the blobs of distinct rows.

        Args:
            table: the table.
            rows: the row ids.
            offset: the first word of the blob column.
            sizes: the new lengths in bytes; added bytes are zero.

        Raises:
            UsageError: a length is 4 GiB or more.
        """
        if (sizes > int(LENGTH)).any():
            raise _blob_too_large()
        pairs: Words = np.empty((len(rows), 2), dtype=np.uint64)
        grown: Bytes = np.zeros(int(sizes.sum()), dtype=np.uint8)
        kernels.grow(table.words, table.heap.data, rows, offset, sizes, pairs, grown)
        table.put_bytes(rows, offset, pairs, grown)


def _blob_too_large() -> UsageError:
    return UsageError(
        "The values that one group collects take 4 GiB or more, which is more than the state holds for one group.",
        action="Group by more columns, or collect less of each row.",
    )


class Collect(Accumulator):
    """`collect_list`, and `collect_set` of inputs of which only distinct ones arrive; nulls are left out."""

    columns = GrowingBytes.columns

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs)
        self._bytes = GrowingBytes()
        self._element = inputs[0]
        self._width = 0 if self._element.kind == "bytes" else byte_width(self._element)

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        column = operands[0]
        self._column = column
        self._valid = and_masks(counts, column.valid)
        self._data = NO_HEAP if self._width == 0 else _element_bytes(column, self._element)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        offset, column = self.places[0].offset, self._column
        if self._width:
            self._bytes.make_room(table, rows, start, offset, width=self._width, valid=self._valid)
            heap = table.heap.data
            kernels.append_fixed(table.words, heap, rows, start, offset, self._data, self._valid, self._width)
        else:
            self._bytes.make_room(table, rows, start, offset, width=0, valid=self._valid, values=column.values)
            heap = table.heap.data
            kernels.append_bytes(table.words, heap, rows, start, offset, column.values, column.heap, self._valid)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        self._bytes.append(table, rows, self.places[0].offset, source)

    def result(self, rows: Rows) -> pa.Array:
        offsets, values = self._lists(rows)
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values, type=self.type.arrow)

    def _lists(self, rows: Rows) -> tuple[NDArray[np.int64], pa.Array]:
        """Return the offsets of the rows' lists, with the end of the last, and the values of all."""
        offset = self.places[0].offset
        offsets = np.empty(rows.count + 1, dtype=np.int64)
        if self._width:
            kernels.list_offsets(rows.words, offset, self._width, offsets)
            count = int(offsets[-1])
            _check_size(count)
            data = np.empty(count * self._width, dtype=np.uint8)
            kernels.read_fixed(rows.words, rows.heap, offset, offsets, self._width, data)
            if self._element.name == "boolean":
                data = np.packbits(data, bitorder="little")
            buffers = [None, pa.py_buffer(data)]
        else:
            total = kernels.bytes_list_offsets(rows.words, rows.heap, offset, offsets)
            count = int(offsets[-1])
            _check_size(count, total)
            ends = np.empty(count + 1, dtype=np.int64)
            data = np.empty(total, dtype=np.uint8)
            kernels.read_bytes(rows.words, rows.heap, offset, ends, data)
            buffers = [None, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(data)]
        if self._element.nested:
            return offsets, unpack(data, ends, self._element)
        return offsets, pa.Array.from_buffers(self._element.arrow, count, buffers)


class FixedBytes(Accumulator):
    """State of a fixed number of bytes, zero before the first value; a row gets its blob with its first value."""

    columns = GrowingBytes.columns

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType], size: int) -> None:
        super().__init__(call, inputs)
        self.size = size
        self._valid = ALL

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        # A group whose values are all null keeps no blob, which would take memory for an empty sketch.
        used = rows[self._valid[start : start + len(rows)].astype(np.bool_)] if self._valid.size else rows
        self._start(table, used)
        self.fold(table, rows, start)

    @abstractmethod
    def fold(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        """Fold in a block (see `update`); all rows that count have their blobs."""

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        offset = self.places[0].offset
        started = source.words[:, offset] != 0
        rows, starts = rows[started], source.ints(offset + 1)[started]
        self._start(table, rows)
        self.add(table, rows, starts, source.heap)

    @abstractmethod
    def add(self, table: Writable, rows: NDArray[np.int64], starts: NDArray[np.int64], heap: Bytes) -> None:
        """Merge blobs, given by their starts in `heap`, into those of rows."""

    def _start(self, table: Writable, rows: NDArray[np.int64]) -> None:
        """Allocate blobs for rows that have none."""
        offset = self.places[0].offset
        fresh = np.unique(rows[table.words[rows, offset] == 0])
        if len(fresh):
            GrowingBytes.grow(table, fresh, offset, np.full(len(fresh), self.size, dtype=np.int64))


class ApproxCountDistinct(FixedBytes):
    """`approx_count_distinct`: HyperLogLog++ registers, packed as Spark packs them, over hashes that Spark computed.

    The input is `xxhash64(value)`, null where the value is null. Bias correction needs the options `raw_estimates`,
    `biases` and `threshold`: Spark's tables for the precision that follows from `relative_sd`.
    """

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        self._precision = sketch_precision(call.options)
        super().__init__(call, inputs, kernels.HEADER + 8 * sketch_words(call.options))
        self._raw = np.array(call.options.get("raw_estimates", ()), dtype=np.float64)
        self._biases = np.array(call.options.get("biases", ()), dtype=np.float64)
        self._threshold = float(call.options.get("threshold", 0.0))

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._hashes = operands[0].values
        self._valid = and_masks(counts, operands[0].valid)

    def fold(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        offset, heap = self.places[0].offset, table.heap.data
        kernels.add_to_registers(table.words, heap, rows, start, offset, self._hashes, self._valid, self._precision)

    def add(self, table: Writable, rows: NDArray[np.int64], starts: NDArray[np.int64], heap: Bytes) -> None:
        kernels.merge_registers(table.words, table.heap.data, rows, self.places[0].offset, starts, heap, self.size)

    def result(self, rows: Rows) -> pa.Array:
        inverse, empty = np.empty(rows.count), np.empty(rows.count)
        kernels.read_registers(rows.words, rows.heap, self.places[0].offset, self._precision, inverse, empty)
        return to_arrow(self._estimate(inverse, empty), ALL, self.type)

    def _estimate(self, inverse: NDArray[np.float64], empty: NDArray[np.float64]) -> NDArray[np.int64]:
        """Estimate cardinalities by the rules of the HyperLogLog++ paper, in Spark's order of operations."""
        registers = float(1 << self._precision)
        small = {4: 0.673, 5: 0.697, 6: 0.709}
        alpha = small.get(self._precision, 0.7213 / (1.0 + 1.079 / registers))
        raw = alpha * registers * registers / inverse
        corrected = raw.copy()
        low = np.flatnonzero(raw < 5.0 * registers) if len(self._raw) else np.empty(0, dtype=np.int64)
        corrected[low] -= self._bias(raw[low])
        with np.errstate(divide="ignore"):
            linear = registers * np.log(registers / empty)
        counting = (linear <= self._threshold) & bool(len(self._raw)) | (raw <= 2.5 * registers)
        estimate = np.where((empty > 0) & counting, linear, corrected)
        # As Java's `Math.round`: NumPy would round halves to even.
        return np.floor(estimate + 0.5).astype(np.int64)

    def _bias(self, estimates: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean bias of the six known estimates nearest to each."""
        known, count = self._raw, len(self._raw)
        low = np.maximum(np.searchsorted(known, estimates) - 5, 0)
        high = np.minimum(low + 6, count)
        while True:
            distance_high = (estimates - known[np.minimum(high, count - 1)]) ** 2
            moving = (high < count) & (distance_high < (estimates - known[low]) ** 2)
            if not moving.any():
                break
            low += moving
            high += moving
        total = np.zeros(len(estimates))
        for step in range(6):  # summed in order, as Spark does
            index = low + step
            total += np.where(index < high, self._biases[np.minimum(index, count - 1)], 0.0)
        mean: NDArray[np.float64] = total / (high - low)
        return mean


def sketch_blobs(words: pa.ListArray) -> pa.Array:
    """Convert Spark's words of `approx_count_distinct` to state blobs; rows have equally many words and no nulls."""
    values = np.asarray(words.flatten())
    blobs = np.zeros((len(words), kernels.HEADER + 8 * (len(values) // max(1, len(words)))), dtype=np.uint8)
    blobs[:, kernels.HEADER :] = values.view(np.uint8).reshape(len(words), -1)
    offsets = np.arange(len(words) + 1) * blobs.shape[1]
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(words), [None, pa.py_buffer(offsets), pa.py_buffer(blobs)]
    )


def _element_bytes(column: Operand, dtype: DataType) -> Bytes:
    """Return the bytes of a column's values as list elements."""
    if dtype.name == "boolean":
        return column.values.astype(np.uint8)
    data = to_arrow(column.values, ALL, dtype).buffers()[1]
    return np.frombuffer(data, dtype=np.uint8)


def _check_size(*lengths: int) -> None:
    if max(lengths) > LIMIT:
        raise OversizeError
