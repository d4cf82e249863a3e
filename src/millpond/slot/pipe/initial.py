"""What runs in Spark's Python worker to bring an initial state to the partitions that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import msgspec
import pyarrow as pa

from millpond.checkpoint.forks.parents import open_state
from millpond.files.backends.patience import LASTING
from millpond.slot.batch.initial import write_rows
from millpond.slot.batch.rows import first_hash
from millpond.slot.batch.task import PipeTask
from millpond.slot.pipe.worker import promptly

WRITTEN = "partition int, file string, checksum string"
"""What comes out: the fields of `Portion`."""

_SCHEMA = pa.schema([("partition", pa.int32()), ("file", pa.string()), ("checksum", pa.string())])


class InitialWrite:
    """A function for `DataFrame.mapInArrow`: writes the rows of one partition to files, and yields what these are.

    Input columns: `__hash`, then those of the operator's initial state; output columns: `WRITTEN`.

    Args:
        task: the operator.
    """

    def __init__(self, task: PipeTask) -> None:
        self.task = task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write everything, then yield a row for each file.

        Raises:
            MillpondError: a file cannot be written.
        """
        batches = (batch for batch in promptly(batches) if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return
        partition = self.task.partition_of(first_hash(first))
        files = open_state(self.task.location, retry_config=LASTING)
        written = list(write_rows(files, self.task, partition, chain([first], batches)))
        yield pa.RecordBatch.from_pylist([msgspec.structs.asdict(one) for one in written], schema=_SCHEMA)
