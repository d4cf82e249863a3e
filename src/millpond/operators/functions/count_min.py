"""`count_min_sketch`: counters of the frequencies of values, in Spark's own binary form."""

# ruff: noqa: D102 (the methods are documented in `Accumulator`)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.aggregate import collect
from millpond.kernels.aggregate import count_min as kernels
from millpond.layout import Rows
from millpond.operators.columns.decode import LIMIT, OversizeError
from millpond.operators.columns.encode import Mask, Operand, and_masks
from millpond.operators.functions.collect import FixedBytes
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable

_VERSION = 1


class CountMin(FixedBytes):
    """`count_min_sketch` of integers, strings and binary values.

    Its options are `multipliers`, the hash multipliers of integers, one for each row of counters; and `width`, the
    length of a row.
    """

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        self._multipliers = np.array(call.options["multipliers"], dtype=np.int64)
        self._width = int(call.options["width"])
        counters = len(self._multipliers) * self._width
        super().__init__(call, inputs, collect.HEADER + 8 * (1 + counters))
        self._counters = counters

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        column = operands[0]
        self._valid = and_masks(counts, column.valid)
        self._values = column.values
        if self.inputs[0].machine == "bytes":
            self._hashes = np.empty((len(column.values), 2), dtype=np.int32)
            kernels.hash_bytes(column.values, column.heap, self._hashes)

    def fold(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        offset, heap = self.places[0].offset, table.heap.data
        if self.inputs[0].machine == "bytes":
            kernel_args = (rows, start, offset, self._hashes, self._valid, len(self._multipliers), self._width)
            kernels.count_hashes(table.words, heap, *kernel_args)
        else:
            values = self._values
            kernels.count_ints(
                table.words, heap, rows, start, offset, values, self._valid, self._multipliers, self._width
            )

    def add(self, table: Writable, rows: NDArray[np.int64], starts: NDArray[np.int64], heap: NDArray[np.uint8]) -> None:
        kernels.add_sketches(table.words, table.heap.data, rows, self.places[0].offset, starts, heap, self.size)

    def result(self, rows: Rows) -> pa.Array:
        depth = len(self._multipliers)
        header = np.concatenate(
            [
                # The zeros make room for the total count, which the kernel fills in.
                np.array([_VERSION, 0, 0, depth, self._width], dtype=">i4").view(np.uint8),
                self._multipliers.astype(">i8").view(np.uint8),
            ]
        )
        length = len(header) + 8 * self._counters
        if rows.count * length > LIMIT:
            raise OversizeError
        out = np.empty((rows.count, length), dtype=np.uint8)
        kernels.serialise(rows.words, rows.heap, self.places[0].offset, header, out)
        ends = np.arange(rows.count + 1, dtype=np.int32) * np.int32(length)
        return pa.Array.from_buffers(pa.binary(), rows.count, [None, pa.py_buffer(ends), pa.py_buffer(out)])
