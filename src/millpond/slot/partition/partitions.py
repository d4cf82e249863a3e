"""All partitions that a slot serves, of all queries of the application."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from millpond.checkpoint.generation import fenced_error
from millpond.errors import FencedError, MillpondError, TransientError
from millpond.files.disk import reason, remedy
from millpond.operators.processors.calls import Caller
from millpond.slot.partition.attempt_lock import Attempt
from millpond.slot.partition.partition import Partition
from millpond.slot.partition.resources import QueryResources, SlotResources
from millpond.slot.process.messages import Done, Hints, QueryStatus, RunBatch
from millpond.slot.process.server import Answer
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.memory.process_memory import set_trim_threshold
from millpond.tasks.offset_log import latest_batch
from millpond.tasks.operator_task import OperatorTask

_TRIM_SHARE = 256
"""The allocator returns freed blocks larger than 1/256 of the budget to the system at once. That is slower, but
rare."""

_IDLE_SECONDS = 60.0
"""Seconds without a request after which a slot asks the store whether a query goes on without it; a request a minute
while the query is idle."""


@dataclass
class _Query:
    """A query in the slot: its current run, if any, and that run's partitions; `lock` guards changes.

    All runs up to generation `ended` have ended: a late task of theirs must not reopen anything. `asked_at` is when a
    partition was last asked for, by the monotonic clock.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    running: QueryResources | None = None
    ended: int = -1
    partitions: dict[tuple[int, int], Partition] = field(default_factory=dict)
    asked_at: float = 0.0

    def versions(self) -> list[tuple[int, int, int]]:
        """Return operator, partition and version of all open partitions."""
        held = sorted(self.partitions.copy().items())
        return [(*place, partition.version) for place, partition in held if partition.version is not None]

    def drain(self, timeout: float) -> None:
        """Make all sealed versions durable."""
        if self.running is not None:
            versions = self.versions()
            self.running.committer.drain(timeout)
            self.running.mark_durable(versions)

    def drop_moved(self, batch: int) -> None:
        """Close partitions that Spark no longer runs here, once their last version is durable.

        Every partition sees every batch. So one that was not asked for the batch before has moved to another host. Its
        memory is needed; its new slot reads the state from the store.
        """
        assert self.running is not None
        for place, partition in list(self.partitions.items()):
            version = partition.version
            if version is None or partition.asked_batch >= batch - 1:
                continue
            try:
                durable = self.running.committer.is_durable(*place, version)
            except MillpondError:  # it never will be
                durable = True
            if durable:
                self.partitions.pop(place).close()

    def release_if_moved(self) -> None:
        """Release an idle query all of whose partitions run on other hosts: no batch here would drop them.

        Raises:
            MillpondError: the store does not answer.
        """
        running, asked_at, versions = self.running, self.asked_at, self.versions()
        if running is None or not running.task.located or not versions:
            return
        if time.monotonic() - asked_at < _IDLE_SECONDS:
            return
        newest = max(version for _, _, version in versions)
        # The next version may have been committed by partitions that are ahead of ours in one batch.
        if not running.checkpoint.has_commits_from(newest + 2):
            return
        with self.lock:
            if self.running is running and self.asked_at == asked_at:
                self.drop_moved(newest + 2)
                if not self.partitions:
                    self.release()

    def release(self) -> None:
        """Close everything, even if closing some of it fails; running attempts fail."""
        partitions, self.partitions = self.partitions, {}
        running, self.running = self.running, None
        with ExitStack() as closing:
            if running is not None:
                closing.callback(running.close)
            for partition in partitions.values():
                closing.callback(partition.close)
        if running is not None:
            gc.collect()  # reference cycles keep files open and mapped
            running.resources.arrow.force(pa.total_allocated_bytes())


