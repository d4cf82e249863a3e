"""An attempt's input as it arrives: rows, parcels of them, and markers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from millpond.layout import HashRange
from millpond.slot.batch.parcels import in_passes, open_parcels
from millpond.slot.batch.rows import strip_markers
from millpond.slot.partition.turns import Attempt


class Feed:
    """An attempt's rows without their markers; at their end, the marker's time is given to `check`.

    Args:
        attempt: is told once all input is in.
        batches: what the slot receives.
        parcels: whether that is where the rows lie, not the rows.
        check: called with the marker's time, if it needs to be looked at.
    """

    def __init__(
        self,
        attempt: Attempt,
        batches: Iterator[pa.RecordBatch],
        parcels: bool,
        check: Callable[[int | None], None] | None,
    ) -> None:
        self._attempt = attempt
        self._batches = batches
        self._parcels = parcels
        self._check = check

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """The rows as they come."""
        time: int | None = None
        for batch in self._batches:
            rows, marked = strip_markers(batch)
            time = time if marked is None else marked
            if self._parcels:
                yield from open_parcels(rows.column(1).to_pylist())
            else:
                yield rows
        if self._check is not None:
            self._check(time)
        self._attempt.fed = True

    def passes(self, wanted: Callable[[int], int]) -> Iterator[tuple[HashRange | None, pa.RecordBatch]]:
        """The rows, in passes (see `in_passes`) if they come as parcels, which can be read in any order."""
        if self._parcels:
            yield from in_passes(self, wanted)
        else:
            yield from ((None, rows) for rows in self)
