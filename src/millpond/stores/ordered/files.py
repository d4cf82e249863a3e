"""How parts of an ordered table get into files, are listed by manifests, and merged there."""

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
from millpond.stores.jobs import Elsewhere, MergeParts
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.ordered.layout import OrderedLayout, names_of, sorted_rows
from millpond.stores.ordered.merge import Input, Window, merged
from millpond.stores.ordered.parts import Part
from millpond.stores.ordered.time_buckets import TimeBuckets
from millpond.stores.runs.compactor import Writer
from millpond.stores.runs.pace import Pace
from millpond.stores.runs.pick import MOST_LAYERS, Extent, pick
from millpond.stores.runs.run import Run

_MOST_DELTAS = 64
_LEAST_BYTES = 32 << 20
_MOST_BYTES = 512 << 20
_PATIENCE = 5
_LEAST_ROWS = 1024

_log = logging.getLogger(__name__)


@dataclass
class _Merge:
    """A merge of files under way: what it reads, the files that it has made here so far, and all when it has ended."""

    inputs: list[Input]
    made: list[Run]
    result: Future[list[Run]]


class PartFiles:
    """The files of an ordered table.

    A manifest lists a file only when the deltas of its rows are not read any more, since rows are not recognised when
    they come twice: a flush writes all parts in memory, and once they and the marks of rows in older files are written,
    the deltas up to the version at which it began are covered.

    Args:
        layout: of the rows. store: writes and opens files. background: merges; writers: writes what leaves memory.
        range_: the hashes that count. budget: bounds temporaries.
        flushed: the version up to which deltas are covered.
        drop_matched: whether merges leave out matched rows.
        elsewhere: has merges done by others.

    Attributes:
        flushed: see above. notes: files that say which rows of others were matched.
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
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._elsewhere = elsewhere
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
        """Note a delta and the version that it made (0: an older one)."""
        self._deltas.append((version, size))

    @property
    def due(self) -> bool:
        """Whether deltas are many or long, and no flush is under way."""
        many = len(self._deltas) >= self.most_deltas or sum(size for _, size in self._deltas) >= self._most_bytes
        return many and self._flushing is None

    def flush(self, parts: Sequence[Part], version: int) -> None:
        """Begin to write all parts, which together are `version`."""
        self._flushing = version
        for part in parts:
            self._write(part)

    def spill(self, parts: Sequence[Part], fits: Callable[[], bool]) -> None:
        """Write parts until the rest fits in memory; waits for it."""
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
            part.burn()
            part.file = self._writers.submit(self._store.write, part.rows, self._layout.rows)

    def listed(self, parts: Sequence[Part]) -> list[RunRef]:
        """The files for a manifest: those that the flushed version covers, the notes on them, and those to come."""
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
        """Between two batches: take over what is written and merged, go on with what is under way.

        Args:
            parts: the state. gone: parts that were dropped since the last time.
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
            merging = self._merge is not None and any(each.part is part for each in self._merge.inputs)
            if part.run is not None and not merging:
                self._store.forget(part.run)
        if self._merge is None:
            self._begin_merge(parts, buckets, expired)
        return parts

    # Flush

    def _step_flush(self, parts: Sequence[Part]) -> None:
        if self._flushing is None:
            return
        covered = [part for part in parts if part.upto <= self._flushing]
        if self._noting is None:
            if any(part.run is None and part.count for part in covered):
                return
            notes = list(self._unsaid(covered))
            if notes:
                self._noting = self._writers.submit(self._store.write, notes, self._layout.rows)
                return
            self._flushed([])
        elif self._noting.done():
            self._flushed([Part.of_run(self._layout, self._noting.result(), self._flushing)])

    def _flushed(self, notes: list[Part]) -> None:
        assert self._flushing is not None
        for old in self.notes:
            if old.run is not None:
                self._store.forget(old.run)
        self.notes, self._noting = notes, None
        self.flushed, self._flushing = self._flushing, None
        self._deltas = [delta for delta in self._deltas if delta[0] > self.flushed]

    def _unsaid(self, parts: Sequence[Part]) -> Iterator[Rows]:
        """The names of the rows in files that were matched and do not say so, in order."""
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
        windows = [Window(expired)] if bucket is not None else buckets.windows(chosen, expired)
        inputs = [Input(part) for part in chosen]
        made: list[Run] = []
        store, layout = self._store, self._layout

        def here() -> Future[list[Run]]:
            return self._background.submit(
                do_merge, self._job(inputs, windows), inputs, layout, store, self._pace, made
            )

        def opened(refs: Sequence[RunRef]) -> list[Run]:
            return [store.open(ref, layout.rows) for ref in refs]

        if self._elsewhere is None:
            result = here()
        else:
            result = self._elsewhere.submit(lambda: self._job(inputs, windows), here, opened)
        self._merge = _Merge(inputs, made, result)

    def _choose(self, parts: Sequence[Part], buckets: TimeBuckets, expired: int) -> tuple[list[Part], int | None]:
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

    def _job(self, inputs: Sequence[Input], windows: Sequence[Window]) -> MergeParts:
        rows, size = sum(each.part.count for each in inputs), sum(each.part.bytes for each in inputs)
        most = self._piece // max(self._layout.stride, size // max(1, rows))
        return MergeParts(
            schema=self._layout.rows.schema,
            inputs=tuple(each.part.ref for each in inputs if each.part.ref is not None),
            marks=tuple(b"" if each.marks is None else each.marks.tobytes() for each in inputs),
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
            if self._failures >= _PATIENCE:
                raise
            _log.warning("Merging %d runs failed and will be tried again: %s", len(merge.inputs), error)
            return list(parts)
        self._failures = 0
        old = [each.part for each in merge.inputs]
        made = [Part.of_run(self._layout, run, max(part.upto for part in old)) for run in runs]
        for each in merge.inputs:
            self._carry_over(each, made)
            assert each.part.run is not None
            self._store.forget(each.part.run)
        return [part for part in parts if part not in old] + made

    def _carry_over(self, each: Input, made: Sequence[Part]) -> None:
        """Mark in the merged parts what was marked while they were made."""
        marks = each.part.marks
        if marks is None:
            return
        since = _set_bits(marks if each.marks is None else marks & ~each.marks)
        for rows in each.part.at(since):
            names = names_of(rows, self._layout)
            hashes = np.ascontiguousarray(names.words[:, HASH])
            numbers = np.ascontiguousarray(names.words[:, self._layout.number]).view(np.int64)
            for part in made:
                part.mark_named(hashes, self._layout.times(names), numbers)

    def close(self) -> None:
        """End what is under way; its files are left to the store's garbage collection."""
        self._pace.stop()
        if self._merge is not None:
            self._merge.result.cancel()
        for note in self.notes:
            if note.run is not None:
                note.run.close()


def do_merge(
    job: MergeParts, inputs: Sequence[Input], layout: OrderedLayout, store: Writer, pace: Pace, made: list[Run]
) -> list[Run]:
    """Write what a merge makes of its inputs, a file for each window of time that has rows.

    Args:
        inputs: the job's, open. layout: of the rows. made: takes the files as they are written.
    """
    for after, until in job.windows:
        pieces = merged(
            inputs,
            layout,
            HashRange(job.lowest, job.highest + 1),
            Window(after, until),
            drop_matched=job.drop_matched,
            size=job.size,
        )
        first = next(pieces, None)
        if first is not None:
            made.append(store.write(pace.over(_chained(first, pieces)), layout.rows))
    return made


def _set_bits(marks: np.ndarray) -> np.ndarray:
    """The positions of the bits that are set."""
    found: np.ndarray = np.flatnonzero(np.unpackbits(marks.view(np.uint8), bitorder="little"))
    return found.astype(np.int64)


def _chained(first: Rows, rest: Iterator[Rows]) -> Iterator[Rows]:
    yield first
    yield from rest
