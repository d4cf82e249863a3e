"""Write of a query's initial state in Spark's Python worker, by partition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import msgspec
import pyarrow as pa

from millpond.checkpoint.forks.parents import open_state
from millpond.files.backends.retry import LONG_RETRY
from millpond.tasks.initial_state import write_rows
from millpond.tasks.operator_task import OperatorTask
from millpond.tasks.rows import first_hash
from millpond.worker.spark_task import without_delayed_acks

WRITTEN = "partition int, file string, checksum string"
"""Schema of the output: the fields of `Portion`."""

_SCHEMA = pa.schema([("partition", pa.int32()), ("file", pa.string()), ("checksum", pa.string())])


class InitialWrite:
    """Function for `DataFrame.mapInArrow` that writes the rows of one partition to files and yields their descriptions.

    Input columns: `__hash`, then those of the operator's initial state; output columns: `WRITTEN`.

    Args:
        task: the operator.
    """

    def __init__(self, task: OperatorTask) -> None:
        self.task = task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write everything, then yield a row for each file.

        Raises:
            MillpondError: a file cannot be written.
        """
        batches = (batch for batch in without_delayed_acks(batches) if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return
        # The exchange below sent all rows of one partition here, so the first row stands for all.
        partition = self.task.partition_of(first_hash(first))
        files = open_state(self.task.location, retry_config=LONG_RETRY)
        written = list(write_rows(files, self.task, partition, chain([first], batches)))
        yield pa.RecordBatch.from_pylist([msgspec.structs.asdict(portion) for portion in written], schema=_SCHEMA)
