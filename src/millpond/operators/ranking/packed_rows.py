"""Whole rows that are ranked or kept in order, packed into the fixed words of a layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.kernels.columns import arrow_words
from millpond.kernels.pointers import address
from millpond.kernels.ranking import compare
from millpond.layout import LENGTH, Bytes, Column, RowLayout, Rows, TableSchema, Words
from millpond.operators.columns.decode import OversizeError, key_columns
from millpond.operators.columns.encode import NO_HEAP, Leaf, Place, flatten, leaf_bytes, numbers, order_leaf
from millpond.operators.columns.order_keys import ORDER_KEY
from millpond.operators.tables.keyed import Keyed
from millpond.spec.operators import Field, Order
from millpond.spec.types import DataType, leaves, parse_type

MAX_BYTES = int(LENGTH)
"""Maximum bytes of the rows of one key: they are one value of a row of state."""

_KINDS = {"int": compare.INT, "float": compare.FLOAT, "wide": compare.WIDE, "bytes": compare.BYTES}


class PackedRows:
    """The layout of rows with these columns, and their order.

    The first two words of a row are the versions in which it came and went (see `kernels.ranking.packed_rows`). The
    null bits and the columns follow, with structs flattened and floats bit by bit. Last comes, for each nested column
    of the order, a key that orders as its values do.

    Args:
        fields: the columns.
        order: the columns that order rows. Rows that are equal there are ordered by the other columns.

    Attributes:
        layout: the layout of a row, all columns being keys.
        descriptor: the columns for `kernels.ranking.compare`, those of the order first.
        ordering: the number of them that belong to the order.
        blobs: first words of the columns of byte strings.
    """

    def __init__(self, fields: Sequence[Field], order: Sequence[Order]) -> None:
        self.fields = tuple(fields)
        self.types = [parse_type(field.type) for field in fields]
        flat = [list(leaves(dtype)) for dtype in self.types]
        firsts = np.cumsum([0, *(len(part) for part in flat)])
        self._order_key_columns = [column.column for column in order if self.types[column.column].nested]
        stored = [leaf for part in flat for leaf in part] + [ORDER_KEY] * len(self._order_key_columns)
        shown = len(stored) - len(self._order_key_columns)
        columns = tuple(Column(str(number), leaf.kind) for number, leaf in enumerate(stored))
        self.layout = RowLayout(TableSchema(columns, ()))
        self.places = [Place.of(offset, index) for index, offset in enumerate(self.layout.offsets)]
        self.blobs: NDArray[np.int64] = np.array(self.layout.bytes_columns, dtype=np.int64)
        keys = {column: shown + number for number, column in enumerate(self._order_key_columns)}
        first = [(keys.get(column.column, firsts[column.column]), column) for column in order]
        named = {place for column in order for place in range(firsts[column.column], firsts[column.column + 1])}
        named |= set(keys.values())
        unordered = [(position, Order(0)) for position in range(len(stored)) if position not in named]
        described = [self._describe(position, stored[position], column) for position, column in first + unordered]
        self.descriptor = np.array(described, dtype=np.int64).reshape(len(described), compare.COLUMN)
        self.ordering = len(first)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The rows' order for kernels (see `kernels.ranking.top_n.RANKING`), valid while this object lives."""
        return address(self.descriptor), len(self.descriptor), self.ordering, self.stride

    @property
    def stride(self) -> int:
        """The bytes of a row."""
        return 8 * self.layout.width

    def _describe(self, position: int, leaf: DataType, order: Order) -> list[int]:
        place = self.places[position]
        flags = compare.DESCENDING * order.descending | compare.NULLS_LAST * order.nulls_last
        kind = _KINDS["bytes" if leaf.nested else leaf.machine or "int"]
        return [kind, place.offset, place.null_word, position % 64, flags]

    def columns(self) -> list[Column]:
        """Return columns of a table that hold one row word for word, from the first word on."""
        head = [Column(name, "word") for name in ("born", "gone")]
        nulls = [Column(f"nulls{number}", "word") for number in range(self.layout.null_words)]
        return [*head, *nulls, *self.layout.schema.keys]

    def pack(self, arrays: Sequence[pa.Array], count: int) -> Rows:
        """Pack arrays of these columns into rows."""
        words: Words = np.empty((count, self.layout.width), dtype=np.uint64)
        arrow_words.put_header(words, np.zeros(count, dtype=np.int64), self.layout.key_start)
        heaps: list[Bytes] = []
        base = 0
        flat = [leaf for array, dtype in zip(arrays, self.types, strict=True) for leaf in flatten(array, dtype)]
        flat += [order_leaf(arrays[column], self.types[column]) for column in self._order_key_columns]
        for leaf, place in zip(flat, self.places, strict=True):
            base += self._put(words, leaf, place, heaps, base)
        return Rows(words, NO_HEAP if not heaps else heaps[0] if len(heaps) == 1 else np.concatenate(heaps))

    def _put(self, words: Words, leaf: Leaf, place: Place, heaps: list[Bytes], base: int) -> int:
        """Write a column, and return the number of bytes that it adds to the heap."""
        place_args = (words, *place)
        machine = leaf.dtype.machine
        if leaf.array is None:
            arrow_words.put_ints(*place_args, np.zeros(len(words), dtype=np.int64), leaf.valid)
        elif machine == "wide":
            arrow_words.put_pairs(*place_args, numbers(leaf.array, leaf.dtype), leaf.valid)
        elif leaf.dtype.kind == "bytes":
            offsets, data = leaf_bytes(leaf)
            first = int(offsets[0])
            arrow_words.pack_bytes(*place_args, offsets, data, base - first, leaf.valid)
            heaps.append(data[first:])
            return len(data) - first
        else:  # floats keep their bits, because output rows must equal input rows
            arrow_words.put_ints(*place_args, numbers(leaf.array, leaf.dtype).view(np.int64), leaf.valid)
        return 0

    def unpack(self, rows: Rows, more: Sequence[pa.Array], fields: Sequence[Field]) -> Iterator[pa.RecordBatch]:
        """Decode rows as Arrow, with more columns beside them.

        Yields:
            One batch, or several where a column exceeds 32-bit offsets.
        """
        try:
            columns = key_columns(rows, self.places, self.types)
        except OversizeError:
            first, second = rows.halves()
            if not first.count:
                raise
            yield from self.unpack(first, [column[: first.count] for column in more], fields)
            yield from self.unpack(second, [column[first.count :] for column in more], fields)
            return
        yield pa.RecordBatch.from_arrays([*columns, *more], names=[field.name for field in fields])


def key_too_large(table: Keyed, key: Rows) -> UsageError:
    """Return the error of a key (one row) whose rows exceed `MAX_BYTES`."""
    values = tuple(column[0].as_py() for column in key_columns(key, table.keys, table.types))
    return UsageError(
        f"The rows of the key {values!r} take 4 GiB or more, which is more than the state holds for one key.",
        action="Partition by more columns, or keep fewer columns of each row.",
    )
