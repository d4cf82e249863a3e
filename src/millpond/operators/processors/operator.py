"""A user's processor on one partition: the state is here, and a caller runs the user's code.

Rows are kept until the batch's input is complete. Then keys are processed in the order of their hashes, some thousand
at a time. Their state in all variables travels with their rows, in columns, and the changes come back. After the rows,
the timers fire that are due by then; a timer that is set meanwhile waits for the next batch. In the first batch of a
query, the rows of an initial state come before all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from millpond.errors import UsageError
from millpond.layout import NEVER, HashRange, Rows, Words
from millpond.operators.columns.decode import OversizeError
from millpond.operators.columns.encode import Leaf, bitwise_leaf, zero_normalised_leaf
from millpond.operators.event_time_slices import times_of
from millpond.operators.kind import Opening
from millpond.operators.processors.calls import COUNT, DUE, KEYS, ROWS, Caller, Changes, FetchState, Phase
from millpond.operators.processors.column_order import ColumnOrder
from millpond.operators.processors.input import MAX_KEYS, Group, Input
from millpond.operators.processors.parts import Parts
from millpond.operators.processors.stored_variable import StoredVariable
from millpond.operators.processors.tables import variables
from millpond.operators.protocol import MakeTable, Times
from millpond.spec.kinds.processor import TIMERS, ProcessorSpec
from millpond.spec.operators import Field
from millpond.spec.types import parse_type
from millpond.stores.memory.spool import Spool

if TYPE_CHECKING:
    from millpond.stores.protocol import Table, TableDelta

_TIME = Field("time", "bigint")
_MAX_NAMED_KEYS = 5  # keys that the error names when a call is lost
_STATE_BYTES_PER_CALL = 16 << 20  # approximate bytes of state in one call: sent, requested as parts, or changed
_FIRST_KEYS = 512  # keys of the first call, before the size of their state is known
_MAX_GROWTH = 8  # factor by which the number of keys grows from call to call, at most


def open_processor(spec: ProcessorSpec, opening: Opening) -> ProcessorOperator:
    """Open a processor's state."""
    return ProcessorOperator(spec, opening.make_table, opening.memory // 16, opening.existing)


class ProcessorOperator:
    """A `ProcessorSpec` on one partition.

    Args:
        spec: the processor.
        make_table: opens the partition's tables.
        memory: bytes of output that are kept in memory.
        existing: the names of the tables that the state has.

    Attributes:
        caller: calls the user's code; to be set before `finish`.
        lost: see `CallsUserCode`.
        initial_rows: the rows of the initial state in the first batch of a query; to be set before `finish`.
    """

    def __init__(self, spec: ProcessorSpec, make_table: MakeTable, memory: int, existing: Collection[str] = ()) -> None:
        self.spec = spec
        self.caller: Caller | None = None
        self.lost = ""
        self.initial_rows: Iterable[pa.RecordBatch] = ()
        self._make_table = make_table
        self._variables = {
            name: StoredVariable(name, variable, make_table) for name, variable in variables(spec).items()
        }
        self._parts = Parts(spec, make_table, existing)
        idle = {variable.table for variable in spec.variables if variable.idle}
        self._active_variables = {name: variable for name, variable in self._variables.items() if name not in idle}
        self._column_orders = {"rows": ColumnOrder(spec.columns, spec.keys)}
        if spec.initial is not None:
            self._column_orders["initial"] = ColumnOrder(spec.initial.columns, spec.initial.keys)
        self._keys_per_call: dict[Phase, int] = dict.fromkeys(("initial", "rows", "timers"), _FIRST_KEYS)
        self._fetched_bytes = 0
        self._times = Times()
        self._input: Input | None = None
        self._output = Spool(None, memory)
        self._called = self._fired = 0
        self.late_rows = 0

    @property
    def tables(self) -> dict[str, Table]:
        """The tables of the variables and of the timers, by name."""
        return {name: variable.table for name, variable in self._variables.items()} | self._parts.tables

    @property
    def extra_metrics(self) -> dict[str, float]:
        """The number of keys with rows, and of timers that were due."""
        return {"called_keys": float(self._called), "due_timers": float(self._fired)}

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._times = times
        self._called = self._fired = self.late_rows = 0
        self._output.clear()
        self._drop_input()
        self._input = self._make_input("rows")
        for variable in self._variables.values():
            variable.begin(version)
        self._parts.begin(version)

    def passes(self, rows: int) -> int:
        """Return 1: the batch is sorted once it is complete."""
        return 1

    def prefetch(self, hashes: Words, needed: int) -> None:
        """Prefetch the state of keys in all variables (see `Prefetchable`)."""
        for variable in self._active_variables.values():
            variable.table.prefetch(hashes, needed, needed)

    def restrict(self, range_: HashRange) -> None:
        """Do nothing: the batch is sorted once it is complete."""

    def process(self, batch: pa.RecordBatch) -> None:
        """Keep rows: the column `__hash`, then those of the spec."""
        if self.spec.time is not None:
            position = self.spec.time.column
            times = times_of(batch.column(1 + position), parse_type(self.spec.columns[position].type))
            on_time = times > self._times.late * 1000
            if not on_time.all():
                self.late_rows += int(np.count_nonzero(~on_time))
                batch = batch.filter(pa.array(on_time))
        assert self._input is not None
        self._input.add(batch.select(self._column_orders["rows"].order))

    def _make_input(self, phase: Phase) -> Input:
        """Return a store for rows until all are there."""
        column_order = self._column_orders[phase]
        return Input(column_order.keys, column_order.others, self._make_table, self._comparison_leaf, phase)

    @staticmethod
    def _comparison_leaf(leaf: Leaf) -> Leaf:
        """Convert a key column so that keys are equal exactly if their rows belong together.

        Spark's worker compares keys in Python, where 0.0 equals −0.0. State is stored bit by bit under the key of the
        first row.
        """
        return zero_normalised_leaf(leaf)

    def finish(self) -> dict[str, TableDelta]:
        """Call the user's code for all rows, then for timers that are due; seal what it changed."""
        for variable in self.spec.variables:
            # `init` runs in each batch, so a variable that it purges starts empty each time.
            if variable.name in self.spec.purged:
                self._variables[variable.table].empty(self._make_table)
                self._parts.empty(variable.parts)
        self._call_for_initial_state(self.initial_rows)
        self._call_for_rows()
        if self.spec.timed:
            self._fire()
        self._call_user("end", {}, lambda table, requested: pa.nulls(len(requested)))
        # Times to live exist in processing time only, as in Spark.
        if self.spec.due_by_processing_time:
            for name, stored in self._variables.items():
                if name != TIMERS:
                    stored.evict(self._times.processing)
            self._parts.evict(self._times.processing)
        return {name: stored.seal() for name, stored in self._variables.items()} | self._parts.seal()

    def _call_for_rows(self) -> None:
        """Call the user's code for all rows of the batch."""
        assert self._input is not None
        for variable in self._active_variables.values():
            variable.expect(self._input.rows)
        for group in self._input.groups():
            self._called += len(group.counts)
            self._call("rows", group)
        self._drop_input()

    def _call_for_initial_state(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Call the user's code for rows of the initial state: the column `__hash`, then those of the spec."""
        if self.spec.initial is None:
            return
        initial = self._make_input("initial")
        try:
            for batch in batches:
                initial.add(batch.select(self._column_orders["initial"].order))
            for variable in self._active_variables.values():
                variable.expect(initial.rows)
            for group in initial.groups():
                self._call("initial", group)
        finally:
            initial.close()

    def _fire(self) -> None:
        """Call the user's code for the timers that are due now, but not for timers that it sets meanwhile."""
        limit = self._times.closed if self.spec.time_mode == "event" else self._times.processing
        due = Input(self.spec.key_fields, (_TIME,), self._make_table, bitwise_leaf)
        try:
            names = ["__hash", *(field.name for field in self.spec.key_fields), _TIME.name]
            for piece in self._variables[TIMERS].take_due(limit):
                lengths = np.diff(piece.times.offsets.to_numpy())
                parents = pa.array(np.repeat(np.arange(len(lengths)), lengths))
                keys = [key.take(parents) for key in piece.columns]
                hashes = pa.array(piece.hashes[parents.to_numpy()])
                due.add(pa.RecordBatch.from_arrays([hashes, *keys, piece.times.flatten()], names=names))
            for group in due.groups():
                self._fired += int(group.counts.sum())
                self._call("timers", group)
        finally:
            due.close()

    def _call(self, phase: Phase, group: Group) -> None:
        """Call the user's code for keys and write its changes, with as many keys per call as their state allows."""
        position = 0
        while position < len(group.counts):
            part = group.cut(position, min(position + self._keys_per_call[phase], len(group.counts)))
            try:
                keys, tables = self._tables(phase, part)
            except OversizeError as error:
                if len(part.counts) == 1:
                    raise UsageError(
                        f"The state for {_describe_keys(phase, self._keys(part))} takes more than 2 GiB.",
                        action="Keep less of it for each key, or share it out among several variables.",
                    ) from error
                # Halve the call until its state fits into one table.
                self._keys_per_call[phase] = len(part.counts) // 2
                continue
            self._fetched_bytes = 0
            try:
                changes = self._call_user(phase, tables, partial(self._fetch_state, phase, part))
            except ConnectionError:
                # The process that ran the user's code is gone, so the error can only name the keys of the call.
                self.lost = _describe_keys(phase, tables[KEYS])
                raise
            self._write(part, keys, tables, changes)
            self._adapt_call_size(
                phase, len(part.counts), [tables[name] for name in keys], [changed for _, changed in changes]
            )
            position += len(part.counts)

    def _fetch_state(self, phase: Phase, group: Group, table: str, requested: pa.RecordBatch) -> pa.Array:
        """Return more rows of a call's key, or the requested parts of keys (see `Parts.read`), which stay in memory."""
        if table == ROWS:
            assert group.pieces is not None
            return self._column_orders[phase].piece(group.pieces, requested.column("part")[0].as_py())
        parts = self._parts.read(group, table, requested)
        self._fetched_bytes += parts.nbytes
        return parts

    def _tables(self, phase: Phase, group: Group) -> tuple[dict[str, Rows], dict[str, pa.RecordBatch]]:
        """Return the keys encoded for the variables' tables, and the tables of a call about them."""
        keys = {name: variable.keys(group.hashes, group.keys) for name, variable in self._active_variables.items()}
        tables = {KEYS: self._keys(group)}
        if column_order := self._column_orders.get(phase):
            tables[ROWS] = column_order.rows(group)
        else:
            tables[DUE] = pa.RecordBatch.from_arrays([group.last], names=[_TIME.name])
        for name, variable in self._active_variables.items():
            columns = variable.read(keys[name])
            if phase == "timers" and name == TIMERS:
                # `take_due` has removed the due timers from the state, but the processor still lists them.
                columns = [_due_and_remaining(group, *columns)]
            tables[name] = pa.RecordBatch.from_arrays(columns, names=["value", "head"][: len(columns)])
        return keys, tables

    def _keys(self, group: Group) -> pa.RecordBatch:
        """Return the table of keys of a call."""
        names = [field.name for field in self.spec.key_fields]
        return pa.RecordBatch.from_arrays([*group.keys, pa.array(group.counts)], names=[*names, COUNT])

    def _write(
        self,
        group: Group,
        keys: dict[str, Rows],
        sent: dict[str, pa.RecordBatch],
        changes: Changes,
    ) -> None:
        """Write the changes of a call."""
        for name, changed in changes:
            if name in self._parts:
                self._parts.write(name, group, changed)
                continue
            rows = keys[name].take(changed.column("at").to_numpy())
            heads = self._parts.remove_uncovered(name, group, sent[name], changed)
            self._active_variables[name].write(rows, changed.column("value"), changed.column("expiry"), heads)

    def _adapt_call_size(
        self, phase: Phase, keys: int, sent: Iterable[pa.RecordBatch], changes: Iterable[pa.RecordBatch]
    ) -> None:
        """Adapt the number of keys of the phase's next call to the state of this one.

        Args:
            phase: the phase of the call.
            keys: the number of keys of the call.
            sent: their state.
            changes: the changes.
        """
        # State that the user requested in parts counts as if it had been sent.
        read = self._fetched_bytes + sum(table.nbytes for table in sent)
        size = max(read, sum(table.nbytes for table in changes))
        limit = min(MAX_KEYS, _STATE_BYTES_PER_CALL * keys // max(1, size), _MAX_GROWTH * self._keys_per_call[phase])
        self._keys_per_call[phase] = max(1, limit)

    def _call_user(self, phase: Phase, tables: dict[str, pa.RecordBatch], answer: FetchState) -> Changes:
        if self.caller is None:
            raise UsageError("No caller of the processor is set.", action="Run the query with millpond.writeStream.")
        times = (self._times.processing, self._times.closed) if self.spec.timed else (-1, -1)
        return self.caller(phase, times, tables, self._add_output, answer)

    def _add_output(self, batch: pa.RecordBatch) -> None:
        """Take output rows of the user's code."""
        # Operators above would drop such rows as late, without a word; Spark fails, too.
        position = self.spec.emitted
        if position is not None:
            field = self.spec.outputs[position]
            earliest = int(times_of(batch.column(position), parse_type(field.type)).min(initial=NEVER))
            if earliest <= self._times.late * 1000:
                raise UsageError(
                    f"[EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED] The processor gave out a row with "
                    f"eventTime={earliest} (µs, {field.name}), not later than watermark={self._times.late} (ms).",
                    action="Give out rows later than the watermark of the batch before, or without an event time.",
                )
        self._output.add(batch)

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the output of the user's code."""
        return self._output.read()

    def _drop_input(self) -> None:
        if self._input is not None:
            self._input.close()
            self._input = None

    def close(self) -> None:
        """Release all memory."""
        self._drop_input()
        self._output.clear()
        for variable in self._variables.values():
            variable.close()
        self._parts.close()


def _due_and_remaining(group: Group, remaining: pa.Array) -> pa.Array:
    """Return the timers of keys: those that are due, and the remaining ones."""
    ends = np.cumsum(group.counts)
    due = pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends]).astype(np.int32)), group.last)
    lengths = np.diff(due.offsets.to_numpy())
    remaining_lengths = remaining.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    keys = np.arange(len(lengths))
    owners = np.concatenate([np.repeat(keys, lengths), np.repeat(keys, remaining_lengths)])
    values = pa.concat_arrays([due.flatten(), remaining.flatten()])
    offsets = np.concatenate([[0], np.cumsum(lengths + remaining_lengths)]).astype(np.int32)
    values = values.take(pa.array(np.argsort(owners, kind="stable")))
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=remaining.type)


def _describe_keys(phase: Phase, keys: pa.RecordBatch) -> str:
    """Describe the keys of a call for an error message: the phase and the first keys."""
    columns = [column.slice(0, _MAX_NAMED_KEYS).to_pylist() for column in keys.columns[:-1]]
    named = ", ".join(map(repr, zip(*columns, strict=True)))
    more = f" and {keys.num_rows - _MAX_NAMED_KEYS} more" if keys.num_rows > _MAX_NAMED_KEYS else ""
    return f"{phase} of {named}{more}"
