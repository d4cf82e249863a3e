"""When the changes of many batches leave the log of deltas for a run."""

from __future__ import annotations

from millpond.kernels.hot_table.state import DIRTY, TOMBSTONE
from millpond.layout import HASH
from millpond.stores.rmw.eviction_buffer import EvictedRun, EvictionBuffer
from millpond.stores.rmw.hot_table import HotTable

_MOST_DELTAS = 64
_LEAST_BYTES = 32 << 20
_MOST_BYTES = 512 << 20
_PER_BATCH = 16 << 20  # bytes copied between two batches, at most, unless far more are dirty
_LEAST_PIECE = 1 << 18


class Flusher:
    """Copies dirty rows into runs once the deltas since the last flush are many or long, some between two batches.

    A recovery reads all deltas behind the version that was flushed last. A flush copies every row that is dirty when it
    begins, piece by piece in hash order; when the files of all pieces (and of all rows evicted before) are written, the
    deltas up to the version at which it began are covered. That a piece may hold changes of later batches does no harm:
    their deltas are read over it.

    Args:
        hot: the rows. buffer: takes the pieces.
        limit: bytes that the table may use.
        flushed: the version whose deltas are covered from the start.

    Attributes:
        flushed: deltas of versions up to this one are not needed any more.
    """

    def __init__(self, hot: HotTable, buffer: EvictionBuffer, limit: int, flushed: int) -> None:
        self._hot = hot
        self._eviction_buffer = buffer
        self._most_bytes = min(max(limit // 2, _LEAST_BYTES), _MOST_BYTES)
        self.flushed = flushed
        self._deltas: list[tuple[int, int]] = []  # version and bytes
        self._version: int | None = None  # at which the running flush began
        self._next_hash = 0  # where its copying goes on
        self._copied = False
        self._needed: tuple[EvictedRun, ...] = ()

    def sealed(self, version: int, size: int) -> None:
        """Note a delta and the version that it made (0: an older one)."""
        self._deltas.append((version, size))

    def step(self, version: int) -> None:
        """Between two batches, the table being at `version`: begin, go on with or finish a flush."""
        if self._copied and self._eviction_buffer.written(self._needed):
            assert self._version is not None
            self.flushed = self._version
            self._deltas = [delta for delta in self._deltas if delta[0] > self.flushed]
            self._version, self._copied, self._needed = None, False, ()
        if self._version is None and self._due:
            self._version, self._next_hash = version, 0
        if self._version is not None and not self._copied:
            self._copy()

    @property
    def _due(self) -> bool:
        size = sum(size for _, size in self._deltas)
        return len(self._deltas) >= _MOST_DELTAS or size >= self._most_bytes

    def _copy(self) -> None:
        hot = self._hot
        row = hot.average_bytes
        wanted = max(_PER_BATCH, hot.dirty * row // 16)
        room = max(_LEAST_PIECE, hot.memory // 3 - self._eviction_buffer.memory)
        most = max(1, min(wanted, room) // row)
        for ids in hot.walk(most, DIRTY, self._next_hash):
            rows = hot.copy(ids, keep=TOMBSTONE, clear=DIRTY)
            self._eviction_buffer.add(rows)
            if len(ids) == most:
                self._next_hash = int(rows.words[-1, HASH])
                return
        self._copied = True
        self._needed = self._eviction_buffer.waiting
