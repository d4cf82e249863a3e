"""Accumulators that keep one of the input values: min, max, first, last, min_by, max_by, and the boolean ones."""

# ruff: noqa: D102 (the methods are documented in `Accumulator`)

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.aggregate import byte_values, decimals, numeric
from millpond.layout import Rows
from millpond.operators.columns.decode import atom, stored_operand
from millpond.operators.columns.encode import ALL, Mask, Operand, Place, and_masks, order_key_operand
from millpond.operators.columns.order_keys import ORDER_KEY
from millpond.operators.functions.accumulators import BLOCK, Accumulator, StateColumn
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable


class ValueColumn:
    """A state column with a value of any type; nested values are kept as byte strings, but not compared."""

    def __init__(self, dtype: DataType) -> None:
        self.state = StateColumn(dtype.kind, null=True)
        self.place: Place
        self._machine = "bytes" if dtype.nested else dtype.machine
        if self._machine == "bytes":
            self._scratch = np.empty(2 * byte_values.SCRATCH, dtype=np.int64)
            self._rows = np.empty(BLOCK, dtype=np.int64)
            self._positions = np.empty(BLOCK, dtype=np.int64)

    def keep_extreme(
        self,
        table: Writable,
        rows: NDArray[np.int64],
        start: int,
        column: Operand,
        valid: Mask,
        *,
        greatest: bool,
        ties: bool = False,
        won: Mask = ALL,
    ) -> None:
        """Keep the least or greatest of a block's values.

        Args:
            table: the table.
            rows: the row ids of the block.
            start: the block's first row in the batch.
            read: the values of the batch.
            valid: a mask of the batch's rows that count.
            greatest: whether to keep the greatest value.
            ties: whether an equal value replaces the current one.
            won: set to 1 for every row of the block that won at its turn, else to 0; not filled if empty.
        """
        place, values, machine = self.place, column.values, self._machine
        if machine == "bytes":
            count = byte_values.extreme_bytes(
                *(table.words, table.heap.data, rows, start, *place, values, column.heap, valid, greatest, ties, won),
                *(self._scratch, self._rows, self._positions),
            )
            self._write(table, count, column, ALL)
            return
        kernel = {"int": numeric.extreme_ints, "float": numeric.extreme_floats, "wide": decimals.extreme_pairs}
        kernel[machine or "int"](table.words, rows, start, *place, valid, values, greatest, ties, won)

    def assign(self, table: Writable, rows: NDArray[np.int64], start: int, column: Operand, won: Mask) -> None:
        """Assign each key the value, or null, of its last row in the block that has won.

        Args:
            table: the table.
            rows: the row ids of the block.
            start: the block's first row in the batch.
            read: the values of the batch.
            won: a mask of the block's rows that have won.
        """
        place, machine = self.place, self._machine
        if machine == "bytes":
            count = byte_values.assign_bytes(
                *(table.words, rows, start, place.null_word, place.null_bit, column.valid, won),
                *(self._scratch, self._rows, self._positions),
            )
            self._write(table, count, column, column.valid)
            return
        values = column.values if machine == "wide" else column.values.view(np.int64)
        kernel = decimals.assign_pairs if machine == "wide" else numeric.assign_words
        block = slice(start, start + len(rows))
        kernel(table.words, rows, 0, *place, won, values[block], column.valid[block])

    def read(self, source: Rows) -> Operand:
        """Return the column in rows of the table's layout."""
        return stored_operand(source, self.place, self._machine)

    def _write(self, table: Writable, count: int, column: Operand, valid: Mask) -> None:
        if count == 0:
            return
        pairs = np.empty((count, 2), dtype=np.uint64)
        byte_values.take_pairs(column.values, valid, self._positions[:count], pairs)
        table.put_bytes(self._rows[:count], self.place.offset, pairs, column.heap)


