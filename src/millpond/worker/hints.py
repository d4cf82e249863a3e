"""The hint extractor (Keyed Prefetching §IV-B): sends slots the keys of rows ahead of the rows themselves.

It runs where rows are prepared for their slots. The next stage starts only when all of them are written, and until then
slots can read the state of their keys. Keys that are surely hot are left out: a count-min sketch, which outlives the
task, identifies them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import MillpondError
from millpond.key_groups import hash_ranges
from millpond.layout import Words
from millpond.slot.prefetch.switch import MAX_HINTED_KEYS, requested_hints
from millpond.slot.process.connection import Connection
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.messages import Hints
from millpond.tasks.offset_log import latest_batch
from millpond.tasks.operator_task import Lookahead, OperatorTask
from millpond.worker.spark_task import batch_of, task_context, without_delayed_acks

if TYPE_CHECKING:
    from millpond.kernels.hints.sketch import Sketch

_NULL_NUMBER = -(1 << 63)

SCHEMA = pa.schema([("hash", pa.uint64())])

_SILENCE_SECONDS = 0.25
"""Seconds without progress after which a slot gets no more hints: its rows are on their way and matter more."""

_MAX_SKETCHES = 64
"""Maximum number of sketches that a worker keeps, those of the operators used last."""


class HintSender:
    """Sends the prefetch hints of one task of one batch to running slots. Best effort: an error ends hints to that
    slot.

    Partitions that want hints of another lookahead get one message without keys, which shows how early these would be.

    Args:
        directory: the directory of the slots.
        task: the operator.
        batch: its id.
        lookahead: the lookahead that sends the hints.
        asked: lookaheads whose hints are wanted, by partition.
    """

    def __init__(
        self,
        directory: SlotDirectory,
        task: OperatorTask,
        batch: int,
        lookahead: Lookahead,
        asked: Mapping[int, Collection[str]],
    ) -> None:
        self._directory = directory
        self._task = task
        self._batch = batch
        self._lookahead = lookahead
        self._asked = asked
        self._sent: dict[int, int] = {}  # number of keys by partition
        self._connections: dict[int, Connection | None] = {}
        self._sketch = _sketch(task.key, task.operator, lookahead, task.settings.hot)

    @classmethod
    def of(cls, directory: SlotDirectory, task: OperatorTask, batch: int, lookahead: Lookahead) -> HintSender | None:
        """Return a sender, or None if no partition wants hints."""
        asked = requested_hints(directory.path, task) if lookahead in task.lookaheads else {}
        return cls(directory, task, batch, lookahead, asked) if asked else None

    def send(self, partition: int, rows: pa.RecordBatch) -> None:
        """Send hints for rows of one partition: the column `__hash`, then the columns of the spec."""
        if partition in self._asked:
            self._send(partition, rows.select([0, *(1 + column for column in self._task.spec.hint_columns)]))

    def send_all(self, keys: pa.RecordBatch) -> None:
        """Send hints for keys of any partitions: the column of hashes, then other columns that the operator needs."""
        hashes = keys.column(0).to_numpy().view(np.uint64)
        # Sorted by hash, the keys of each partition are one slice, as partitions are ranges of hashes.
        order = np.argsort(hashes)
        keys = keys.take(pa.array(order))
        lows = [range_.lo for range_ in hash_ranges(self._task.partitions)]
        cuts = [*np.searchsorted(hashes[order], np.array(lows, np.uint64)).tolist(), len(hashes)]
        for partition, (start, stop) in enumerate(pairwise(cuts)):
            if start < stop and partition in self._asked:
                self._send(partition, keys.slice(start, stop - start))

    def _send(self, partition: int, keys: pa.RecordBatch) -> None:
        sent = self._sent.get(partition)
        if self._lookahead not in self._asked[partition]:
            if sent is None:
                self._sent[partition] = 0
                self._send_hints(partition, pa.RecordBatch.from_pylist([], schema=SCHEMA))
            return
        if sent is not None and sent >= MAX_HINTED_KEYS:
            return  # a partition looks up no more keys for one batch
        hashes = keys.column(0).to_numpy().view(np.uint64)
        rare = self._sketch.rare(*np.unique(hashes, return_counts=True))
        if not len(rare):
            return
        if keys.num_columns == 1:
            hinted = pa.RecordBatch.from_arrays([pa.array(rare)], schema=SCHEMA)
        else:
            firsts = _distinct_positions(keys, hashes)
            hinted = keys.take(pa.array(firsts[np.isin(hashes[firsts], rare)]))
        self._sent[partition] = (sent or 0) + hinted.num_rows
        self._send_hints(partition, hinted)

    def _send_hints(self, partition: int, keys: pa.RecordBatch) -> None:
        slot = partition % self._task.slots
        try:
            if slot not in self._connections:
                self._connections[slot] = None
                self._connections[slot] = Connection(
                    self._directory.connect(f"slot-{slot}", _SILENCE_SECONDS), _SILENCE_SECONDS
                )
            connection = self._connections[slot]
            if connection is not None:
                connection.send(Hints(self._task, partition, self._batch, self._lookahead))
                connection.send_table(keys)
        except (OSError, MillpondError):
            # Not tried again: the rows themselves follow, and late hints only delay them.
            failed, self._connections[slot] = self._connections[slot], None
            self._close_connections(failed)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            self._close_connections(connection)

    @staticmethod
    def _close_connections(connection: Connection | None) -> None:
        if connection is not None:
            with suppress(OSError):
                connection.close()


class SourceHints:
    """Function for `DataFrame.mapInArrow` that sends hints for keys of a later batch and yields nothing.

    Args:
        task: the operator.
        batch: the id of the batch.
    """

    def __init__(self, task: OperatorTask, batch: int) -> None:
        self.task = task
        self.batch = batch

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Send hints for all rows of a column of hashes."""
        directory = SlotDirectory.of(self.task)
        hints = HintSender.of(directory, self.task, self.batch, "source")
        if hints is None:
            return
        try:
            for batch in batches:
                if not requested_hints(directory.path, self.task):
                    break  # no partition wants hints any more: the query has ended, for example
                hints.send_all(batch)
        finally:
            hints.close()
        yield from ()


