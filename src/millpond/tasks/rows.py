"""Columns that the planner adds before an operator's own: the key hash, and the mark of marker rows.

Every partition gets one marker row in every batch. The top bits of its hash are the partition's lowest key group; the
other bits are the batch's time in milliseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.errors import MillpondError
from millpond.key_groups import IN_GROUP_BITS
from millpond.spec.operators import COMBINED_ROWS

HASH = 0
MARK = 1
_KEY = 2
_TIME_MASK = (1 << IN_GROUP_BITS) - 1


def move_last_first(batch: pa.RecordBatch, last: int) -> pa.RecordBatch:
    """Move a batch's `last` last columns, hash and mark among them, to the front."""
    others = batch.num_columns - last
    return batch.select([*range(others, batch.num_columns), *range(others)])


def first_hash(batch: pa.RecordBatch) -> int:
    """Return the signed hash of the first row, which determines the partition."""
    return int(batch.column(HASH)[0].as_py())


def located_rows(batches: Iterator[pa.RecordBatch], low: int, high: int) -> Iterator[pa.RecordBatch]:
    """Remove Spark's partitioning key, the third column, after checking that all rows belong to the partition.

    If something has changed Spark's plan, markers and rows may arrive in different tasks, or rows of several partitions
    in one.

    Args:
        batches: the rows of a task.
        low, high: the interval `[low, high)` of the partition's unsigned hashes.

    Raises:
        MillpondError: a row's hash lies outside of the interval.
    """
    for batch in batches:
        hashes: NDArray[np.uint64] = batch.column(HASH).to_numpy().view(np.uint64)
        if len(hashes) and not low <= int(hashes.min()) <= int(hashes.max()) < high:
            raise misplaced_error()
        yield batch.select([index for index in range(batch.num_columns) if index != _KEY])


def misplaced_error() -> MillpondError:
    """Return the error for rows that Spark has sent to another partition than the plan says."""
    return MillpondError(
        "Spark did not send rows to their partition as planned: another extension of Spark has changed the plan.",
        action="Set spark.millpond.placement to off, or remove the extension.",
    )


def key_groups(batch: pa.RecordBatch) -> NDArray[np.uint16]:
    """Return the key group of each row: the top bits of its hash."""
    hashes: NDArray[np.uint64] = batch.column(HASH).to_numpy().view(np.uint64)
    return (hashes >> np.uint64(IN_GROUP_BITS)).astype(np.uint16)


def strip_markers(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int | None]:
    """Remove marker rows and the mark column; return the rows and the batch's time if there was a marker."""
    marks: Any = batch.column(MARK)
    columns = batch.columns
    names = batch.schema.names
    rows = pa.RecordBatch.from_arrays([columns[HASH], *columns[MARK + 1 :]], names=[names[HASH], *names[MARK + 1 :]])
    if not marks.true_count:
        return rows, None
    marker = int(pc.index(marks, True).as_py())
    time = batch.column(HASH)[marker].as_py() & _TIME_MASK
    # A slice copies nothing, unlike a filter.
    if marks.true_count == 1 and marker == 0:
        return rows.slice(1), time
    if marks.true_count == 1 and marker == batch.num_rows - 1:
        return rows.slice(0, marker), time
    return rows.filter(pc.invert(pc.fill_null(marks, False))), time


def is_combined(batch: pa.RecordBatch) -> bool:
    """Return whether rows were combined before the exchange; then the last column counts the rows combined into
    each.
    """
    return bool(batch.schema.names[-1] == COMBINED_ROWS.name)
