"""Accumulators from which rows can be taken back: `count`, `sum` and `avg`, exact for integers and decimals."""

# ruff: noqa: D102 (what a method does is said once, in `Accumulator`)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import NumericRangeError
from millpond.kernels import decimals, retract
from millpond.layout import Rows, Words
from millpond.operators.accumulators import (
    Accumulator,
    StateColumn,
    overflow_in_integers,
    overflow_in_sum,
    sum_precision,
    words_of,
)
from millpond.operators.decode import floats, ints, to_arrow
from millpond.operators.encode import ALL, Mask, Operand, both
from millpond.operators.spec import AggregateCall
from millpond.operators.types import DataType

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable

Signs = NDArray[np.int8]


class Retractable(Accumulator):
    """An accumulator that folds rows in by their sign.

    Attributes:
        signs: 1 or −1 for every row of the Arrow batch; set before `load`.
    """

    signs: Signs


class Count(Retractable):
    """`count(*)`, `count(x, …)`, `count_if(b)`: one word."""

    columns: tuple[StateColumn, ...] = (StateColumn("word"),)

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        for column in operands:
            counts = both(counts, column.valid)
        if self.call.function == "count_if":
            counts = both(counts, operands[0].values.astype(np.uint8))
        self._counts = counts

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        retract.count(table.words, rows, start, self.places[0].offset, self._counts, self.signs)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        _add(table, rows, self.places[0].offset, source.words[:, self.places[0].offset])

    def result(self, rows: Rows) -> pa.Array:
        return to_arrow(ints(rows, self.places[0].offset), ALL, self.type)


class _Wide(Retractable):
    """A 128-bit sum and the number of values."""

    columns = (StateColumn("wide"), StateColumn("word"))

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._values = operands[0].values
        self._valid = both(counts, operands[0].valid)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        kernel = retract.sum_pairs if self._values.ndim == 2 else retract.sum_words
        kernel(table.words, rows, start, self.places[0].offset, self._values, self._valid, self.signs)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        at = self.places[0].offset
        retract.sum_pairs(table.words, rows, 0, at, self._sums(source), ALL, np.ones(len(rows), dtype=np.int8))
        _add(table, rows, at + 2, source.words[:, at + 2] - np.uint64(1))  # a sum was counted as one value

    def _sums(self, rows: Rows) -> Words:
        offset = self.places[0].offset
        return np.ascontiguousarray(rows.words[:, offset : offset + 2])

    def _numbers(self, rows: Rows) -> NDArray[np.int64]:
        return ints(rows, self.places[1].offset)


class SumInts(_Wide):
    """`sum` of integers: what leaves the range of its type wraps, or is an error in ANSI mode."""

    def result(self, rows: Rows) -> pa.Array:
        sums, there = self._sums(rows), self._numbers(rows) != 0
        low = np.ascontiguousarray(sums[:, 0]).view(np.int64)
        if self.ansi and (((low >> 63) != np.ascontiguousarray(sums[:, 1]).view(np.int64)) & there).any():
            raise overflow_in_integers()
        return to_arrow(low, there.view(np.uint8), self.type)


class SumDecimals(_Wide):
    """`sum` of decimals: what exceeds its precision is null, or an error in ANSI mode."""

    def result(self, rows: Rows) -> pa.Array:
        sums, there = self._sums(rows), self._numbers(rows) != 0
        fits = _within(sums, 10 ** sum_precision(self.inputs[0]))
        if self.ansi and (there & ~fits).any():
            raise overflow_in_sum()
        return to_arrow(sums, (there & fits).view(np.uint8), self.type)


class AverageInts(_Wide):
    """`avg` of integers."""

    def result(self, rows: Rows) -> pa.Array:
        sums, numbers = self._sums(rows), self._numbers(rows)
        high = np.ascontiguousarray(sums[:, 1]).view(np.int64).astype(np.float64)
        low = np.ascontiguousarray(sums[:, 0])
        small = (low.view(np.int64) >> 63) == np.ascontiguousarray(sums[:, 1]).view(np.int64)
        total = np.where(small, low.view(np.int64).astype(np.float64), high * 2.0**64 + low.astype(np.float64))
        with np.errstate(divide="ignore", invalid="ignore"):
            return to_arrow(total / numbers, (numbers != 0).view(np.uint8), self.type)


