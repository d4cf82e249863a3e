"""A slot's cache of rows of an external table, by key, with a time to live."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from millpond.layout import INLINE, LENGTH, Column, Ints, Rows
from millpond.lookup.fetch import ABSENT, FAILED, PRESENT, looked_up_schema
from millpond.lookup.rows import KeyedValues, Values, no_values
from millpond.operators.columns.decode import OversizeError, nested_column
from millpond.operators.columns.encode import ALL, strings
from millpond.operators.columns.nested import pack
from millpond.operators.protocol import MakeTable
from millpond.operators.tables.keyed import keyed
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.spec.types import DataType, parse_type

_NEVER_EXPIRES = (1 << 62) - 1


class Cache:
    """The keys that were looked up with their results, including keys that the table does not have.

    Args:
        spec: the lookup join.
        make_table: opens the table.
    """

    def __init__(self, spec: EnrichSpec, make_table: MakeTable) -> None:
        self._spec = spec
        self._keyed = keyed(spec.key_fields, [(Column("value", "bytes"), False), (Column("until", "word"), False)])
        self._value, self._until = (place.offset for place in self._keyed.values)
        self._type = DataType("struct", fields=tuple((field.name, parse_type(field.type)) for field in spec.found))
        self._columns = looked_up_schema(spec)
        self._table = make_table("cache", self._keyed.layout.schema, self._keyed.initial, kind="cache")
        self._table.max_rows = spec.most

    @property
    def memory(self) -> int:
        """The bytes that the cache takes."""
        return self._table.memory

    @property
    def is_enabled(self) -> bool:
        """Whether it keeps anything."""
        return self._spec.ttl_ms != 0 and self._spec.most > 0

    def begin(self) -> None:
        """Start a batch."""
        self._table.shrink_to_limit()

    def encode_keys(self, hashes: Ints, columns: list[pa.Array]) -> Rows:
        """Encode keys for the cache."""
        return self._keyed.encode_columns(hashes, columns)

    def find(self, keys: Rows, stamp: int, now: int) -> list[KeyedValues]:
        """Find keys in the cache.

        Args:
            keys: distinct keys.
            stamp: the batch that uses them.
            now: the time in milliseconds (monotonic).

        Returns:
            The positions of the keys that the cache has with their results; at least one pair.
        """
        ids = self._table.find(keys, stamp)
        known = np.flatnonzero(ids >= 0)
        rows = self._table.copy(ids[known])
        until = rows.ints(self._until)
        good = until >> 1 > now
        if not good.all():
            known, until, rows = known[good], until[good], rows.take(good)
        if not len(known):
            return [no_values(self._columns)]
        # The lowest bit separates keys that the table has from absent ones.
        states = np.where(until & 1, PRESENT, ABSENT).astype(np.uint8)
        pieces = self._decode(rows)
        cuts = np.cumsum([piece.num_rows for piece in pieces])[:-1]
        parts = zip(np.split(known, cuts), pieces, np.split(states, cuts), strict=True)
        return [(positions, Values(piece, own, {})) for positions, piece, own in parts]

    def _decode(self, rows: Rows) -> list[pa.RecordBatch]:
        """Decode the values of rows, in several batches where one would exceed Arrow's 32-bit offsets."""
        try:
            values = nested_column(rows, self._value, ALL, self._type)
        except OversizeError:
            if rows.count == 1:
                raise
            return [piece for half in rows.halves() for piece in self._decode(half)]
        return [pa.RecordBatch.from_arrays(values.flatten(), schema=self._columns)]

    def add(self, keys: Rows, values: Values, stamp: int, requested_at: int) -> None:
        """Add results of keys, except those whose lookup failed.

        Args:
            keys: the keys.
            values: their results.
            stamp: the batch that uses them.
            requested_at: the time of the request in milliseconds (monotonic).
        """
        if not self.is_enabled:
            return
        ttl = self._spec.ttl_ms
        until = _NEVER_EXPIRES if ttl < 0 else requested_at + ttl
        struct = pa.StructArray.from_arrays(values.columns.columns, fields=list(self._type.arrow))
        packed = strings(*pack(struct, self._type), ALL)
        layout = self._keyed.layout
        words = np.zeros((keys.count, layout.width), np.uint64)
        words[:, : layout.key_stop] = keys.words
        words[:, self._value : self._value + 2] = packed.values
        words[:, self._until] = np.uint64(until << 1) | (values.states == PRESENT).astype(np.uint64)
        heap = packed.heap
        if len(keys.heap):  # the values' long bytes follow those of the keys in the heap
            long = (words[:, self._value] & LENGTH) > INLINE
            words[long, self._value + 1] += np.uint64(len(keys.heap))
            heap = np.concatenate([keys.heap, packed.heap])
        # A failed key is not cached, so that the next batch requests it again.
        good = values.states != FAILED
        self._table.add(Rows(words if good.all() else words[good], heap), stamp)

    def close(self) -> None:
        """Release all memory."""
        self._table.close()
