"""Accumulators over integers and doubles: count, sum, average. Each call keeps a few words per key.

An `Accumulator` is made from a call and bound to its state columns (`bind`). Each batch starts with `begin`. For every
Arrow batch, `load` is followed by `update` for each block of located rows. `result` computes the results of rows.
Partial states of one key that were folded separately, as panes of a window or merging sessions, are merged by
`combine`.
"""

# ruff: noqa: D102 (the methods are documented in `Accumulator`)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import ArithmeticOverflowError
from millpond.kernels.aggregate import numeric
from millpond.layout import Kind, Rows
from millpond.operators.columns.decode import not_null, to_arrow
from millpond.operators.columns.encode import ALL, Mask, Operand, Place, and_masks, is_true
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType, parse_type

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable

BLOCK = 2048
"""Rows located and folded at a time, few enough to stay in the processor's cache in between."""


_NO_EXCESSES = np.empty(0, dtype=np.int64)


class StateColumn(NamedTuple):
    """A column of state: its kind, and whether a fresh key has null there instead of zero."""

    kind: Kind
    null: bool = False


class Accumulator(ABC):
    """One aggregate call: its state columns, folding rows into them, and its result.

    Attributes:
        columns: the state columns.
        places: the places of the state columns in a row, once bound.
    """

    columns: tuple[StateColumn, ...]

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        self.call = call
        self.inputs = tuple(inputs)
        self.type = parse_type(call.type)
        self.ansi = call.options.get("eval_mode") == "ansi"
        self.places: tuple[Place, ...] = ()

    def bind(self, places: Sequence[Place]) -> None:
        """Set the places of the state columns."""
        self.places = tuple(places)

    def begin(self, version: int) -> None:  # noqa: B027 (most have nothing to do)
        """Start the batch that reads state `version`. Without this call, all batches count as one."""

    @abstractmethod
    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        """Load the inputs of an Arrow batch; `counts` is the mask of rows that count (filter, distinct)."""

    @abstractmethod
    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        """Fold in the block of the batch that begins at `start`; `rows` are the row ids of its keys."""

    def combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        """Merge partial states into rows, as if the partial states' inputs came after those of the rows.

        Args:
            table: the table.
            rows: row ids, possibly repeated; `source` must not lie in any of these rows.
            source: a row of the table's layout for each row id; its heap may be the table's own.

        Raises:
            ArithmeticOverflowError: a sum overflows in ANSI mode.
        """
        for start in range(0, len(rows), BLOCK):
            block = slice(start, start + BLOCK)
            self._combine(table, rows[block], source.take(block))

    @abstractmethod
    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        """Merge one block (see `combine`)."""

    @abstractmethod
    def result(self, rows: Rows) -> pa.Array:
        """Return the call's result for every row."""


class Count(Accumulator):
    """`count(*)`, `count(x, …)`: one word."""

    columns: tuple[StateColumn, ...] = (StateColumn("word"),)

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._counts = and_masks(counts, *(column.valid for column in operands))

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        count_valid(table, rows, start, self.places[0], self._counts)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        add_counts(table, rows, source, self.places[0])

    def result(self, rows: Rows) -> pa.Array:
        return to_arrow(rows.ints(self.places[0].offset), ALL, self.type)


class CountIf(Count):
    """`count_if(b)`."""

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        super().load((), and_masks(counts, is_true(operands[0])))


class SumInts(Accumulator):
    """`sum` of integers: one word, wrapping, or an error in ANSI mode."""

    columns: tuple[StateColumn, ...] = (StateColumn("word", null=True),)

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._values = operands[0].values
        self._valid = and_masks(counts, operands[0].valid)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        self._add(table, rows, start, self._values, self._valid)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        self._add(table, rows, 0, source.ints(self.places[0].offset), not_null(source, self.places[0]))

    def _add(
        self, table: Writable, rows: NDArray[np.int64], start: int, values: NDArray[np.int64], valid: Mask
    ) -> None:
        kernel_args = (table.words, rows, start, *self.places[0], valid, values)
        if not self.ansi:
            numeric.sum_ints(*kernel_args)
        elif not numeric.sum_ints_checked(*kernel_args):
            raise overflow_in_integers()

    def result(self, rows: Rows) -> pa.Array:
        place = self.places[0]
        return to_arrow(rows.ints(place.offset), not_null(rows, place), self.type)


