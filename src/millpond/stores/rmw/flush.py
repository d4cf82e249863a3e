"""Flushing: writing the changes of many batches to a run, so that their deltas are no longer needed."""

from __future__ import annotations

from millpond.kernels.hot_table.state import DIRTY, TOMBSTONE
from millpond.layout import HASH
from millpond.stores.delta_backlog import DeltaBacklog
from millpond.stores.rmw.eviction_buffer import EvictedRun, EvictionBuffer
from millpond.stores.rmw.hot.table import HotTable

_BYTES_PER_BATCH = 16 << 20  # bytes copied between two batches, at most, unless far more bytes are dirty
_MIN_PIECE_BYTES = 1 << 18  # bytes of a flushed piece, at least, however full the eviction buffer


class Flusher:
    """Copies dirty rows into runs, a part between every two batches, once the deltas since the last flush are many.

    A recovery reads all deltas after the last flushed version. A flush copies every row that is dirty when it begins,
    piece by piece in hash order. It ends when the files of all pieces, and of all rows evicted before, are written.
    The deltas up to the version at which the flush began are then covered. A piece may hold changes of later batches;
    that is harmless, because recovery applies their deltas on top.

    Args:
        hot: the rows. buffer: takes the pieces.
        budget: bytes of memory that the tables of a slot share.
        flushed: the version whose deltas are covered from the start.

    Attributes:
        backlog: deltas since the last flush. flushed: deltas of versions up to this one are no longer needed.
    """

    def __init__(self, hot: HotTable, buffer: EvictionBuffer, budget: int, flushed: int) -> None:
        self._hot = hot
        self._eviction_buffer = buffer
        self.backlog = DeltaBacklog(budget)
        self.flushed = flushed
        self._version: int | None = None  # the version at which the running flush began
        self._next_hash = 0  # the hash at which copying continues
        self._copied = False
        self._needed: tuple[EvictedRun, ...] = ()

    def step(self, version: int) -> None:
        """Begin, continue or finish a flush; called between two batches, with the table at `version`."""
        if self._copied and self._eviction_buffer.written(self._needed):
            assert self._version is not None
            self.flushed = self._version
            # Deltas of later versions stay: rows may have changed again after they were copied.
            self.backlog.cover(self.flushed)
            self._version, self._copied, self._needed = None, False, ()
        if self._version is None and self.backlog.due:
            self._version, self._next_hash = version, 0
        if self._version is not None and not self._copied:
            self._copy()

    def _copy(self) -> None:
        hot = self._hot
        row_bytes = hot.average_row_bytes
        # Large flushes copy a sixteenth of the dirty rows between two batches, so that they advance, too.
        wanted = max(_BYTES_PER_BATCH, hot.dirty * row_bytes // 16)
        # Pieces wait in the eviction buffer until they are written; they may take only its share of the memory.
        room = max(_MIN_PIECE_BYTES, hot.memory // 3 - self._eviction_buffer.memory)
        piece_rows = max(1, min(wanted, room) // row_bytes)
        for ids in hot.walk(piece_rows, DIRTY, self._next_hash):
            rows = hot.copy(ids, keep=TOMBSTONE, clear=DIRTY)
            self._eviction_buffer.add(rows)
            if len(ids) == piece_rows:
                # Continue at the last hash, not after it: the next dirty row may have the same hash.
                self._next_hash = int(rows.words[-1, HASH])
                return
        self._copied = True
        # Rows evicted before may be dirty, too: the deltas are covered only once their files are written.
        self._needed = self._eviction_buffer.waiting
