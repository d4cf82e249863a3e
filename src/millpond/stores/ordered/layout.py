"""How rows of an ordered table lie: the layout of their columns, their order, their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import Shape, shape_of
from millpond.kernels.ordered import order as ordered
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import HASH, META, Column, RowLayout, Rows, TableSchema, Words

TIME = "__time"
NUMBER = "__number"


def ordered_schema(keys: Sequence[Column], values: Sequence[Column], *, marked: bool) -> TableSchema:
    """The schema of an ordered table: a multimap from `keys` to `values`.

    Args:
        keys, values: the stored columns.
        marked: whether rows are told apart (by a number), so that they can be marked.
    """
    own = (Column(TIME, "word"), Column(NUMBER, "word")) if marked else (Column(TIME, "word"),)
    return TableSchema(tuple(keys), (*own, *values))


@dataclass(frozen=True, eq=False)
class OrderedLayout:
    """A row layout with the places that order rows.

    Attributes:
        rows: the layout. shape: as kernels take it.
        time, number: words of the time and of the number (0: rows have none).
        places: what `kernels.ordered.order.match` has to know of it.
    """

    rows: RowLayout
    shape: Shape
    time: int
    number: int
    places: NDArray[Any]

    @staticmethod
    def of(schema: TableSchema) -> OrderedLayout:
        """The places in tables of a schema that `ordered_schema` made."""
        rows = RowLayout(schema)
        shape = shape_of(rows)
        at = len(schema.keys)
        marked = len(schema.values) > 1 and schema.values[1].name == NUMBER
        key_words, references = rows.key_stop - rows.key_start, shape.references_at + rows.key_start
        place = (8 * rows.width, rows.offsets[at], rows.key_start, key_words, shape.null_mask, references)
        places = np.array([place], ordered.ORDERED_PLACES)
        return OrderedLayout(rows, shape, rows.offsets[at], rows.offsets[at + 1] if marked else 0, places)

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return 8 * self.rows.width

    def times(self, rows: Rows) -> NDArray[np.int64]:
        """The times of rows."""
        return np.ascontiguousarray(rows.words[:, self.time]).view(np.int64)


def sorted_rows(pieces: Sequence[Rows], layout: OrderedLayout) -> Rows:
    """The rows of some pieces in the order of (hash, time); those alike keep their order. The heap is compact."""
    hashes, order = order_by_hash(np.concatenate([piece.words[:, HASH] for piece in pieces]))
    ordered.order_times(hashes, order, np.concatenate([layout.times(piece) for piece in pieces]))
    found = [addresses(piece.words, piece.heap) for piece in pieces]
    rows_at, heaps_at = (np.concatenate(each)[order] for each in zip(*found, strict=True))
    return Rows(*gather_rows(rows_at, heaps_at, layout.rows.width, layout.shape.blobs))


def empty_rows(layout: OrderedLayout) -> Rows:
    """No rows."""
    words: Words = np.empty((0, layout.rows.width), np.uint64)
    return Rows(words, np.empty(0, np.uint8))


def names_of(rows: Rows, layout: OrderedLayout) -> Rows:
    """Notes that rows were matched: rows with their hash, time and number, and nothing else."""
    words: Words = np.zeros((rows.count, layout.rows.width), np.uint64)
    words[:, HASH] = rows.words[:, HASH]
    words[:, META] = (rows.words[:, META] >> np.uint64(16) << np.uint64(16)) | np.uint64(ordered.MARK)
    words[:, layout.time] = rows.words[:, layout.time]
    words[:, layout.number] = rows.words[:, layout.number]
    return Rows(words, np.empty(0, np.uint8))
