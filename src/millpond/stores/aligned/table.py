"""The aligned append store: whole windows of rows, read gradually when they close, and then dropped (FlowKV §4.1).

Rows are kept by window, not by key. Each window, or each pane of sliding windows, has a table of its own. A batch sorts
the rows that it appends by hash, once. The result is both the batch's delta and a segment of the window, and is not
written again: it is read in place, in the batch's sealed file or in the commit that contains it. Only a window with
many small segments has them merged, in the background, into a file. There is no compaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from millpond.files.backends.filesystem import Buffer
from millpond.files.formats.append_file import (
    AppendFile,
    AppendFileWriter,
    ByteRange,
    MappedBytes,
    open_files,
)
from millpond.files.formats.blocks import kernel_layout
from millpond.files.refs import RunRef, TableManifest
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.layout import HASH, HashRange, RowLayout, Rows, TableSchema
from millpond.stores.aligned.hash_intervals import in_hash_order, read_gradually
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.protocol import TableDelta
from millpond.stores.runs.background_merge import BackgroundMerge

_MAX_SMALL_SEGMENTS = 64
"""Number of segments from which a window's segments are merged, unless they are large."""
_LARGE_SEGMENT_BYTES = 4 << 20  # average bytes from which segments are read well without a merge
_MAX_SEGMENTS = 512  # segments that are merged even if they are large

WindowName = int | str
"""Name of a window: its start, or the name of several that are kept together."""


