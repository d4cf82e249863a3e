"""The exchange within one host: rows reach their partition's slot through files, past Spark's shuffle.

Spark's shuffle serialises every row, compresses it, and builds it up again before it becomes a column: more than the
state costs. Where all tasks run on one host, the map side writes Arrow record batches, one file per task with its rows
brought together by key group, and only **parcels** go through Spark's shuffle: one row per task and partition that says
where its rows lie. Spark chooses which attempt's parcels count, as it chooses which attempt's shuffle output does; the
files stay until the next batch, so that a repeated attempt, or another slot, finds them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from millpond.conf import KEY_GROUP_BITS
from millpond.errors import MillpondError
from millpond.files.disk import reason, remedy
from millpond.slot.batch.offsets import latest_batch
from millpond.slot.batch.parcels import PARCEL, Parcel, exchange_folder
from millpond.slot.batch.rows import key_groups
from millpond.slot.batch.task import PipeTask
from millpond.slot.pipe.hints import HintSender
from millpond.slot.pipe.worker import batch_of, promptly, task_context
from millpond.slot.process.identity import owner
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.spec.types import parse_type

_SORTED = 16384
"""Rows that are brought in order together: new keys of a longer stretch in order would crowd one end of an index."""

_BUFFER = 1 << 20
"""Bytes that are written at once: Arrow writes each of a column's buffers, and what pads it, by itself."""


class ExchangeWrite:
    """A function for `DataFrame.mapInArrow`: writes its rows to a file by partition, and yields their parcels.

    Input columns: `__hash`, the operator's, and others that are not written. Output columns: `__parcel`, the operator's
    and those of combined rows (all null), `__hash` (the lowest of the parcel's partition), `__mark`.
    """

    def __init__(self, task: PipeTask) -> None:
        self.task = task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write everything, then yield one row per partition that got any.

        Raises:
            MillpondError: the file cannot be written.
        """
        batches = promptly(batches)
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            return
        columns = range(1 + len(self.task.spec.input_fields))
        if first.num_columns > len(columns):
            first = first.select(columns)
            batches = (batch.select(columns) for batch in batches)
        context = task_context()
        told = batch_of(context)
        batch = latest_batch(self.task) if told is None else told
        directory = SlotDirectory.of(self.task)
        directory.enter(owner(self.task.jvm))
        folder = exchange_folder(directory.path, self.task) / str(batch)
        path = folder / f"{self.task.operator}-{context.taskAttemptId() if context else os.getpid()}.arrow"
        hints = HintSender.of(directory, self.task, batch, "exchange")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            parcels = self._write(path, first, batches, hints)
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
        combined = ((field.name, parse_type(field.type).arrow) for field in self.task.combined)
        others = [(field.name, field.type) for field in list(first.schema)[1:]] + list(combined)
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([msgspec.msgpack.encode(parcel) for parcel in parcels.values()], pa.binary()),
                *(pa.nulls(len(parcels), type_) for _, type_ in others),
                pa.array([self._low(partition) for partition in parcels], pa.int64()),
                pa.array([False] * len(parcels)),
            ],
            names=[PARCEL, *(name for name, _ in others), "__hash", "__mark"],
        )

    def _write(
        self, path: Path, first: pa.RecordBatch, others: Iterator[pa.RecordBatch], hints: HintSender | None
    ) -> dict[int, Parcel]:
        parcels: dict[int, Parcel] = {}
        with (
            pa.OSFile(str(path), "wb") as unbuffered,
            pa.BufferedOutputStream(unbuffered, _BUFFER) as file,
            pa.ipc.new_stream(file, first.schema) as stream,
        ):
            stream.write_batch(first.slice(0, 0))  # the schema goes out with the first batch, which no place counts
            for batch in chain([first], others):
                for start in range(0, batch.num_rows, _SORTED):
                    for partition, rows in self._by_partition(batch.slice(start, _SORTED)):
                        parcel = parcels.setdefault(partition, Parcel(str(path), [], 0))
                        parcel.places.append(file.tell())
                        parcel.rows += rows.num_rows
                        stream.write_batch(rows)
                        if hints is not None:
                            hints.send(partition, rows)
        return parcels

    def _by_partition(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each partition, in order of their key groups: close keys lie together for the slot."""
        groups = key_groups(batch)
        together = batch.take(pa.array(np.argsort(groups, kind="stable")))
        counts = np.bincount((groups.astype(np.uint32) * self.task.partitions) >> KEY_GROUP_BITS)
        starts = np.cumsum(counts) - counts
        for partition in np.flatnonzero(counts).tolist():
            yield partition, together.slice(int(starts[partition]), int(counts[partition]))

    def _low(self, partition: int) -> int:
        low, _ = self.task.hash_range(partition)
        return low - (1 << 64) if low >= 1 << 63 else low
