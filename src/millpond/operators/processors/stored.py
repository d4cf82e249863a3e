"""A processor's variables and timers on one partition: read and written for many keys at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.layout import LENGTH, NEVER, Ints, Rows
from millpond.operators.columns.decode import OversizeError, ints, key_columns, nested_column
from millpond.operators.columns.encode import ALL, as_it_is, flatten, key_rows, strings, validity
from millpond.operators.columns.nested import pack
from millpond.operators.processors.input import Input
from millpond.operators.processors.tables import Variable
from millpond.operators.protocol import MakeTable
from millpond.spec.kinds.processor import HEAD
from millpond.spec.types import parse_type
from millpond.stores.rmw.expiry import Expiry

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta
    from millpond.stores.rmw.table import RmwTable


_HEAD = parse_type(HEAD)
_MOST = 64 << 20  # bytes of a table of a call, and of what is due and taken out together, unless they are of one key


class Due(NamedTuple):
    """What came due of some keys.

    Attributes:
        hashes: of the keys. columns: the keys' columns. times: of the timers, a list for each key.
    """

    hashes: Ints
    columns: list[pa.Array]
    times: pa.ListArray


class Stored:
    """One variable's table.

    Args:
        name: of the table. variable: how it is stored. make_table: opens the partition's tables.
    """

    def __init__(self, name: str, variable: Variable, make_table: MakeTable) -> None:
        self.variable = variable
        keyed = variable.keyed
        self.table: RmwTable = make_table(name, keyed.layout.schema, keyed.initial)
        self._at = keyed.values[0].offset
        self._expiry: Expiry | None = None
        if variable.expires:
            self._expires_at = keyed.values[1].offset
            self._expiry = self.table.expire_by(self._expires_at)
        self._head_at = keyed.values[-1].offset
        self._version = 0

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self.table.begin(version)

    def keys(self, hashes: Ints, columns: list[pa.Array]) -> Rows:
        """Keys, by their hashes and columns, as the table takes them: as in Spark, floats are told apart bit by bit."""
        keyed = self.variable.keyed
        pairs = zip(columns, keyed.types, strict=True)
        leaves = [as_it_is(leaf) for one, dtype in pairs for leaf in flatten(one, dtype)]
        return key_rows(hashes, leaves, keyed.keys, keyed.layout.key_stop)

    def expect(self, keys: int) -> None:
        """Be ready for so many more keys, which come in the order of their hashes (see `RmwTable.expect`)."""
        self.table.expect(min(keys, self.table.ahead))

    def read(self, keys: Rows) -> list[pa.Array]:
        """What each key has, null for nothing; if any has parts beside, also the heads. The keys are different ones.

        Raises:
            OversizeError: several keys have too much for one table of a call.
        """
        rows = self.table.find(keys, self._version)
        there = np.flatnonzero(rows >= 0)
        if not len(there):
            return [pa.nulls(len(rows), self.variable.type.arrow)]
        if len(there) > 1 and int((self.table.words[rows[there], self._at] & LENGTH).sum()) > _MOST:
            raise OversizeError
        held = self.table.copy(rows[there])
        columns = [nested_column(held, self._at, ALL, self.variable.type)]
        if (heads := self._heads(held)) is not None:
            columns.append(heads)
        if len(there) == len(rows):
            return columns
        places = np.zeros(len(rows), np.int64)
        places[there] = np.arange(len(there))
        return [column.take(pa.array(places, mask=rows < 0)) for column in columns]

    def _heads(self, held: Rows) -> pa.StructArray | None:
        """What rows say of parts beside them, null for none; None if no row has any."""
        if not self.variable.headed:
            return None
        there = (held.words[:, self._head_at] & LENGTH) != 0
        return nested_column(held, self._head_at, there.view(np.uint8), _HEAD) if there.any() else None

    def write(
        self, keys: Rows, values: pa.Array, expiries: pa.Array | None, heads: pa.StructArray | None = None
    ) -> None:
        """Write what each key has from now on, null for nothing.

        Args:
            keys: different ones. values: what they have. expiries: when something of it is due.
            heads: what parts they have beside it; if not given, no key has any, and none had.
        """
        most = max(1, len(values) * self.table.portion // max(1, values.nbytes))
        for start in range(0, len(values), most):
            some = slice(start, start + most)
            part = (None if one is None else one[some] for one in (expiries, heads))
            self._write(Rows(keys.words[some], keys.heap), values[some], *part)

    def _write(self, keys: Rows, values: pa.Array, expiries: pa.Array | None, heads: pa.StructArray | None) -> None:
        if values.null_count:
            gone = values.is_null().to_numpy(zero_copy_only=False)
            rows = self.table.find(Rows(keys.words[gone], keys.heap), self._version)
            rows = rows[rows >= 0]
            if len(rows):
                self.table.remove(rows)
            kept = pa.array(~gone)
            keys, values = Rows(keys.words[~gone], keys.heap), values.filter(kept)
            expiries = None if expiries is None else expiries.filter(kept)
            heads = None if heads is None else heads.filter(kept)
        if not len(values):
            return
        times = np.full(len(values), NEVER) if expiries is None else expiries.to_numpy(zero_copy_only=False)
        stamps = self._version if self._expiry is None else Expiry.stamps(times)
        rows = self.table.upsert(keys, stamps).rows
        self._put(rows, values, times)
        if heads is not None:
            packed = strings(*pack(heads, _HEAD), validity(heads))
            self.table.put_bytes(rows, self._head_at, packed.values, packed.heap)

    def _put(self, rows: NDArray[np.int64], values: pa.Array, times: NDArray[np.int64]) -> None:
        packed = strings(*pack(values, self.variable.type), ALL)
        self.table.put_bytes(rows, self._at, packed.values, packed.heap)
        if self._expiry is not None:
            self._expiry.write(rows, times)

    def take_due(self, limit: int) -> Iterator[Due]:
        """Take out the timers that are due at a time in milliseconds; use a piece before the next."""
        keyed = self.variable.keyed
        for rows in self._due(limit):
            held = self.table.copy(rows)
            times = nested_column(held, self._at, ALL, self.variable.type)
            due, left = _split(times, pc.less_equal(times.values, limit))
            yield Due(ints(held, 0), key_columns(held, keyed.keys, keyed.types), due)
            self._keep(rows, left, left.values)

    def take_out(self, limit: int) -> Iterator[tuple[Ints, list[pa.Array], pa.Array]]:
        """Take out what is due at a time in milliseconds: hashes, columns of keys, what they have; use it at once."""
        keyed = self.variable.keyed
        for rows in self._due(limit):
            held = self.table.copy(rows)
            yield (
                ints(held, 0),
                key_columns(held, keyed.keys, keyed.types),
                nested_column(held, self._at, ALL, self.variable.type),
            )
            self.table.remove(rows)

    def _due(self, limit: int) -> Iterator[NDArray[np.int64]]:
        """Rows of which something is due, by their ids; remove it before the next ones."""
        assert self._expiry is not None
        for rows in self._expiry.due(limit):
            before = np.cumsum((self.table.words[rows, self._at] & LENGTH).astype(np.int64))
            yield from np.split(rows, np.flatnonzero(np.diff(before // _MOST)) + 1)

    def empty(self, make_table: MakeTable) -> None:
        """Remove everything; `make_table`: opens tables that live for a moment."""
        keyed = self.variable.keyed
        keys = Input(self.variable.fields, (), make_table, as_it_is, "emptied")
        try:
            names = ["__hash", *(field.name for field in self.variable.fields)]
            for held in self.table.scan():
                columns = [pa.array(ints(held, 0)), *key_columns(held, keyed.keys, keyed.types)]
                keys.add(pa.RecordBatch.from_arrays(columns, names=names))
            for group in keys.groups():
                self.write(
                    self.keys(group.hashes, group.keys), pa.nulls(len(group.counts), self.variable.type.arrow), None
                )
        finally:
            keys.close()

    def evict(self, now: int) -> None:
        """Remove what has expired by a time in milliseconds."""
        if self._expiry is None:
            return
        for rows in self._due(now):
            if self.variable.type.name != "array":
                self.table.remove(rows)
                continue
            held = self.table.copy(rows)
            parts = nested_column(held, self._at, ALL, self.variable.type)
            _, left = _split(parts, pc.less_equal(pc.struct_field(parts.values, "expiry"), now))
            beside = None
            if (heads := self._heads(held)) is not None:
                beside = heads.field("expiry").fill_null(0).to_numpy()
                beside = np.where(beside > now, beside, NEVER)
            self._keep(rows, left, pc.struct_field(left.values, "expiry"), beside)

    def _keep(
        self, rows: NDArray[np.int64], left: pa.ListArray, expiries: pa.Array, beside: Ints | None = None
    ) -> None:
        """Keep of some rows what is left of their lists, in the table's order of expiry.

        Args:
            rows: their ids. left: what is left. expiries: of all its parts.
            beside: when what is beside each row expires, `NEVER` if nothing is there.
        """
        offsets = left.offsets.to_numpy()
        some = np.diff(offsets) > 0
        firsts = np.full(len(rows), NEVER)
        if some.any():
            firsts[some] = np.minimum.reduceat(expiries.to_numpy(zero_copy_only=False), offsets[:-1][some])
        there = some if beside is None else some | (beside < NEVER)
        if beside is not None:
            firsts = np.minimum(firsts, beside)
        self.table.remove(rows[~there])
        if there.any():
            self.table.touch(rows[there])
            self._put(rows[there], left.filter(pa.array(there)), firsts[there])

    def seal(self) -> TableDelta:
        """End the batch."""
        return self.table.seal()

    def close(self) -> None:
        """Give all memory back."""
        self.table.close()


def _split(lists: pa.ListArray, chosen: pa.Array) -> tuple[pa.ListArray, pa.ListArray]:
    """The chosen elements of some lists, and the others."""
    taken = chosen.to_numpy(zero_copy_only=False)
    ends = lists.offsets.to_numpy()
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(taken)])[ends]
    offsets = before - before[0], (ends - ends[0]) - (before - before[0])
    values = lists.values.slice(ends[0], ends[-1] - ends[0]), chosen.slice(ends[0], ends[-1] - ends[0])
    masks = values[1], pc.invert(values[1])
    some, others = (
        pa.ListArray.from_arrays(pa.array(at.astype(np.int32)), values[0].filter(mask), type=lists.type)
        for at, mask in zip(offsets, masks, strict=True)
    )
    return some, others
