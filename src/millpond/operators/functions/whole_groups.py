"""Accumulators of groups whose rows are all there (the append pattern of FlowKV §3.1), and lists of rows.

They belong to temporary tables for one piece of rows, in which each group is whole (`aggregate/buffered.py`,
`sessions/closed.py`). Their only state in the table is the number of the group.
"""

# ruff: noqa: D102 (the methods are documented in `Accumulator`)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import Rows
from millpond.operators.columns.decode import LIMIT, OversizeError
from millpond.operators.columns.encode import ALL, Mask, Operand, and_masks, concatenate_masks, plain, validity
from millpond.operators.columns.offsets import bounds_of, spans
from millpond.operators.functions.accumulators import Accumulator, StateColumn
from millpond.spec.functions import ROWS
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable


class WholeGroups(Accumulator):
    """One call over groups whose rows are all there; `result` is called when all rows have been loaded.

    Attributes:
        count: the number of groups; groups are numbered from 0.
    """

    columns = (StateColumn("word"),)

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs)
        self.count = 0
        self._groups: list[NDArray[np.int64]] = []

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        offset = self.places[0].offset
        numbers = table.words[rows, offset].view(np.int64)
        if not numbers.all():
            # Zero is the word of a fresh row, so groups are numbered from 1 in the table.
            fresh = np.unique(rows[numbers == 0])
            table.words[fresh, offset] = np.arange(self.count + 1, self.count + 1 + len(fresh), dtype=np.uint64)
            self.count += len(fresh)
            numbers = table.words[rows, offset].view(np.int64)
        self._groups.append(numbers - 1)

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        raise UsageError(f"{self.call.function} has no partial states.", action="Give it all rows of a group at once.")

    @property
    def groups(self) -> NDArray[np.int64]:
        """The number of each loaded row's group."""
        return np.concatenate(self._groups)

    def numbers(self, rows: Rows) -> NDArray[np.int64]:
        """Return the numbers of the groups of rows of the table."""
        return rows.ints(self.places[0].offset) - 1


class GatheredRows(WholeGroups):
    """A list of each group's rows, in the order in which they were kept.

    `rows`: structs of all inputs, nulls included. `collect_list`: the one input, without nulls.
    """

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs)
        self._parts: list[pa.Array] = []
        self._counts: list[Mask] = []
        self._order = self._bounds = np.empty(0, np.int64)

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        raise UsageError("Rows are gathered as they are.", action="Call `gather`.")

    def gather(self, columns: Sequence[pa.Array], counts: Mask) -> None:
        """Load the inputs of an Arrow batch, in place of `load`."""
        columns = [plain(column) for column in columns]
        if self.call.function == ROWS:
            self._parts.append(pa.StructArray.from_arrays(columns, fields=list(self.type.arrow.value_type)))
            self._counts.append(ALL)
        else:
            self._parts.append(columns[0])
            self._counts.append(and_masks(counts, validity(columns[0])))

    def result(self, rows: Rows) -> pa.Array:
        offsets, values = self._lists(rows)
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values, type=self.type.arrow)

    def _lists(self, rows: Rows) -> tuple[NDArray[np.int64], pa.Array]:
        """Return the offsets of the lists of the table's rows, with the end of the last, and the elements."""
        if not len(self._bounds):
            self._sort_by_group()
        members, offsets = spans(self._bounds, self.numbers(rows))
        if len(members) > LIMIT:
            raise OversizeError
        return offsets, self._take(self._order[members])

    def _sort_by_group(self) -> None:
        """Sort the rows that count by their groups."""
        counts = concatenate_masks(self._counts, [len(part) for part in self._parts])
        if sum(part.nbytes for part in self._parts) <= LIMIT:
            self._parts = [pa.concat_arrays(self._parts)]
        groups = self.groups
        if counts.size:
            counting = np.flatnonzero(counts)
            groups = groups[counting]
        _, self._order = order_by_hash(groups.view(np.uint64))
        if counts.size:
            self._order = counting[self._order]
        self._bounds = bounds_of(np.bincount(groups, minlength=self.count))

    def _take(self, places: NDArray[np.int64]) -> pa.Array:
        """Return the rows with these numbers."""
        if len(self._parts) == 1:
            (whole,) = self._parts
            in_order = len(places) == len(whole) and np.array_equal(places, np.arange(len(whole)))
            return whole if in_order else whole.take(pa.array(places))
        _, order = order_by_hash(places.view(np.uint64))
        firsts = bounds_of(np.array([len(part) for part in self._parts]))
        cuts = np.searchsorted(places[order], firsts)
        pieces = [
            part.take(pa.array(places[order[low:high]] - first))
            for part, first, low, high in zip(self._parts, firsts[:-1], cuts[:-1], cuts[1:], strict=True)
        ]
        if sum(part.nbytes for part in pieces) > LIMIT:
            raise OversizeError
        inverse = np.empty(len(places), np.int64)
        inverse[order] = np.arange(len(places))
        return pa.concat_arrays(pieces).take(pa.array(inverse))