class AverageDecimals(_Wide):
    """`avg` of decimals, divided half up."""

    def result(self, rows: Rows) -> pa.Array:
        sums, numbers = self._sums(rows), self._numbers(rows)
        beyond = ~_within(sums, 10 ** sum_precision(self.inputs[0]))
        out, state = np.empty_like(sums), np.empty(rows.count, dtype=np.uint8)
        limit = words_of(10**self.type.precision)
        decimals.average(sums, numbers, self.type.scale - self.inputs[0].scale, *limit, out, state)
        there = numbers != 0
        if self.ansi and (there & beyond).any():
            raise overflow_in_sum()
        if self.ansi and (there & (state == 2)).any():
            raise NumericRangeError(
                f"an average cannot be represented as {self.call.type}.",
                action="Use 'try_avg', or set spark.sql.ansi.enabled to false (it is then null). SQLSTATE: 22003",
            )
        return to_arrow(out, ((state == 1) & there & ~beyond).view(np.uint8), self.type)


class SumFloats(Retractable):
    """`sum` and `avg` of floats and doubles: a compensated sum; NaNs and infinities are counted beside it."""

    columns = (StateColumn("word"),) * 6

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._values = operands[0].values.astype(np.float64, copy=False)
        self._valid = both(counts, operands[0].valid)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        retract.sum_floats(table.words, rows, start, self.places[0].offset, self._values, self._valid, self.signs)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        at, ones = self.places[0].offset, np.ones(len(rows), dtype=np.int8)
        for part in (at, at + 1):
            retract.sum_floats(table.words, rows, 0, at, floats(source, part), ALL, ones)
        _add(table, rows, at + 2, source.words[:, at + 2] - np.uint64(2))  # two sums were counted as two values
        for counter in range(at + 3, at + 6):
            _add(table, rows, counter, source.words[:, counter])

    def result(self, rows: Rows) -> pa.Array:
        offset = self.places[0].offset
        numbers, nans, above, below = (ints(rows, offset + 2 + number) for number in range(4))
        finite = floats(rows, offset) + floats(rows, offset + 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            total = np.where(above != 0, np.inf, np.where(below != 0, -np.inf, finite))
            total = np.where((nans != 0) | ((above != 0) & (below != 0)), np.nan, total)
            if self.call.function == "avg":
                total = total / numbers
        return to_arrow(total, (numbers != 0).view(np.uint8), self.type)


def _add(table: Writable, rows: NDArray[np.int64], offset: int, numbers: NDArray[np.uint64]) -> None:
    """Add to a word of rows, which may be named several times."""
    np.add.at(table.words[:, offset], rows, numbers)


def _within(sums: Words, limit: int) -> NDArray[np.bool_]:
    """Whether |sum| < limit, for 128-bit numbers."""
    low, high = np.ascontiguousarray(sums[:, 0]), np.ascontiguousarray(sums[:, 1])
    negative = high >> np.uint64(63) != 0
    flipped = ~low + np.uint64(1)
    high = np.where(negative, ~high + (flipped == 0), high)
    low = np.where(negative, flipped, low)
    limit_low, limit_high = words_of(limit)
    fits: NDArray[np.bool_] = (high < limit_high) | ((high == limit_high) & (low < limit_low))
    return fits


def _sum(call: AggregateCall, inputs: Sequence[DataType]) -> Retractable:
    if inputs[0].name == "decimal":
        return SumDecimals(call, inputs)
    return (SumFloats if inputs[0].machine == "float" else SumInts)(call, inputs)


def _average(call: AggregateCall, inputs: Sequence[DataType]) -> Retractable:
    if inputs[0].name == "decimal":
        return AverageDecimals(call, inputs)
    return (SumFloats if inputs[0].machine == "float" else AverageInts)(call, inputs)


RETRACTABLE: dict[str, Callable[[AggregateCall, Sequence[DataType]], Retractable]] = {
    "count": Count,
    "count_if": Count,
    "sum": _sum,
    "avg": _average,
}
