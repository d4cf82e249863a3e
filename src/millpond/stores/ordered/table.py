"""The ordered store: a multimap of rows by key and event time, read by time intervals, expired by time.

State is a set of immutable parts, each ordered by (key hash, time), most of them within one time bucket. The rows that
a batch adds become parts. Parts of a bucket are merged as they grow, and an expired bucket is dropped whole. Rows never
change except for one bit, the mark that they were matched, which is kept beside the part until the part is merged.
(APSys '18 §3.3 for unsorted, append-only writes, APSys '18 §4.2 for range reads by event time.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.files.formats.blocks import BLOCK_BYTES
from millpond.files.formats.segment import encode_rows
from millpond.files.refs import TableManifest
from millpond.kernels.ordered import order as ordered
from millpond.kernels.ordered import scan as ordered_scan
from millpond.kernels.ordered.order import MARK, MATCHED
from millpond.layout import HASH, META, NEVER, HashRange, Rows, TableSchema, Words
from millpond.stores.hash_filter import inside
from millpond.stores.memory.spooled import spool_pieces
from millpond.stores.ordered.block_prefetcher import BlockPrefetcher, KeyIntervals, PartBlockNumbers, find_blocks
from millpond.stores.ordered.files import PartFiles
from millpond.stores.ordered.layout import OrderedLayout, empty_rows, matched_names, sorted_rows
from millpond.stores.ordered.memory_merge import merge_in_memory
from millpond.stores.ordered.merge import Input, TimeInterval, merge_parts
from millpond.stores.ordered.parts import BEGINNING, Part
from millpond.stores.ordered.time_buckets import TimeBuckets
from millpond.stores.protocol import TableDelta
from millpond.stores.runs.compactor import Writer
from millpond.stores.runs.prefetcher import PrefetchFigures
from millpond.stores.runs.run import discard_result
from millpond.stores.runs.run_store import RunStore
from millpond.stores.table_resources import TableResources

_CHUNK_ROWS = 65536  # rows in a piece of a scan or a delta
_PREFETCH_DIVISOR = 16
"""Divisor of the memory that one prefetch may fill with blocks: half of the block cache."""

_INDEX_DIVISOR = 256
"""Divisor of the table's bytes of memory: the rows of a part that are indexed for their expiry, 16 bytes each."""


