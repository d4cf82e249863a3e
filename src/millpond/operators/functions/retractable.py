"""Accumulators that support retraction of rows: `count`, `sum`, `avg` and `bit_xor`.

Sums are exact, and wide enough never to overflow. Only `result` checks a sum against the range of its type. So a sum is
in range again once the rows that exceeded it are retracted.
"""

# ruff: noqa: D102 (the methods are documented in `Accumulator`)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.aggregate import fixed_point, retract
from millpond.layout import Rows, Words
from millpond.operators.columns.decode import to_arrow, widen
from millpond.operators.columns.encode import Mask, Operand, and_masks
from millpond.operators.functions.accumulators import Accumulator, Count, CountIf, StateColumn, overflow_in_integers
from millpond.operators.functions.decimal_sums import averages, overflow_in_sum, sum_precision, words_of
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable

Signs = NDArray[np.int8]


class Retractable(Accumulator):
    """An accumulator that folds rows in by their sign.

    Attributes:
        signs: 1 or −1 for every row of the Arrow batch; set before `load`.
    """

    signs: Signs

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        raise AssertionError(f"{self.call.function} over a changelog has no partial states")


class RetractableCount(Retractable, Count):
    """`count(*)`, `count(x, …)`: one word."""

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        retract.count(table.words, rows, start, *self.places[0], self._counts, self.signs)


class RetractableCountIf(RetractableCount, CountIf):
    """`count_if(b)`."""


class RetractableBitXor(Retractable):
    """`bit_xor`: a retracted value is combined once more. The second word is the number of values."""

    columns: tuple[StateColumn, ...] = (StateColumn("word"), StateColumn("word"))

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._values = operands[0].values
        self._valid = and_masks(counts, operands[0].valid)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        retract.bit_xor(table.words, rows, start, *self.places[0], self._valid, self._values, self.signs)

    def result(self, rows: Rows) -> pa.Array:
        bits, numbers = (rows.ints(place.offset) for place in self.places)
        return to_arrow(bits, (numbers != 0).view(np.uint8), self.type)


class _RetractableSum(Retractable):
    """A sum of several words in two's complement, followed by the number of values."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType], size: int, *, more: int = 0) -> None:
        super().__init__(call, inputs)
        self._size = size
        self.columns = (StateColumn("word"),) * (size + 1 + more)

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._values = operands[0].values
        self._valid = and_masks(counts, operands[0].valid)

    def _sums(self, rows: Rows) -> Words:
        return rows.span(self.places[0].offset, self._size)

    def _value_counts(self, rows: Rows) -> NDArray[np.int64]:
        return rows.ints(self.places[self._size].offset)


class _RetractableIntSum(_RetractableSum):
    """A sum of 64-bit integers, in 128 bits."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs, 2)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        retract.sum_words(table.words, rows, start, *self.places[0], self._valid, self._values, self.signs)


class RetractableSumInts(_RetractableIntSum):
    """`sum` of integers: out of range, it wraps, is null (`try_sum`), or is an error in ANSI mode."""

    def result(self, rows: Rows) -> pa.Array:
        low, high = (rows.ints(self.places[word].offset) for word in (0, 1))
        nonempty, within = self._value_counts(rows) != 0, low >> 63 == high
        if self.ansi and (nonempty & ~within).any():
            raise overflow_in_integers()
        if self.call.options.get("eval_mode") == "try":
            nonempty &= within
        return to_arrow(low, nonempty.view(np.uint8), self.type)


class RetractableAverageInts(_RetractableIntSum):
    """`avg` of integers."""

    def result(self, rows: Rows) -> pa.Array:
        low, high = (rows.ints(self.places[word].offset) for word in (0, 1))
        numbers, small = self._value_counts(rows), low >> 63 == high
        wide = high.astype(np.float64) * 2.0**64 + low.view(np.uint64).astype(np.float64)
        # Within 64 bits one conversion rounds once; the two halves would round twice.
        total = np.where(small, low.astype(np.float64), wide)
        with np.errstate(divide="ignore", invalid="ignore"):
            return to_arrow(total / numbers, (numbers != 0).view(np.uint8), self.type)


