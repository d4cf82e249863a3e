"""Accumulators of central moments of one or two arguments: variance, skewness, covariance, regression and so on."""

# ruff: noqa: D102 (the methods are documented in `Accumulator`)

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import DivideByZeroError
from millpond.kernels.aggregate import moments
from millpond.layout import Rows
from millpond.operators.columns.decode import to_arrow
from millpond.operators.columns.encode import Mask, Operand, and_masks
from millpond.operators.functions.accumulators import Accumulator, StateColumn
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable

Doubles = NDArray[np.float64]
Flags = NDArray[np.bool_]

_NAN = np.float64("nan").view(np.uint64)


class Statistic(Accumulator):
    """A statistic over doubles in consecutive words: the number of values, their means, and sums of products.

    Without any value the result is null. With the option `merges_empty`, a value with an overflowing product makes that
    sum NaN: Spark before 4.3 merges each batch's state with that of no rows, and multiplies the product by zero.
    """

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType], width: int) -> None:
        super().__init__(call, inputs)
        self.columns = (StateColumn("word"),) * width

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._values = [operand.values.astype(np.float64, copy=False) for operand in operands]
        self._valid = counts = and_masks(counts, *(operand.valid for operand in operands))
        self._overflows: list[Flags] = []
        if self.call.options.get("merges_empty"):
            with np.errstate(all="ignore"):
                self._overflows = [~np.isfinite(product) for product in self._products(*self._values)]
            if counts.size:
                self._overflows = [overflows & counts.astype(np.bool_) for overflows in self._overflows]

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        self._add(table, rows, start)
        # The sums are the last words, in the order of the products.
        first = self.places[0].offset + len(self.columns) - len(self._overflows)
        for offset, overflows in enumerate(self._overflows, first):
            table.words[rows[overflows[start : start + len(rows)]], offset] = _NAN

    @abstractmethod
    def _add(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        """Fold in a block as Spark 4.3 does (see `update`)."""

    @abstractmethod
    def _products(self, *values: Doubles) -> list[Doubles]:
        """Return each row's product for each of the sums."""

    def result(self, rows: Rows) -> pa.Array:
        state = [rows.floats(place.offset) for place in self.places]
        with np.errstate(all="ignore"):
            values, valid = self._statistic(*state)
        return to_arrow(values, (valid & (state[0] != 0.0)).view(np.uint8), self.type)

    @abstractmethod
    def _statistic(self, count: Doubles, *state: Doubles) -> tuple[Doubles, Flags]:
        """Return the result of every row, and a mask of those that are defined; rows without any value are ignored."""

    def _where(self, defined: Flags, values: Doubles) -> tuple[Doubles, Flags]:
        """Return results where they are defined; others are null, or NaN in Spark's legacy mode."""
        if self.call.options.get("null_on_divide_by_zero", True):
            return values, defined
        return np.where(defined, values, np.nan), np.ones(len(values), dtype=np.bool_)

    def _quotients(self, needed: Flags, dividends: Doubles, divisors: Doubles) -> tuple[Doubles, Flags]:
        """Divide as Spark does: division by zero gives null, or an error in ANSI mode.

        A divisor can be zero although no deviation is: its square or cube may be less than any double.

        Raises:
            DivideByZeroError: a wanted quotient has divisor zero, in ANSI mode.
        """
        divided = divisors != 0.0
        if self.ansi and (needed & ~divided).any():
            raise DivideByZeroError(
                f"division by zero in {self.call.function}: the values deviate by too little.",
                action="Set spark.sql.ansi.enabled to false (it is then null) and start again. SQLSTATE: 22012",
            )
        return dividends / divisors, divided


class Moments(Statistic):
    """Statistics from central moments of one argument up to an order."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType], *, order: int) -> None:
        super().__init__(call, inputs, order + 1)
        self._order = order

    def _add(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        (values,) = self._values
        moments.moments(table.words, rows, start, *self.places[0], self._valid, values, self._order)

    def _products(self, *values: Doubles) -> list[Doubles]:
        (x,) = values
        return [x * x, x * x * x, x * x * x * x][: self._order - 1]

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        offset = self.places[0].offset
        others = source.span(offset, self._order + 1)
        moments.combine_moments(table.words, rows, offset, self._order, others)


class Variance(Moments):
    """`stddev` and `variance`, of the sample or the population."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType], *, sample: bool, root: bool = False) -> None:
        super().__init__(call, inputs, order=2)
        self._sample = sample
        self._root = root

    def _statistic(self, count: Doubles, *state: Doubles) -> tuple[Doubles, Flags]:
        _, squares = state
        values = squares / (count - 1.0 if self._sample else count)
        if self._root:
            values = np.sqrt(values)
        return self._where(count != 1.0, values) if self._sample else (values, count != 0.0)


class Skewness(Moments):
    """`skewness`."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs, order=3)

    def _statistic(self, count: Doubles, *state: Doubles) -> tuple[Doubles, Flags]:
        _, squares, cubes = state
        spread = squares != 0.0
        values, divided = self._quotients(spread, np.sqrt(count) * cubes, np.sqrt(squares * squares * squares))
        values, defined = self._where(spread, values)
        return values, defined & (divided | ~spread)


class Kurtosis(Moments):
    """`kurtosis`, in excess of that of a normal distribution."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs, order=4)

    def _statistic(self, count: Doubles, *state: Doubles) -> tuple[Doubles, Flags]:
        _, squares, _, fourths = state
        spread = squares != 0.0
        values, divided = self._quotients(spread, count * fourths, squares * squares)
        values, defined = self._where(spread, values - 3.0)
        return values, defined & (divided | ~spread)


class SquaredDeviations(Moments):
    """`regr_sxx`, `regr_syy`: the sum of squared deviations of one side of pairs."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs, order=2)

    def _statistic(self, count: Doubles, *state: Doubles) -> tuple[Doubles, Flags]:
        return state[1], count != 0.0


class CoMoments(Statistic):
    """Statistics from central moments of two arguments; pairs with a null do not count."""

    width: int

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs, self.width)

    def _add(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        moments.comoments(table.words, rows, start, *self.places[0], self._valid, *self._values, self.width)

    def _products(self, *values: Doubles) -> list[Doubles]:
        x, y = values
        return [x * y, x * x, y * y][: self.width - 3]

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        offset = self.places[0].offset
        others = source.span(offset, self.width)
        moments.combine_comoments(table.words, rows, offset, self.width, others)


class Covariance(CoMoments):
    """`covar_pop`, `covar_samp`."""

    width = 4

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType], *, sample: bool) -> None:
        super().__init__(call, inputs)
        self._sample = sample

    def _statistic(self, count: Doubles, *state: Doubles) -> tuple[Doubles, Flags]:
        products = state[2]
        if self._sample:
            return self._where(count != 1.0, products / (count - 1.0))
        return products / count, count != 0.0


class ProductDeviations(CoMoments):
    """`regr_sxy`: the sum of the products of deviations."""

    width = 4

    def _statistic(self, count: Doubles, *state: Doubles) -> tuple[Doubles, Flags]:
        return state[2], count != 0.0


class Correlation(CoMoments):
    """`corr`: Pearson's coefficient; where one side does not vary, null, or with `merges_empty` a division by zero."""

    width = 6

    def _statistic(self, count: Doubles, *state: Doubles) -> tuple[Doubles, Flags]:
        _, _, products, squares_x, squares_y = state
        vary = (squares_x != 0.0) & (squares_y != 0.0)
        if self.call.options.get("merges_empty"):
            vary = count > 1.0
        values, divided = self._quotients(vary, products, np.sqrt(squares_x * squares_y))
        values, defined = self._where(count != 1.0, values)
        return values, defined & ((vary & divided) | (count == 1.0))


class Determination(CoMoments):
    """`regr_r2(y, x)`: the square of the correlation; null where x does not vary, 1 where only y does not."""

    width = 6

    def _statistic(self, count: Doubles, *state: Doubles) -> tuple[Doubles, Flags]:
        _, _, products, squares_y, squares_x = state
        vary = (squares_x != 0.0) & (squares_y != 0.0)
        values, divided = self._quotients(vary, products, np.sqrt(squares_y * squares_x))
        flat = squares_y == 0.0
        return np.where(flat, 1.0, values * values), (squares_x != 0.0) & (divided | flat)


class Regression(CoMoments):
    """`regr_slope(y, x)`, `regr_intercept(y, x)`: null where x does not vary."""

    width = 5

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType], *, intercept: bool) -> None:
        super().__init__(call, inputs)
        self._intercept = intercept

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        # The arguments are (y, x), but the state has x first.
        super().load(operands[::-1], counts)

    def _statistic(self, count: Doubles, *state: Doubles) -> tuple[Doubles, Flags]:
        mean_x, mean_y, products, squares = state
        slopes = products / squares
        return mean_y - slopes * mean_x if self._intercept else slopes, squares != 0.0
