"""A hundred starts of queries of two applications at once: real slots, and no Spark, which takes most of a start."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
from pyspark import TaskContext

from millpond.checkpoint.generation import claim
from millpond.checkpoint.recovery import Recovery
from millpond.files.locations.opening import join_url, open_filesystem
from millpond.slot.process.client import drain
from millpond.worker.slot_stage import SlotStage

from .conftest import FakeContext, grouped, table_of

STARTS = 25
"""Of each of four queries."""


class Query:
    """A query of two partitions, in two slots, whose every batch counts one more row of one key in each."""

    def __init__(self, task, contexts):
        self.task = task
        self.contexts = contexts
        self.files = open_filesystem(join_url(task.location, "millpond"))

    def start(self, *, drained, whole):
        """A start and a batch: behind what is durable, with the rows that follow from that."""
        if drained:
            drain(self.task, 30)
        claimed = claim(self.files, run="run", partitions=2)
        recovery = Recovery(self.files, claimed, 1)
        version = recovery.newest()
        recovery.write_base([version])
        task = msgspec.structs.replace(self.task, generation=claimed.number)
        with ThreadPoolExecutor(2) as tasks:
            for answer in tasks.map(lambda partition: self.run(task, version, partition, whole), range(2)):
                assert answer == [(version + 1, version + 1)]

    def run(self, task, batch, partition, whole):
        """A task of a batch; a consumer that stops early has its row, but does not hear that this was the last."""
        self.contexts.here = FakeContext(batch)
        output = SlotStage(task)(iter([grouped(partition, [1], [1], partitions=2)]))
        if whole:
            return list(table_of(output).values())
        first = next(output)
        output.close()  # type: ignore[attr-defined]  # a generator, as Spark sees it
        return list(table_of([first]).values())


def test_a_hundred_starts(task, monkeypatch, counting):
    contexts = threading.local()
    monkeypatch.setattr(TaskContext, "get", staticmethod(lambda: contexts.here))

    def often(number):
        drawn = random.Random(number)
        own = {"application": f"app-{number % 2}", "query": f"query-{number}", "location": f"{task.location}-{number}"}
        query = Query(msgspec.structs.replace(counting, **own, partitions=2, slots=2), contexts)
        for _ in range(STARTS):
            # What was not drained is what a start finds that did not wait for the store.
            query.start(drained=drawn.random() < 0.6, whole=drawn.random() < 0.6)
        drain(query.task, 30)
        assert Recovery(query.files, operators=1).newest() > STARTS // 2

    with ThreadPoolExecutor(4) as queries:
        list(queries.map(often, range(4)))