class AlignedTable:
    """The rows of one window. Not thread-safe; made by `AlignedStore.open`.

    Attributes:
        layout: of the rows. rows: number of rows. lowest: rows with lower hashes no longer count.
    """

    def __init__(
        self,
        owner: AlignedStore,
        window: WindowName,
        files: AppendFiles,
        layout: RowLayout,
        manifest: TableManifest,
        deltas: Sequence[ByteRange],
    ) -> None:
        self._owner = owner
        self._window = window
        self.layout = layout
        self._store = files
        self._merged = [(ref, files.open(ref, [layout])) for ref in reversed(manifest.runs)]  # oldest first
        self._flushed = manifest.flushed
        self._segments = [file for delta in deltas for file in files.open_range(delta, [layout])]  # newer
        self._chunks: list[Rows] = []
        self._fresh: list[AppendFile] = []  # segments of the running batch
        self._merging = BackgroundMerge[AppendFile, tuple[RunRef, AppendFile]]()
        self._merge_version = 0  # version that the running merge has read
        self._remerged_files = 0  # inputs of the running merge that are results of earlier merges
        self.buffered = 0
        self.lowest = manifest.lowest
        self.rows = sum(file.rows for file in self.files)
        self._held = self._charged = 0  # bytes beside buffered rows; bytes of this table in the store's account
        self._update_held()

    @property
    def files(self) -> list[AppendFile]:
        """The sealed segments, oldest first."""
        return [file for _, file in self._merged] + self._segments

    @property
    def bytes(self) -> int:
        """Bytes of all sealed segments; of a shared file, the partition's share."""
        return sum(file.bytes for file in self.files)

    @property
    def memory(self) -> int:
        """Bytes of memory in use: buffered rows, resident segments, directories of files."""
        return self.buffered + self._held

    def _update_held(self) -> None:
        files = self.files + self._fresh
        resident = sum(file.data.size for file in files if isinstance(file.data, _ResidentSegment))
        self._held = resident + sum(file.memory for file in files)
        self._owner.charge(self.memory - self._charged)
        self._charged = self.memory

    @property
    def portion_bytes(self) -> int:
        """Bytes of input to work on at once, at most."""
        return self._owner.portion_bytes

    @property
    def portion_keys(self) -> int:
        """Number of keys to work on together: unlimited."""
        return self._owner.portion_keys

    @property
    def in_flight(self) -> bool:
        """Whether a merge is running, or is done and `begin` has not yet taken over its result."""
        return self._merging.running

    @property
    def over_budget(self) -> bool:
        """Always False: rows leave memory anyway once they are sealed."""
        return False

    def set_idle(self, idle: bool) -> None:
        """Do nothing: rows stay in memory for one batch at most."""

    def passes(self, rows: int) -> int:
        """Return 1: rows are taken in any order, so one pass is enough."""
        return 1

    def restrict(self, range_: HashRange) -> None:
        """Do nothing: rows are taken in any order."""

    def append(self, rows: Rows) -> None:
        """Append copies of rows, all words of which are filled."""
        rows = rows.packed()
        room = rows.words.nbytes + rows.words.nbytes // 8
        self._owner.make_room(room)
        chunk = Rows(*gather_rows(*addresses(*rows), self.layout.width, kernel_layout(self.layout).blobs))
        self._chunks.append(chunk)
        size = chunk.words.nbytes + chunk.heap.nbytes
        self.buffered += size
        self._owner.charge(size - room)  # `make_room` has reserved `room`
        self._charged = self.memory
        self.rows += chunk.count

    def freeze(self, *, spool: bool) -> None:
        """Turn the buffered rows into a segment, in memory or in a file on the local disk."""
        if not self._chunks:
            return
        rows = in_hash_order(self._chunks, self.layout)
        self._chunks = []
        self.buffered = 0

        def fill(writer: AppendFileWriter) -> None:
            writer.begin(self.layout)
            writer.add(rows, rows.words[:, HASH])

        if spool:
            self._fresh.append(AppendFile(MappedBytes(self._store.spool(fill), "a segment set aside"), [self.layout]))
            self._update_held()
            return
        pieces: list[Buffer] = []
        writer = AppendFileWriter(pieces.append, compress=True)
        fill(writer)
        writer.finish()
        self._fresh.append(AppendFile(_ResidentSegment(b"".join(pieces), "a segment in memory"), [self.layout]))
        self._update_held()

    def seal(self) -> TableDelta:
        """End the batch, and return the segments that it appended."""
        self.freeze(spool=False)
        new, self._fresh = self._fresh, []
        self._segments += new
        return TableDelta(sum(file.sections[0].rows for file in new), [_encoded(file) for file in new])

    def adopt_sealed(self, data: Buffer) -> None:
        """Replace the last delta's segments by its sealed copy, which frees their memory."""
        files = open_files(MappedBytes(data, "a sealed delta"), [self.layout])
        # The segments of the last `seal` are the last of the list.
        self._segments[len(self._segments) - len(files) :] = files
        self._update_held()

    def begin(self, version: int) -> None:
        """Start a batch: move segments that are still in memory to disk, and merge many small ones."""
        background, piece = self._owner.background, self._owner.piece
        for number, file in enumerate(self._segments):
            # `adopt_sealed` has not replaced this segment, so it still takes memory.
            if isinstance(file.data, _ResidentSegment):
                view = self._store.spool_bytes(file.data.view)
                self._segments[number] = AppendFile(MappedBytes(view, "a segment set aside"), [self.layout])
        self._adopt()
        if not self._merging.running and self._due:
            # Files merged before are merged again only once they are many, so that a row is rewritten few times.
            old = len(self._merged) if len(self._merged) >= _MAX_SMALL_SEGMENTS // 2 else 0
            inputs = [file for _, file in self._merged[:old]] + self._segments
            self._merging.track(inputs, background.submit(self._merge, inputs, piece))
            self._merge_version, self._remerged_files = version, old
        self._update_held()

    @property
    def _due(self) -> bool:
        count, size = len(self._segments), sum(file.data.size for file in self._segments)
        return count >= _MAX_SEGMENTS or (count >= _MAX_SMALL_SEGMENTS and size < count * _LARGE_SEGMENT_BYTES)

    def _merge(self, inputs: Sequence[AppendFile], piece: int) -> tuple[RunRef, AppendFile]:
        def fill(writer: AppendFileWriter) -> None:
            writer.begin(self.layout)
            for rows in read_gradually([inputs], self.layout, piece):
                writer.add(rows, rows.words[:, HASH])

        return self._store.write(fill, [self.layout], sum(file.rows for file in inputs))

    def _adopt(self) -> None:
        done = self._merging.take()
        if done is None:
            return
        inputs, result = done
        version, old = self._merge_version, self._remerged_files
        for ref, file in self._merged[:old]:
            self._store.drop_copy(ref, file)
        self._merged = [*self._merged[old:], result]
        # Segments appended since the merge began stay behind its result.
        self._segments = self._segments[len(inputs) - old :]
        # The merge read all segments of the state `version`, so it covers the deltas up to that version.
        self._flushed = version

    def manifest(self) -> TableManifest:
        """List the merged segments, newest first; the other segments are the deltas of later versions."""
        refs = tuple(ref for ref, _ in reversed(self._merged))
        return TableManifest(refs, self._flushed, self.rows, lowest=self.lowest)

    def stats(self) -> dict[str, int]:
        """Return figures: `keys` (rows), `bytes` (memory and files), `hot_bytes` (memory)."""
        return {
            "keys": self.rows,
            "bytes": self.bytes + self.buffered,
            "hot_bytes": self.memory,
        }

    def all_segments(self) -> list[AppendFile]:
        """Return all segments, oldest first, including those of the running batch."""
        if self._chunks:
            self.freeze(spool=False)
        return self.files + self._fresh

    def drop_copies(self) -> None:
        """Drop the local copies of the table's files: its window has closed, so its rows are not read again."""
        for ref, file in self._merged:
            self._store.drop_copy(ref, file)

    def close(self) -> None:
        """Close the table and release its segments. Local copies of its files stay for the next slot that opens it."""
        self._owner.remove(self._window, self)
        self._merging.close()
        self._chunks, self._fresh, self._segments, self._merged = [], [], [], []
        self.buffered = self._held = 0
        self._owner.charge(-self._charged)
        self._charged = 0