class PassingHints:
    """Function that Spark calls with batches of columns (`arrow_udf`); it sends hints and returns true for each row.

    A batch's rows continue once its result is returned, that is, after their hints were sent.

    Args:
        targets: the operators, each with the name of the lookahead and its number of columns: the hash, then those
            that the operator needs in addition.
    """

    def __init__(self, targets: Sequence[tuple[OperatorTask, Lookahead, int]]) -> None:
        self.targets = targets

    def __call__(self, batches: Iterator[pa.Array | tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Send hints for all keys of the batch that the task works on."""
        senders: list[HintSender | None] | None = None
        try:
            for columns in without_delayed_acks(batches):
                arrays = columns if isinstance(columns, tuple) else (columns,)
                if senders is None:
                    senders = self._senders()
                start = 0
                for hints, (_, _, width) in zip(senders, self.targets, strict=True):
                    selected, start = arrays[start : start + width], start + width
                    if hints is not None:
                        hints.send_all(_keys(selected))
                yield pa.repeat(pa.scalar(True), len(arrays[0]))
        finally:
            for hints in senders or ():
                if hints is not None:
                    hints.close()

    def _senders(self) -> list[HintSender | None]:
        given_batch = batch_of(task_context())
        try:
            task = self.targets[0][0]
            batch = latest_batch(task) if given_batch is None else given_batch
            directory = SlotDirectory.of(task)
            return [HintSender.of(directory, operator, batch, name) for operator, name, _ in self.targets]
        except (OSError, MillpondError):
            return [None] * len(self.targets)


@lru_cache(_MAX_SKETCHES)
def _sketch(query: str, operator: int, lookahead: Lookahead, hot: int) -> Sketch:
    """Return this worker's sketch of the keys that a lookahead has sent to an operator."""
    from millpond.kernels.hints.sketch import Sketch  # imported late: only tasks that send hints need kernels

    return Sketch(hot)


def _distinct_positions(keys: pa.RecordBatch, hashes: Words) -> NDArray[np.int64]:
    """Return the positions of distinct keys.

    Numbers beside a hash, such as a time or a side, distinguish keys; values of other types do not.
    """
    types = keys.schema.types[1:]
    if types and all(pa.types.is_int64(type_) or pa.types.is_boolean(type_) for type_ in types):
        numbers = [column.cast(pa.int64()).fill_null(_NULL_NUMBER).to_numpy() for column in keys.columns[1:]]
        order: NDArray[np.int64] = np.lexsort((*numbers, hashes))
        changes = np.any([np.diff(column[order]) != 0 for column in (hashes, *numbers)], axis=0)
        firsts: NDArray[np.int64] = order[np.concatenate([[True], changes])]
    else:
        firsts = np.unique(hashes, return_index=True)[1]
    return firsts


def _keys(columns: Sequence[pa.Array]) -> pa.RecordBatch:
    """Build a batch of hashes and their columns, without rows whose hash is null because of an error."""
    keys = pa.RecordBatch.from_arrays(list(columns), names=[f"_{position}" for position in range(len(columns))])
    return keys.filter(columns[0].is_valid()) if columns[0].null_count else keys
