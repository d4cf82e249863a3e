"""Row layout of an ordered table: columns, sort order, names of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import KernelLayout, kernel_layout
from millpond.kernels.ordered import order as ordered
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import HASH, META, Column, RowLayout, Rows, TableSchema, Words

TIME = "__time"
NUMBER = "__number"


def ordered_schema(keys: Sequence[Column], values: Sequence[Column], *, marked: bool) -> TableSchema:
    """Make the schema of an ordered table: a multimap from `keys` to `values`.

    Args:
        keys, values: the stored columns.
        marked: whether rows get a number, so that a row can be named and marked as matched.
    """
    own = (Column(TIME, "word"), Column(NUMBER, "word")) if marked else (Column(TIME, "word"),)
    return TableSchema(tuple(keys), (*own, *values))


@dataclass(frozen=True, eq=False)
class OrderedLayout:
    """A row layout with the words that define the sort order.

    Attributes:
        rows: the layout. shape: the same, in the form that kernels take.
        time, number: index of the time word and of the number word (0: rows have no number).
        places: the layout in the form that `kernels.ordered.order.match` takes.
    """

    rows: RowLayout
    shape: KernelLayout
    time: int
    number: int
    places: NDArray[Any]

    @staticmethod
    def of(schema: TableSchema) -> OrderedLayout:
        """Derive the layout from a schema made by `ordered_schema`."""
        rows = RowLayout(schema)
        shape = kernel_layout(rows)
        position = len(schema.keys)
        marked = len(schema.values) > 1 and schema.values[1].name == NUMBER
        key_words, references = rows.key_stop - rows.key_start, shape.references_at + rows.key_start
        place = (8 * rows.width, rows.offsets[position], rows.key_start, key_words, shape.null_mask, references)
        places = np.array([place], ordered.ORDERED_PLACES)
        return OrderedLayout(rows, shape, rows.offsets[position], rows.offsets[position + 1] if marked else 0, places)

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return 8 * self.rows.width

    def times(self, rows: Rows) -> NDArray[np.int64]:
        """Return the times of rows."""
        return rows.ints(self.time)


def sorted_rows(pieces: Sequence[Rows], layout: OrderedLayout) -> Rows:
    """Sort rows by (hash, time), keeping the order of equal ones, with one compact heap."""
    hashes, order = order_by_hash(np.concatenate([piece.words[:, HASH] for piece in pieces]))
    ordered.order_times(hashes, order, np.concatenate([layout.times(piece) for piece in pieces]))
    chunks = [addresses(piece.words, piece.heap) for piece in pieces]
    rows_at, heaps_at = (np.concatenate(column)[order] for column in zip(*chunks, strict=True))
    return Rows(*gather_rows(rows_at, heaps_at, layout.rows.width, layout.shape.blobs))


def empty_rows(layout: OrderedLayout) -> Rows:
    """Return rows of length zero."""
    words: Words = np.empty((0, layout.rows.width), np.uint64)
    return Rows(words, np.empty(0, np.uint8))


def matched_names(rows: Rows, layout: OrderedLayout) -> Rows:
    """Name matched rows: return rows with only their hash, time and number, and the flag `MARK`."""
    words: Words = np.zeros((rows.count, layout.rows.width), np.uint64)
    words[:, HASH] = rows.words[:, HASH]
    words[:, META] = (rows.words[:, META] >> np.uint64(16) << np.uint64(16)) | np.uint64(ordered.MARK)
    words[:, layout.time] = rows.words[:, layout.time]
    words[:, layout.number] = rows.words[:, layout.number]
    return Rows(words, np.empty(0, np.uint8))