class _ResidentSegment(MappedBytes):
    """A segment in memory that is not yet in a file."""


def _encoded(file: AppendFile) -> memoryview:
    assert isinstance(file.data, MappedBytes)
    return file.data.view


class AlignedStore:
    """The windows of one operator on one partition, each a table, and the memory that they share.

    Args:
        schema: the stored columns. Rows of equal keys have equal hashes; every appended row is kept.
        files: writes segments. budget: the memory shared with the other tables of the slot.
        background: runs segment merges.

    Attributes:
        layout: of the rows. piece: bytes read at once.
    """

    def __init__(
        self,
        schema: TableSchema,
        files: AppendFiles,
        budget: MemoryBudget,
        background: Executor,
    ) -> None:
        self.layout = RowLayout(schema)
        self._files = files
        self._budget = budget
        self._account = budget.open()
        self.background = background
        self.piece = budget.piece
        self._tables: dict[WindowName, AlignedTable] = {}

    def open(
        self,
        window: WindowName,
        manifest: TableManifest,
        deltas: Sequence[ByteRange] = (),
        *,
        layout: RowLayout | None = None,
    ) -> AlignedTable:
        """Open a window at a version; only the directories of its segments are read.

        Args:
            manifest: of the table. deltas: places of the deltas after `manifest.flushed`, oldest first.
            layout: of its rows, if it differs from the store's.

        Raises:
            StateDamagedError: a file is missing or damaged.
        """
        table = AlignedTable(self, window, self._files, layout or self.layout, manifest, deltas)
        self._tables[window] = table
        return table

    @property
    def portion_bytes(self) -> int:
        """Bytes of input to work on at once, at most."""
        return 2 * self._budget.piece

    @property
    def portion_keys(self) -> int:
        """Number of keys to work on together: unlimited."""
        return 1 << 32

    def _memory(self) -> int:
        return sum(table.memory for table in self._tables.values())

    def make_room(self, more: int) -> None:
        """Reserve `more` bytes; if memory is short, spool rows of the running batch to files, largest buffers first."""
        self._budget.trim_if_needed()
        held = self._memory() + more
        if self._account.reserve(held):
            return
        for table in sorted(self._tables.values(), key=lambda table: -table.buffered):
            table.freeze(spool=True)
            held = self._memory() + more
            if self._account.reserve(held):
                return
        self._account.force(held)

    def charge(self, more: int) -> None:
        """Account for memory that a table has taken (or, if negative, released) beside what it appends."""
        self._account.force(max(0, self._account.reserved + more))

    def remove(self, window: WindowName, table: AlignedTable) -> None:
        """Remove a closed table."""
        if self._tables.get(window) is table:
            del self._tables[window]

    def close(self) -> None:
        """Close all tables and release all memory."""
        for table in tuple(self._tables.values()):
            table.close()
        self._account.close()
