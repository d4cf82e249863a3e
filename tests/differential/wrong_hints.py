"""Hints that no client should send: for other keys, a batch late or early, over and over, of some rows, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
import pyarrow as pa

import millpond.worker.exchange as exchange
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.tasks.operator_task import Lookahead, OperatorTask
from millpond.worker.exchange import ExchangeWrite
from millpond.worker.hints import HintSender


class WrongHints(HintSender):
    """Sends wrong hints, whether any are wanted or not."""

    def __init__(self, directory: SlotDirectory, task: OperatorTask, batch: int, lookahead: Lookahead) -> None:
        super().__init__(directory, task, batch, lookahead, dict.fromkeys(range(task.partitions), (lookahead,)))
        self._right = batch
        self._random = Random(batch)

    @classmethod
    def of(cls, directory: SlotDirectory, task: OperatorTask, batch: int, lookahead: Lookahead) -> HintSender | None:
        """Always a sender, where there are hints at all."""
        return cls(directory, task, batch, lookahead) if lookahead in task.lookaheads else None

    def send(self, partition: int, rows: pa.RecordBatch) -> None:
        """Announce anything but the keys of these rows, or these in a wrong way."""
        self._batch = self._right + self._random.choice((0, 0, 0, -1, 1, 7))
        what = self._random.choice(("others", "others", "turned", "some", "all", "none", "again"))
        if what == "others":
            low, high = self._task.hash_range(self._random.randrange(self._task.partitions))
            hashes = np.random.default_rng(self._right).integers(low, high, rows.num_rows, np.uint64)
            columns = [pa.array(hashes.view(np.int64)), *rows.columns[1:]]
            rows = pa.RecordBatch.from_arrays(columns, names=rows.schema.names)
        elif what == "turned":
            turn = pa.array(np.roll(np.arange(rows.num_rows), 1))
            columns = [rows.column(0), *(column.take(turn) for column in rows.columns[1:])]
            rows = pa.RecordBatch.from_arrays(columns, names=rows.schema.names)
        elif what == "some":
            rows = rows.slice(0, rows.num_rows // 2)
        times = {"none": 0, "again": 5}.get(what, 1)
        for _ in range(times):
            super().send(self._random.choice((partition, partition, 0)), rows)


class WrongExchangeWrite(ExchangeWrite):
    """The map side of an exchange, with wrong hints."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """See `ExchangeWrite`."""
        with mock.patch.object(exchange, "HintSender", WrongHints):
            yield from super().__call__(batches)


def switch_at_random(slots: Path, random: Random) -> None:
    """Let partitions that ask for hints ask for those of another lookahead, or of both."""
    for file in slots.glob("millpond-*/*/hints/*/*"):
        partition = file.name.partition(",")[0]
        file.rename(file.with_name(f"{partition},{random.choice(('exchange', 'source', 'exchange,source'))}"))
