"""The hint extractor (Keyed Prefetching §IV-B): tells slots which keys are on their way, past the data.

It runs where rows are made ready for their slots: the stage that follows begins when all of them are written, and until
then the state of their keys can be read. Keys that are surely hot are left out: a count-min sketch, which lives as long
as the process, knows them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from millpond.errors import MillpondError
from millpond.layout import Words
from millpond.slot.batch.task import Lookahead, PipeTask
from millpond.slot.prefetch.switch import MOST, wanted
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.protocol import Connection, Hints

if TYPE_CHECKING:
    from millpond.kernels.hints.sketch import Sketch

SCHEMA = pa.schema([("hash", pa.uint64())])

_PATIENCE = 0.25
"""Seconds without progress after which a slot is told no more: the rows are on their way, and matter more."""

_sketches: dict[tuple[str, int, Lookahead], Sketch] = {}


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
        self._lookahead: Lookahead = lookahead
        self._asked = asked
        self._sent: dict[int, int] = {}  # keys, by partition
        self._connections: dict[int, Connection | None] = {}
        from millpond.kernels.hints.sketch import Sketch  # kernels are for those who use them

        self._sketch = _sketches.setdefault((task.key, task.operator, lookahead), Sketch())

    @classmethod
    def of(cls, directory: SlotDirectory, task: PipeTask, batch: int, lookahead: Lookahead) -> HintSender | None:
        """A sender, if any partition wants hints."""
        asked = wanted(directory.path, task) if lookahead in task.lookaheads else {}
        return cls(directory, task, batch, lookahead, asked) if asked else None

    def send(self, partition: int, rows: pa.RecordBatch) -> None:
        """Announce the keys of some rows of a partition: the column `__hash`, then those of the spec."""
        asked, sent = self._asked.get(partition), self._sent.get(partition)
        if asked is None:
            return
        slot = partition % self._task.slots
        if self._lookahead in asked:
            if sent is not None and sent >= MOST:
                return  # no more would be looked at
            hashes = rows.column(0).to_numpy().view(np.uint64)
            rare = self._sketch.rare(*np.unique(hashes, return_counts=True))
            if len(rare):
                self._sent[partition] = (sent or 0) + len(rare)
                self._announce(slot, partition, self._keys(rows, hashes, rare))
        elif sent is None:
            self._sent[partition] = 0
            self._announce(slot, partition, pa.RecordBatch.from_pylist([], schema=SCHEMA))

    def _keys(self, rows: pa.RecordBatch, hashes: Words, rare: Words) -> pa.RecordBatch:
        """The hashes, and with them what the operator asks for of the rows' columns."""
        columns = self._task.spec.announced
        if not columns:
            return pa.RecordBatch.from_arrays([pa.array(rare)], schema=SCHEMA)
        unique, firsts = np.unique(hashes, return_index=True)
        at = pa.array(firsts[np.searchsorted(unique, rare)])
        return rows.select([0, *(1 + column for column in columns)]).take(at)

    def _announce(self, slot: int, partition: int, keys: pa.RecordBatch) -> None:
        try:
            if slot not in self._connections:
                self._connections[slot] = None
                self._connections[slot] = Connection(self._directory.connect(f"slot-{slot}", _PATIENCE), _PATIENCE)
            connection = self._connections[slot]
            if connection is not None:
                connection.send(Hints(self._task, partition, self._batch, self._lookahead))
                connection.send_schema(keys.schema)
                connection.send_batch(keys)
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
                hashes = batch.column(0).to_numpy().view(np.uint64)
                order = np.argsort(hashes)
                rows = batch.take(pa.array(order))
                lows = [self.task.hash_range(partition)[0] for partition in range(self.task.partitions)]
                cuts = [*np.searchsorted(hashes[order], np.array(lows, np.uint64)).tolist(), len(hashes)]
                for partition, (start, stop) in enumerate(pairwise(cuts)):
                    if start < stop:
                        hints.send(partition, rows.slice(start, stop - start))
        finally:
            hints.close()
        yield from ()
