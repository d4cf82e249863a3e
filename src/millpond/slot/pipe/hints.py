"""The hint extractor (Keyed Prefetching §IV-B): tells slots which keys are on their way, past the data.

It runs where rows are made ready for their slots: the stage that follows begins when all of them are written, and until
then the state of their keys can be read. Keys that are surely hot are left out: a count-min sketch, which outlives the
task, knows them.
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
from millpond.layout import Words
from millpond.slot.batch.offsets import latest_batch
from millpond.slot.batch.task import Lookahead, PipeTask
from millpond.slot.pipe.worker import batch_of, promptly, task_context
from millpond.slot.prefetch.switch import MOST, wanted
from millpond.slot.process.connection import Connection
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.messages import Hints

if TYPE_CHECKING:
    from millpond.kernels.hints.sketch import Sketch

_NO_NUMBER = -(1 << 63)

SCHEMA = pa.schema([("hash", pa.uint64())])

_PATIENCE = 0.25
"""Seconds without progress after which a slot is told no more: the rows are on their way, and matter more."""

_SKETCHES = 64
"""Sketches that a worker keeps, of the operators that it has met last."""


class HintSender:
    """Sends the hints of one task of one batch to the slots that run. Whatever goes wrong ends them, and nothing else.

    Partitions that want those of another lookahead get one without keys, to see how early this one would be.

    Args:
        directory: of the slots. task: the operator. batch: its id. lookahead: who sends them.
        asked: the partitions that want hints, and of which lookaheads.
    """

    def __init__(
        self,
        directory: SlotDirectory,
        task: PipeTask,
        batch: int,
        lookahead: Lookahead,
        asked: Mapping[int, Collection[str]],
    ) -> None:
        self._directory = directory
        self._task = task
        self._batch = batch
        self._lookahead = lookahead
        self._asked = asked
        self._sent: dict[int, int] = {}  # keys, by partition
        self._connections: dict[int, Connection | None] = {}
        self._sketch = _sketch(task.key, task.operator, lookahead, task.settings.hot)

    @classmethod
    def of(cls, directory: SlotDirectory, task: PipeTask, batch: int, lookahead: Lookahead) -> HintSender | None:
        """A sender, if any partition wants hints."""
        asked = wanted(directory.path, task) if lookahead in task.lookaheads else {}
        return cls(directory, task, batch, lookahead, asked) if asked else None

    def send(self, partition: int, rows: pa.RecordBatch) -> None:
        """Announce the keys of some rows of a partition: the column `__hash`, then those of the spec."""
        if partition in self._asked:
            self._send(partition, rows.select([0, *(1 + column for column in self._task.spec.announced)]))

    def spread(self, keys: pa.RecordBatch) -> None:
        """Announce keys of any partitions: the column of hashes, then what the operator asks for beside them."""
        hashes = keys.column(0).to_numpy().view(np.uint64)
        order = np.argsort(hashes)
        keys = keys.take(pa.array(order))
        lows = [self._task.hash_range(partition)[0] for partition in range(self._task.partitions)]
        cuts = [*np.searchsorted(hashes[order], np.array(lows, np.uint64)).tolist(), len(hashes)]
        for partition, (start, stop) in enumerate(pairwise(cuts)):
            if start < stop and partition in self._asked:
                self._send(partition, keys.slice(start, stop - start))

    def _send(self, partition: int, keys: pa.RecordBatch) -> None:
        sent = self._sent.get(partition)
        if self._lookahead not in self._asked[partition]:
            if sent is None:
                self._sent[partition] = 0
                self._announce(partition, pa.RecordBatch.from_pylist([], schema=SCHEMA))
            return
        if sent is not None and sent >= MOST:
            return  # no more would be looked at
        hashes = keys.column(0).to_numpy().view(np.uint64)
        rare = self._sketch.rare(*np.unique(hashes, return_counts=True))
        if not len(rare):
            return
        if keys.num_columns == 1:
            some = pa.RecordBatch.from_arrays([pa.array(rare)], schema=SCHEMA)
        else:
            firsts = _different(keys, hashes)
            some = keys.take(pa.array(firsts[np.isin(hashes[firsts], rare)]))
        self._sent[partition] = (sent or 0) + some.num_rows
        self._announce(partition, some)

    def _announce(self, partition: int, keys: pa.RecordBatch) -> None:
        slot = partition % self._task.slots
        try:
            if slot not in self._connections:
                self._connections[slot] = None
                self._connections[slot] = Connection(self._directory.connect(f"slot-{slot}", _PATIENCE), _PATIENCE)
            connection = self._connections[slot]
            if connection is not None:
                connection.send(Hints(self._task, partition, self._batch, self._lookahead))
                connection.send_table(keys)
        except (OSError, MillpondError):
            lost, self._connections[slot] = self._connections[slot], None
            self._hang_up(lost)

    def close(self) -> None:
        """Hang up."""
        for connection in self._connections.values():
            self._hang_up(connection)

    @staticmethod
    def _hang_up(connection: Connection | None) -> None:
        if connection is not None:
            with suppress(OSError):
                connection.close()


class KeysAhead:
    """A function for `DataFrame.mapInArrow`: announces keys that a later batch will ask for, and yields nothing.

    Args:
        task: the operator. batch: the id of the batch.
    """

    def __init__(self, task: PipeTask, batch: int) -> None:
        self.task = task
        self.batch = batch

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Announce all of a column of hashes."""
        directory = SlotDirectory.of(self.task)
        hints = HintSender.of(directory, self.task, self.batch, "source")
        if hints is None:
            return
        try:
            for batch in batches:
                if not wanted(directory.path, self.task):
                    break  # nobody asks any more: the query has ended, say
                hints.spread(batch)
        finally:
            hints.close()
        yield from ()


