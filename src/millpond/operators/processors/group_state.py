"""A user's function over groups with state on one partition: the state is here, and a caller runs the user's code.

A key has one row: its state and, if there are timeouts, its timeout, which is also the row's time of expiry. Timeouts
are processed after all rows; one that is set then waits for the next batch.

The function's calls are a processor's (see `calls`), with these differences:

- the table `main` has one column, `value`: the state of each key, null for none.
- the phase `timers` is for keys that time out: `count` is 0, and there is no table `due`.
- changes have the state and, as `expiry`, the time at which the key times out, null for none. A key without a change
  keeps its state and timeout.
- there is no phase `end`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.layout import NEVER, Rows
from millpond.operators.columns.encode import Leaf, bitwise_leaf
from millpond.operators.kind import Opening
from millpond.operators.processors.calls import COUNT, KEYS, ROWS, Changes, Phase
from millpond.operators.processors.input import Group, Input
from millpond.operators.processors.operator import ProcessorOperator
from millpond.operators.protocol import MAIN
from millpond.spec.kinds.group_state import STATE, TIMEOUT, GroupStateSpec
from millpond.spec.operators import Field

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta


def open_group_state(spec: GroupStateSpec, opening: Opening) -> GroupStateOperator:
    """Open the state of a function over groups."""
    return GroupStateOperator(spec, opening.make_table, opening.memory // 16)


class GroupStateOperator(ProcessorOperator):
    """A `GroupStateSpec` on one partition; arguments and attributes as of `ProcessorOperator`."""

    spec: GroupStateSpec

    def finish(self) -> dict[str, TableDelta]:
        """Call the user's function for all rows, then for keys that time out; seal what it changed."""
        self._call_for_rows()
        if self.spec.expires:
            self._fire()
        return {MAIN: self._variables[MAIN].seal()}

    @staticmethod
    def _comparison_leaf(leaf: Leaf) -> Leaf:
        """Keep the column: Spark compares these keys in SQL, before Python gets them."""
        return leaf

    def _fire(self) -> None:
        """Call the user's function for the keys whose timeout is before (not at) the current time."""
        limit = self._times.closed if self.spec.time_mode == "event" else self._times.processing
        names = ["__hash", *(field.name for field in self.spec.key_fields), STATE]
        due = Input(self.spec.key_fields, (Field(STATE, self.spec.tables[MAIN][0]),), self._make_table, bitwise_leaf)
        try:
            for hashes, keys, state in self._variables[MAIN].take_timed_out(limit - 1):
                due.add(pa.RecordBatch.from_arrays([pa.array(hashes), *keys, state], names=names))
            # All are taken out first: a timeout that a call sets must not fire within the same batch.
            for group in due.groups():
                self._fired += len(group.counts)
                self._call("timers", group)
        finally:
            due.close()

    def _tables(self, phase: Phase, group: Group) -> tuple[dict[str, Rows], dict[str, pa.RecordBatch]]:
        """Return the keys encoded for the table, and the tables of a call about them."""
        variable, column_order = self._variables[MAIN], self._column_orders["rows"]
        keys = variable.keys(group.hashes, group.keys)
        names = [field.name for field in self.spec.key_fields]
        if phase == "rows":
            counts = group.counts
            (state,) = variable.read(keys)
        else:
            counts = np.zeros(len(group.counts), np.int64)
            state = group.last
        states = pc.struct_field(state, STATE) if self.spec.expires else state
        tables = {
            KEYS: pa.RecordBatch.from_arrays([*group.keys, pa.array(counts)], names=[*names, COUNT]),
            MAIN: pa.RecordBatch.from_arrays([states], names=["value"]),
        }
        if phase == "rows":
            tables[ROWS] = column_order.rows(group)
        return {MAIN: keys}, tables

    def _write(
        self,
        group: Group,
        keys: dict[str, Rows],
        sent: dict[str, pa.RecordBatch],
        changes: Changes,
    ) -> None:
        """Write the changes of a call."""
        rows = keys[MAIN]
        unchanged = np.ones(rows.count, np.bool_)
        for _, changed in changes:
            positions = changed.column("at").to_numpy()
            self._write_state(rows.take(positions), changed.column("value"), changed.column("expiry"))
            unchanged[positions] = False
        # `take_timed_out` removed the rows, so a timeout that the call did not change is written back
        if ROWS not in sent and unchanged.any():
            kept = group.rows[-1].filter(pa.array(unchanged))
            self._write_state(rows.take(unchanged), *(pc.struct_field(kept, name) for name in (STATE, TIMEOUT)))

    def _write_state(self, keys: Rows, states: pa.Array, timeouts: pa.Array) -> None:
        """Write the new state and timeout of keys; a key with neither is removed."""
        variable = self._variables[MAIN]
        if not self.spec.expires:
            variable.write(keys, states, None)
            return
        nothing = pc.and_(states.is_null(), timeouts.is_null())
        fields = list(variable.variable.type.arrow)
        values = pa.StructArray.from_arrays([states, timeouts], fields=fields, mask=nothing)
        variable.write(keys, values, timeouts.fill_null(NEVER))
