"""The hint extractor (Keyed Prefetching, §IV-B): tells slots which keys are on their way, past the data.

It runs where rows are made ready for their slots: the stage that follows begins when all of them are written, and until
then the state of their keys can be read. Keys that are surely hot are left out: a count-min sketch, which lives as long
as the process, knows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np
import pyarrow as pa

from millpond.errors import MillpondError
from millpond.kernels.hints.sketch import Sketch
from millpond.layout import Words
from millpond.slot.batch.task import Lookahead, PipeTask
from millpond.slot.pipe.client import SlotFinder
from millpond.slot.prefetch.switch import wanted
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.protocol import Connection, Hints

SCHEMA = pa.schema([("hash", pa.uint64())])

_sketches: dict[tuple[str, int], Sketch] = {}


class HintSender:
    """Sends the hints of one task of one batch. Whatever goes wrong ends them, and nothing else.

    Slots that want those of another lookahead get one without keys, to see how early this one would be.

    Args:
        task: the operator. batch: its id. lookahead: who sends them.
        slots: those that want hints, and of which lookahead.
    """

    def __init__(self, task: PipeTask, batch: int, lookahead: Lookahead, slots: Mapping[int, str]) -> None:
        self._task = task
        self._batch = batch
        self._lookahead: Lookahead = lookahead
        self._slots = slots
        self._marked: set[int] = set()
        self._connections: dict[int, Connection | None] = {}
        self._sketch = _sketches.setdefault((task.key, task.operator), Sketch())

    @classmethod
    def of(cls, directory: SlotDirectory, task: PipeTask, batch: int, lookahead: Lookahead) -> HintSender | None:
        """A sender, if any slot wants hints."""
        slots = wanted(directory.path, task) if lookahead in task.lookaheads else {}
        return cls(task, batch, lookahead, slots) if slots else None

    def send(self, partition: int, hashes: Words) -> None:
        """Announce the keys of some rows of a partition."""
        slot = partition % self._task.slots
        if slot not in self._slots:
            return
        if self._slots[slot] == self._lookahead:
            rare = self._sketch.rare(np.unique(hashes))
            if len(rare):
                self._announce(slot, partition, rare)
        elif partition not in self._marked:
            self._marked.add(partition)
            self._announce(slot, partition, hashes[:0])

    def _announce(self, slot: int, partition: int, hashes: Words) -> None:
        try:
            if slot not in self._connections:
                self._connections[slot] = None
                self._connections[slot] = SlotFinder(self._task).find(slot)[0]
            connection = self._connections[slot]
            if connection is not None:
                connection.send(Hints(self._task, partition, self._batch, self._lookahead))
                connection.send_schema(SCHEMA)
                connection.send_batch(pa.RecordBatch.from_arrays([pa.array(hashes)], schema=SCHEMA))
        except (OSError, MillpondError):
            self._connections[slot] = None

    def close(self) -> None:
        """Hang up."""
        for connection in self._connections.values():
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
        hints = HintSender.of(SlotDirectory.of(self.task), self.task, self.batch, "source")
        if hints is None:
            return
        try:
            for batch in batches:
                hashes = np.sort(batch.column(0).to_numpy().view(np.uint64))
                bounds = [self.task.hash_range(partition)[0] for partition in range(1, self.task.partitions)]
                cuts = np.searchsorted(hashes, np.array(bounds, np.uint64))
                for partition, some in enumerate(np.split(hashes, cuts)):
                    if len(some):
                        hints.send(partition, some)
        finally:
            hints.close()
        yield from ()
