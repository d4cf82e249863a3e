"""Batch after batch through slots that are killed and stopped at random over a store that fails, tears and repeats."""

import os
import random
import signal

import msgspec
import numpy as np
import pytest
from pyspark import TaskContext

from millpond.errors import TransientError
from millpond.slot.process.client import drain
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.worker.slot_stage import SlotStage

from .conftest import FakeContext, grouped, hasty, table_of

pytestmark = pytest.mark.costly

BATCHES = 15
ATTEMPTS = 8


_SIGNALS = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]


class Storm:
    """Sends input and, now and then, a signal to whatever serves it."""

    def __init__(self, task, seed):
        self.directory = SlotDirectory.of(task)
        self.random = random.Random(seed)

    def input(self, pieces):
        for piece in pieces:
            self.strike()
            yield piece
        self.strike()

    def strike(self):
        if self.random.random() < 0.06:
            name = self.random.choice(["slot-0", "slot-0", "slot-0", "template"])
            process = self.directory.recorded_process(name)
            if process is not None and process.alive():
                os.kill(
                    process.pid, self.random.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
                )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_every_batch_gives_what_it_should(counting, monkeypatch, seed, mode):
    task = msgspec.structs.replace(
        hasty(counting), location=f"faults+{counting.location}?latency_ms=1&fail=0.03&torn=0.03&repeat=0.05&seed={seed}"
    )
    task = msgspec.structs.replace(
        task, settings=msgspec.structs.replace(task.settings, commit_mode=mode, start_timeout=10.0)
    )
    storm = Storm(task, seed)
    rows = np.random.default_rng(seed)
    truth = {}
    for batch in range(BATCHES):
        pieces, touched = [], {}
        for _ in range(4):
            keys, values = rows.integers(0, 50, 200), rows.integers(-1000, 1000, 200)
            pieces.append(grouped(0, keys, values))
            for key, value in zip(keys.tolist(), values.tolist(), strict=True):
                count, total = truth.get(key, (0, 0))
                touched[key] = truth[key] = (count + 1, total + value)
        for attempt in range(ATTEMPTS):
            context = FakeContext(batch, attempt)
            monkeypatch.setattr(TaskContext, "get", staticmethod(lambda context=context: context))
            try:
                output = table_of(SlotStage(task)(storm.input(pieces)))
                break
            except TransientError:
                continue
        else:
            pytest.fail(f"batch {batch} failed {ATTEMPTS} times")
        assert output == touched, batch
    assert drain(task, 30) in ({}, {(0, 0): BATCHES})
