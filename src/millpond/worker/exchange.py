"""Local exchange: rows reach their partition's slot through files on the host, not through Spark's shuffle.

Spark's shuffle serialises every row, compresses it, and rebuilds it before it becomes a column again. That costs more
than the state does. Where all tasks run on one host, the map side writes Arrow record batches: one file per task, with
rows grouped by key group. Only **block references** go through Spark's shuffle: one row per task and partition with the
location of its rows. Spark decides which attempt's references count, as for any shuffle output. The files stay until
the next batch, so that a repeated attempt or another slot finds them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from millpond.errors import MillpondError
from millpond.files.disk import reason, remedy
from millpond.key_groups import KEY_GROUP_BITS, as_signed, hash_ranges
from millpond.slot.process.identity import owner
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.spec.types import parse_type
from millpond.tasks.block_references import BLOCK_REFERENCE, BlockReference, exchange_folder
from millpond.tasks.offset_log import latest_batch
from millpond.tasks.operator_task import OperatorTask
from millpond.tasks.rows import key_groups
from millpond.worker.hints import HintSender
from millpond.worker.spark_task import batch_of, task_context, without_delayed_acks

_SORTED_ROWS = 16384
"""Number of rows that are sorted together. New keys of a longer sorted stretch would cluster at one end of an index."""

_WRITE_BYTES = 1 << 20
"""Bytes per write. Without buffering, Arrow writes each buffer of a column, and its padding, separately."""


class ExchangeWrite:
    """Function for `DataFrame.mapInArrow` that writes its rows to a file by partition and yields block references.

    Input columns: `__hash`, the operator's columns, and others that are not written. Output columns:
    `__block_reference`, the operator's and those of combined rows (all null), `__hash` (the lowest of the reference's
    partition), `__mark`.
    """

    def __init__(self, task: OperatorTask) -> None:
        self.task = task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write everything, then yield one row per partition with rows.

        Raises:
            MillpondError: the file cannot be written.
        """
        batches = without_delayed_acks(batches)
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            return
        columns = range(1 + len(self.task.spec.input_fields))
        # Further columns are arguments for combining; this form sends single rows.
        if first.num_columns > len(columns):
            first = first.select(columns)
            batches = (batch.select(columns) for batch in batches)
        context = task_context()
        given_batch = batch_of(context)
        batch = latest_batch(self.task) if given_batch is None else given_batch
        directory = SlotDirectory.of(self.task)
        directory.register(owner(self.task.jvm))
        folder = exchange_folder(directory.path, self.task) / str(batch)
        # The attempt id in the name keeps attempts from overwriting each other's files.
        path = folder / f"{self.task.operator}-{context.taskAttemptId() if context else os.getpid()}.arrow"
        hints = HintSender.of(directory, self.task, batch, "exchange")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            references = self._write(path, first, batches, hints)
        except OSError as error:
            raise MillpondError(
                f"Rows on their way to their slots cannot be written: {reason(error)}.",
                action=remedy(error, str(directory.path), "point TMPDIR to another disk"),
                query=self.task.query,
                operator=str(self.task.operator),
                version=batch,
                file=str(path),
            ) from error
        finally:
            if hints is not None:
                hints.close()
        ranges = hash_ranges(self.task.partitions)
        combined = ((field.name, parse_type(field.type).arrow) for field in self.task.combined)
        others = [(field.name, field.type) for field in list(first.schema)[1:]] + list(combined)
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([msgspec.msgpack.encode(reference) for reference in references.values()], pa.binary()),
                *(pa.nulls(len(references), type_) for _, type_ in others),
                pa.array([as_signed(ranges[partition].lo) for partition in references], pa.int64()),
                pa.array([False] * len(references)),
            ],
            names=[BLOCK_REFERENCE, *(name for name, _ in others), "__hash", "__mark"],
        )

    def _write(
        self, path: Path, first: pa.RecordBatch, others: Iterator[pa.RecordBatch], hints: HintSender | None
    ) -> dict[int, BlockReference]:
        references: dict[int, BlockReference] = {}
        with (
            pa.OSFile(str(path), "wb") as unbuffered,
            pa.BufferedOutputStream(unbuffered, _WRITE_BYTES) as file,
            pa.ipc.new_stream(file, first.schema) as stream,
        ):
            stream.write_batch(first.slice(0, 0))  # writes the schema with an empty batch, which no reference includes
            for batch in chain([first], others):
                for start in range(0, batch.num_rows, _SORTED_ROWS):
                    for partition, rows in self._by_partition(batch.slice(start, _SORTED_ROWS)):
                        reference = references.setdefault(partition, BlockReference(str(path), [], 0))
                        reference.places.append(file.tell())
                        reference.rows += rows.num_rows
                        stream.write_batch(rows)
                        if hints is not None:
                            hints.send(partition, rows)
        return references

    def _by_partition(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of each partition, sorted by key group so that close keys are adjacent for the slot."""
        groups = key_groups(batch)
        grouped = batch.take(pa.array(np.argsort(groups, kind="stable")))
        counts = np.bincount((groups.astype(np.uint32) * self.task.partitions) >> KEY_GROUP_BITS)
        starts = np.cumsum(counts) - counts
        for partition in np.flatnonzero(counts).tolist():
            yield partition, grouped.slice(int(starts[partition]), int(counts[partition]))
