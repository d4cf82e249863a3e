"""A user's function over groups with state, on one partition: its state here, its code wherever the caller is.

A key has one row: its state and, if there are timeouts, when it times out, which also is the row's time of expiry. Keys
that time out are looked for once all rows are worked through; what is set then waits for the next batch.

The function's calls are a processor's (see `calls`), but for these:

- the table `main` has one column, `value`: the state of each key, null for none.
- the phase `timers` is for keys that time out: `count` is 0, and there is no table `due`.
- what changed has the state and, as `expiry`, the time at which the key times out, null for none. A key that is not in
  it keeps what it has.
- the phase `end` does not come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.layout import NEVER, Rows
from millpond.operators.columns.encode import Leaf, as_it_is
from millpond.operators.kind import Opening
from millpond.operators.processors.calls import COUNT, KEYS, ROWS, Changed, Phase
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
        """Have the user's function called for all rows, then for keys that time out; seal what it changed."""
        self._call_for_rows()
        if self.spec.expires:
            self._fire()
        return {MAIN: self._variables[MAIN].seal()}

    @staticmethod
    def _compared(leaf: Leaf) -> Leaf:
        """As SQL groups: Spark compares these keys before they are sent to Python."""
        return leaf

    def _fire(self) -> None:
        """Call the user's function for the keys that time out now: before, not at, the time that it is."""
        limit = self._times.closed if self.spec.time_mode == "event" else self._times.processing
        names = ["__hash", *(field.name for field in self.spec.key_fields), STATE]
        due = Input(self.spec.key_fields, (Field(STATE, self.spec.tables[MAIN][0]),), self._make_table, as_it_is)
        try:
            for hashes, keys, held in self._variables[MAIN].take_out(limit - 1):
                due.add(pa.RecordBatch.from_arrays([pa.array(hashes), *keys, held], names=names))
            for group in due.groups():
                self._fired += len(group.counts)
                self._call("timers", group)
        finally:
            due.close()

    def _tables(self, phase: Phase, group: Group) -> tuple[dict[str, Rows], dict[str, pa.RecordBatch]]:
        """The keys as the table takes them, and what a call about them is sent."""
        one, arranged = self._variables[MAIN], self._arranged["rows"]
        keys = one.keys(group.hashes, group.keys)
        names = [field.name for field in self.spec.key_fields]
        if phase == "rows":
            counts = group.counts
            (held,) = one.read(keys)
        else:
            counts = np.zeros(len(group.counts), np.int64)
            held = group.last
        states = pc.struct_field(held, STATE) if self.spec.expires else held
        tables = {
            KEYS: pa.RecordBatch.from_arrays([*group.keys, pa.array(counts)], names=[*names, COUNT]),
            MAIN: pa.RecordBatch.from_arrays([states], names=["value"]),
        }
        if phase == "rows":
            tables[ROWS] = arranged.rows(group)
        return {MAIN: keys}, tables

    def _write(
        self,
        group: Group,
        keys: dict[str, Rows],
        sent: dict[str, pa.RecordBatch],
        answered: Changed,
    ) -> None:
        """Write what a call has changed."""
        words, heap = keys[MAIN]
        left = np.ones(len(words), np.bool_)
        for _, changed in answered:
            at = changed.column("at").to_numpy()
            self._keep(Rows(words[at], heap), changed.column("value"), changed.column("expiry"))
            left[at] = False
        if ROWS not in sent and left.any():  # a timeout that was left as it is comes again
            kept = group.rows[-1].filter(pa.array(left))
            self._keep(Rows(words[left], heap), *(pc.struct_field(kept, name) for name in (STATE, TIMEOUT)))

    def _keep(self, keys: Rows, states: pa.Array, timeouts: pa.Array) -> None:
        """Write what keys have from now on: nothing, where they have neither a state nor a timeout."""
        one = self._variables[MAIN]
        if not self.spec.expires:
            one.write(keys, states, None)
            return
        nothing = pc.and_(states.is_null(), timeouts.is_null())
        fields = list(one.variable.type.arrow)
        values = pa.StructArray.from_arrays([states, timeouts], fields=fields, mask=nothing)
        one.write(keys, values, timeouts.fill_null(NEVER))
