"""Accumulators of groups whose rows are all there (FlowKV's append pattern), and the plainest: the rows themselves.

They belong to tables that live for one piece of rows only, in which each group is whole (`holistic.py`,
`closed_sessions.py`): what they keep in the table is the number of the group.
"""

# ruff: noqa: D102 (what a method does is said once, in `Accumulator`)

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.kernels.sort import order_by_hash
from millpond.layout import Rows
from millpond.operators.accumulators import Accumulator, StateColumn
from millpond.operators.decode import ints
from millpond.operators.encode import Mask, Operand
from millpond.operators.spec import AggregateCall
from millpond.operators.types import DataType

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable


class WholeGroups(Accumulator):
    """One call over groups of rows that are all there."""

    columns = (StateColumn("word"),)

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs)
        self._groups: list[NDArray[np.int64]] = []
        self._count = 0
        self._results: pa.Array | None = None

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        offset = self.places[0].offset
        numbers = table.words[rows, offset].view(np.int64)
        if not numbers.all():
            fresh = np.unique(rows[numbers == 0])
            table.words[fresh, offset] = np.arange(self._count + 1, self._count + 1 + len(fresh), dtype=np.uint64)
            self._count += len(fresh)
            numbers = table.words[rows, offset].view(np.int64)
        self._groups.append(numbers - 1)
        self._results = None

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        raise UsageError(f"{self.call.function} has no partial states.", action="Give it all rows of a group at once.")

    def result(self, rows: Rows) -> pa.Array:
        if self._results is None:
            groups = np.concatenate(self._groups) if self._groups else np.empty(0, np.int64)
            self._results = self._all(groups, self._count)
        return self._results.take(pa.array(ints(rows, self.places[0].offset) - 1))

    @abstractmethod
    def _all(self, groups: NDArray[np.int64], count: int) -> pa.Array:
        """The results of groups 0 to `count`; `groups` are the numbers of the loaded rows' groups."""


class Gathered(WholeGroups):
    """`rows`: all rows of a group, nulls included, as a list of structs, in the order in which they were kept."""

    def __init__(self, call: AggregateCall, inputs: Sequence[DataType]) -> None:
        super().__init__(call, inputs)
        self._batches: list[list[pa.Array]] = []

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        raise UsageError("Rows are gathered as they are.", action="Call `gather`.")

    def gather(self, columns: Sequence[pa.Array]) -> None:
        """Take up the inputs of an Arrow batch, instead of `load`."""
        self._batches.append(list(columns))

    def _all(self, groups: NDArray[np.int64], count: int) -> pa.Array:
        _, order = order_by_hash(groups.view(np.uint64))
        starts = np.searchsorted(groups[order], np.arange(count + 1), "left").astype(np.int32)
        taken = pa.array(order)
        columns = [pa.concat_arrays(parts).take(taken) for parts in zip(*self._batches, strict=True)]
        listed = self.type.arrow
        rows = pa.StructArray.from_arrays(columns, fields=list(listed.value_type))
        return pa.ListArray.from_arrays(pa.array(starts), rows, type=listed)
