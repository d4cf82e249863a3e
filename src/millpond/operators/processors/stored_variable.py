"""A processor's variables and timers on one partition, read and written for many keys at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.layout import LENGTH, NEVER, Ints, Rows
from millpond.operators.columns.decode import OversizeError, key_columns, nested_column
from millpond.operators.columns.encode import ALL, bitwise_leaf, strings, validity
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
_MAX_BYTES = 64 << 20  # of a table of a call, and of due rows taken out together, unless they are of one key


class Due(NamedTuple):
    """The due timers of keys.

    Attributes:
        hashes: the keys' hashes.
        columns: the keys' columns.
        times: the times of the timers, a list for each key.
    """

    hashes: Ints
    columns: list[pa.Array]
    times: pa.ListArray


class StoredVariable:
    """The table of one variable.

    Args:
        name: the name of the table.
        variable: the storage of the variable.
        make_table: opens the partition's tables.
    """

    def __init__(self, name: str, variable: Variable, make_table: MakeTable) -> None:
        self.variable = variable
        keyed = variable.keyed
        self.table: RmwTable = make_table(name, keyed.layout.schema, keyed.initial)
        self._value_offset = keyed.values[0].offset
        self._expiry: Expiry | None = None
        if variable.expires:
            self._expiry_offset = keyed.values[1].offset
            self._expiry = self.table.expire_by(self._expiry_offset)
        self._head_offset = keyed.values[-1].offset
        self._version = 0

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self.table.begin(version)

    def keys(self, hashes: Ints, columns: list[pa.Array]) -> Rows:
        """Encode keys for the table; as in Spark, floats are compared bit by bit."""
        return self.variable.keyed.encode_columns(hashes, columns, bitwise_leaf)

    def expect(self, keys: int) -> None:
        """Prepare for `keys` more keys, which come in hash order (see `RmwTable.expect`)."""
        self.table.size_index(min(keys, self.table.portion_keys))

    def read(self, keys: Rows) -> list[pa.Array]:
        """Return the state of distinct keys, null for none, and the heads if any key has parts.

        Raises:
            OversizeError: several keys have too much state for one table of a call.
        """
        rows = self.table.find(keys, self._version)
        present = np.flatnonzero(rows >= 0)
        if not len(present):
            return [pa.nulls(len(rows), self.variable.type.arrow)]
        # A single key cannot be split, so it is read whatever its size; `_call` halves the others.
        if len(present) > 1 and int((self.table.words[rows[present], self._value_offset] & LENGTH).sum()) > _MAX_BYTES:
            raise OversizeError
        stored = self.table.copy(rows[present])
        columns = [nested_column(stored, self._value_offset, ALL, self.variable.type)]
        if (heads := self._heads(stored)) is not None:
            columns.append(heads)
        if len(present) == len(rows):
            return columns
        places = np.zeros(len(rows), np.int64)
        places[present] = np.arange(len(present))
        return [column.take(pa.array(places, mask=rows < 0)) for column in columns]

    def _heads(self, rows: Rows) -> pa.StructArray | None:
        """Return the heads of rows, null for rows without parts; None if no row has any."""
        if not self.variable.headed:
            return None
        present = (rows.words[:, self._head_offset] & LENGTH) != 0
        return nested_column(rows, self._head_offset, present.view(np.uint8), _HEAD) if present.any() else None

    def write(
        self, keys: Rows, values: pa.Array, expiries: pa.Array | None, heads: pa.StructArray | None = None
    ) -> None:
        """Write the new state of keys, null for none.

        Args:
            keys: distinct keys.
            values: their state.
            expiries: the earliest expiry in each, in milliseconds.
            heads: the heads of their parts; if not given, no key has or had parts.
        """
        max_rows = max(1, len(values) * self.table.portion_bytes // max(1, values.nbytes))
        for start in range(0, len(values), max_rows):
            piece = slice(start, start + max_rows)
            part = (None if column is None else column[piece] for column in (expiries, heads))
            self._write(keys.take(piece), values[piece], *part)

    def _write(self, keys: Rows, values: pa.Array, expiries: pa.Array | None, heads: pa.StructArray | None) -> None:
        if values.null_count:
            null = values.is_null().to_numpy(zero_copy_only=False)
            # Found first, since `upsert` would create a row for a key that never had state.
            rows = self.table.find(keys.take(null), self._version)
            rows = rows[rows >= 0]
            if len(rows):
                self.table.remove(rows)
            kept = pa.array(~null)
            keys, values = keys.take(~null), values.filter(kept)
            expiries = None if expiries is None else expiries.filter(kept)
            heads = None if heads is None else heads.filter(kept)
        if not len(values):
            return
        times = np.full(len(values), NEVER) if expiries is None else expiries.to_numpy(zero_copy_only=False)
        stamps = self._version if self._expiry is None else Expiry.stamps(times)
        rows = self.table.upsert(keys, stamps).rows
        self._put_values(rows, values, times)
        if heads is not None:
            packed = strings(*pack(heads, _HEAD), validity(heads))
            self.table.put_bytes(rows, self._head_offset, packed.values, packed.heap)

    def _put_values(self, rows: NDArray[np.int64], values: pa.Array, times: NDArray[np.int64]) -> None:
        packed = strings(*pack(values, self.variable.type), ALL)
        self.table.put_bytes(rows, self._value_offset, packed.values, packed.heap)
        if self._expiry is not None:
            self._expiry.write(rows, times)

    def take_due(self, limit: int) -> Iterator[Due]:
        """Take out the timers that are due at `limit`, in milliseconds; use a piece before the next."""
        keyed = self.variable.keyed
        for rows in self._due(limit):
            stored = self.table.copy(rows)
            times = nested_column(stored, self._value_offset, ALL, self.variable.type)
            due, remaining = _split(times, pc.less_equal(times.values, limit))
            yield Due(stored.ints(0), key_columns(stored, keyed.keys, keyed.types), due)
            self._keep_remaining(rows, remaining, remaining.values)

    def take_timed_out(self, limit: int) -> Iterator[tuple[Ints, list[pa.Array], pa.Array]]:
        """Take out what is due at `limit`, in milliseconds: the hashes and columns of keys, and their state.

        Use a piece before the next.
        """
        keyed = self.variable.keyed
        for rows in self._due(limit):
            stored = self.table.copy(rows)
            yield (
                stored.ints(0),
                key_columns(stored, keyed.keys, keyed.types),
                nested_column(stored, self._value_offset, ALL, self.variable.type),
            )
            self.table.remove(rows)

    def _due(self, limit: int) -> Iterator[NDArray[np.int64]]:
        """Yield ids of rows that have something due; remove it before the next ones."""
        assert self._expiry is not None
        for rows in self._expiry.due(limit):
            before = np.cumsum((self.table.words[rows, self._value_offset] & LENGTH).astype(np.int64))
            yield from np.split(rows, np.flatnonzero(np.diff(before // _MAX_BYTES)) + 1)

    def empty(self, make_table: MakeTable) -> None:
        """Remove everything; `make_table` opens temporary tables."""
        keyed = self.variable.keyed
        keys = Input(self.variable.fields, (), make_table, bitwise_leaf, "emptied")
        try:
            names = ["__hash", *(field.name for field in self.variable.fields)]
            # The keys are collected first, because a table must not change while it is scanned.
            for stored in self.table.scan():
                columns = [pa.array(stored.ints(0)), *key_columns(stored, keyed.keys, keyed.types)]
                keys.add(pa.RecordBatch.from_arrays(columns, names=names))
            for group in keys.groups():
                self.write(
                    self.keys(group.hashes, group.keys), pa.nulls(len(group.counts), self.variable.type.arrow), None
                )
        finally:
            keys.close()

    def evict(self, now: int) -> None:
        """Remove what has expired by `now`, in milliseconds."""
        if self._expiry is None:
            return
        for rows in self._due(now):
            if self.variable.type.name != "array":
                self.table.remove(rows)
                continue
            stored = self.table.copy(rows)
            parts = nested_column(stored, self._value_offset, ALL, self.variable.type)
            _, remaining = _split(parts, pc.less_equal(pc.struct_field(parts.values, "expiry"), now))
            parts_expiry = None
            if (heads := self._heads(stored)) is not None:
                parts_expiry = heads.field("expiry").fill_null(0).to_numpy()
                parts_expiry = np.where(parts_expiry > now, parts_expiry, NEVER)
            self._keep_remaining(rows, remaining, pc.struct_field(remaining.values, "expiry"), parts_expiry)

    def _keep_remaining(
        self, rows: NDArray[np.int64], remaining: pa.ListArray, expiries: pa.Array, parts_expiry: Ints | None = None
    ) -> None:
        """Keep the remaining list elements of rows, in the table's order of expiry.

        Args:
            rows: the row ids.
            remaining: the remaining elements, a list for each row.
            expiries: the expiry of each of these elements.
            parts_expiry: the expiry of the parts beside each row, `NEVER` if there are none.
        """
        offsets = remaining.offsets.to_numpy()
        nonempty = np.diff(offsets) > 0
        firsts = np.full(len(rows), NEVER)
        if nonempty.any():
            firsts[nonempty] = np.minimum.reduceat(expiries.to_numpy(zero_copy_only=False), offsets[:-1][nonempty])
        kept = nonempty if parts_expiry is None else nonempty | (parts_expiry < NEVER)
        if parts_expiry is not None:
            firsts = np.minimum(firsts, parts_expiry)
        self.table.remove(rows[~kept])
        if kept.any():
            self.table.touch(rows[kept])
            self._put_values(rows[kept], remaining.filter(pa.array(kept)), firsts[kept])

    def seal(self) -> TableDelta:
        """End the batch."""
        return self.table.seal()

    def close(self) -> None:
        """Release all memory."""
        self.table.close()


def _split(lists: pa.ListArray, chosen: pa.Array) -> tuple[pa.ListArray, pa.ListArray]:
    """Split lists into the chosen elements and the others."""
    taken = chosen.to_numpy(zero_copy_only=False)
    ends = lists.offsets.to_numpy()
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(taken)])[ends]
    offsets = before - before[0], (ends - ends[0]) - (before - before[0])
    values = lists.values.slice(ends[0], ends[-1] - ends[0]), chosen.slice(ends[0], ends[-1] - ends[0])
    masks = values[1], pc.invert(values[1])
    chosen_lists, others = (
        pa.ListArray.from_arrays(pa.array(ends_.astype(np.int32)), values[0].filter(mask), type=lists.type)
        for ends_, mask in zip(offsets, masks, strict=True)
    )
    return chosen_lists, others
