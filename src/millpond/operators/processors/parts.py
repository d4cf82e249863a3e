"""What keys have much of: parts of their lists and maps, beside the rows that travel with every call."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from millpond.conf import KEY_GROUP_BITS
from millpond.kernels.event_time.slices import spread
from millpond.layout import Ints, Rows
from millpond.operators.columns.decode import OversizeError
from millpond.operators.processors.input import Group
from millpond.operators.processors.stored import Stored
from millpond.operators.processors.tables import parts
from millpond.operators.protocol import MakeTable
from millpond.spec.kinds.processor import HEAD, ProcessorSpec
from millpond.spec.types import parse_type

if TYPE_CHECKING:
    from millpond.stores.protocol import Table, TableDelta

_HEAD = parse_type(HEAD).arrow
_TOGETHER = 4096  # parts that are removed together


class Parts:
    """The parts of a processor's variables on one partition.

    The hash of a part is that of its key, mixed with its number within the key group, so that parts of one key lie
    apart in the table, and with their key in every partition. A variable's table is there when the first part comes.

    Args:
        spec: of the processor. make_table: opens the partition's tables. existing: the tables that the state has.
    """

    def __init__(self, spec: ProcessorSpec, make_table: MakeTable, existing: Collection[str]) -> None:
        self._make_table = make_table
        self._variables = parts(spec)
        self._names = {one.table: one.parts for one in spec.variables}
        self._version = 0
        self._stored = {name: self._open(name) for name in self._variables if name in existing}

    def _open(self, name: str) -> Stored:
        return Stored(name, self._variables[name], self._make_table)

    def __contains__(self, name: str) -> bool:
        """Whether a table is one of parts."""
        return name in self._variables

    @property
    def tables(self) -> dict[str, Table]:
        """The tables that are there, by name."""
        return {name: one.table for name, one in self._stored.items()}

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        for one in self._stored.values():
            one.begin(version)

    def read(self, group: Group, name: str, asked: pa.RecordBatch) -> pa.Array:
        """Parts of some keys of a group (see `operators.processors.calls`); each is asked for once."""
        if name not in self._stored:
            return pa.nulls(asked.num_rows, self._variables[name].type.arrow)
        one = self._stored[name]
        return _read(one, _keys(one, group, *(asked.column(at).to_numpy() for at in ("at", "part"))))

    def write(self, name: str, group: Group, changed: pa.RecordBatch) -> None:
        """Write parts that have changed."""
        if name not in self._stored:
            self._stored[name] = self._open(name)
            self._stored[name].begin(self._version)
        one = self._stored[name]
        keys = _keys(one, group, *(changed.column(at).to_numpy() for at in ("at", "part")))
        one.write(keys, changed.column("value"), changed.column("expiry"))

    def follow(self, table: str, group: Group, sent: pa.RecordBatch, changed: pa.RecordBatch) -> pa.StructArray | None:
        """Remove the parts that the heads of a variable's rows speak of no more.

        Args:
            table: the variable's. group: the keys. sent: what they had. changed: what some have now.

        Returns:
            The heads to be written; None if there neither are nor were any.
        """
        heads = changed.column("head") if "head" in changed.schema.names else None
        if "head" not in sent.schema.names:
            return heads
        heads = pa.nulls(len(changed), _HEAD) if heads is None else heads
        at = changed.column("at").to_numpy()
        before = sent.column("head").take(changed.column("at"))
        first, stop = (_numbers(before, end) for end in ("first", "stop"))
        kept, end = (_numbers(heads, end) for end in ("first", "stop"))
        one = self._stored[self._names[table]]
        for begin, until in ((first, np.minimum(stop, kept)), (np.maximum(first, end), stop)):
            lengths = np.maximum(until - begin, 0)
            for start in range(0, int(lengths.sum()), _TOGETHER):
                some, number = _inside(lengths, start, _TOGETHER)
                one.write(_keys(one, group, at[some], begin[some] + number), pa.nulls(len(some)), None)
        return heads

    def empty(self, name: str) -> None:
        """Remove all parts that a table has, if it is there."""
        if name in self._stored:
            self._stored[name].empty(self._make_table)

    def evict(self, now: int) -> None:
        """Remove what has expired by a time in milliseconds."""
        for one in self._stored.values():
            one.evict(now)

    def seal(self) -> dict[str, TableDelta]:
        """End the batch."""
        return {name: one.seal() for name, one in self._stored.items()}

    def close(self) -> None:
        """Give all memory back."""
        for one in self._stored.values():
            one.close()


def _read(stored: Stored, keys: Rows) -> pa.Array:
    """Parts, a few at a time where they are much larger than most."""
    try:
        return stored.read(keys)[0]
    except OversizeError:
        middle = keys.count // 2
        halves = Rows(keys.words[:middle], keys.heap), Rows(keys.words[middle:], keys.heap)
        return pa.concat_arrays([_read(stored, half) for half in halves])


def _keys(stored: Stored, group: Group, at: Ints, numbers: Ints) -> Rows:
    """Parts, by the positions of their keys in a group and their numbers, as the table takes them."""
    hashes = np.empty(len(at), np.int64)
    spread(group.hashes[at], np.ascontiguousarray(numbers), KEY_GROUP_BITS, hashes)
    places = pa.array(at)
    return stored.keys(hashes, [*(column.take(places) for column in group.keys), pa.array(numbers)])


def _numbers(heads: pa.StructArray, name: str) -> Ints:
    return heads.field(name).fill_null(0).to_numpy() if len(heads) else np.empty(0, np.int64)


def _inside(lengths: Ints, start: int, most: int) -> tuple[Ints, Ints]:
    """Of ranges one after the other, some places from a start on: in which range each is, and where there."""
    ends = np.cumsum(lengths)
    places = np.arange(start, min(start + most, int(ends[-1])))
    some = np.searchsorted(ends, places, "right")
    return some, places - (ends - lengths)[some]
