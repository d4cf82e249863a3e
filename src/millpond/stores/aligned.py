"""The aligned append store: whole windows of rows, read gradually when they close, and then dropped (FlowKV §4.1).

Rows are kept by window, not by key: a table for each window, or for each pane of sliding windows. What a batch appends
to a table is sorted by hash once, and is at the same time its delta and a segment of the window: it is not written
again, but read where it lies, in the sealed file of the batch or in the commit that took it over. Only where a window
gathers many small segments are they merged, behind the batch's back, into a file. Nothing is ever compacted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.errors import TransientError
from millpond.files.append_file import (
    AppendFile,
    AppendFileWriter,
    MappedBytes,
    RemoteBytes,
    Section,
    Slice,
    open_files,
)
from millpond.files.blocks import HashRange, shape_of
from millpond.files.filesystem import Buffer
from millpond.files.refs import RunRef, TableManifest
from millpond.kernels.gather import addresses, gather_rows
from millpond.kernels.sort import order_by_hash
from millpond.layout import HASH, RowLayout, Rows, TableSchema
from millpond.stores.append_files import AppendFiles
from millpond.stores.budget import MemoryBudget
from millpond.stores.protocol import TableDelta

_MOST_SEGMENTS = 64
"""Segments of a window from which they are merged, unless they are large."""
_LARGE = 4 << 20
_MOST_LARGE = 512
_LEAST_PIECE = 1 << 16
_SIDE_BY_SIDE = 16
"""Segments in a remote location that are read side by side."""

Window = int | str
"""What a window is called: where it begins, or the name of some that are kept together."""

_log = logging.getLogger(__name__)


class AlignedTable:
    """The rows of one window. Not thread-safe; made by `AlignedStore.open`.

    Attributes:
        layout: of the rows. rows: how many there are.
    """

    def __init__(
        self,
        owner: AlignedStore,
        window: Window,
        files: AppendFiles,
        manifest: TableManifest,
        deltas: Sequence[Slice],
    ) -> None:
        self._owner = owner
        self._window = window
        self.layout = layout = owner.layout
        self._store = files
        self._merged = [(ref, files.open(ref, [layout])) for ref in reversed(manifest.runs)]  # oldest first
        self._flushed = manifest.flushed
        self._segments = [file for at in deltas for file in files.open_slice(at, [layout])]  # behind those merged
        self._chunks: list[Rows] = []
        self._fresh: list[AppendFile] = []  # segments of the running batch
        self._merging: tuple[int, int, int, Future[tuple[RunRef, AppendFile]]] | None = None
        self.buffered = 0
        self.touched = False
        self.rows = sum(file.sections[0].rows for file in self.files)
        self._held = 0
        self._count()

    @property
    def files(self) -> list[AppendFile]:
        """The sealed segments, oldest first."""
        return [file for _, file in self._merged] + self._segments

    @property
    def bytes(self) -> int:
        """Bytes of all segments."""
        return sum(ref.bytes for ref, _ in self._merged) + sum(file.data.size for file in self._segments)

    @property
    def memory(self) -> int:
        """Bytes of memory that the table holds."""
        return self.buffered + self._held

    def _count(self) -> None:
        files = self.files + self._fresh
        resident = sum(file.data.size for file in files if isinstance(file.data, _Resident))
        self._held = resident + sum(file.memory for file in files)

    @property
    def portion(self) -> int:
        """Bytes of input that should be worked on at once, at most."""
        return self._owner.portion

    @property
    def ahead(self) -> int:
        """How many keys should be worked on together: any number."""
        return self._owner.ahead

    def passes(self, rows: int) -> int:
        """In how many passes over ranges of the hash to work through a batch: one, in any order."""
        return 1

    def narrow(self, range_: HashRange) -> None:
        """Nothing: rows are taken in any order."""

    def append(self, rows: Rows) -> None:
        """Append rows (all words filled); they are copied."""
        rows = Rows(np.ascontiguousarray(rows.words), np.ascontiguousarray(rows.heap))
        self._owner.make_room(rows.words.nbytes + rows.words.nbytes // 8)
        self.put(rows, np.arange(rows.count))

    def put(self, rows: Rows, select: NDArray[np.int64]) -> None:
        """Append some of the rows, for which there is room."""
        rows_at, heaps_at = addresses(rows.words, rows.heap)
        at = rows_at[select]
        chunk = Rows(*gather_rows(at, heaps_at[: len(at)], self.layout.width, shape_of(self.layout).blobs))
        self._chunks.append(chunk)
        self.buffered += chunk.words.nbytes + chunk.heap.nbytes
        self.rows += chunk.count
        self.touched = True

    def freeze(self, *, spool: bool) -> None:
        """Make a segment of the rows in the buffer, in memory or in a file on the local disk."""
        if not self._chunks:
            return
        rows = _sorted(self._chunks, self.layout)
        self._chunks = []
        self.buffered = 0

        def fill(writer: AppendFileWriter) -> None:
            writer.begin(self.layout)
            writer.add(rows, rows.words[:, HASH])

        if spool:
            self._fresh.append(AppendFile(MappedBytes(self._store.spool(fill), "a segment set aside"), [self.layout]))
            self._count()
            return
        pieces: list[Buffer] = []
        writer = AppendFileWriter(pieces.append, compress=True)
        fill(writer)
        writer.finish()
        self._fresh.append(AppendFile(_Resident(b"".join(pieces), "a segment in memory"), [self.layout]))
        self._count()

    def seal(self) -> TableDelta:
        """End the batch: the segments that it has appended."""
        self.freeze(spool=False)
        new, self._fresh = self._fresh, []
        self._segments += new
        self.touched = False
        return TableDelta(sum(file.sections[0].rows for file in new), [_view(file) for file in new])

    def placed(self, data: Buffer) -> None:
        """Say where the last delta lies from now on; what it took of memory is free."""
        files = open_files(MappedBytes(data, "a sealed delta"), [self.layout])
        self._segments[len(self._segments) - len(files) :] = files
        self._count()

    def begin(self, version: int) -> None:
        """Start a batch: segments that nobody has placed leave memory, and many small ones are merged."""
        background, piece = self._owner.background, self._owner.piece
        for at, file in enumerate(self._segments):
            if isinstance(file.data, _Resident):
                view = self._store.put_aside(file.data.view)
                self._segments[at] = AppendFile(MappedBytes(view, "a segment set aside"), [self.layout])
        self._adopt()
        if self._merging is None and self._due:
            old = len(self._merged) if len(self._merged) >= _MOST_SEGMENTS // 2 else 0
            inputs = [file for _, file in self._merged[:old]] + self._segments
            future = background.submit(self._merge, inputs, piece)
            self._merging = version, old, len(self._segments), future
        self._count()

    @property
    def _due(self) -> bool:
        count, size = len(self._segments), sum(file.data.size for file in self._segments)
        return count >= _MOST_LARGE or (count >= _MOST_SEGMENTS and size < count * _LARGE)

    def _merge(self, inputs: Sequence[AppendFile], piece: int) -> tuple[RunRef, AppendFile]:
        def fill(writer: AppendFileWriter) -> None:
            writer.begin(self.layout)
            for rows in gradually([inputs], self.layout, piece):
                writer.add(rows, rows.words[:, HASH])

        return self._store.write(fill, [self.layout], sum(file.sections[0].rows for file in inputs))

    def _adopt(self) -> None:
        if self._merging is None or not self._merging[3].done():
            return
        (version, old, count, future), self._merging = self._merging, None
        try:
            result = future.result()
        except (TransientError, OSError) as error:
            _log.warning("Merging %d segments of a window failed and will be tried again: %s", count, error)
            return
        for ref, file in self._merged[:old]:
            self._store.forget(ref, file)
        self._merged = [*self._merged[old:], result]
        self._segments = self._segments[count:]
        self._flushed = version

    def manifest(self) -> TableManifest:
        """The merged segments, newest first; the others are the deltas of later versions."""
        return TableManifest(tuple(ref for ref, _ in reversed(self._merged)), self._flushed, self.rows)

    def stats(self) -> dict[str, int]:
        """Figures: `keys`: rows; `windows`; `segments`; `bytes`: in memory and files; `hot_bytes`: in memory."""
        return {
            "keys": self.rows,
            "windows": 1,
            "segments": len(self.files),
            "bytes": self.bytes + self.buffered,
            "hot_bytes": self.memory,
        }

    def readable(self) -> list[AppendFile]:
        """All segments, oldest first, those of the running batch included."""
        if self._chunks:
            self.freeze(spool=False)
        return self.files + self._fresh

    def close(self) -> None:
        """Let go of the segments."""
        self._owner.forget(self._window, self)
        if self._merging is not None:
            self._merging[3].cancel()
        for ref, file in self._merged:
            self._store.forget(ref, file)
        self._chunks, self._fresh, self._segments, self._merged = [], [], [], []
        self.buffered = self._held = 0


class _Resident(MappedBytes):
    """A segment that takes memory until it lies in a file."""


def _view(file: AppendFile) -> memoryview:
    assert isinstance(file.data, MappedBytes)
    return file.data.view


class AlignedStore:
    """The windows of one operator on one partition, each a table. Not thread-safe: one writer.

    A batch is `begin`, any number of `append`, `seal`. `read` sees what was appended before.

    Args:
        schema: the stored columns. Rows of equal keys have equal hashes; each row that is appended is kept.
        files: where segments are written. budget: the memory shared with the other tables of the slot.
        background: merges segments.
        prefix: tables are called by this name, `@`, and their window.

    Attributes:
        layout: of the rows. piece: bytes of what is read at once.
    """

    def __init__(
        self,
        schema: TableSchema,
        files: AppendFiles,
        budget: MemoryBudget,
        background: Executor,
        *,
        prefix: str = "main",
    ) -> None:
        self.layout = RowLayout(schema)
        self._files = files
        self._budget = budget
        self._account = budget.open()
        self.background = background
        self.piece = budget.piece
        self._prefix = prefix
        self._tables: dict[Window, AlignedTable] = {}
        self._spilled_bytes = 0

    def open(self, window: Window, manifest: TableManifest, deltas: Sequence[Slice] = ()) -> AlignedTable:
        """Open a window at a version; of its segments only the directories are read.

        Args:
            manifest: of the table. deltas: where those behind `manifest.flushed` lie, oldest first.

        Raises:
            StateDamagedError: a file is missing or damaged.
        """
        table = AlignedTable(self, window, self._files, manifest, deltas)
        self._tables[window] = table
        return table

    def name(self, window: Window) -> str:
        """What the table of a window is called."""
        return f"{self._prefix}@{window}"

    @property
    def tables(self) -> Mapping[str, AlignedTable]:
        """The tables by name."""
        return {self.name(window): table for window, table in self._tables.items()}

    def windows(self) -> list[Any]:
        """The windows that have rows, ascending."""
        return sorted(self._tables)

    @property
    def portion(self) -> int:
        """Bytes of input that should be worked on at once, at most."""
        return 2 * self._budget.piece

    @property
    def ahead(self) -> int:
        """How many keys should be worked on together: any number."""
        return 1 << 32

    def begin(self, version: int) -> None:
        """Start the batch that reads `version`."""
        for table in self._tables.values():
            table.begin(version)
        self._account.force(self._memory())

    def append(self, rows: Rows, windows: NDArray[np.int64]) -> None:
        """Append rows (all words filled), each to its window; windows that are new get a table."""
        if not rows.count:
            return
        words = np.ascontiguousarray(rows.words)
        rows = Rows(words, np.ascontiguousarray(rows.heap))
        self.make_room(words.nbytes + words.nbytes // 8)
        lowest, highest = int(windows.min()), int(windows.max())
        if lowest == highest:
            self._table(lowest).put(rows, np.arange(len(words)))
            return
        order = np.argsort(windows, kind="stable")
        ordered = windows[order]
        cuts = np.flatnonzero(np.diff(ordered)) + 1
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(order)], strict=True):
            self._table(int(ordered[begin])).put(rows, order[begin:end])

    def _table(self, window: int) -> AlignedTable:
        return self._tables.get(window) or self.open(window, TableManifest())

    def _memory(self) -> int:
        return sum(table.memory for table in self._tables.values())

    def make_room(self, more: int) -> None:
        """Have room for so many more bytes, in part by moving rows that wait for the end of the batch to a file."""
        self._budget.relieve()
        held = self._memory() + more
        if self._account.reserve(held):
            return
        for table in sorted(self._tables.values(), key=lambda each: -each.buffered):
            if self._account.reserve(held + more):
                break
            self._spilled_bytes += table.buffered
            table.freeze(spool=True)
            held = self._memory() + more
        if not self._account.reserve(held):
            self._account.force(held)

    def read(self, *windows: Window, size: int | None = None, range_: HashRange = HashRange()) -> Iterator[Rows]:  # noqa: B008
        """All rows of some windows together, gradually, in hash order (rows of one hash in the order they came).

        Args:
            size: bytes of a piece, roughly; all rows of one hash are in one piece, which may be larger if they are.
            range_: the hashes wanted.

        Yields:
            Non-empty pieces with compact heaps. They stay valid; the windows may change once all are read.
        """
        groups = []
        for window in windows:
            table = self._tables.get(window)
            if table is not None:
                groups.append(table.readable())
        return gradually(groups, self.layout, size or self._budget.piece, range_)

    def reader(self, *windows: Window) -> WindowReader:
        """Holds on to what some windows hold now, to be read even after they are dropped."""
        tables = [self._tables[window] for window in windows if window in self._tables]
        return WindowReader([table.readable() for table in tables], self.layout, self.piece)

    def drop(self, window: Window) -> None:
        """Forget a window as a whole."""
        table = self._tables.get(window)
        if table is not None:
            table.close()

    def forget(self, window: Window, table: AlignedTable) -> None:
        """A table is closed."""
        if self._tables.get(window) is table:
            del self._tables[window]

    def seal(self) -> dict[str, TableDelta]:
        """End the batch: the deltas of the windows that it has appended to, by table."""
        deltas = {self.name(w): table.seal() for w, table in self._tables.items() if table.touched}
        self._account.force(self._memory())
        self._budget.relieve()
        return deltas

    def stats(self) -> dict[str, int]:
        """Figures of all windows (see `AlignedTable.stats`), and `spilled_bytes`: what did not fit in memory before it
        was sealed.
        """
        figures = dict.fromkeys(("keys", "windows", "segments", "bytes", "hot_bytes"), 0)
        figures["spilled_bytes"] = self._spilled_bytes
        for table in self._tables.values():
            for name, value in table.stats().items():
                figures[name] = figures.get(name, 0) + value
        return figures

    def close(self) -> None:
        """Give all memory back."""
        for table in tuple(self._tables.values()):
            table.close()
        self._account.close()


class WindowReader:
    """Reads windows that have closed, as often as asked (see `AlignedStore.reader`)."""

    def __init__(self, groups: Sequence[Sequence[AppendFile]], layout: RowLayout, piece: int) -> None:
        self._groups = groups
        self._layout = layout
        self._piece = piece

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(file.sections[0].rows for group in self._groups for file in group)

    def read(self, size: int | None = None) -> Iterator[Rows]:
        """See `AlignedStore.read`."""
        return gradually(self._groups, self._layout, size or self._piece)


def gradually(
    groups: Sequence[Sequence[AppendFile]],
    layout: RowLayout,
    size: int,
    range_: HashRange = HashRange(),  # noqa: B008
) -> Iterator[Rows]:
    """The rows of hash-ordered files, interval by interval of the hash axis (FlowKV §4.1, gradual state loading).

    Args:
        groups: the files of each window, oldest first.
        layout: of the rows. size: bytes of an interval's rows, roughly. range_: the hashes wanted.
    """
    cursors = [_Cursor(file, section, range_) for group in groups for file in group for section in file.sections]
    cursors = [cursor for cursor in cursors if cursor.pending]
    if not cursors:
        return
    ends = list(_boundaries(cursors, size, range_))
    remote = any(isinstance(cursor.file.data, RemoteBytes) for cursor in cursors)
    pool = ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(cursors)), "millpond-window") if remote else None
    try:
        for end in ends:
            taken = (pool.map if pool else map)(partial(_Cursor.upto, end=end), cursors)
            parts = [part for some in taken for part in some]
            if parts:
                yield _sorted(parts, layout)
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


class _Cursor:
    """Reads one file in hash order."""

    def __init__(self, file: AppendFile, section: Section, range_: HashRange) -> None:
        self.file = file
        self.section = section
        first = section.first
        self.at = max(0, int(np.searchsorted(first, np.uint64(range_.lo), "left")) - 1)
        self.stop = int(np.searchsorted(first, np.uint64(range_.hi - 1), "right"))
        self._lo = np.uint64(range_.lo)
        self._rest: Rows | None = None  # what is left of the last block read

    @property
    def pending(self) -> int:
        """Blocks that are not read yet."""
        return max(0, self.stop - self.at)

    def upto(self, end: int) -> list[Rows]:
        """All rows that are left with hashes below `end`."""
        out: list[Rows] = []
        if self._rest is not None:
            self._split(self._rest, end, out)
        last = int(np.searchsorted(self.section.first, np.uint64(end - 1), "right"))
        last = min(self.stop, last)
        if self._rest is None and self.at < last:
            blocks = np.arange(self.at, last)
            self.at = last
            self.file.data.expect(self.file.ranges(self.section, np.arange(last, min(self.stop, 2 * last - blocks[0]))))
            for block in self.file.read(self.section, blocks):
                self._split(block, end, out)
        return out

    def _split(self, rows: Rows, end: int, out: list[Rows]) -> None:
        hashes = rows.words[:, HASH]
        begin = int(np.searchsorted(hashes, self._lo, "left"))
        cut = int(np.searchsorted(hashes, np.uint64(end - 1), "right"))
        if cut > begin:
            out.append(Rows(rows.words[begin:cut], rows.heap))
        self._rest = Rows(rows.words[cut:], rows.heap) if cut < len(hashes) else None


def _boundaries(cursors: Sequence[_Cursor], size: int, range_: HashRange) -> Iterator[int]:
    """Where to cut the axis (each the end of an interval, excluded) so that each has rows of about `size` bytes."""
    fences = np.concatenate([c.section.first[c.at : c.stop] for c in cursors])
    heap_and_words = []
    for cursor in cursors:
        rows = np.diff(cursor.section.starts)[cursor.at : cursor.stop]
        # Compressed blocks are shorter than what is in them, but not long values alone.
        words = rows * (8 * cursor.section.layout.width)
        heap_and_words.append(np.maximum(words, 2 * cursor.section.sizes[cursor.at : cursor.stop] * _has_heap(cursor)))
    sizes = np.concatenate(heap_and_words)
    order = np.argsort(fences, kind="stable")
    before = np.cumsum(sizes[order]) - sizes[order]
    step = max(size, _LEAST_PIECE)
    cuts = np.searchsorted(before, np.arange(step, int(sizes.sum()), step), "left")
    for fence in np.unique(fences[order[cuts[cuts < len(order)]]]).tolist():
        if fence > range_.lo:
            yield fence
    yield range_.hi


def _has_heap(cursor: _Cursor) -> int:
    return 1 if cursor.section.layout.bytes_columns else 0


def _sorted(chunks: Sequence[Rows], layout: RowLayout) -> Rows:
    """The rows of some chunks in hash order, those of one hash in the order of the chunks, with one compact heap."""
    at, heaps = [], []
    for chunk in chunks:
        rows_at, heaps_at = addresses(chunk.words, chunk.heap)
        at.append(rows_at)
        heaps.append(heaps_at)
    hashes = np.concatenate([chunk.words[:, HASH] for chunk in chunks])
    _, order = order_by_hash(hashes)
    rows_at, heaps_at = np.concatenate(at)[order], np.concatenate(heaps)[order]
    return Rows(*gather_rows(rows_at, heaps_at, layout.width, shape_of(layout).blobs))