class TrySumInts(SumInts):
    """`try_sum` of integers: null beyond 64 bits.

    Spark adds up the rows of a batch before it adds them to the state. A sum that is out of range when a batch ends
    stays null. So a second word marks sums that are out of range, and that may return within the batch.
    """

    columns = (StateColumn("word", null=True), StateColumn("word"))

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs)
        self._batch = np.uint64(1)

    def begin(self, version: int) -> None:
        # Never 0: batch 0 names sums that exceeded 64 bits when a batch ended.
        self._batch = np.uint64(1 + version % (2**32 - 1))

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        kernel_args = (table.words, rows, start, *self.places[0], self._valid)
        numeric.try_sum_ints(*kernel_args, self._values, _NO_EXCESSES, self._batch)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        place = self.places[0]
        kernel_args = (table.words, rows, 0, *place, not_null(source, place))
        sums, excesses = (source.ints(place_.offset) for place_ in self.places)
        numeric.try_sum_ints(*kernel_args, sums, excesses, self._batch)

    def result(self, rows: Rows) -> pa.Array:
        sums, excesses = (rows.ints(place.offset) for place in self.places)
        valid = and_masks(not_null(rows, self.places[0]), (excesses == 0).view(np.uint8))
        return to_arrow(sums, valid, self.type)


class Bits(SumInts):
    """`bit_and`, `bit_or`, `bit_xor`: one word."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType], *, operation: int) -> None:
        super().__init__(call, inputs)
        self._operation = operation

    def _add(
        self, table: Writable, rows: NDArray[np.int64], start: int, values: NDArray[np.int64], valid: Mask
    ) -> None:
        numeric.combine_bits(table.words, rows, start, *self.places[0], valid, values, self._operation)


class SumFloats(Accumulator):
    """`sum` of floats and doubles: one word."""

    columns: tuple[StateColumn, ...] = (StateColumn("word", null=True),)

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._values = operands[0].values.astype(np.float64, copy=False)
        self._valid = and_masks(counts, operands[0].valid)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        self._add(table, rows, start, self._values, self._valid)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        self._add(table, rows, 0, source.floats(self.places[0].offset), not_null(source, self.places[0]))

    def _add(
        self, table: Writable, rows: NDArray[np.int64], start: int, values: NDArray[np.float64], valid: Mask
    ) -> None:
        numeric.sum_floats(table.words, rows, start, *self.places[0], valid, values)

    def result(self, rows: Rows) -> pa.Array:
        place = self.places[0]
        return to_arrow(rows.floats(place.offset), not_null(rows, place), self.type)


class Product(SumFloats):
    """`product`, of doubles: one word."""

    def _add(
        self, table: Writable, rows: NDArray[np.int64], start: int, values: NDArray[np.float64], valid: Mask
    ) -> None:
        numeric.multiply_floats(table.words, rows, start, *self.places[0], valid, values)


class Average(SumFloats):
    """`avg` of integers, floats and doubles: a sum of doubles and a count."""

    columns = (StateColumn("word"), StateColumn("word"))

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        super().update(table, rows, start)
        count_valid(table, rows, start, self.places[1], self._valid)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        super()._combine(table, rows, source)
        add_counts(table, rows, source, self.places[1])

    def result(self, rows: Rows) -> pa.Array:
        counts = rows.ints(self.places[1].offset)
        with np.errstate(divide="ignore", invalid="ignore"):
            quotients = rows.floats(self.places[0].offset) / counts
        # The average of no values is null.
        return to_arrow(quotients, (counts != 0).view(np.uint8), self.type)


def overflow_in_integers() -> ArithmeticOverflowError:
    """Return the error of an integer sum that exceeds its type."""
    return ArithmeticOverflowError(
        "overflow in a sum of integers.",
        action="Set spark.sql.ansi.enabled to false (the sum then wraps) and start again, or sum a wider type "
        "with a new checkpointLocation. SQLSTATE: 22003",
    )


def count_valid(table: Writable, rows: NDArray[np.int64], start: int, place: Place, valid: Mask) -> None:
    """Add one to the count of every valid row of a block."""
    if valid.size:
        numeric.count_valid(table.words, rows, start, place.offset, valid)
    else:
        numeric.count_rows(table.words, rows, place.offset)


def add_counts(table: Writable, rows: NDArray[np.int64], source: Rows, place: Place) -> None:
    """Add the counts of other rows of the table's layout."""
    numeric.sum_ints(table.words, rows, 0, *place, ALL, source.ints(place.offset))
