"""Files of an ordered table: writing parts, listing them in manifests, merging them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing
from itertools import chain

import msgspec
import numpy as np

from millpond.files.refs import RunRef
from millpond.layout import HASH, HashRange, Rows
from millpond.stores.delta_backlog import DeltaBacklog
from millpond.stores.jobs import MergeParts
from millpond.stores.ordered.layout import OrderedLayout, matched_names, sorted_rows
from millpond.stores.ordered.merge import Input, TimeInterval, merge_parts
from millpond.stores.ordered.parts import Part
from millpond.stores.ordered.time_buckets import TimeBuckets
from millpond.stores.runs.background_merge import BackgroundMerge
from millpond.stores.runs.compactor import Writer
from millpond.stores.runs.merge import piece_rows
from millpond.stores.runs.pace import Pace
from millpond.stores.runs.pick import MAX_LAYERS, Extent, pick
from millpond.stores.runs.run import Run, close_runs, discard_result
from millpond.stores.table_resources import TableResources

_MARK_WORDS = 1 << 13
"""Words of marks that are unpacked at a time: half a million rows, each of which takes up to nine bytes."""


class PartFiles:
    """The files of an ordered table.

    Rows are not deduplicated, so the state must not read a row from a delta and from a file. A manifest therefore lists
    a file only once the deltas of its rows are no longer read. A flush writes all parts in memory, and the marks of
    rows in older files. Afterwards, deltas up to the version at which the flush began are covered.

    Args:
        layout: of the rows. store: writes and opens files.
        resources: threads for writes and merges, and the budget that bounds temporaries.
        range_: the hash range of the partition.
        flushed: the version up to which deltas are covered.
        drop_matched: whether merges leave out matched rows.

    Attributes:
        backlog: deltas since the last flush. flushed: see above.
        matched_files: files that name the matched rows of other files.
    """

    def __init__(
        self,
        layout: OrderedLayout,
        store: Writer,
        resources: TableResources,
        range_: HashRange,
        flushed: int,
        drop_matched: bool,
    ) -> None:
        self._remote_compactor = resources.remote_compactor
        self._layout = layout
        self._store = store
        self._background = resources.background
        self._writers = resources.write_pool
        self._namers = resources.naming_pool
        self._range = range_
        self._piece = resources.budget.piece
        self._drop_matched = drop_matched
        self._pace = Pace()
        self.backlog = DeltaBacklog(resources.budget.total)
        self.flushed = flushed
        self.matched_files: list[Part] = []
        self._flushing: int | None = None
        self._naming = BackgroundMerge[Input, list[Run]]()  # the running write of matched files
        self._matched_outputs: list[Run] = []  # matched files that it has written so far
        self._merge = BackgroundMerge[Input, list[Run]]()
        self._dropped: list[Part] = []  # no longer part of the state, but still read in the background
        self._outputs: list[Run] = []  # files of the running merge that this process has written so far

    @property
    def due(self) -> bool:
        """Whether a flush should start, and none is running."""
        return self.backlog.due and self._flushing is None

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
                part.adopt_file(part.file.result())
                if fits():
                    return

    def _write(self, part: Part) -> None:
        if part.rows is not None and part.file is None and part.count:
            # Flags must be in the rows before the writer reads them; later marks are written as names.
            part.flag_matched_rows()
            part.file = self._writers.submit(self._store.write, part.rows, self._layout.rows)

    def manifest_refs(self, parts: Sequence[Part]) -> list[RunRef]:
        """List files for a manifest: those that the flushed version covers, their matched files, and pending ones.

        Pending files are not part of the state; the manifest names them so that the garbage collection keeps them.
        """
        refs = [msgspec.structs.replace(file.ref, marks=True) for file in self.matched_files if file.ref is not None]
        # Copied: background threads append to these lists.
        pending = [run.ref for run in list(self._outputs)] if self._merge.running else []
        pending += [run.ref for run in list(self._matched_outputs)] if self._naming.running else []
        pending += [part.ref for part in self._dropped]
        for part in parts:
            if part.ref is not None and part.upto <= self.flushed:
                refs.append(part.ref)
            else:
                pending.append(part.ref)
        return refs + [msgspec.structs.replace(ref, pending=True) for ref in pending if ref is not None]

    def step(self, parts: list[Part], dropped: Sequence[Part], buckets: TimeBuckets, expired: int) -> list[Part]:
        """Take over finished writes and merges, and continue a running flush; called between two batches.

        Args:
            parts: the state. dropped: parts that were dropped since the last call.
            buckets: of the parts' times. expired: end of the times that have expired.

        Returns:
            The state, with merged parts in place of their inputs.
        """
        for part in parts:
            if part.file is not None and part.file.done():
                part.adopt_file(part.file.result())
        self._advance_flush(parts)
        self._dropped += dropped
        if (done := self._merge.take()) is not None:
            parts = self._adopt(parts, *done)
        # Files that are read in the background are dropped afterwards.
        in_use = [source.part for source in (*self._merge.inputs, *self._naming.inputs)]
        for part in self._dropped:
            if part.file is not None:
                discard_result(part.file)
            if part.run is not None and part not in in_use:
                self._store.drop(part.run)
        self._dropped = [part for part in self._dropped if part in in_use]
        if not self._merge.running:
            self._begin_merge(parts, buckets, expired)
        return parts

    # Flush

    def _advance_flush(self, parts: Sequence[Part]) -> None:
        if self._flushing is None:
            return
        # Parts that later batches added are not covered by this flush.
        covered = [part for part in parts if part.upto <= self._flushing]
        if not self._naming.running:
            # Some parts are not in files yet.
            if any(part.run is None and part.count for part in covered):
                return
            # Marks on rows in files are so far in deltas or older matched files only, so they must be written before
            # deltas are covered.
            inputs = [Input(part) for part in covered if part.marks is not None and part.run is not None]
            if not inputs:
                self._finish_flush([])
                return
            self._matched_outputs = []
            # Not by the writers: rows that leave memory must not wait until files are read.
            writing = self._namers.submit(self._write_matched, inputs, self._matched_outputs)
            self._naming.track(inputs, writing)
        if (done := self._naming.take()) is not None:
            _, runs = done
            self._finish_flush([Part.of_run(self._layout, run, self._flushing) for run in runs])

    def _finish_flush(self, matched_files: list[Part]) -> None:
        assert self._flushing is not None
        # The new matched files include the old ones: marks stay in memory until a merge writes them into the rows.
        for old in self.matched_files:
            if old.run is not None:
                self._store.drop(old.run)
        self.matched_files = matched_files
        self.flushed, self._flushing = self._flushing, None
        self.backlog.cover(self.flushed)

    def _write_matched(self, inputs: Sequence[Input], outputs: list[Run]) -> list[Run]:
        """Write the names of the matched rows in files that do not carry the flag themselves. Runs in the background.

        Args:
            inputs: the files, and copies of their marks.
            outputs: receives each matched file when it is written.

        Returns:
            `outputs`. If a write fails, or the table is closed meanwhile, they are closed.
        """
        try:
            # Up to a quarter of all rows may be named (see `_choose_inputs`), and more until the next merge. So the
            # names of one output file are in memory at a time.
            for names in self._pace.throttle(self._unflagged_names(inputs)):
                run = self._store.write(names, self._layout.rows)
                outputs.append(run)
        except BaseException:
            close_runs(outputs)
            raise
        return outputs

    def _unflagged_names(self, inputs: Sequence[Input]) -> Iterator[Rows]:
        """Yield these names in pieces of about two temporaries, each in order."""
        names: list[Rows] = []
        size = 0
        for source in inputs:
            assert source.marks is not None
            for rows in chain.from_iterable(map(source.part.rows_at_positions, _set_bits(source.marks))):
                names.append(matched_names(rows, self._layout))
                size += names[-1].words.nbytes
                # Each yield becomes a file, so they are large: with the sorted copy, half of the budget's temporaries.
                if size >= 2 * self._piece:
                    yield sorted_rows(names, self._layout)
                    names, size = [], 0
        if names:
            yield sorted_rows(names, self._layout)

    # Merges

    def _begin_merge(self, parts: Sequence[Part], buckets: TimeBuckets, expired: int) -> None:
        chosen, bucket = self._choose_inputs(parts, buckets, expired)
        if not chosen:
            return
        intervals = [TimeInterval(expired)] if bucket is not None else buckets.intervals(chosen, expired)
        inputs = [Input(part) for part in chosen]
        outputs: list[Run] = []
        self._outputs = outputs
        store, layout = self._store, self._layout

        def merge_locally() -> Future[list[Run]]:
            return self._background.submit(
                do_merge, self._job(inputs, intervals), inputs, layout, store, self._pace, outputs
            )

        def open_results(refs: Sequence[RunRef]) -> list[Run]:
            with ExitStack() as on_failure:
                runs = [on_failure.enter_context(closing(store.open(ref, layout.rows))) for ref in refs]
                on_failure.pop_all()
            return runs

        if self._remote_compactor is None:
            result = merge_locally()
        else:
            result = self._remote_compactor.submit(lambda: self._job(inputs, intervals), merge_locally, open_results)
        self._merge.track(inputs, result)

    def _choose_inputs(
        self, parts: Sequence[Part], buckets: TimeBuckets, expired: int
    ) -> tuple[list[Part], int | None]:
        # Only files that a manifest lists as state are merged: the rows of later files are still read from deltas.
        groups: dict[int | None, list[Part]] = {}
        for part in sorted(parts, key=lambda part: -part.upto):
            if part.run is not None and part.upto <= self.flushed:
                groups.setdefault(buckets.bucket_of(part), []).append(part)
        self._pace.set_full_speed(any(len(group) > 2 * MAX_LAYERS for group in groups.values()))
        for number, group in groups.items():
            chosen = pick([Extent(0, 1, part.bytes) for part in group])
            if chosen is not None:
                return group[chosen.begin : chosen.end], number
        for number, group in groups.items():
            for part in group:
                # Rewriting one part drops its expired rows, and moves marks from memory into its rows.
                if part.expired_share(expired) > 0.5 or part.marked * 4 > part.count:
                    return [part], number
        return [], None

    def _job(self, inputs: Sequence[Input], intervals: Sequence[TimeInterval]) -> MergeParts:
        rows, size = sum(source.part.count for source in inputs), sum(source.part.bytes for source in inputs)
        row_bytes = max(self._layout.stride, size // max(1, rows))
        return MergeParts(
            schema=self._layout.rows.schema,
            inputs=tuple(source.part.ref for source in inputs if source.part.ref is not None),
            marks=tuple(b"" if source.marks is None else source.marks.tobytes() for source in inputs),
            lowest=self._range.lo,
            highest=self._range.hi - 1,
            intervals=tuple((interval.after, interval.until) for interval in intervals),
            drop_matched=self._drop_matched,
            size=piece_rows(self._piece, row_bytes),
        )

    def _adopt(self, parts: Sequence[Part], inputs: Sequence[Input], runs: Sequence[Run]) -> list[Part]:
        old = [source.part for source in inputs]
        merged_parts = [Part.of_run(self._layout, run, max(part.upto for part in old)) for run in runs]
        for source in inputs:
            self._carry_over(source, merged_parts)
        # Dropped in `step`: a write of names may still read them.
        self._dropped += [part for part in old if part not in self._dropped]
        return [part for part in parts if part not in old] + merged_parts

    def _carry_over(self, source: Input, outputs: Sequence[Part]) -> None:
        """Copy the marks that an input got while the merge was running to the merged parts."""
        marks = source.part.marks
        if marks is None:
            return
        # Bits set since the merge copied them.
        since = _set_bits(marks if source.marks is None else marks & ~source.marks)
        for rows in chain.from_iterable(map(source.part.rows_at_positions, since)):
            names = matched_names(rows, self._layout)
            hashes = names.word(HASH)
            numbers = names.ints(self._layout.number)
            for part in outputs:
                part.mark_named(hashes, self._layout.times(names), numbers)

    def close(self) -> None:
        """Cancel background work; files being written are left to the store's garbage collection."""
        self._pace.stop()
        self._merge.close()
        self._naming.close()
        for part in [*self.matched_files, *self._dropped]:
            if part.run is not None:
                part.run.close()


def do_merge(
    job: MergeParts, inputs: Sequence[Input], layout: OrderedLayout, store: Writer, pace: Pace, outputs: list[Run]
) -> list[Run]:
    """Merge parts into one file for each time interval that has rows.

    Args:
        inputs: the job's inputs, opened. layout: of the rows. outputs: receives each file when it is written.

    Returns:
        `outputs`. If the merge fails, they are closed.
    """
    try:
        for after, until in job.intervals:
            pieces = merge_parts(
                inputs,
                layout,
                HashRange(job.lowest, job.highest + 1),
                TimeInterval(after, until),
                drop_matched=job.drop_matched,
                size=job.size,
            )
            first = next(pieces, None)
            if first is not None:
                outputs.append(store.write(pace.throttle(chain([first], pieces)), layout.rows))
    except BaseException:
        for run in outputs:
            run.close()
        raise
    return outputs


def _set_bits(marks: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the positions of the set bits, in pieces."""
    for start in range(0, len(marks), _MARK_WORDS):
        bits = np.unpackbits(marks[start : start + _MARK_WORDS].view(np.uint8), bitorder="little")
        yield np.flatnonzero(bits).astype(np.int64) + 64 * start