class OrderedTable:
    """One ordered table of one partition.

    A batch is `begin`, `append`, `build_parts`, then reading, marking and `expire`, then `seal`. Rows that were read
    stay valid until the next `begin`. Not thread-safe: one writer.

    Args:
        schema: the stored columns, as `ordered_schema` makes them.
        resources: the memory and the threads that the table shares with the other tables of its slot.
        range_: the hash range of the table.
        store: writes run files. Without one, everything stays in memory.
        manifest: the state before the deltas to be loaded.
        drop_matched: whether matched rows are dropped.

    Attributes:
        layout: of the rows.
        parts: the state before the batch. fresh: the parts that the batch adds, once settled.
        expired: rows up to this time (microseconds) are not part of the state that the batch reads; until: the same for
            the state that it leaves.
    """

    def __init__(
        self,
        schema: TableSchema,
        resources: TableResources,
        range_: HashRange = HashRange(),  # noqa: B008
        *,
        store: Writer | None = None,
        manifest: TableManifest = TableManifest(),  # noqa: B008
        parts: Sequence[Part] = (),
        drop_matched: bool = False,
    ) -> None:
        self.ordered = OrderedLayout.of(schema)
        self.layout = self.ordered.rows
        self._range = range_
        self._budget = resources.budget
        self._account = self._budget.open()
        self._drop_matched = drop_matched
        self._files: PartFiles | None = None
        if store is not None:
            self._files = PartFiles(self.ordered, store, resources, range_, manifest.flushed, drop_matched)
        self._file_lookups = self._reported_lookups = (
            0  # keys looked up in files: after the last seal; already reported at that seal
        )
        readers = resources.readers
        self._prefetcher = (
            None if readers is None else BlockPrefetcher(readers, self._budget.total // _PREFETCH_DIVISOR)
        )
        self.parts: list[Part] = list(parts)
        self.fresh: list[Part] = []
        self.expired = self.until = manifest.expired
        self._buckets = TimeBuckets()
        self._version = manifest.flushed
        self._sealed = True
        self._pending_rows: list[Rows] = []
        self._pending_bytes = 0
        self._appended_rows = 0
        self._newly_marked: list[tuple[Part, NDArray[np.int64]]] = []

    @classmethod
    def open(
        cls,
        schema: TableSchema,
        manifest: TableManifest,
        store: RunStore,
        resources: TableResources,
        range_: HashRange = HashRange(),  # noqa: B008
        *,
        drop_matched: bool = False,
        writable: bool = True,
    ) -> OrderedTable:
        """Open a table on the runs of a manifest; `load` then applies the later deltas.

        If not `writable`, nothing is written to `store`.

        Raises:
            StateDamagedError: a run file is missing or damaged.
        """
        layout = OrderedLayout.of(schema)
        # Pending files are named only for the garbage collection; their rows are still in deltas.
        refs = [ref for ref in manifest.runs if not ref.pending]
        runs = store.open_all(refs, layout.rows, range_)
        parts: list[Part] = []
        matched_files: list[Part] = []
        for ref, run in zip(refs, runs, strict=True):
            (matched_files if ref.marks else parts).append(Part.of_run(layout, run, manifest.flushed))
        table = cls(
            schema,
            resources,
            range_,
            store=store if writable else None,
            manifest=manifest,
            parts=parts,
            drop_matched=drop_matched,
        )
        try:
            for file in matched_files:
                for rows, _ in file.chunks():
                    # A shared file also names rows of other partitions.
                    table._apply_matched_names(inside(rows, file.range))
                if table._files is not None:
                    table._files.matched_files.append(file)
        except BaseException:
            table.close()
            for run in runs:
                run.close()
            raise
        return table

    @property
    def portion_bytes(self) -> int:
        """Bytes of input to work on at once, at most."""
        return 2 * self._budget.piece

    # A batch

    def begin(self, version: int) -> None:
        """Start the batch that reads `version`: drop expired parts, merge parts, take over written files."""
        if not self._sealed:
            raise UsageError(f"The batch on version {self._version} was not sealed.", action="Open the table again.")
        self._build_parts(version)  # the rows of loaded deltas
        self._version = version
        self._sealed = False
        self.expired = self.until
        self.parts += self.fresh
        self.fresh, self._newly_marked = [], []
        # Rows may be matched after `seal`, when the output is read. The next batch's figures include these look-ups.
        self._file_lookups = sum(part.lookups for part in self.parts) - self._reported_lookups
        self._reported_lookups = 0
        for part in self.parts:
            part.lookups = 0
        self._appended_rows = 0
        expired_parts = [part for part in self.parts if part.is_expired(self.expired)]
        self.parts = [part for part in self.parts if not part.is_expired(self.expired)]
        self._buckets.choose_length(self.parts, self.expired)
        self.parts = self._merge_in_memory()
        if self._files is not None:
            self.parts = self._files.step(self.parts, expired_parts, self._buckets, self.expired)
            if self._files.due:
                self.parts = self._merge_in_memory(everything=True)
                self._files.flush(self.parts, version)
        self._reserve()

    def prefetch(self, hashes: Words, lo: NDArray[np.int64] | None = None, hi: NDArray[np.int64] | None = None) -> None:
        """Read blocks in files that rows of the other side will look up.

        Args:
            hashes: of the keys; may repeat.
            lo, hi: the time interval of each look-up, both ends included; any time if not given. Expired times are left
                out.
        """
        if self._prefetcher is None:
            return
        lo = np.full(len(hashes), BEGINNING) if lo is None else lo
        hi = np.full(len(hashes), NEVER) if hi is None else hi
        self._prefetcher.prefetch(
            KeyIntervals(hashes, lo, hi).after(self.until if self._sealed else self.expired), self.parts
        )

    @property
    def remote_parts(self) -> list[Part]:
        """The parts whose blocks are read by remote requests."""
        return [part for part in self.parts if part.remote]

    def remote_blocks(self, keys: KeyIntervals) -> PartBlockNumbers:
        """Find the blocks of remote parts that the batch may look up, as many as have room in memory."""
        return find_blocks(
            keys.after(self.expired), self.remote_parts, self._budget.total // _PREFETCH_DIVISOR // BLOCK_BYTES
        )

    def append(self, rows: Rows, times: NDArray[np.int64], matched: NDArray[np.bool_] | None = None) -> None:
        """Add rows to the batch.

        Args:
            rows: whole rows; meta word, time and number are filled here.
            times: the time of each row, in microseconds; `NEVER` for rows without time.
            matched: mask of rows that were matched already; no row if not given.
        """
        # Row numbers are unique in the table: the version, then the position within the batch.
        first = self._version << 32 | self._appended_rows
        ordered.put_times(rows.words, times, self.ordered.time, self.ordered.number, first)
        if matched is not None:
            rows.words[matched, META] |= np.uint64(MATCHED)
        self._appended_rows += rows.count
        self._add(rows)

    def _add(self, rows: Rows) -> None:
        self._pending_rows.append(rows)
        self._pending_bytes += rows.words.nbytes + rows.heap.nbytes
        if self._pending_bytes > self._account.limit // 4:
            self._build_parts(self._version + 1)
            self._reserve()

    def build_parts(self) -> None:
        """Turn the rows of the batch into parts, which `fresh` then has."""
        self._build_parts(self._version + 1)
        self._reserve()

    def _build_parts(self, upto: int) -> None:
        waiting, self._pending_rows, self._pending_bytes = self._pending_rows, [], 0
        if not waiting:
            return
        rows = sorted_rows(waiting, self.ordered)
        del waiting
        self.fresh += [Part(self.ordered, piece, upto) for piece in self._buckets.split(rows, self.ordered)]

    def mark(
        self,
        part: Part,
        rows_at: NDArray[np.uint64],
        positions: NDArray[np.int64],
        keep: NDArray[np.uint8],
        *,
        once: bool,
    ) -> NDArray[np.int64]:
        """Mark rows of a part as matched.

        Args:
            part: one of `parts` or `fresh`.
            rows_at, positions: addresses of rows and their positions in the part; may repeat.
            keep: which of them count; with `once`, cleared for rows that were matched before.
            once: whether a row counts only for its first match.

        Returns:
            The positions of the rows that were not matched before.
        """
        new = np.empty(len(positions), np.int64)
        count = ordered_scan.mark(rows_at, positions, len(positions), part.bits(), once, keep, new)
        new = new[:count]
        part.marked += count
        # Rows of this batch carry the mark into the delta themselves; only older rows are named.
        if count and part.upto <= self._version:
            self._newly_marked.append((part, new))
        return new

    def expire(self, until: int) -> None:
        """Expire rows with a time up to `until` (microseconds) from the state that the batch leaves."""
        self.until = max(self.until, until)

    def expired_unmatched_rows(self) -> Iterator[Rows]:
        """Yield the rows that `expire` removed in this batch and that were never matched."""
        max_indexed = 1 + self._account.limit // _INDEX_DIVISOR
        for part in (*self.parts, *self.fresh):
            for rows in part.unmatched_rows(self.floor(part), self.until, max_indexed):
                yield rows
                self._budget.trim_if_needed()

    def floor(self, part: Part) -> int:
        """Return the time up to which a part's rows do not count in this batch; rows of the batch itself all count."""
        # After `seal`, `_version` is already the next one, while the batch is still being read.
        return BEGINNING if part.upto > self._version - self._sealed else self.expired

    def seal(self) -> TableDelta:
        """End the batch, and encode the rows that it added and the marks that it set."""
        count = 0

        def encoded() -> Iterator[list[Any]]:
            nonlocal count
            for rows in self._changes():
                count += rows.count
                yield encode_rows(rows, self.layout, True)
            if not count:
                yield encode_rows(empty_rows(self.ordered), self.layout, True)

        self.build_parts()
        pieces = spool_pieces(encoded(), self._account.limit // 16)
        delta = TableDelta(count, pieces)
        self._sealed = True
        self._version += 1
        self._reported_lookups = sum(part.lookups for part in (*self.parts, *self.fresh))
        if self._prefetcher is not None:
            self._prefetcher.end_batch()
        if self._files is not None:
            self._files.backlog.add(self._version, sum(part.bytes for part in self.fresh))
        self._budget.trim_if_needed()
        return delta

    def _changes(self) -> Iterator[Rows]:
        """Yield the rows of the batch, then the names of older rows that it marked."""
        for part in self.fresh:
            # A background thread may be writing the part to a file; its rows must not change then.
            if part.file is None:
                part.flag_matched_rows()
            if part.marks is None and part.rows is not None:
                yield from self._unexpired(rows for rows, _ in part.chunks())
            else:
                yield from merge_parts(
                    [Input(part)],
                    self.ordered,
                    self._range,
                    TimeInterval(self.until),
                    drop_matched=self._drop_matched,
                    size=_CHUNK_ROWS,
                )
        for part, positions in self._newly_marked:
            for rows in part.rows_at_positions(np.sort(positions)):
                yield matched_names(rows, self.ordered)

    def _unexpired(self, pieces: Iterator[Rows]) -> Iterator[Rows]:
        """Filter out rows that have already left the state."""
        for rows in pieces:
            if self.until == BEGINNING and not self._drop_matched:
                yield rows
                continue
            stay = self.ordered.times(rows) > self.until
            if self._drop_matched:
                stay &= rows.words[:, META] & np.uint64(MATCHED) == 0
            if stay.all():
                yield rows
            elif stay.any():
                yield rows.take(stay)

    def touched(self) -> Iterator[Rows]:
        """Yield the rows that the batch added."""
        for part in self.fresh:
            yield from self._unexpired(rows for rows, _ in part.chunks())

    def load(self, delta_rows: Rows, visible: HashRange = HashRange()) -> None:  # noqa: B008
        """Apply a delta during recovery; rows outside `visible` are skipped."""
        delta_rows = inside(delta_rows, visible)
        is_name = delta_rows.words[:, META] & np.uint64(MARK) != 0
        if not is_name.all():
            self._add((delta_rows.take(~is_name) if is_name.any() else delta_rows).packed())
        if is_name.any():
            # Rows of earlier deltas must be in parts before they can be marked.
            self._build_parts(self._version + 1)
            self._apply_matched_names(delta_rows.take(is_name))
            self._reserve()
        if self._files is not None:
            self._files.backlog.add(0, delta_rows.words.nbytes)

    def _apply_matched_names(self, rows: Rows) -> None:
        hashes = rows.word(HASH)
        times = self.ordered.times(rows)
        numbers = rows.ints(self.ordered.number)
        order = np.lexsort((numbers, times, hashes))
        names = (hashes[order], times[order], numbers[order])
        for part in (*self.fresh, *self.parts):
            missing = part.mark_named(*names)
            names = (names[0][missing], names[1][missing], names[2][missing])

    # Memory

    def _merge_in_memory(self, *, everything: bool = False) -> list[Part]:
        return merge_in_memory(
            self.parts,
            self._buckets,
            self._range,
            self.expired,
            max_bytes=self._account.limit // 4,
            drop_matched=self._drop_matched,
            everything=everything,
        )

    def _reserve(self) -> None:
        """Reserve the memory of all parts; if that is refused, write parts to files."""
        if self._account.reserve(self.memory):
            return
        if self._files is not None:
            self._files.spill((*self.parts, *self.fresh), self._fits)
        self._account.force(self.memory)

    def _fits(self) -> bool:
        return self._account.reserve(self.memory)

    @property
    def memory(self) -> int:
        """Bytes of memory that the rows take."""
        return self._pending_bytes + sum(part.memory for part in (*self.parts, *self.fresh))

    # The rest

    def scan(self) -> Iterator[Rows]:
        """Yield the whole state in hash order, in pieces."""
        self._build_parts(self._version + 1)
        inputs = [Input(part) for part in (*self.parts, *self.fresh)]
        if inputs:
            interval = TimeInterval(self.until)
            yield from merge_parts(
                inputs, self.ordered, self._range, interval, drop_matched=self._drop_matched, size=_CHUNK_ROWS
            )

    def manifest(self) -> TableManifest:
        """List the runs that hold the state together with the deltas of later versions."""
        keys = self.stats()["keys"]
        if self._files is None:
            return TableManifest((), 0, keys, self.until)
        parts = [part for part in (*self.parts, *self.fresh) if not part.is_expired(self.until)]
        refs = self._files.manifest_refs(parts)
        return TableManifest(tuple(refs), self._files.flushed, keys, self.until)

    def stats(self) -> dict[str, int]:
        """Return figures, as `RmwTable.stats`; `keys` estimates the number of rows that have not expired."""
        parts = (*self.parts, *self.fresh)
        hot = [part for part in parts if part.rows is not None]
        filed = [part for part in parts if part.rows is None]
        figures = PrefetchFigures() if self._prefetcher is None else self._prefetcher.latest
        return {
            "keys": sum(part.count - round(part.count * part.expired_share(self.until)) for part in parts),
            "bytes": sum(part.bytes for part in parts),
            "cache_hits": 0,
            "cache_misses": self._file_lookups + sum(part.lookups for part in filed),
            **figures.stats(),
            "hot_rows": sum(part.count for part in hot),
            "hot_bytes": self.memory,
            "dirty_rows": sum(part.count for part in hot if part.file is None),
            "buffer_bytes": sum(part.memory for part in hot if part.file is not None),
            "run_rows": sum(part.count for part in filed),
        }

    def close(self) -> None:
        """Close the table and release all memory."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        if self._files is not None:
            self._files.close()
        for part in (*self.parts, *self.fresh):
            if part.file is not None:
                discard_result(part.file)
            if part.run is not None:
                part.run.close()
        self.parts, self.fresh, self._pending_rows = [], [], []
        self._account.close()