class KeysPassing:
    """A function of columns that Spark calls with batches of them (`arrow_udf`): announces keys, gives true for each.

    What it gives for a batch lets the batch's rows go on: they do so once their keys are announced.

    Args:
        announced: operators, each with the name of the lookahead, and how many columns there are for it: the hash, then
            what it asks for beside that.
    """

    def __init__(self, announced: Sequence[tuple[PipeTask, Lookahead, int]]) -> None:
        self.announced = announced

    def __call__(self, batches: Iterator[pa.Array | tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
        """Announce all keys of the batch that the task works on."""
        senders: list[HintSender | None] | None = None
        try:
            for columns in promptly(batches):
                arrays = columns if isinstance(columns, tuple) else (columns,)
                if senders is None:
                    senders = self._senders()
                start = 0
                for hints, (_, _, width) in zip(senders, self.announced, strict=True):
                    some, start = arrays[start : start + width], start + width
                    if hints is not None:
                        hints.spread(_keys(some))
                yield pa.repeat(pa.scalar(True), len(arrays[0]))
        finally:
            for hints in senders or ():
                if hints is not None:
                    hints.close()

    def _senders(self) -> list[HintSender | None]:
        told = batch_of(task_context())
        try:
            task = self.announced[0][0]
            batch = latest_batch(task) if told is None else told
            directory = SlotDirectory.of(task)
            return [HintSender.of(directory, one, batch, name) for one, name, _ in self.announced]
        except (OSError, MillpondError):
            return [None] * len(self.announced)


@lru_cache(_SKETCHES)
def _sketch(query: str, operator: int, lookahead: Lookahead, hot: int) -> Sketch:
    """What this worker knows of the keys that a lookahead has announced to an operator."""
    from millpond.kernels.hints.sketch import Sketch  # kernels are for those who use them

    return Sketch(hot)


def _different(keys: pa.RecordBatch, hashes: Words) -> NDArray[np.int64]:
    """The positions of different keys; where numbers, as a time, or a side, go with a hash, they make a difference."""
    types = keys.schema.types[1:]
    if types and all(pa.types.is_int64(one) or pa.types.is_boolean(one) for one in types):
        numbers = [column.cast(pa.int64()).fill_null(_NO_NUMBER).to_numpy() for column in keys.columns[1:]]
        order: NDArray[np.int64] = np.lexsort((*numbers, hashes))
        changes = np.any([np.diff(column[order]) != 0 for column in (hashes, *numbers)], axis=0)
        firsts: NDArray[np.int64] = order[np.concatenate([[True], changes])]
    else:
        firsts = np.unique(hashes, return_index=True)[1]
    return firsts


def _keys(columns: Sequence[pa.Array]) -> pa.RecordBatch:
    """Columns of hashes and what goes with them, of which hashes can be null where there was an error."""
    keys = pa.RecordBatch.from_arrays(list(columns), names=[f"_{at}" for at in range(len(columns))])
    return keys.filter(columns[0].is_valid()) if columns[0].null_count else keys