class Extreme(Accumulator):
    """`min`, `max`, and over booleans `bool_and`, `bool_or`."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType], *, greatest: bool) -> None:
        super().__init__(call, inputs)
        self._greatest = greatest
        self._value = ValueColumn(inputs[0])
        self.columns = (self._value.state,)

    def bind(self, places: Sequence[Place]) -> None:
        super().bind(places)
        self._value.place = places[0]

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._column = operands[0]
        self._valid = and_masks(counts, operands[0].valid)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        self._value.keep_extreme(table, rows, start, self._column, self._valid, greatest=self._greatest)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        column = self._value.read(source)
        self._value.keep_extreme(table, rows, 0, column, column.valid, greatest=self._greatest)

    def result(self, rows: Rows) -> pa.Array:
        return atom(rows, self.places[0], self.type)


class ExtremeBy(Accumulator):
    """`min_by`, `max_by`: the value beside the least or greatest ordering; of equal orderings the last.

    With one input, this is `min` or `max` of nested values, ordered by byte strings that encode them; of equal values
    the first.
    """

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType], *, greatest: bool) -> None:
        super().__init__(call, inputs)
        self._greatest = greatest
        self._ties = len(inputs) > 1
        self._by_keys = inputs[-1].nested
        self._value = ValueColumn(inputs[0])
        self._ordering = ValueColumn(ORDER_KEY if self._by_keys else inputs[-1])
        self._won = np.empty(BLOCK, dtype=np.uint8)
        self.columns = (self._value.state, self._ordering.state)

    def bind(self, places: Sequence[Place]) -> None:
        super().bind(places)
        self._value.place, self._ordering.place = places

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._column, by = operands[0], operands[-1]
        self._by = order_key_operand(by, self.inputs[-1]) if self._by_keys else by
        self._valid = and_masks(counts, self._by.valid)

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        self._keep_winners(table, rows, start, self._column, self._by, self._valid)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        by = self._ordering.read(source)
        self._keep_winners(table, rows, 0, self._value.read(source), by, by.valid)

    def _keep_winners(
        self, table: Writable, rows: NDArray[np.int64], start: int, column: Operand, by: Operand, valid: Mask
    ) -> None:
        self._ordering.keep_extreme(
            table, rows, start, by, valid, greatest=self._greatest, ties=self._ties, won=self._won
        )
        self._value.assign(table, rows, start, column, self._won)

    def result(self, rows: Rows) -> pa.Array:
        return atom(rows, self.places[0], self.type)


class _SelectedValue(Accumulator):
    """One of the input values, with or without nulls.

    If `counted`, a word records whether any row has counted, because a null value does not show it.
    """

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType], *, counted: bool) -> None:
        super().__init__(call, inputs)
        self._ignore_nulls = bool(call.options.get("ignore_nulls", False))
        self._value = ValueColumn(inputs[0])
        self.columns = (self._value.state, StateColumn("word")) if counted else (self._value.state,)

    def bind(self, places: Sequence[Place]) -> None:
        super().bind(places)
        self._value.place = places[0]

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        self._column = operands[0]
        self._counts = and_masks(counts, operands[0].valid) if self._ignore_nulls else counts

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        self._keep_winners(table, rows, start, self._column, self._counts)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        column, counts = self._value.read(source), ALL
        # A null value does not show whether a row has counted; the word does.
        if len(self.columns) > 1:
            counts = (source.words[:, self.places[1].offset] != 0).view(np.uint8)
        elif self._ignore_nulls:
            counts = column.valid
        self._keep_winners(table, rows, 0, column, counts)

    @abstractmethod
    def _keep_winners(
        self, table: Writable, rows: NDArray[np.int64], start: int, column: Operand, counts: Mask
    ) -> None:
        """Assign the values of a block's rows that count and win over the current ones."""

    def result(self, rows: Rows) -> pa.Array:
        return atom(rows, self.places[0], self.type)


class First(_SelectedValue):
    """`first` and `any_value`."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs, counted=True)
        self._won = np.empty(BLOCK, dtype=np.uint8)

    def _keep_winners(
        self, table: Writable, rows: NDArray[np.int64], start: int, column: Operand, counts: Mask
    ) -> None:
        numeric.select_first(table.words, rows, start, *self.places[1], counts, self._won)
        self._value.assign(table, rows, start, column, self._won)


class Last(_SelectedValue):
    """`last`: counted where rows that pass a filter may have a null value."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        counted = call.filter is not None and not call.options.get("ignore_nulls", False)
        super().__init__(call, inputs, counted=counted)

    def _keep_winners(
        self, table: Writable, rows: NDArray[np.int64], start: int, column: Operand, counts: Mask
    ) -> None:
        stop = start + len(rows)
        won = counts[start:stop] if counts.size else np.ones(len(rows), dtype=np.uint8)
        if len(self.columns) > 1:
            table.words[rows[won.astype(np.bool_)], self.places[1].offset] = 1
        self._value.assign(table, rows, start, column, won)