class PartitionServer:
    """Runs partitions. It needs neither sockets nor Spark, so tests drive it in their own process.

    Args:
        directory: the application's private directory on this host.
        number: number of this slot on the host.
        host: the host as Spark names it; empty under a local master.
    """

    def __init__(self, directory: Path, number: int = 0, host: str = "") -> None:
        self.slot = uuid.uuid4().hex
        self._number = number
        self._host = host
        self._directory = directory
        self._merges = ThreadPoolExecutor(1, thread_name_prefix="millpond-merge")
        self._writers = ThreadPoolExecutor(1, thread_name_prefix="millpond-write")
        self._namers = ThreadPoolExecutor(1, thread_name_prefix="millpond-names")
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="millpond-read-ahead")
        self._lock = threading.Lock()
        self._resources: SlotResources | None = None
        self._queries: dict[str, _Query] = {}
        self._closed = threading.Event()

    def run(
        self,
        run: RunBatch,
        batches: Iterator[pa.RecordBatch],
        cancel: Callable[[], None] = lambda: None,
        caller: Caller | None = None,
    ) -> Answer:
        """Run one batch of one partition (see `Work`).

        Yields:
            Output batches, once all input has arrived, its state is sealed, and the version that the commit mode
            requires is durable.

        Returns:
            The batch's id and figures.

        Raises:
            MillpondError: with query, operator, partition and version filled in.
        """
        _add_module_paths(run.paths)
        try:
            batch = latest_batch(run.task) if run.batch is None else run.batch
            partition = self._partition(run.task, run.partition, batch)
            attempt = Attempt(batch, run.attempt, cancel)
            metrics = yield from partition.run(
                attempt,
                batches,
                sync=run.task.settings.commit_mode == "sync",
                verify_batch=run.verify_batch or run.batch is None,
                caller=caller,
            )
        except MillpondError as error:
            raise error.at(
                query=run.task.query, operator=str(run.task.operator), partition=run.partition, version=run.batch
            ) from None
        except ConnectionError:  # `PeerGone`: of the attempt's input; slots wait without limit, so never `PeerSilent`
            raise
        except OSError as error:
            raise TransientError(
                f"The host's disk cannot be used: {reason(error)}.",
                action=remedy(error, str(self._directory), "point TMPDIR to another local disk and start again"),
                query=run.task.query,
                operator=str(run.task.operator),
                partition=run.partition,
                version=run.batch,
                file=error.filename or str(self._directory),
            ) from error
        return Done(batch, metrics)

    def open_ahead(self, tasks: Sequence[OperatorTask], partitions: Sequence[int], version: int) -> None:
        """Open partitions of a query's operators at a version, one after the other; best effort.

        A partition that cannot be opened is opened again by its first batch, which reports the error.
        """
        with suppress(MillpondError, OSError):
            # Look all partitions up first: one that is released meanwhile must not be opened again.
            for partition in [self._partition(task, number) for number in partitions for task in tasks]:
                partition.open_ahead(version)

    def hint(self, hints: Hints, keys: pa.RecordBatch) -> None:
        """Pass prefetch hints to a partition if it is open (see `Work`)."""
        query = self._query(hints.task.key)
        running = query.running
        if running is not None and running.task.generation == hints.task.generation:
            held = query.partitions.get((hints.task.operator, hints.partition))
            if held is not None:
                held.hint(hints, keys)

    def drain(self, query: str, timeout: float, generation: int | None = None) -> list[tuple[int, int, int]]:
        """Make a query's sealed state durable and release the query.

        Args:
            query: `OperatorTask.key`.
            timeout: limit in seconds.
            generation: generation of the run that has ended; later runs are kept. None releases any run.

        Returns:
            Operator, partition and version of each open partition, all durable.

        Raises:
            MillpondError: the state did not become durable in time; nothing is released.
        """
        held = self._query(query)
        with held.lock:
            if generation is not None:
                # From now on, late tasks of the ended run are refused.
                held.ended = max(held.ended, generation)
                if held.running is not None and held.running.task.generation > generation:
                    return []
            versions = held.versions()
            try:
                held.drain(timeout)
            except FencedError:
                if generation is not None:
                    held.release()  # a newer run has taken over: these commits can never become durable
                raise
            held.release()
        return versions

    def status(self, query: str) -> QueryStatus:
        """Return the status of a query in this slot (see `Work`)."""
        held = self._query(query)
        answered = [
            (*place, batch)
            for place, partition in sorted(held.partitions.copy().items())
            if (batch := partition.answered_batch) is not None  # read once: another thread may discard the state
        ]
        running = held.running
        if running is None:
            return QueryStatus(answered)
        failure = running.committer.commit_failure()
        return QueryStatus(
            answered,
            commit_failures=[failure] if failure else [],
            failed_commits=running.committer.stats.retries,
            lost_calls=[running.lost_call] if running.lost_call else [],
        )

    def close(self) -> None:
        """Finish pending commits, each query within its exit timeout, and release everything."""
        self._closed.set()
        with self._lock:
            queries = list(self._queries.values())
        for query in queries:
            with query.lock:
                if query.running is None:
                    continue
                try:
                    try:
                        query.drain(query.running.task.settings.exit_timeout)
                    finally:
                        query.release()
                except Exception:  # go on: the other queries' commits are still to be finished
                    traceback.print_exc(file=sys.stderr)
        self._merges.shutdown(wait=False, cancel_futures=True)
        self._writers.shutdown(wait=False, cancel_futures=True)
        self._namers.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _query(self, query: str) -> _Query:
        with self._lock:
            return self._queries.setdefault(query, _Query())

    def _partition(self, task: OperatorTask, number: int, batch: int = -1) -> Partition:
        place = (task.operator, number)
        query = self._query(task.key)
        with query.lock:
            running = query.running
            if running is not None and running.task.generation > task.generation:
                raise fenced_error(running.task.generation, task.generation)
            if task.generation <= query.ended:
                raise FencedError(
                    f"The run of generation {task.generation} of the query has ended.",
                    action="Nothing is to be done: this is a task that its query did not wait for.",
                )
            # A newer run has started: the previous one may not commit any more (fencing), so its partitions are closed.
            if running is not None and running.task.generation < task.generation:
                query.release()
                running = None
            if running is None:
                running = query.running = QueryResources(task, self._slot_resources(task))
            if place not in query.partitions:
                query.partitions[place] = Partition(running, task, number)
            partition = query.partitions[place]
            partition.asked_batch = max(partition.asked_batch, batch)
            query.asked_at = time.monotonic()
            if task.located:
                query.drop_moved(batch)
            return partition

    def _watch_moves(self) -> None:
        while not self._closed.wait(_IDLE_SECONDS):
            with self._lock:
                queries = list(self._queries.values())
            for query in queries:
                with suppress(MillpondError, OSError):  # asked again soon
                    query.release_if_moved()

    def _slot_resources(self, task: OperatorTask) -> SlotResources:
        with self._lock:
            if self._resources is None:
                budget = MemoryBudget(task.settings.memory)
                set_trim_threshold(budget.total // _TRIM_SHARE)
                self._resources = SlotResources(
                    self.slot,
                    self._number,
                    self._host,
                    self._directory,
                    budget,
                    budget.open(),
                    self._merges,
                    self._writers,
                    self._namers,
                    self._readers,
                )
                threading.Thread(target=self._watch_moves, name="millpond-moves", daemon=True).start()
            return self._resources


def _add_module_paths(paths: Sequence[str]) -> None:
    """Add Spark's module paths to `sys.path`; modules may have been added since the slot started."""
    new = [path for path in paths if path not in sys.path]
    if new:
        sys.path += new
        importlib.invalidate_caches()
