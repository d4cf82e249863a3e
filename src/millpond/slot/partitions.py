"""The slot's inside: all partitions that it serves, of all queries of the application."""

from __future__ import annotations

import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from millpond.errors import FencedError, MillpondError
from millpond.slot.partition import Partition
from millpond.slot.protocol import Done, Run
from millpond.slot.running import Means, RunningQuery
from millpond.slot.server import Answer
from millpond.slot.turns import Attempt
from millpond.stores.budget import MemoryBudget


class PartitionServer:
    """Runs partitions. Needs neither sockets nor Spark, so tests drive it in their own process.

    Args:
        directory: the application's private directory on this host.
        number: of this slot among those of the host.
    """

    def __init__(self, directory: Path, number: int = 0) -> None:
        self.slot = uuid.uuid4().hex
        self._number = number
        self._directory = directory
        self._merges = ThreadPoolExecutor(1, thread_name_prefix="millpond-merge")
        self._writers = ThreadPoolExecutor(1, thread_name_prefix="millpond-write")
        self._lock = threading.Lock()
        self._means: Means | None = None
        self._queries: dict[str, RunningQuery] = {}
        self._partitions: dict[tuple[str, int, int], Partition] = {}

    def run(self, run: Run, batches: Iterator[pa.RecordBatch], abandon: Callable[[], None] = lambda: None) -> Answer:
        """Run one batch of one partition.

        Yields:
            Output batches, after all input is in, its state is sealed, and what the commit mode asks for is durable.

        Returns:
            The batch's id and figures.

        Raises:
            MillpondError: with query, operator, partition and version filled in.
        """
        try:
            partition = self._partition(run)
            batch = partition.query.latest_batch() if run.batch is None else run.batch
            attempt = Attempt(batch, run.attempt, abandon)
            metrics = yield from partition.run(
                attempt, batches, sync=run.task.settings.commit_mode == "sync", check_time=run.batch is None
            )
        except MillpondError as error:
            raise error.at(
                query=run.task.query, operator=str(run.task.operator), partition=run.partition, version=run.batch
            ) from None
        return Done(batch, metrics)

    def drain(self, query: str, timeout: float) -> list[tuple[int, int, int]]:
        """Make a query's sealed state durable and let go of it.

        Returns:
            Operator, partition and version of what was held; all of it is durable.

        Raises:
            MillpondError: it could not be made durable in time; nothing is let go of.
        """
        with self._lock:
            running = self._queries.get(query)
            if running is None:
                return []
            versions = self._versions(query)
            running.committer.drain(timeout)
            self._let_go(running)
        return versions

    def held(self, query: str) -> list[tuple[int, int, int]]:
        """Operator, partition and version of the query's partitions."""
        with self._lock:
            return self._versions(query)

    def close(self) -> None:
        """Finish pending commits, each query within its exit time-out, and let go of everything."""
        with self._lock:
            for running in list(self._queries.values()):
                try:
                    running.committer.drain(running.task.settings.exit_timeout)
                except MillpondError:
                    traceback.print_exc(file=sys.stderr)
                self._let_go(running)
        self._merges.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False, cancel_futures=True)

    def _versions(self, query: str) -> list[tuple[int, int, int]]:
        return [
            (operator, number, partition.version)
            for (owner, operator, number), partition in sorted(self._partitions.items())
            if owner == query and partition.version is not None
        ]

    def _partition(self, run: Run) -> Partition:
        task = run.task
        key = (task.query, task.operator, run.partition)
        with self._lock:
            running = self._running(run)
            partition = self._partitions.get(key)
            if partition is None:
                partition = self._partitions[key] = Partition(running, task, run.partition)
            return partition

    def _running(self, run: Run) -> RunningQuery:
        task = run.task
        running = self._queries.get(task.query)
        if running is not None and running.task.generation > task.generation:
            raise FencedError(
                f"Generation {running.task.generation} of the query has taken over from generation {task.generation}.",
                action="Stop this run; only the newest run of a query may write its checkpoint.",
            )
        if running is not None and running.task.generation < task.generation:
            self._let_go(running)
            running = None
        if running is None:
            if self._means is None:
                budget = MemoryBudget(task.settings.memory)
                self._means = Means(
                    self.slot, self._number, self._directory, budget, budget.open(), self._merges, self._writers
                )
            running = self._queries[task.query] = RunningQuery(task, self._means)
        return running

    def _let_go(self, running: RunningQuery) -> None:
        query = running.task.query
        del self._queries[query]
        for key in [key for key in self._partitions if key[0] == query]:
            self._partitions.pop(key).close()
        running.close()
