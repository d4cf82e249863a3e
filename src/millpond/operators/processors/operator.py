"""A user's processor on one partition: its state here, its code wherever the caller is.

Rows are kept until the batch's input is whole. Then keys are worked through in the order of their hashes, some thousand
at a time: what the variables have of them travels with their rows, in columns, and what has changed comes back. After
the rows come the timers that are due by then; a timer that is set while these fire waits for the next batch. In the
first batch of a query the rows of an initial state come before all others.
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
from millpond.operators.columns.encode import Leaf, as_it_is, of_either_zero
from millpond.operators.event_time_slices import times_of
from millpond.operators.kind import Opening
from millpond.operators.processors.arranged import Arranged
from millpond.operators.processors.calls import COUNT, DUE, KEYS, ROWS, Ask, Caller, Changed, Phase
from millpond.operators.processors.input import KEYS as MOST_KEYS
from millpond.operators.processors.input import Group, Input
from millpond.operators.processors.parts import Parts
from millpond.operators.processors.stored import Stored
from millpond.operators.processors.tables import variables
from millpond.operators.protocol import MakeTable, Times
from millpond.spec.kinds.processor import TIMERS, ProcessorSpec
from millpond.spec.operators import Field
from millpond.spec.types import parse_type
from millpond.stores.memory.spool import Spool

if TYPE_CHECKING:
    from millpond.stores.protocol import Table, TableDelta

_TIME = Field("time", "bigint")
_NAMED = 5  # keys that are named where a call is lost
_STATE = 16 << 20  # bytes of state that a call is sent, with the parts that it asks for, or changes, roughly
_SLOWLY = 512  # keys of the first call, of which nothing is known
_FASTER = 8  # times as many keys has the next call, at most


def open_processor(spec: ProcessorSpec, opening: Opening) -> ProcessorOperator:
    """Open a processor's state."""
    return ProcessorOperator(spec, opening.make_table, opening.memory // 16, opening.existing)


class ProcessorOperator:
    """A `ProcessorSpec` on one partition.

    Args:
        spec: what it is. make_table: opens the partition's tables. memory: bytes of output that are kept in memory.
        existing: the names of the tables that the state has.

    Attributes:
        caller: calls the user's code; to be set before `finish`.
        lost: see `Calling`.
        initial_rows: those of the initial state, if the batch is the first; to be set before `finish`.
    """

    def __init__(self, spec: ProcessorSpec, make_table: MakeTable, memory: int, existing: Collection[str] = ()) -> None:
        self.spec = spec
        self.caller: Caller | None = None
        self.lost = ""
        self.initial_rows: Iterable[pa.RecordBatch] = ()
        self._make_table = make_table
        self._memory = memory
        self._variables = {name: Stored(name, one, make_table) for name, one in variables(spec).items()}
        self._parts = Parts(spec, make_table, existing)
        idle = {one.table for one in spec.variables if one.idle}
        self._asked_for = {name: one for name, one in self._variables.items() if name not in idle}
        self._arranged = {"rows": Arranged(spec.columns, spec.keys)}
        if spec.initial is not None:
            self._arranged["initial"] = Arranged(spec.initial.columns, spec.initial.keys)
        self._together: dict[Phase, int] = dict.fromkeys(("initial", "rows", "timers"), _SLOWLY)
        self._fetched = 0
        self._times = Times()
        self._input: Input | None = None
        self._shown = Spool(None, memory)
        self._called = self._fired = 0
        self.late_rows = 0

    @property
    def tables(self) -> dict[str, Table]:
        """The variables' tables, and that of timers, by name."""
        return {name: one.table for name, one in self._variables.items()} | self._parts.tables

    @property
    def figures(self) -> dict[str, float]:
        """How many keys had rows, and how many timers were due."""
        return {"called_keys": float(self._called), "due_timers": float(self._fired)}

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._times = times
        self._called = self._fired = self.late_rows = 0
        self._shown.close()
        self._shown = Spool(None, self._memory)
        self._drop_input()
        self._input = self._kept("rows")
        for one in self._variables.values():
            one.begin(version)
        self._parts.begin(version)

    def passes(self, rows: int) -> int:
        """In how many passes over ranges of the hash to work through a batch: one, in any order."""
        return 1

    def announce(self, hashes: Words, needed: int) -> None:
        """Let what variables have of some keys be read (see `Announced`)."""
        for one in self._asked_for.values():
            one.table.announce(hashes, needed, needed)

    def narrow(self, range_: HashRange) -> None:
        """Nothing: rows are taken in any order."""

    def process(self, batch: pa.RecordBatch) -> None:
        """Keep rows: the column `__hash`, then those of the spec."""
        if self.spec.time is not None:
            at = self.spec.time.column
            times = times_of(batch.column(1 + at), parse_type(self.spec.columns[at].type))
            on_time = times > self._times.late * 1000
            if not on_time.all():
                self.late_rows += int(np.count_nonzero(~on_time))
                batch = batch.filter(pa.array(on_time))
        assert self._input is not None
        self._input.add(batch.select(self._arranged["rows"].order))

    def _kept(self, phase: Phase) -> Input:
        """What keeps rows until all are there."""
        arranged = self._arranged[phase]
        return Input(arranged.keys, arranged.others, self._make_table, self._compared, phase)

    @staticmethod
    def _compared(leaf: Leaf) -> Leaf:
        """What a column of keys becomes, so that those are the same whose rows come with one call.

        As in Spark's worker, where Python compares them. What a call reads and writes is kept under the key of its
        first row, bit by bit.
        """
        return of_either_zero(leaf)

    def finish(self) -> dict[str, TableDelta]:
        """Have the user's code called for all rows, then for timers that are due; seal what it changed."""
        for variable in self.spec.variables:
            if variable.name in self.spec.purged:
                self._variables[variable.table].empty(self._make_table)
                self._parts.empty(variable.parts)
        self._begin_with(self.initial_rows)
        self._call_for_rows()
        if self.spec.timed:
            self._fire()
        self._ask("end", {}, lambda table, asked: pa.nulls(len(asked)))
        if self.spec.ticks:
            for name, one in self._variables.items():
                if name != TIMERS:
                    one.evict(self._times.processing)
            self._parts.evict(self._times.processing)
        return {name: one.seal() for name, one in self._variables.items()} | self._parts.seal()

    def _call_for_rows(self) -> None:
        """Have the user's code called for all rows of the batch."""
        assert self._input is not None
        for one in self._asked_for.values():
            one.expect(self._input.rows)
        for group in self._input.groups():
            self._called += len(group.counts)
            self._call("rows", group)
        self._drop_input()

    def _begin_with(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Have the user's code called for rows of the initial state: the column `__hash`, then those of the spec."""
        if self.spec.initial is None:
            return
        initial = self._kept("initial")
        try:
            for batch in batches:
                initial.add(batch.select(self._arranged["initial"].order))
            for one in self._asked_for.values():
                one.expect(initial.rows)
            for group in initial.groups():
                self._call("initial", group)
        finally:
            initial.close()

    def _fire(self) -> None:
        """Call the user's code for the timers that are due now, and not for those that it sets meanwhile."""
        limit = self._times.closed if self.spec.time_mode == "event" else self._times.processing
        due = Input(self.spec.key_fields, (_TIME,), self._make_table, as_it_is)
        try:
            names = ["__hash", *(field.name for field in self.spec.key_fields), _TIME.name]
            for some in self._variables[TIMERS].take_due(limit):
                lengths = np.diff(some.times.offsets.to_numpy())
                parents = pa.array(np.repeat(np.arange(len(lengths)), lengths))
                keys = [key.take(parents) for key in some.columns]
                hashes = pa.array(some.hashes[parents.to_numpy()])
                due.add(pa.RecordBatch.from_arrays([hashes, *keys, some.times.flatten()], names=names))
            for group in due.groups():
                self._fired += int(group.counts.sum())
                self._call("timers", group)
        finally:
            due.close()

    def _call(self, phase: Phase, group: Group) -> None:
        """Call the user's code for some keys, and write what it changed: for so many at a time as state allows."""
        at = 0
        while at < len(group.counts):
            some = group.cut(at, min(at + self._together[phase], len(group.counts)))
            try:
                keys, tables = self._tables(phase, some)
            except OversizeError as error:
                if len(some.counts) == 1:
                    raise UsageError(
                        f"The state for {_told(phase, self._keys(some))} takes more than 2 GiB.",
                        action="Keep less of it for each key, or share it out among several variables.",
                    ) from error
                self._together[phase] = len(some.counts) // 2
                continue
            self._fetched = 0
            try:
                answered = self._ask(phase, tables, partial(self._part, phase, some))
            except OSError:
                self.lost = _told(phase, tables[KEYS])
                raise
            self._write(some, keys, tables, answered)
            self._learn(phase, len(some.counts), [tables[name] for name in keys], [one for _, one in answered])
            at += len(some.counts)

    def _part(self, phase: Phase, group: Group, table: str, asked: pa.RecordBatch) -> pa.Array:
        """More rows of the key of a call; or parts of some keys (see `Parts.read`), which stay in memory."""
        if table == ROWS:
            assert group.pieces is not None
            return self._arranged[phase].piece(group.pieces, asked.column("part")[0].as_py())
        found = self._parts.read(group, table, asked)
        self._fetched += found.nbytes
        return found

    def _tables(self, phase: Phase, group: Group) -> tuple[dict[str, Rows], dict[str, pa.RecordBatch]]:
        """The keys as the variables' tables take them, and what a call about them is sent."""
        keys = {name: one.keys(group.hashes, group.keys) for name, one in self._asked_for.items()}
        tables = {KEYS: self._keys(group)}
        if arranged := self._arranged.get(phase):
            tables[ROWS] = arranged.rows(group)
        else:
            tables[DUE] = pa.RecordBatch.from_arrays([group.last], names=[_TIME.name])
        for name, one in self._asked_for.items():
            columns = one.read(keys[name])
            if phase == "timers" and name == TIMERS:
                columns = [_joined(group, *columns)]
            tables[name] = pa.RecordBatch.from_arrays(columns, names=["value", "head"][: len(columns)])
        return keys, tables

    def _keys(self, group: Group) -> pa.RecordBatch:
        """The table of keys that a call is sent."""
        names = [field.name for field in self.spec.key_fields]
        return pa.RecordBatch.from_arrays([*group.keys, pa.array(group.counts)], names=[*names, COUNT])

    def _write(
        self,
        group: Group,
        keys: dict[str, Rows],
        sent: dict[str, pa.RecordBatch],
        answered: Changed,
    ) -> None:
        """Write what a call has changed."""
        for name, changed in answered:
            if name in self._parts:
                self._parts.write(name, group, changed)
                continue
            words, heap = keys[name]
            rows = Rows(words[changed.column("at").to_numpy()], heap)
            heads = self._parts.follow(name, group, sent[name], changed)
            self._asked_for[name].write(rows, changed.column("value"), changed.column("expiry"), heads)

    def _learn(
        self, phase: Phase, keys: int, sent: Iterable[pa.RecordBatch], answered: Iterable[pa.RecordBatch]
    ) -> None:
        """See from a call of how many keys the next one of its phase should be.

        Args:
            phase: of the call. keys: how many it was about. sent: their state. answered: what changed.
        """
        told = self._fetched + sum(one.nbytes for one in sent)
        size = max(told, sum(one.nbytes for one in answered))
        most = min(MOST_KEYS, _STATE * keys // max(1, size), _FASTER * self._together[phase])
        self._together[phase] = max(1, most)

    def _ask(self, phase: Phase, tables: dict[str, pa.RecordBatch], answer: Ask) -> Changed:
        if self.caller is None:
            raise UsageError(
                "Nobody is there to call the processor.", action="Run the query with millpond.writeStream."
            )
        times = (self._times.processing, self._times.closed) if self.spec.timed else (-1, -1)
        return self.caller(phase, times, tables, self._take, answer)

    def _take(self, batch: pa.RecordBatch) -> None:
        """Take rows that the user's code gave out."""
        at = self.spec.emitted
        if at is not None:
            field = self.spec.outputs[at]
            earliest = int(times_of(batch.column(at), parse_type(field.type)).min(initial=NEVER))
            if earliest <= self._times.late * 1000:
                raise UsageError(
                    f"[EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED] The processor gave out a row with "
                    f"eventTime={earliest} (µs, {field.name}), not later than watermark={self._times.late} (ms).",
                    action="Give out rows later than the watermark of the batch before, or without an event time.",
                )
        self._shown.add(batch)

    def output(self) -> Iterator[pa.RecordBatch]:
        """What the user's code gave out."""
        return self._shown.read()

    def _drop_input(self) -> None:
        if self._input is not None:
            self._input.close()
            self._input = None

    def close(self) -> None:
        """Give all memory back."""
        self._drop_input()
        self._shown.close()
        for one in self._variables.values():
            one.close()
        self._parts.close()


def _joined(group: Group, left: pa.Array) -> pa.Array:
    """The timers of some keys: those that are due, and those that are left."""
    ends = np.cumsum(group.counts)
    due = pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends]).astype(np.int32)), group.last)
    lengths = np.diff(due.offsets.to_numpy())
    others = left.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    keys = np.arange(len(lengths))
    owners = np.concatenate([np.repeat(keys, lengths), np.repeat(keys, others)])
    values = pa.concat_arrays([due.flatten(), left.flatten()])
    offsets = np.concatenate([[0], np.cumsum(lengths + others)]).astype(np.int32)
    values = values.take(pa.array(np.argsort(owners, kind="stable")))
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=left.type)


def _told(phase: Phase, keys: pa.RecordBatch) -> str:
    """The keys of a call, for people: the first ones."""
    first = keys.select(keys.schema.names[:-1]).slice(0, _NAMED).to_pylist()
    named = ", ".join(repr(tuple(key.values())) for key in first)
    more = f" and {keys.num_rows - _NAMED} more" if keys.num_rows > _NAMED else ""
    return f"{phase} of {named}{more}"
