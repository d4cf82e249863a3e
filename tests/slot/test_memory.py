"""A real slot whose state grows to twenty times its memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyspark import TaskContext

from millpond.slot.process.client import SlotFinder
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall, Field
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.slot_stage import SlotStage

from .conftest import TIME, FakeContext, begin, hashes_in, key_hash

BUDGET = 64 << 20
CODE = 16 << 20
"""What kernels take in a slot, which an idle one has not loaded yet."""
CALLS = [AggregateCall(name, (0,), "bigint") for name in ("sum", "min", "max", "count") * 15]
WIDE = AggregateSpec((Field("k", "bigint"),), (Field("v", "bigint"),), tuple(CALLS), "update")
ROW = 8 * (4 + len(CALLS))
"""Bytes of a row: hash, stamp, null bits (of 61 columns), key, values."""
FRESH = 100_000
"""New keys in a batch; a quarter as many old ones come with them."""


def anonymous(pid: int) -> int:
    """Bytes of anonymous memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


@contextmanager
def watched(pid: int) -> Iterator[list[int]]:
    """The most anonymous memory that a process has meanwhile, in a list of one."""
    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            most[0] = max(most[0], anonymous(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def arrivals(number: int, rng: np.random.Generator) -> Iterator[pa.RecordBatch]:
    """The input of a batch: fresh keys and some that have long left memory."""
    fresh = np.arange(number * FRESH, (number + 1) * FRESH)
    keys = np.concatenate([fresh, rng.integers(0, number * FRESH + 1, FRESH // 4)])
    rng.shuffle(keys)
    yield pa.record_batch(
        {"__hash": pa.array([key_hash(0, 1, TIME)]), "__mark": [True], "k": pa.array([0]), "v": pa.array([0])}
    )
    for start in range(0, len(keys), 50_000):
        part = keys[start : start + 50_000]
        columns = [hashes_in(0, 1, part), np.zeros(len(part), bool), part, part % 100]
        yield pa.record_batch([pa.array(column) for column in columns], names=["__hash", "__mark", "k", "v"])


@pytest.mark.timeout(600)
def test_a_slot_keeps_within_its_memory(task: OperatorTask, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = msgspec.structs.replace(task.settings, memory=BUDGET)
    task = msgspec.structs.replace(
        task, spec=WIDE, template="millpond.slot.template", partitions=1, slots=1, settings=settings
    )
    begin(task)
    connection, process = SlotFinder(task).find(0)
    connection.close()
    idle = anonymous(process.pid)
    batches = -(-20 * BUDGET // (ROW * FRESH))
    rng, known = np.random.default_rng(1), 0
    with watched(process.pid) as most:
        for number in range(batches):
            context = FakeContext(number)
            monkeypatch.setattr(TaskContext, "get", staticmethod(lambda context=context: context))
            known += sum(rows.num_rows for rows in SlotStage(task)(arrivals(number, rng)))
            print(f"batch {number}: {(most[0] - idle) >> 20} MB")
    assert known > batches * FRESH
    assert (most[0] - idle) >> 20 <= (BUDGET + CODE) >> 20
