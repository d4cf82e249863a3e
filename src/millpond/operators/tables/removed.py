"""Keys that a batch removes at its end, because they have lost all their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.segment import decode_rows, encode_rows
from millpond.layout import RowLayout, Rows
from millpond.operators.functions.accumulators import BLOCK
from millpond.stores.memory.spooled import concatenate, spool_pieces

if TYPE_CHECKING:
    from millpond.stores.rmw.table import RmwTable


class RemovedKeys:
    """Removes keys that have lost all their rows. Keeps copies of their table rows, whose old images the output shows.

    Args:
        layout: the layout of the table.
        table: the table.
    """

    def __init__(self, layout: RowLayout, table: RmwTable) -> None:
        self._layout = layout
        self._table = table
        self._segments: list[Any] = []

    def clear(self) -> None:
        """Drop the keys that the last batch has removed."""
        self._segments = []

    def remove(self, is_empty: Callable[[Rows], NDArray[np.bool_]], version: int, *, keep: bool) -> None:
        """Remove empty keys among those that the batch has changed; call it before the table is sealed.

        Args:
            is_empty: returns a mask of the keys to remove; sees each key that the batch has changed once.
            version: the state version that the batch reads.
            keep: whether to keep the table rows of removed keys for `rows`.
        """
        table, key_stop = self._table, self._layout.key_stop
        # The table must not change while `touched` is read, so the rows are copied first.
        pieces = (encode_rows(rows, self._layout, False) for rows in self._select(is_empty, keep))
        self._segments = spool_pieces(pieces, table.portion_bytes)
        if not self._segments:
            return
        # The keys are of the whole range of hashes, not only of that of the last pass.
        table.unrestrict()
        for rows in self.rows():
            for keys in rows.leading(key_stop).pieces(BLOCK):
                ids = table.find(keys, version, counted=False)
                assert (ids >= 0).all(), "a key that the batch has changed is missing"
                table.remove(ids)
        if not keep:
            self.clear()

    def rows(self) -> Iterator[Rows]:
        """Yield the rows of the table that belong to removed keys, as they were at the end of the batch."""
        if self._segments:
            yield from decode_rows(concatenate(self._segments), self._layout, "removed keys")

    def _select(self, is_empty: Callable[[Rows], NDArray[np.bool_]], keep: bool) -> Iterator[Rows]:
        """Yield the empty keys among those that the batch has changed; without their values if these are not kept."""
        for rows in self._table.touched():
            empty = is_empty(rows)
            if empty.any():
                rows = rows.take(empty)
                if not keep:
                    rows.words[:, self._layout.key_stop :] = 0
                yield rows
