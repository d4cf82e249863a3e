"""Groups that a batch removes at its end, because they have lost all their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.segment import decode_rows, encode_rows
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.layout import RowLayout, Rows
from millpond.operators.functions.accumulators import BLOCK
from millpond.stores.memory.spooled import concatenate, spool_pieces

if TYPE_CHECKING:
    from millpond.stores.rmw.table import RmwTable


class RemovedGroups:
    """Removes groups from their table, and keeps them for the output of the batch, which has their old images.

    Args:
        layout: the layout of the table.
        table: the table.
    """

    def __init__(self, layout: RowLayout, table: RmwTable) -> None:
        self._layout = layout
        self._table = table
        self._long_keys = np.array(layout.bytes_columns[: layout.key_bytes], dtype=np.int64)
        self._segments: list[Any] = []

    def clear(self) -> None:
        """Drop the groups that the last batch has removed."""
        self._segments = []

    def remove(self, is_empty: Callable[[Rows], NDArray[np.bool_]], version: int, *, keep: bool) -> None:
        """Remove empty groups among those that the batch has changed; call it before the table is sealed.

        Args:
            is_empty: returns a mask of the groups to remove; may see a group twice.
            version: the state version that the batch reads.
            keep: whether `rows` is to yield the groups.
        """
        removed = self._remove(is_empty, version)
        if keep:
            pieces = (encode_rows(rows, self._layout, False) for rows in removed)
            self._segments = spool_pieces(pieces, self._table.portion_bytes)
        else:
            for _ in removed:
                pass

    def rows(self) -> Iterator[Rows]:
        """Yield the groups that the batch has removed, as they were before that."""
        if self._segments:
            yield from decode_rows(concatenate(self._segments), self._layout, "removed groups")

    def _remove(self, is_empty: Callable[[Rows], NDArray[np.bool_]], version: int) -> Iterator[Rows]:
        """Remove empty groups, and yield them."""
        table, done = self._table, False
        while not done:
            waiting: list[Rows] = []
            size, done = 0, True
            # The table must not change while it is read, so the keys of empty groups are collected first.
            for rows in table.touched():
                empty = is_empty(rows)
                if empty.any():
                    waiting.append(self._keys(rows.take(empty)))
                    size += waiting[-1].words.nbytes + waiting[-1].heap.nbytes
                if size > table.portion_bytes:
                    done = False
                    break
            if waiting:
                # The keys are of the whole range of hashes, not only of that of the last pass.
                table.unrestrict()
            for keys in waiting:
                for block in keys.pieces(BLOCK):
                    ids = table.find(block, version)
                    yield table.copy(ids)
                    table.remove(ids)

    def _keys(self, rows: Rows) -> Rows:
        """Copy the keys of groups, with their long values, which may lie in the table's own heap."""
        keys = rows.leading(self._layout.key_stop)
        return Rows(*gather_rows(*addresses(*keys), self._layout.key_stop, self._long_keys))
