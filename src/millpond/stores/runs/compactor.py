"""Compaction of a table's runs in the background, to keep their number low."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

from millpond.files.refs import RunRef
from millpond.layout import HASH, HashRange, RowLayout, Rows, TableSchema
from millpond.stores.jobs import MergeRuns, RemoteCompactor
from millpond.stores.runs.background_merge import BackgroundMerge
from millpond.stores.runs.merge import merge, piece_rows
from millpond.stores.runs.pace import Pace
from millpond.stores.runs.pick import MAX_LAYERS, Extent, Pick, group_layers, pick
from millpond.stores.runs.run import Run
from millpond.stores.runs.run_set import RunSet


class Writer(Protocol):
    """Writes and opens runs (see `RunStore`)."""

    def write(self, rows: Rows | Iterable[Rows], layout: RowLayout) -> Run:
        """Write a run from pieces and open it."""

    def drop(self, run: Run) -> None:
        """Drop what is cached of a run that is no longer part of the state."""

    def open(
        self,
        ref: RunRef,
        layout: RowLayout,
        range_: HashRange = HashRange(),  # noqa: B008
        axis: int = HASH,
    ) -> Run:
        """Open a run that another process or an earlier call has written."""


class Compactor:
    """Merges runs of one table, one merge at a time.

    Merged inputs are not deleted here, because older versions of the state still name them. A merge that is lost, at
    any point, leaves at most a file that no manifest names.

    Args:
        runs: the table's runs.
        store: writes the merged runs.
        background: runs the merges.
        piece: bytes merged at once, roughly.
        max_layers: number of runs that may hold one key before some are merged.
        share: share of one core that a merge may take; more when it falls behind.
        remote_compactor: submits merges to remote workers; without it, all run in this process.
        earlier: earlier schemas of the table, which runs may still have.
    """

    def __init__(
        self,
        runs: RunSet,
        store: Writer,
        background: Executor,
        *,
        piece: int = 4 << 20,
        max_layers: int = MAX_LAYERS,
        share: float = 0.5,
        remote_compactor: RemoteCompactor | None = None,
        earlier: Collection[TableSchema] = (),
    ) -> None:
        self._remote_compactor = remote_compactor
        self._earlier = tuple(dict.fromkeys(schema for schema in earlier if schema != runs.layout.schema))
        self._runs = runs
        self._store = store
        self._background = background
        self._piece = piece
        self._max_layers = max_layers
        self._pace = Pace(share)
        self._merge = BackgroundMerge[Run, Run]()

    @property
    def running(self) -> bool:
        """Whether a merge is running, or is done and not yet adopted."""
        return self._merge.running

    def step(self, excluded: Collection[Run] = ()) -> None:
        """Adopt a merge that is done, and begin one that is due. Called by the table's writer.

        Args:
            excluded: runs that must not be merged.

        Raises:
            MillpondError: merging has failed: at once if a run is damaged, else after several attempts.
        """
        if (done := self._merge.take()) is not None:
            self._adopt(*done)
        files = self._mergeable(excluded)
        extents = [_extent(run) for run in files]
        self._pace.set_full_speed(len(group_layers(extents)) > 2 * self._max_layers)
        if not self._merge.running:
            chosen = pick(extents, self._max_layers)
            if chosen is not None:
                self._start_merge(files, chosen)

    def close(self) -> None:
        """Cancel the running merge; its result is not used."""
        self._pace.stop()
        self._merge.close()

    def _mergeable(self, excluded: Collection[Run]) -> Sequence[Run]:
        # Runs without files stay, and so do runs between them: a merge takes neighbours only.
        runs = self._runs.runs
        waiting = [i for i, run in enumerate(runs) if run.ref is None or run in excluded]
        return runs[waiting[-1] + 1 :] if waiting else runs

    def _start_merge(self, files: Sequence[Run], chosen: Pick) -> None:
        inputs = tuple(files[chosen.begin : chosen.end])
        job = self._job(inputs, chosen.whole)

        def merge_locally() -> Future[Run]:
            return self._background.submit(do_merge, job, inputs, self._store, self._pace)

        def open_result(refs: Sequence[RunRef]) -> Run:
            (ref,) = refs
            return self._store.open(ref, self._runs.layout)

        result = (
            merge_locally()
            if self._remote_compactor is None
            else self._remote_compactor.submit(lambda: job, merge_locally, open_result)
        )
        self._merge.track(inputs, result)

    def _job(self, inputs: Sequence[Run], whole: bool) -> MergeRuns:
        layout, range_ = self._runs.layout, self._runs.range
        rows, size = sum(run.rows for run in inputs), sum(_extent(run).bytes for run in inputs)
        row_bytes = max(8 * layout.width, size // max(1, rows))
        return MergeRuns(
            schema=layout.schema,
            inputs=tuple(run.ref for run in inputs if run.ref is not None),
            axis=next((run.view.axis for run in inputs if not run.view.visible.whole), HASH),
            lowest=range_.lo,
            highest=range_.hi - 1,
            drop_tombstones=whole,
            size=piece_rows(self._piece, row_bytes),
            earlier=self._earlier,
        )

    def _adopt(self, inputs: Sequence[Run], merged: Run) -> None:
        # The result is empty if all keys were deleted.
        self._runs.replace(inputs, [merged] if merged.rows else [])
        for run in inputs:
            self._store.drop(run)


def do_merge(job: MergeRuns, inputs: Sequence[Run], store: Writer, pace: Pace) -> Run:
    """Merge opened inputs and write the result."""
    pieces = merge(
        [run.view for run in inputs],
        inputs[0].layout,
        drop_tombstones=job.drop_tombstones,
        lowest=job.lowest,
        highest=job.highest,
        size=job.size,
    )
    return store.write(pace.throttle(pieces), inputs[0].layout)


def _extent(run: Run) -> Extent:
    ref = run.ref
    assert ref is not None
    if ref.visible is None or run.view.axis != HASH:
        return Extent(ref.first, ref.last, run.bytes)
    # Only the rows inside `visible` count.
    first, last = max(ref.first, ref.visible[0]), min(ref.last, ref.visible[1])
    return Extent(first, max(first, last), run.bytes)
