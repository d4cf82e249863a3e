"""A slot in the test's own process that counts more keys than it has memory for, and hints for it."""

import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from millpond.slot.partition.partition import Partition
from millpond.slot.partition.partitions import PartitionServer
from millpond.slot.process.messages import Hints, RunBatch
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.prefetcher import Prefetcher
from millpond.tasks.operator_task import OperatorTask

from .conftest import TIME, hashes_in, key_hash, table_of

MEMORY = 16 << 20
KEYS = 400_000
"""Of which some 200,000 have room in memory."""


def rows_of(keys: np.ndarray) -> Iterator[pa.RecordBatch]:
    yield pa.record_batch(
        {"__hash": pa.array([key_hash(0, 1, TIME)]), "__mark": [True], "k": pa.array([0]), "v": pa.array([0])}
    )
    for start in range(0, len(keys), 50_000):
        some = keys[start : start + 50_000]
        columns = [hashes_in(0, 1, some), np.zeros(len(some), bool), some, np.ones(len(some), np.int64)]
        yield pa.record_batch([pa.array(column) for column in columns], names=["__hash", "__mark", "k", "v"])


def run(server: PartitionServer, task: OperatorTask, batch: int, keys: np.ndarray) -> tuple[dict, dict[str, float]]:
    answer = server.run(RunBatch(task, 0, batch, batch), rows_of(keys))
    batches = []
    while True:
        try:
            batches.append(next(answer))
        except StopIteration as end:
            return table_of(batches), end.value.metrics


def hint(server: PartitionServer, task: OperatorTask, batch: int, keys: np.ndarray) -> None:
    hashes = pa.array(hashes_in(0, 1, keys))
    server.hint(Hints(task, 0, batch, "exchange"), pa.record_batch([hashes], names=["__hash"]))


def held(server: PartitionServer) -> tuple[Partition, RmwTable, Prefetcher]:
    """The partition, its table, and what reads that ahead."""
    (query,) = server._queries.values()
    (partition,) = query.partitions.values()
    assert partition._operator is not None
    (table,) = partition._operator.tables.values()
    assert isinstance(table, RmwTable)
    assert table._prefetcher is not None
    return partition, table, table._prefetcher


def read_ahead(server: PartitionServer) -> None:
    """Wait until what was announced is read."""
    deadline = time.monotonic() + 120
    while held(server)[2]._read_claimed:
        assert time.monotonic() < deadline
        time.sleep(0.001)
