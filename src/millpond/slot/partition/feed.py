"""An attempt's input as it arrives: rows, block references, combined rows, and markers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from time import monotonic

import pyarrow as pa

from millpond.layout import HashRange
from millpond.slot.partition.attempt_lock import Attempt
from millpond.tasks.block_references import open_references, split_into_passes
from millpond.tasks.operator_task import OperatorTask
from millpond.tasks.rows import strip_markers


class Feed:
    """An attempt's rows without their markers. At the end, `check` gets the marker's time.

    Args:
        attempt: its `waiting_since` is set while the feed waits for the next batch of rows.
        batches: batches that the slot receives. Columns: hash, mark, a block reference in the local exchange, the
            operator's columns, and those of combined rows. A batch has references, rows or combined rows; its other
            columns are null.
        task: the operator.
        check: called with the marker's time; None if it needs no check.
    """

    def __init__(
        self,
        attempt: Attempt,
        batches: Iterator[pa.RecordBatch],
        task: OperatorTask,
        check: Callable[[int | None], None] | None,
    ) -> None:
        self._attempt = attempt
        self._batches = batches
        self._first = 2 if task.exchange == "local" else 1  # index of the first of the operator's columns
        self._combined = len(task.combined)
        self._check = check
        self._in_files = False

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield rows as they arrive; combined rows have their count as the last column (`is_combined`)."""
        time: int | None = None
        for batch in self._received():
            rows, marked = strip_markers(batch)
            time = time if marked is None else marked
            if rows.num_rows:
                yield from self._rows(rows)
        # Checked before the end of the input, so that an attempt with another batch's rows fails before the seal.
        if self._check is not None:
            self._check(time)

    def _received(self) -> Iterator[pa.RecordBatch]:
        batch: pa.RecordBatch | None
        while True:
            self._attempt.waiting_since = monotonic()
            batch = next(self._batches, None)
            self._attempt.waiting_since = None
            if batch is None:
                return
            yield batch

    def _rows(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if self._first == 2 and not rows.column(1).null_count:
            self._in_files = True
            yield from open_references(rows.column(1).to_pylist())
            return
        last = rows.num_columns
        if self._combined and rows.column(last - 1).null_count:
            last -= self._combined
        yield rows.select([0, *range(self._first, last)])

    def passes(self, wanted: Callable[[int], int]) -> Iterator[tuple[HashRange | None, pa.RecordBatch]]:
        """Yield the rows, in passes (see `split_into_passes`) if they are in files, which can be read in any order."""
        batches = iter(self)
        first = next(batches, None)
        if first is None:
            return
        batches = chain([first], batches)
        if self._in_files:
            yield from split_into_passes(batches, wanted)
        else:
            yield from ((None, rows) for rows in batches)