class RetractableSumDecimals(_RetractableSum):
    """`sum` of decimals, in 192 bits: beyond its precision, it is null, or an error in ANSI mode."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs, 3)
        self._limit = 10 ** sum_precision(inputs[0])

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        super().load(operands, counts)
        if self._values.ndim == 1:
            # One kernel for both widths: the sum is wide in any case.
            self._values = widen(self._values)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        retract.sum_pairs(table.words, rows, start, *self.places[0], self._valid, self._values, self.signs)

    def result(self, rows: Rows) -> pa.Array:
        valid = (self._value_counts(rows) != 0) & self._within(rows)
        return to_arrow(rows.span(self.places[0].offset, 2), valid.view(np.uint8), self.type)

    def _within(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the rows whose sums are within their precision.

        Raises:
            ArithmeticOverflowError: a sum is not, in ANSI mode.
        """
        low, high, above = (rows.word(place.offset) for place in self.places[:3])
        within = _is_below(low, high, above, self._limit)
        if self.ansi and not within.all():
            raise overflow_in_sum(self.call)
        return within


class RetractableAverageDecimals(RetractableSumDecimals):
    """`avg` of decimals, divided half up."""

    def result(self, rows: Rows) -> pa.Array:
        sums, counts = rows.span(self.places[0].offset, 2), self._value_counts(rows)
        return averages(self.inputs[0], self.type, sums, counts, self._within(rows), ansi=self.ansi)


class RetractableSumFloats(_RetractableSum):
    """`sum` of floats and doubles: an exact sum of the finite values; NaNs and infinities are counted."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        self._width = fixed_point.FLOATS if inputs[0].name == "float" else fixed_point.DOUBLES
        super().__init__(call, inputs, self._width.words, more=3)

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        super().load(operands, counts)
        self._values = self._values.astype(np.float64, copy=False)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        kernel_args = (table.words, rows, start, *self.places[0], self._valid)
        fixed_point.sum_floats(*kernel_args, self._values, self.signs, *self._width)

    def result(self, rows: Rows) -> pa.Array:
        return to_arrow(self._totals(rows), (self._value_counts(rows) != 0).view(np.uint8), self.type)

    def _totals(self, rows: Rows) -> NDArray[np.float64]:
        nans, above, below = (rows.ints(place.offset) for place in self.places[self._size + 1 :])
        finite = np.empty(rows.count)
        fixed_point.nearest(self._sums(rows), self._width.base, finite)
        # Infinities are counted, not added, so that the sum is finite again once they are retracted.
        total = np.where(above != 0, np.inf, np.where(below != 0, -np.inf, finite))
        return np.where((nans != 0) | ((above != 0) & (below != 0)), np.nan, total)


class RetractableAverageFloats(RetractableSumFloats):
    """`avg` of floats and doubles."""

    def result(self, rows: Rows) -> pa.Array:
        numbers = self._value_counts(rows)
        with np.errstate(divide="ignore", invalid="ignore"):
            return to_arrow(self._totals(rows) / numbers, (numbers != 0).view(np.uint8), self.type)


def _is_below(low: Words, high: Words, above: Words, limit: int) -> NDArray[np.bool_]:
    """Return whether |sum| < limit, for 192-bit numbers."""
    small = above.view(np.int64) == high.view(np.int64) >> 63
    negative = high >> np.uint64(63) != 0
    flipped = ~low + np.uint64(1)
    high = np.where(negative, ~high + (flipped == 0), high)
    low = np.where(negative, flipped, low)
    limit_low, limit_high = words_of(limit)
    fits: NDArray[np.bool_] = small & ((high < limit_high) | ((high == limit_high) & (low < limit_low)))
    return fits


def retractable_sum(call: AggregateCall, inputs: Sequence[DataType]) -> Retractable:
    """Return the accumulator of a `sum` of this type."""
    if inputs[0].name == "decimal":
        return RetractableSumDecimals(call, inputs)
    return (RetractableSumFloats if inputs[0].machine == "float" else RetractableSumInts)(call, inputs)


def retractable_average(call: AggregateCall, inputs: Sequence[DataType]) -> Retractable:
    """Return the accumulator of an `avg` of this type."""
    if inputs[0].name == "decimal":
        return RetractableAverageDecimals(call, inputs)
    return (RetractableAverageFloats if inputs[0].machine == "float" else RetractableAverageInts)(call, inputs)
