"""Records of all open windows (the Stat table of FlowKV §4.2), and the buffers that they refer to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.errors import SettingError
from millpond.files.formats.blocks import kernel_layout
from millpond.kernels.pointers import address
from millpond.kernels.runs.gather import addresses, gather, heap_bytes
from millpond.kernels.unaligned import stat_table as kernels
from millpond.kernels.unaligned.stat_table import WINDOW
from millpond.layout import RowLayout, Rows

_MAX_LOAD = 0.6  # share of used slots from which the table doubles
_MIN_WINDOWS = 1024  # slots of a new table
_MIN_ROWS = 1024  # rows of a new write buffer
_MIN_HEAP_BYTES = 1 << 16  # bytes of long values of a new write buffer


class WindowStat:
    """The open windows by id. Grows by doubling.

    Attributes:
        table: the records (see `kernels.unaligned.stat_table.WINDOW`).
        count: number of windows.
    """

    def __init__(self) -> None:
        self.table: NDArray[Any] = np.zeros(_MIN_WINDOWS, WINDOW)
        self.count = 0

    @property
    def memory(self) -> int:
        """Bytes of the table."""
        return self.table.nbytes

    def growth(self, more: int) -> int:
        """Return the additional bytes for `more` windows; both tables exist while the new one is filled."""
        size = self._size(more)
        return 0 if size == len(self.table) else size * WINDOW.itemsize

    def _size(self, more: int) -> int:
        size = len(self.table)
        while self.count + more > _MAX_LOAD * size:
            size *= 2
        return size

    def make_room(self, more: int) -> None:
        """Make room for `more` additional windows."""
        size = self._size(more)
        if size != len(self.table):
            table = np.zeros(size, WINDOW)
            kernels.move(self.table, table)
            self.table = table

    def lookup(self, ids: NDArray[np.uint64]) -> NDArray[Any]:
        """Copy the records of windows (id 0: no such window)."""
        out = np.empty(len(ids), WINDOW)
        kernels.copy_records(self.table, ids, out)
        return out

    def remove(self, ids: NDArray[np.uint64], released: NDArray[np.int32]) -> None:
        """Remove windows; `released` counts them for each chunk of the prefetch buffer."""
        self.count -= kernels.remove(self.table, ids, released)


class WriteBuffer:
    """Rows that are in no segment yet, in order of arrival; rows of one window are linked.

    Attributes:
        rows: number of rows, taken ones included. heap_used: bytes of their long values.
        following: for each row, the next row of its window, or -1.
    """

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self._blobs = kernel_layout(layout).blobs
        self.words = np.empty((_MIN_ROWS, layout.width), np.uint64)
        self.heap = np.empty(_MIN_HEAP_BYTES if len(self._blobs) else 0, np.uint8)
        self.following = np.empty(_MIN_ROWS, np.int32)
        self.rows = 0
        self.heap_used = 0

    @property
    def memory(self) -> int:
        """Bytes of memory in use."""
        return self.words.nbytes + self.heap.nbytes + self.following.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without its long values."""
        return 8 * self.layout.width + 4

    def long_bytes(self, rows: Rows) -> int:
        """Return the bytes of the rows' long values."""
        if not len(self._blobs):
            return 0
        rows_at, _ = addresses(rows.words, rows.heap)
        return int(heap_bytes(rows_at, len(rows_at), self._blobs))

    def needed(self, rows: int, long_bytes: int) -> int:
        """Return the bytes of the buffer once it has room for more rows and long values."""
        words = _doubled(len(self.words), self.rows + rows) * self.row_bytes
        return words + (_doubled(len(self.heap), self.heap_used + long_bytes) if len(self._blobs) else 0)

    def put(self, rows: Rows, long_bytes: int) -> int:
        """Copy rows into the buffer; returns the number of the first."""
        first, count = self.rows, rows.count
        size = _doubled(len(self.words), first + count)
        if size != len(self.words):
            self.words = _grown(self.words, size, first)
            self.following = _grown(self.following, size, first)
        if len(self._blobs):
            size = _doubled(len(self.heap), self.heap_used + long_bytes)
            if size != len(self.heap):
                self.heap = _grown(self.heap, size, self.heap_used)
        rows_at, heaps_at = addresses(rows.words, rows.heap)
        target = address(self.words) + first * 8 * self.layout.width
        self.heap_used = gather(
            rows_at, heaps_at, count, self.layout.width, self._blobs, target, address(self.heap), self.heap_used
        )
        self.rows += count
        return first

    def clear(self, *, shrink: bool = False) -> None:
        """Drop all rows; with `shrink`, release their memory."""
        self.rows = self.heap_used = 0
        if shrink:
            self.__init__(self.layout)  # type: ignore[misc]


class Chunk(NamedTuple):
    """Rows that one predictive batch read has loaded."""

    rows: Rows
    windows: int


class PrefetchBuffer:
    """Rows of windows that are expected to trigger soon, in chunks, each released with its last window."""

    def __init__(self) -> None:
        self._chunks: list[Chunk | None] = []
        self.released = np.zeros(64, np.int32)  # for each chunk, the number of windows taken or evicted

    @property
    def memory(self) -> int:
        """Bytes of memory in use."""
        return sum(c.rows.words.nbytes + c.rows.heap.nbytes for c in self._chunks if c is not None)

    def add(self, rows: Rows, windows: int) -> int:
        """Add the rows of windows; returns the chunk's number."""
        number = next((n for n, chunk in enumerate(self._chunks) if chunk is None), len(self._chunks))
        if number == len(self._chunks):
            self._chunks.append(None)
        if number >= len(self.released):
            self.released = _grown(self.released, 2 * len(self.released), len(self.released))
            self.released[number:] = 0
        self._chunks[number] = Chunk(rows, windows)
        self.released[number] = 0
        return number

    def sweep(self) -> int:
        """Release chunks that no window needs; returns the number of chunks left."""
        kept = 0
        for number, chunk in enumerate(self._chunks):
            if chunk is not None:
                if self.released[number] >= chunk.windows:
                    self._chunks[number] = None
                else:
                    kept += 1
        return kept

    def addresses(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the addresses of each chunk's words and heap."""
        words = [0 if c is None else address(c.rows.words) for c in self._chunks]
        heaps = [0 if c is None else address(c.rows.heap) for c in self._chunks]
        return np.array(words, np.uint64), np.array(heaps, np.uint64)

    def clear(self) -> None:
        """Release all chunks; no record may refer to them any more."""
        self._chunks = []
        self.released[:] = 0


def outgrown_error() -> SettingError:
    """Create the error for windows whose records alone outgrow the memory."""
    return SettingError(
        "The open session windows outgrew the memory of their slot: each needs some 200 bytes, in half of it.",
        action="Raise spark.millpond.slot.memory, and start again.",
    )


def _doubled(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size


def _grown(array: NDArray[Any], size: int, used: int) -> NDArray[Any]:
    out = np.empty((size, *array.shape[1:]), array.dtype)
    out[:used] = array[:used]
    return out
