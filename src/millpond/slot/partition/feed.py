"""An attempt's input as it arrives: rows, parcels of them, rows combined of them, and markers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import pyarrow as pa

from millpond.layout import HashRange
from millpond.slot.batch.parcels import in_passes, open_parcels
from millpond.slot.batch.rows import strip_markers
from millpond.slot.batch.task import PipeTask
from millpond.slot.partition.turns import Attempt


class Feed:
    """An attempt's rows without their markers; at their end, the marker's time is given to `check`.

    Args:
        attempt: is told once all input is in.
        batches: what the slot receives: hash, mark, with the local exchange a parcel, the operator's columns, and those
            of combined rows. A batch has either parcels, or rows, or combined rows; its other columns are null.
        task: the operator.
        check: called with the marker's time, if it needs to be looked at.
    """

    def __init__(
        self,
        attempt: Attempt,
        batches: Iterator[pa.RecordBatch],
        task: PipeTask,
        check: Callable[[int | None], None] | None,
    ) -> None:
        self._attempt = attempt
        self._batches = batches
        self._first = 2 if task.exchange == "local" else 1  # of the operator's columns
        self._combined = len(task.combined)
        self._check = check
        self._in_files = False

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """The rows as they come; combined ones have their count as last column (`is_combined`)."""
        time: int | None = None
        for batch in self._batches:
            rows, marked = strip_markers(batch)
            time = time if marked is None else marked
            if rows.num_rows:
                yield from self._rows(rows)
        if self._check is not None:
            self._check(time)
        self._attempt.fed = True

    def _rows(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if self._first == 2 and not rows.column(1).null_count:
            self._in_files = True
            yield from open_parcels(rows.column(1).to_pylist())
            return
        last = rows.num_columns
        if self._combined and rows.column(last - 1).null_count:
            last -= self._combined
        yield rows.select([0, *range(self._first, last)])

    def passes(self, wanted: Callable[[int], int]) -> Iterator[tuple[HashRange | None, pa.RecordBatch]]:
        """The rows, in passes (see `in_passes`) if they lie in files, which can be read in any order."""
        batches = iter(self)
        first = next(batches, None)
        if first is None:
            return
        batches = chain([first], batches)
        if self._in_files:
            yield from in_passes(batches, wanted)
        else:
            yield from ((None, rows) for rows in batches)
