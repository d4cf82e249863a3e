"""`percentile_approx`: quantiles from summaries of bounded size."""

# ruff: noqa: D102 (the methods are documented in `Accumulator`)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.aggregate import collect, quantiles
from millpond.layout import Rows
from millpond.operators.columns.decode import LIMIT, OversizeError, to_arrow
from millpond.operators.columns.encode import Mask, Operand, and_masks
from millpond.operators.columns.offsets import bounds_of
from millpond.operators.functions.accumulators import BLOCK, Accumulator, StateColumn
from millpond.operators.functions.collect import GrowingBytes
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable

_MIN_BUFFERED, _MAX_BUFFERED = 64, 50_000
"""Bounds of the number of values that are buffered before they become samples."""
_MAGNITUDE_MASK = np.int64(2**63 - 1)


class PercentileApprox(Accumulator):
    """`percentile_approx` of numbers and times, of one share or several.

    Its options are `percentages`, `accuracy` (ranks are wrong by at most 1 / accuracy of the values), and `array`:
    whether the result is an array. A result of a decimal type is returned as a double.
    """

    columns = (*GrowingBytes.columns, StateColumn("word"), StateColumn("word"))

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs)
        self._bytes = GrowingBytes()
        shares = np.array(call.options["percentages"], dtype=np.float64)
        self._places = np.argsort(shares, kind="stable")
        self._shares = shares[self._places]
        accuracy = call.options["accuracy"]
        self._error = 1.0 / accuracy
        self._buffered = min(max(2 * accuracy, _MIN_BUFFERED), _MAX_BUFFERED)
        self._rows = np.empty(BLOCK, dtype=np.int64)
        self._sizes = np.empty(BLOCK, dtype=np.int64)

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._data = _to_ordered_ints(operands[0].values.astype(np.float64, copy=False)).view(np.uint8)
        self._valid = and_masks(counts, operands[0].valid)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        offset, width = self.places[0].offset, quantiles.VALUE
        self._bytes.make_room(table, rows, start, offset, width=width, valid=self._valid)
        heap = table.heap.data
        collect.append_fixed(table.words, heap, rows, start, offset, self._data, self._valid, width)
        self._flush_full_buffers(table, rows)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        offset, counts = self.places[0].offset, self.places[2].offset
        self._bytes.make_room_for(table, rows, offset, source.ints(offset + 2))
        heap = table.heap.data
        quantiles.combine(table.words, heap, rows, offset, counts, self._error, *source.packed())
        self._flush_full_buffers(table, rows)

    def _flush_full_buffers(self, table: Writable, rows: NDArray[np.int64]) -> None:
        """Turn the buffered values of rows with many of them into samples."""
        offset, counts = self.places[0].offset, self.places[2].offset
        while True:
            kernel_args = (rows, offset, counts, self._error, self._buffered, self._rows, self._sizes)
            short = quantiles.settle(table.words, table.heap.data, *kernel_args)
            if not short:
                return
            # These rows lack room for their samples: they grow, and are tried again.
            rows, first = np.unique(self._rows[:short], return_index=True)
            self._bytes.grow(table, rows, offset, self._sizes[first])

    def result(self, rows: Rows) -> pa.Array:
        offset, counts = self.places[0].offset, self.places[2].offset
        ordered = np.empty((rows.count, len(self._shares)), dtype=np.int64)
        nonempty = np.empty(rows.count, dtype=np.uint8)
        quantiles.query(rows.words, rows.heap, offset, counts, self._error, self._shares, ordered, nonempty)
        values = np.empty((rows.count, len(self._shares)))
        values[:, self._places] = _from_ordered_ints(ordered)
        if not self.call.options.get("array"):
            return _typed(values[:, 0], nonempty, self.type)
        present = nonempty.astype(np.bool_) & bool(len(self._shares))
        if present.sum() * len(self._shares) > LIMIT:
            raise OversizeError
        kept = values[present].reshape(-1)
        listed = _typed(kept, np.ones(len(kept), np.uint8), self.type.fields[0][1])
        offsets = bounds_of(np.where(present, len(self._shares), 0)).astype(np.int32)
        mask = None if present.all() else pa.array(~present)
        return pa.ListArray.from_arrays(pa.array(offsets), listed, type=self.type.arrow, mask=mask)


def _to_ordered_ints(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return integers that order as doubles do in Java: −0.0 before 0.0, NaN after all."""
    bits = np.where(np.isnan(values), np.nan, values).view(np.int64)
    return bits ^ ((bits >> 63) & _MAGNITUDE_MASK)


def _from_ordered_ints(ordered: NDArray[np.int64]) -> NDArray[np.float64]:
    """Convert the integers of `_to_ordered_ints` back to doubles."""
    bits: NDArray[np.int64] = ordered ^ ((ordered >> 63) & _MAGNITUDE_MASK)
    return bits.view(np.float64)


def _typed(values: NDArray[np.float64], valid: Mask, dtype: DataType) -> pa.Array:
    """Convert doubles to a type; values beyond the range of bigint become its greatest (the least is a double)."""
    if dtype.machine == "float":
        return to_arrow(values, valid, dtype)
    beyond = values >= 2.0**63
    whole = np.where(beyond, 0.0, values).astype(np.int64)
    return to_arrow(np.where(beyond, _MAGNITUDE_MASK, whole), valid, dtype)
