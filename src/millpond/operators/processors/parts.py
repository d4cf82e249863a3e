"""Large state of keys: parts of their lists and maps, beside the rows that travel with every call."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from millpond.kernels.event_time.slices import spread
from millpond.key_groups import KEY_GROUP_BITS
from millpond.layout import Ints, Rows
from millpond.operators.columns.decode import OversizeError
from millpond.operators.processors.input import Group
from millpond.operators.processors.stored_variable import StoredVariable
from millpond.operators.processors.tables import parts
from millpond.operators.protocol import MakeTable
from millpond.spec.kinds.processor import HEAD, ProcessorSpec
from millpond.spec.types import parse_type

if TYPE_CHECKING:
    from millpond.stores.protocol import Table, TableDelta

_HEAD = parse_type(HEAD).arrow
_PARTS_PER_REMOVAL = 4096  # parts that are removed at a time


class Parts:
    """The parts of a processor's variables on one partition.

    The hash of a part is its key's hash, mixed with the part's number within the key group. So parts of one key lie
    apart in the table, but in the partition of their key. A variable's table is made when its first part comes.

    Args:
        spec: the processor.
        make_table: opens the partition's tables.
        existing: the names of the tables that the state has.
    """

    def __init__(self, spec: ProcessorSpec, make_table: MakeTable, existing: Collection[str]) -> None:
        self._make_table = make_table
        self._variables = parts(spec)
        self._names = {variable.table: variable.parts for variable in spec.variables}
        self._version = 0
        self._stored = {name: self._open(name) for name in self._variables if name in existing}

    def _open(self, name: str) -> StoredVariable:
        return StoredVariable(name, self._variables[name], self._make_table)

    def __contains__(self, name: str) -> bool:
        """Return whether a table holds parts."""
        return name in self._variables

    @property
    def tables(self) -> dict[str, Table]:
        """The tables that exist, by name."""
        return {name: stored.table for name, stored in self._stored.items()}

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        for stored in self._stored.values():
            stored.begin(version)

    def read(self, group: Group, name: str, requested: pa.RecordBatch) -> pa.Array:
        """Return the requested parts of keys of a group (see `operators.processors.calls`); each is requested once."""
        if name not in self._stored:
            return pa.nulls(requested.num_rows, self._variables[name].type.arrow)
        stored = self._stored[name]
        return _read(stored, _keys(stored, group, *(requested.column(column).to_numpy() for column in ("at", "part"))))

    def write(self, name: str, group: Group, changed: pa.RecordBatch) -> None:
        """Write changed parts."""
        if name not in self._stored:
            self._stored[name] = self._open(name)
            # A table that is made within a batch has to begin it, too.
            self._stored[name].begin(self._version)
        stored = self._stored[name]
        keys = _keys(stored, group, *(changed.column(column).to_numpy() for column in ("at", "part")))
        stored.write(keys, changed.column("value"), changed.column("expiry"))

    def remove_uncovered(
        self, table: str, group: Group, sent: pa.RecordBatch, changed: pa.RecordBatch
    ) -> pa.StructArray | None:
        """Remove the parts that the heads of a variable's rows no longer cover.

        Args:
            table: the variable's table.
            group: the keys.
            sent: the rows that the call was sent.
            changed: the rows that it has changed.

        Returns:
            The heads to write; None if the rows have no heads before or after.
        """
        heads = changed.column("head") if "head" in changed.schema.names else None
        if "head" not in sent.schema.names:
            return heads
        heads = pa.nulls(len(changed), _HEAD) if heads is None else heads
        positions = changed.column("at").to_numpy()
        before = sent.column("head").take(changed.column("at"))
        first, stop = (_numbers(before, end) for end in ("first", "stop"))
        kept, end = (_numbers(heads, end) for end in ("first", "stop"))
        stored = self._stored[self._names[table]]
        for begin, until in ((first, np.minimum(stop, kept)), (np.maximum(first, end), stop)):
            lengths = np.maximum(until - begin, 0)
            for start in range(0, int(lengths.sum()), _PARTS_PER_REMOVAL):
                ranges, number = _locate(lengths, start, _PARTS_PER_REMOVAL)
                stored.write(
                    _keys(stored, group, positions[ranges], begin[ranges] + number), pa.nulls(len(ranges)), None
                )
        return heads

    def empty(self, name: str) -> None:
        """Remove all parts of a table, if it exists."""
        if name in self._stored:
            self._stored[name].empty(self._make_table)

    def evict(self, now: int) -> None:
        """Remove what has expired by `now`, in milliseconds."""
        for stored in self._stored.values():
            stored.evict(now)

    def seal(self) -> dict[str, TableDelta]:
        """End the batch."""
        return {name: stored.seal() for name, stored in self._stored.items()}

    def close(self) -> None:
        """Release all memory."""
        for stored in self._stored.values():
            stored.close()


def _read(stored: StoredVariable, keys: Rows) -> pa.Array:
    """Read parts, in halves if they exceed the limits of one table."""
    try:
        return stored.read(keys)[0]
    except OversizeError:
        return pa.concat_arrays([_read(stored, half) for half in keys.halves()])


def _keys(stored: StoredVariable, group: Group, at: Ints, numbers: Ints) -> Rows:
    """Encode the keys of parts for the table, given positions of keys in a group and numbers of parts."""
    hashes = np.empty(len(at), np.int64)
    spread(group.hashes[at], numbers, KEY_GROUP_BITS, hashes)
    places = pa.array(at)
    return stored.keys(hashes, [*(column.take(places) for column in group.keys), pa.array(numbers)])


def _numbers(heads: pa.StructArray, name: str) -> Ints:
    return heads.field(name).fill_null(0).to_numpy() if len(heads) else np.empty(0, np.int64)


def _locate(lengths: Ints, start: int, limit: int) -> tuple[Ints, Ints]:
    """Locate places in consecutive ranges.

    Args:
        lengths: the lengths of the ranges.
        start: the first place.
        limit: the maximum number of places.

    Returns:
        For each place, its range, and its position within the range.
    """
    ends = np.cumsum(lengths)
    places = np.arange(start, min(start + limit, int(ends[-1])))
    ranges = np.searchsorted(ends, places, "right")
    return ranges, places - (ends - lengths)[ranges]
