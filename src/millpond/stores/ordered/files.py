"""Files of an ordered table: writing parts, listing them in manifests, merging them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, wait
from dataclasses import dataclass

import msgspec
import numpy as np

from millpond.errors import TransientError
from millpond.files.refs import RunRef
from millpond.layout import HASH, HashRange, Rows
from millpond.stores.jobs import MergeParts, RemoteCompactor
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.ordered.layout import OrderedLayout, names_of, sorted_rows
from millpond.stores.ordered.merge import Input, TimeInterval, merged
from millpond.stores.ordered.parts import Part
from millpond.stores.ordered.time_buckets import TimeBuckets
from millpond.stores.runs.compactor import Writer
from millpond.stores.runs.pace import Pace
from millpond.stores.runs.pick import MOST_LAYERS, Extent, pick
from millpond.stores.runs.run import Run

_MOST_DELTAS = 64
_LEAST_BYTES = 32 << 20
_MOST_BYTES = 512 << 20
_MAX_FAILURES = 5
_LEAST_ROWS = 1024

_log = logging.getLogger(__name__)


@dataclass
class _Merge:
    """A running merge: its inputs, the files written in this process so far, and the future of all files."""

    inputs: list[Input]
    made: list[Run]
    result: Future[list[Run]]


class PartFiles:
    """The files of an ordered table.

    Rows are not deduplicated, so the state must not read a row from a delta and from a file. A manifest therefore lists
    a file only once the deltas of its rows are no longer read. A flush writes all parts in memory, and the marks of
    rows in older files. Afterwards, deltas up to the version at which the flush began are covered.

    Args:
        layout: of the rows. store: writes and opens files.
        background: runs merges; writers: writes parts that leave memory.
        range_: the hash range of the partition. budget: bounds temporaries.
        flushed: the version up to which deltas are covered.
        drop_matched: whether merges leave out matched rows.
        remote_compactor: submits merges to remote workers.

    Attributes:
        flushed: see above. notes: files that name the matched rows of other files.
    """

    def __init__(
        self,
        layout: OrderedLayout,
        store: Writer,
        background: Executor,
        writers: Executor,
        range_: HashRange,
        budget: MemoryBudget,
        flushed: int,
        drop_matched: bool,
        remote_compactor: RemoteCompactor | None = None,
    ) -> None:
        self._remote_compactor = remote_compactor
        self._layout = layout
        self._store = store
        self._background = background
        self._writers = writers
        self._range = range_
        self._piece = budget.piece
        self._most_bytes = min(max(budget.total // 2, _LEAST_BYTES), _MOST_BYTES)
        self._drop_matched = drop_matched
        self._pace = Pace()
        self.most_deltas = _MOST_DELTAS
        self.flushed = flushed
        self.notes: list[Part] = []
        self._deltas: list[tuple[int, int]] = []  # version and bytes
        self._flushing: int | None = None
        self._noting: Future[Run] | None = None
        self._merge: _Merge | None = None
        self._failures = 0

    def sealed(self, version: int, size: int) -> None:
        """Record a delta and the version that it made (0: an older one)."""
        self._deltas.append((version, size))

    @property
    def due(self) -> bool:
        """Whether the deltas are many or long, and no flush is running."""
        many = len(self._deltas) >= self.most_deltas or sum(size for _, size in self._deltas) >= self._most_bytes
        return many and self._flushing is None

    def flush(self, parts: Sequence[Part], version: int) -> None:
        """Start to write all parts, which together are the state `version`."""
        self._flushing = version
        for part in parts:
            self._write(part)

    def spill(self, parts: Sequence[Part], fits: Callable[[], bool]) -> None:
        """Start to write all parts, oldest first, and wait until the parts still in memory fit."""
        for part in sorted(parts, key=lambda part: part.upto):
            self._write(part)
        for part in parts:
            if part.file is not None:
                wait([part.file])
                part.settle(part.file.result())
                if fits():
                    return

    def _write(self, part: Part) -> None:
        if part.rows is not None and part.file is None and part.count:
            part.set_deleted()
            part.file = self._writers.submit(self._store.write, part.rows, self._layout.rows)

    def listed(self, parts: Sequence[Part]) -> list[RunRef]:
        """List files for a manifest: those that the flushed version covers, their notes, and pending ones.

        Pending files are not part of the state; the manifest names them so that the garbage collection keeps them.
        """
        refs = [msgspec.structs.replace(note.ref, marks=True) for note in self.notes if note.ref is not None]
        pending = [] if self._merge is None else [run.ref for run in list(self._merge.made)]
        for part in parts:
            if part.ref is not None and part.upto <= self.flushed:
                refs.append(part.ref)
            else:
                pending.append(part.ref)
        return refs + [msgspec.structs.replace(ref, pending=True) for ref in pending if ref is not None]

    def step(
        self, parts: list[Part], gone: Sequence[Part], buckets: TimeBuckets, expired: int, version: int
    ) -> list[Part]:
        """Take over finished writes and merges, and continue a running flush; called between two batches.

        Args:
            parts: the state. gone: parts that were dropped since the last call.

        Returns:
            The state, with merged parts in place of their inputs.
        """
        for part in parts:
            if part.file is not None and part.file.done():
                part.settle(part.file.result())
        self._step_flush(parts)
        if self._merge is not None and self._merge.result.done():
            parts = self._adopt(parts, self._merge)
        for part in gone:
            if part.file is not None:
                part.file.cancel()
            merging = self._merge is not None and any(source.part is part for source in self._merge.inputs)
            # The inputs of a running merge are dropped when its result is adopted.
            if part.run is not None and not merging:
                self._store.forget(part.run)
        if self._merge is None:
            self._begin_merge(parts, buckets, expired)
        return parts

    # Flush

    def _step_flush(self, parts: Sequence[Part]) -> None:
        if self._flushing is None:
            return
        # Parts that later batches added are not covered by this flush.
        covered = [part for part in parts if part.upto <= self._flushing]
        if self._noting is None:
            # Some parts are not in files yet.
            if any(part.run is None and part.count for part in covered):
                return
            # Marks on rows in files are so far in deltas or older notes only, so they must be written before deltas are
            # covered.
            notes = list(self._unflagged_names(covered))
            if notes:
                self._noting = self._writers.submit(self._store.write, notes, self._layout.rows)
                return
            self._flushed([])
        elif self._noting.done():
            self._flushed([Part.of_run(self._layout, self._noting.result(), self._flushing)])

    def _flushed(self, notes: list[Part]) -> None:
        assert self._flushing is not None
        # The new notes include the old ones: marks stay in memory until a merge writes them into the rows.
        for old in self.notes:
            if old.run is not None:
                self._store.forget(old.run)
        self.notes, self._noting = notes, None
        self.flushed, self._flushing = self._flushing, None
        self._deltas = [delta for delta in self._deltas if delta[0] > self.flushed]

    def _unflagged_names(self, parts: Sequence[Part]) -> Iterator[Rows]:
        """Yield the names of the matched rows in files that do not carry the flag themselves, in order."""
        names = [
            names_of(rows, self._layout)
            for part in parts
            if part.marks is not None and part.run is not None
            for rows in part.at(_set_bits(part.marks))
        ]
        if names:
            yield sorted_rows(names, self._layout)

    # Merges

    def _begin_merge(self, parts: Sequence[Part], buckets: TimeBuckets, expired: int) -> None:
        chosen, bucket = self._choose(parts, buckets, expired)
        if not chosen:
            return
        windows = [TimeInterval(expired)] if bucket is not None else buckets.windows(chosen, expired)
        inputs = [Input(part) for part in chosen]
        outputs: list[Run] = []
        store, layout = self._store, self._layout

        def here() -> Future[list[Run]]:
            return self._background.submit(
                do_merge, self._job(inputs, windows), inputs, layout, store, self._pace, outputs
            )

        def opened(refs: Sequence[RunRef]) -> list[Run]:
            return [store.open(ref, layout.rows) for ref in refs]

        if self._remote_compactor is None:
            result = here()
        else:
            result = self._remote_compactor.submit(lambda: self._job(inputs, windows), here, opened)
        self._merge = _Merge(inputs, outputs, result)

    def _choose(self, parts: Sequence[Part], buckets: TimeBuckets, expired: int) -> tuple[list[Part], int | None]:
        # Only files that a manifest lists as state are merged: the rows of later files are still read from deltas.
        groups: dict[int | None, list[Part]] = {}
        for part in sorted(parts, key=lambda part: -part.upto):
            if part.run is not None and part.upto <= self.flushed:
                groups.setdefault(buckets.of(part), []).append(part)
        self._pace.hurry(any(len(group) > 2 * MOST_LAYERS for group in groups.values()))
        for number, group in groups.items():
            chosen = pick([Extent(0, 1, part.bytes) for part in group])
            if chosen is not None:
                return group[chosen.begin : chosen.end], number
        for number, group in groups.items():
            for part in group:
                marked = 0 if part.marks is None else int(np.bitwise_count(part.marks).sum())
                if part.expired_share(expired) > 0.5 or marked * 4 > part.count:
                    return [part], number
        return [], None

    def _job(self, inputs: Sequence[Input], windows: Sequence[TimeInterval]) -> MergeParts:
        rows, size = sum(source.part.count for source in inputs), sum(source.part.bytes for source in inputs)
        most = self._piece // max(self._layout.stride, size // max(1, rows))
        return MergeParts(
            schema=self._layout.rows.schema,
            inputs=tuple(source.part.ref for source in inputs if source.part.ref is not None),
            marks=tuple(b"" if source.marks is None else source.marks.tobytes() for source in inputs),
            lowest=self._range.lo,
            highest=self._range.hi - 1,
            windows=tuple((window.after, window.until) for window in windows),
            drop_matched=self._drop_matched,
            size=min(max(most, _LEAST_ROWS), 65536),
        )

    def _adopt(self, parts: Sequence[Part], merge: _Merge) -> list[Part]:
        self._merge = None
        try:
            runs = merge.result.result()
        except (TransientError, OSError, CancelledError) as error:
            self._failures += 1
            if self._failures >= _MAX_FAILURES:
                raise
            _log.warning("Merging %d runs failed and will be tried again: %s", len(merge.inputs), error)
            return list(parts)
        self._failures = 0
        old = [source.part for source in merge.inputs]
        merged_parts = [Part.of_run(self._layout, run, max(part.upto for part in old)) for run in runs]
        for source in merge.inputs:
            self._carry_over(source, merged_parts)
            assert source.part.run is not None
            self._store.forget(source.part.run)
        return [part for part in parts if part not in old] + merged_parts

    def _carry_over(self, each: Input, made: Sequence[Part]) -> None:
        """Copy the marks that an input got while the merge was running to the merged parts."""
        marks = each.part.marks
        if marks is None:
            return
        # Bits set since the merge copied them.
        since = _set_bits(marks if each.marks is None else marks & ~each.marks)
        for rows in each.part.at(since):
            names = names_of(rows, self._layout)
            hashes = np.ascontiguousarray(names.words[:, HASH])
            numbers = np.ascontiguousarray(names.words[:, self._layout.number]).view(np.int64)
            for part in made:
                part.mark_named(hashes, self._layout.times(names), numbers)

    def close(self) -> None:
        """Cancel background work; files being written are left to the store's garbage collection."""
        self._pace.stop()
        if self._merge is not None:
            self._merge.result.cancel()
        for note in self.notes:
            if note.run is not None:
                note.run.close()


def do_merge(
    job: MergeParts, inputs: Sequence[Input], layout: OrderedLayout, store: Writer, pace: Pace, made: list[Run]
) -> list[Run]:
    """Merge parts into one file for each time interval that has rows.

    Args:
        inputs: the job's inputs, opened. layout: of the rows. made: receives each file when it is written.

    Returns:
        `made`.
    """
    for after, until in job.windows:
        pieces = merged(
            inputs,
            layout,
            HashRange(job.lowest, job.highest + 1),
            TimeInterval(after, until),
            drop_matched=job.drop_matched,
            size=job.size,
        )
        first = next(pieces, None)
        if first is not None:
            made.append(store.write(pace.over(_chained(first, pieces)), layout.rows))
    return made


def _set_bits(marks: np.ndarray) -> np.ndarray:
    """Return the positions of the set bits."""
    positions: np.ndarray = np.flatnonzero(np.unpackbits(marks.view(np.uint8), bitorder="little"))
    return positions.astype(np.int64)


def _chained(first: Rows, rest: Iterator[Rows]) -> Iterator[Rows]:
    yield first
    yield from rest
