"""Accumulators over decimals: sums and averages, with Spark's limits and rounding."""

# ruff: noqa: D102 (the methods are documented in `Accumulator`)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import ArithmeticOverflowError, NumericRangeError
from millpond.kernels.aggregate import decimals
from millpond.layout import Rows, Words
from millpond.operators.columns.decode import not_null, to_arrow
from millpond.operators.columns.encode import Mask, Operand, and_masks
from millpond.operators.functions.accumulators import Accumulator, StateColumn, add_counts, count_valid
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable

_DIGITS = 38
_NO_EXCESSES: Words = np.empty(0, dtype=np.uint64)


class SumDecimals(Accumulator):
    """`sum` of decimals: two words; a sum beyond its precision is null, or an error in ANSI mode.

    A sum has ten digits more than its input. Where these exceed 38 digits, a few rows can take the sum out of range,
    and others of the same batch can bring it back. Spark adds up the rows of a batch before it adds them to the state.
    A sum that is out of range when a batch ends stays null. So these sums have a third word.
    """

    columns: tuple[StateColumn, ...] = (StateColumn("wide", null=True),)

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs)
        self._limit = words_of(10 ** sum_precision(inputs[0]))
        self._may_return = inputs[0].precision + 10 > _DIGITS
        if self._may_return:
            self.columns = (self.columns[0], StateColumn("word"), *self.columns[1:])
        self._batch = np.uint64(1)

    def begin(self, version: int) -> None:
        # Never 0, since an excess of zero means that the sum is within its precision.
        self._batch = np.uint64(1 + version % (2**32 - 1))

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._values = operands[0].values
        self._valid = and_masks(counts, operands[0].valid)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        self._add(table, rows, start, self._values, _NO_EXCESSES, self._valid)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        place = self.places[0]
        excesses = source.words[:, self.places[1].offset].copy() if self._may_return else _NO_EXCESSES
        self._add(table, rows, 0, source.span(place.offset, 2), excesses, not_null(source, place))

    def _add(
        self, table: Writable, rows: NDArray[np.int64], start: int, values: NDArray[Any], excesses: Words, valid: Mask
    ) -> None:
        kernel_args = (table.words, rows, start, *self.places[0], valid, values)
        if self._may_return:
            decimals.sum_beyond(*kernel_args, excesses, *self._limit, self._batch)
        elif values.ndim == 2:
            decimals.sum_long(*kernel_args, *self._limit)
        else:
            decimals.sum_short(*kernel_args, *self._limit)

    def result(self, rows: Rows) -> pa.Array:
        valid = and_masks(not_null(rows, self.places[0]), self._within(rows).view(np.uint8))
        return to_arrow(self._sums(rows), valid, self.type)

    def _sums(self, rows: Rows) -> Words:
        return rows.span(self.places[0].offset, 2)

    def _within(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the rows whose sums are within their precision.

        Raises:
            ArithmeticOverflowError: a sum is not, in ANSI mode.
        """
        sums = self._sums(rows)
        within: NDArray[np.bool_] = (sums[:, 1] != decimals.OVERFLOWN) | (sums[:, 0] != 0)
        if self._may_return:
            within &= rows.words[:, self.places[1].offset] == 0
        if self.ansi and not within.all():
            raise overflow_in_sum(self.call)
        return within


class AverageDecimals(SumDecimals):
    """`avg` of decimals: a sum and a count, divided half up."""

    columns = (StateColumn("wide"), StateColumn("word"))

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        super().update(table, rows, start)
        count_valid(table, rows, start, self.places[-1], self._valid)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        super()._combine(table, rows, source)
        add_counts(table, rows, source, self.places[-1])

    def result(self, rows: Rows) -> pa.Array:
        counts = rows.ints(self.places[-1].offset)
        return averages(self.inputs[0], self.type, self._sums(rows), counts, self._within(rows), ansi=self.ansi)


def averages(
    dtype: DataType,
    result: DataType,
    sums: Words,
    counts: NDArray[np.int64],
    within: NDArray[np.bool_],
    *,
    ansi: bool,
) -> pa.Array:
    """Compute averages of decimals.

    Args:
        dtype: the type of the values.
        result: the type of the averages.
        sums: the sums, as uint64[n, 2].
        counts: the numbers of values; the average of no values is null.
        within: a mask of the sums within their precision; the averages of the others are null.
        ansi: whether an average beyond its precision is an error instead of null.

    Raises:
        NumericRangeError: an average is beyond its precision, in ANSI mode.
    """
    out, state = np.empty_like(sums), np.empty(len(sums), dtype=np.uint8)
    decimals.average(sums, counts, result.scale - dtype.scale, *words_of(10**result.precision), out, state)
    if ansi and (within & (state == 2)).any():
        raise NumericRangeError(
            f"an average cannot be represented as decimal({result.precision},{result.scale}).",
            action="Use 'try_avg', or set spark.sql.ansi.enabled to false (it is then null). SQLSTATE: 22003",
        )
    return to_arrow(out, (within & (state == 1)).view(np.uint8), result)


def sum_precision(dtype: DataType) -> int:
    """Return the digits of a sum of decimals: ten more than the input's, 38 at most."""
    return min(_DIGITS, dtype.precision + 10)


def overflow_in_sum(call: AggregateCall) -> ArithmeticOverflowError:
    """Return the error of a sum or an average of decimals whose sum is beyond its precision."""
    return ArithmeticOverflowError(
        "overflow in a sum of decimals.",
        action=f"Use 'try_{call.function}', or set spark.sql.ansi.enabled to false (it is then null), and start again. "
        "SQLSTATE: 22003",
    )


def words_of(value: int) -> tuple[np.uint64, np.uint64]:
    """Split a number below 2¹²⁸ into two words, the low one first."""
    return np.uint64(value & (2**64 - 1)), np.uint64(value >> 64)
