"""One partition of one operator: runs batches in turn, seals them, and answers repeated attempts."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from millpond.checkpoint.formats.manifest import PartitionManifest, Sealed, seal, seal_again
from millpond.errors import TransientError
from millpond.layout import HashRange
from millpond.metrics import DURABLE_METRICS, MOVED, OPEN, reducer
from millpond.operators.kinds.registry import open_operator
from millpond.operators.processors.calls import CallsUserCode, HasInitialState
from millpond.operators.protocol import AdoptsSparkState, Combining, Times
from millpond.slot.partition.attempt_lock import Attempt, AttemptLock, query_stopped_error
from millpond.slot.partition.checksum import InputChecksum
from millpond.slot.partition.feed import Feed
from millpond.slot.partition.resources import QueryResources
from millpond.slot.partition.tables import Tables, attach_context
from millpond.slot.prefetch.hints import PrefetchHints
from millpond.slot.process.messages import Hints
from millpond.spec.operators import GLOBAL_HASH
from millpond.stores.aligned.table import AlignedTable
from millpond.stores.memory.spool import Spool
from millpond.tasks.initial_state import read_rows
from millpond.tasks.offset_log import check_time
from millpond.tasks.operator_task import OperatorTask
from millpond.tasks.rows import is_combined

if TYPE_CHECKING:
    from millpond.operators.processors.calls import Caller
    from millpond.operators.protocol import Operator
    from millpond.stores.protocol import TableDelta

_SPOOL_MEMORY = 64 << 20
"""Bytes of a repeated attempt's input that stay in memory; the rest is spilled."""

Output = Generator[pa.RecordBatch, None, dict[str, float]]


@dataclass
class AppliedBatch:
    """The last batch that the partition has applied.

    Attributes:
        batch: its id.
        input: checksum of its rows without markers.
        epoch: epoch of the resulting state.
        metrics: its figures.
        sealed: the resulting state, if it may have to be sealed again (see `Partition._seal_again`).
    """

    batch: int
    input: InputChecksum
    epoch: int
    metrics: dict[str, float] = field(default_factory=dict)
    sealed: Sealed | None = None


class Partition:
    """One partition of one operator in a running query. `run` may be called from any thread.

    Args:
        query: the running query.
        task: the operator.
        number: the partition's number.

    Attributes:
        answered_batch: the last batch whose output may be read, as the versions that it waits for are durable; None
            if the state was opened since.
        asked_batch: the newest batch that was asked for.
    """

    def __init__(self, query: QueryResources, task: OperatorTask, number: int) -> None:
        self.query = query
        self.task = task
        self.number = number
        self._attempt_lock = AttemptLock(task.settings.attempt_timeout, self._discard)
        self._memory = task.settings.memory * task.slots // max(task.slots, task.partitions)
        self._hints = PrefetchHints(query.hint_switch(task, number), task.lookaheads, self._memory)
        self._operator_lock = threading.Lock()  # held during each step that reads or replaces the operator
        self._epoch = 0  # changes with the state, so that readers of an older state's output stop
        self._operator: Operator | None = None
        self._tables: Tables | None = None
        self._manifest: PartitionManifest | None = None
        self._applied: AppliedBatch | None = None
        self.answered_batch: int | None = None
        self.asked_batch = -1
        # Since the last figures: whether the state was opened in mid-run, and how long opening took.
        self._moved, self._open_ms = False, 0.0

    @property
    def version(self) -> int | None:
        """The version that the partition holds: sealed here or opened from the store."""
        manifest = self._manifest
        return None if manifest is None else manifest.version

    def open_ahead(self, version: int) -> None:
        """Open a version before the batch that reads it arrives. The batch waits until this is done.

        The call does nothing if an attempt holds the lock or waits for it, as that attempt opens the version that it
        reads.

        Raises:
            MillpondError: the version cannot be opened. The batch will try again.
        """
        with self._attempt_lock.try_hold(version) as free:
            # A batch that came first has opened the partition already, maybe at a later version.
            if free and self._manifest is None:
                self._open(version)

    def hint(self, hints: Hints, keys: pa.RecordBatch) -> None:
        """Store prefetch hints, and look them up now if the partition is idle, else as soon as it can."""
        hashes = keys.column(0).to_numpy().view(np.uint64)
        self._hints.store(hints.batch, hints.lookahead, hashes, keys if keys.num_columns > 1 else None)
        with self._attempt_lock.try_hold() as free:
            if free and self._manifest is not None:
                # A reader of the last batch's output may grow the index that the look-up reads.
                with self._operator_lock:
                    self._hints.prefetch(self._operator, self._manifest.version)

    def run(
        self,
        attempt: Attempt,
        batches: Iterator[pa.RecordBatch],
        *,
        sync: bool = False,
        verify_batch: bool = False,
        caller: Caller | None = None,
    ) -> Output:
        """Run a batch or answer it again; yield its output once it is sealed and the previous version is durable.

        Args:
            attempt: the attempt; its batch reads the version of the same number.
            batches: input with hash and mark columns; either rows or, with the local exchange, block references.
            sync: whether to wait until the version that the batch creates is durable, instead of the one that it reads.
            verify_batch: whether to check the marker's time against the batch, as its id was not given or may be
                outdated.
            caller: calls the user's processor, where the operator is one.

        Returns:
            The batch's figures.
        """
        # This batch waits for the version that it reads: its commit is no longer held back for grouping.
        self.query.committer.release(attempt.batch)
        check = partial(check_time, self.task, attempt.batch) if verify_batch else None
        feed = Feed(attempt, batches, self.task, check)
        applied = self._apply_first(attempt, feed, caller, sync) or self._apply_repeated(attempt, feed, caller, sync)
        metrics = dict(applied.metrics)
        # Waiting only for the version that was read overlaps this commit with the next batch. In sync mode the input
        # cannot be repeated.
        metrics["commit_wait_ms"] = self._wait_durable(attempt.batch + sync)
        with self._operator_lock:
            # If the state changed during the wait, this output can no longer be read.
            if self._epoch == applied.epoch:
                self.answered_batch = attempt.batch
        metrics["output_rows"] = 0.0
        # An adoption of Spark's state has no output.
        for batch in () if self.task.adopts else self._output(applied):
            metrics["output_rows"] += batch.num_rows
            yield batch
        return metrics

    def _apply_first(self, attempt: Attempt, feed: Feed, caller: Caller | None, sync: bool) -> AppliedBatch | None:
        """Apply the batch unless it has been applied already; return None if it has."""
        with self._attempt_lock.hold(attempt):
            if self._applied is not None and self._applied.batch == attempt.batch:
                return None
            return self._apply(attempt, feed.passes(self._passes), caller, sync)

    def _apply_repeated(self, attempt: Attempt, feed: Feed, caller: Caller | None, sync: bool) -> AppliedBatch:
        """Answer from memory if the input is unchanged, else apply the batch again to the version that it reads.

        The input is read without holding the lock: if one task joins two readers of the same batch, it would wait for
        itself.
        """
        spool = Spool(self.query.spill, min(_SPOOL_MEMORY, self.task.settings.memory // 16))
        try:
            seen = InputChecksum()
            for rows in feed:
                seen.add(rows)
                spool.add(rows)
            with self._attempt_lock.hold(attempt):
                applied = self._applied
                if applied is not None and applied.batch == attempt.batch and applied.input == seen:
                    self._seal_again(applied, attempt.number + 1)
                    return applied
                self._discard()
                return self._apply(attempt, ((None, rows) for rows in spool.read()), caller, sync)
        finally:
            spool.clear()

    def _apply(
        self,
        attempt: Attempt,
        passes: Iterable[tuple[HashRange | None, pa.RecordBatch]],
        caller: Caller | None,
        sync: bool,
    ) -> AppliedBatch:
        batch = attempt.batch
        if self._applied is not None and self._applied.batch > batch:
            raise TransientError(f"Batch {batch} was overtaken by batch {self._applied.batch}.")
        # After a seal the tables hold version `batch + 1`: a repeated attempt with other input starts from the version
        # again.
        if self._manifest is None or self._manifest.version != batch or (sync and self._is_replaced(self._manifest)):
            self._discard()
            self._open(batch)
        operator, manifest = self._operator, self._manifest
        assert operator is not None
        assert manifest is not None
        started = time.perf_counter()
        try:
            with self._operator_lock:
                self._epoch += 1
                # From here to the seal, no repeated attempt may be answered from memory.
                self._applied = None
                operator.begin(batch, self._times(batch))
                if isinstance(operator, CallsUserCode):
                    operator.caller = caller
                if isinstance(operator, HasInitialState):
                    begins = batch == 0 and self.task.initial
                    operator.initial_rows = read_rows(self.query.files, self.task, self.number) if begins else ()
            self._hints.begin(batch)
            # The previous batch is complete, so no attempt reads its exchanged rows any more.
            self.query.forget_batches(batch)
            seen = InputChecksum()
            rows_in = combined = 0
            take = operator.process
            if self.task.adopts:
                assert isinstance(operator, AdoptsSparkState)
                take = operator.adopt
            for range_, rows in passes:
                # Charge the received batches to the slot's memory, so that tables evict rows in time.
                self.query.resources.arrow.force(pa.total_allocated_bytes())
                seen.add(rows)
                if range_ is not None:
                    operator.restrict(range_)
                self._hints.prefetch(operator, batch)
                if self.task.combined and is_combined(rows):
                    assert isinstance(operator, Combining)
                    combined += operator.process_combined(rows)
                else:
                    rows_in += rows.num_rows
                    take(rows)
            # The query has stopped: its committer takes no more versions.
            if self._attempt_lock.closed:
                raise query_stopped_error()
            rows_in += combined
            processed = time.perf_counter()
            deltas = operator.finish()
            figures = self._figures(operator, batch + 1) | {
                "input_rows": float(rows_in),
                "exchanged_rows": float(seen.rows),
                "combined_rows": float(combined),
                "changed_rows": float(sum(delta.rows for delta in deltas.values())),
                "late_rows": float(operator.late_rows),
                "process_ms": (processed - started) * 1000,
            }
            sealed = self._seal(operator, manifest, seen, rows_in, deltas, figures, attempt.number + 1 if sync else 0)
        except BaseException as error:
            self.query.record_lost_call(operator, self.task.operator, self.number, batch)
            attach_context(error, self.task.spec, manifest)
            try:
                self._discard()  # the tables contain half a batch
            except Exception:  # the batch's own error says whether the batch is repeated
                traceback.print_exc(file=sys.stderr)
            lost = isinstance(error, ConnectionError)  # the connection of its input is gone
            if self._attempt_lock.closed and isinstance(error, Exception) and not lost:
                raise query_stopped_error() from error  # it failed because its tables and files were closed
            raise
        self._hints.adapt(figures)
        # The mapped file takes disk space, so it is kept only where another slot may run an attempt.
        kept = sealed if sync and self.task.may_move else None
        self._applied = AppliedBatch(batch, seen, self._epoch, figures, kept)
        return self._applied

    def _is_replaced(self, manifest: PartitionManifest) -> bool:
        """Return whether a later attempt, on another host, has made the version that this partition holds.

        Spark has used the output of that attempt, as it runs another one only when it has given up the one before.
        """
        if not self.task.may_move:
            return False
        latest = self.query.checkpoint.open_partition(self.task.operator, self.number, manifest.version)
        return latest.id != manifest.id

    def _passes(self, rows: int) -> int:
        """Return the number of passes for a batch of `rows` rows."""
        with self._operator_lock:
            return 1 if self._operator is None else self._operator.passes(rows)

    def _times(self, batch: int) -> Times:
        """Return the batch's times minus the operator's lag; zeros if it needs no times."""
        lag = self.task.spec.lag
        if lag is None:
            return Times()
        before, now = self.query.planned(batch - 1), self.query.planned(batch)
        return Times(max(0, before.watermark - lag), max(0, now.watermark - lag), now.time)

    def _seal(
        self,
        operator: Operator,
        parent: PartitionManifest,
        seen: InputChecksum,
        rows: int,
        deltas: Mapping[str, TableDelta],
        figures: Mapping[str, float],
        attempt: int,
    ) -> Sealed:
        sealed = seal(
            parent,
            {
                name: (table.manifest(), deltas[name].pieces if name in deltas else [])
                for name, table in operator.tables.items()
            },
            input_checksum=seen.value,
            input_rows=rows,
            rows={name: delta.rows for name, delta in deltas.items()},
            metrics={name: round(figures[name]) for name in DURABLE_METRICS if name in figures},
            schema_number=self.query.checkpoint.base.schema_number,
            host=self.query.resources.host,
            attempt=attempt,
        )
        # Written before it is submitted: the file survives this process, and the next slot adopts and commits it.
        sealed = self.query.sealed.write(sealed, self.task.generation)
        for name, table in operator.tables.items():
            # Aligned tables read their delta from the sealed file from now on, which frees its memory.
            if isinstance(table, AlignedTable) and name in deltas:
                (data,) = sealed.pieces[name]
                table.adopt_sealed(data)
        self._submit(sealed)
        return sealed

    def _seal_again(self, applied: AppliedBatch, attempt: int) -> None:
        """Seal the applied batch again as that of a later attempt, if attempts in other slots may differ.

        Of the durable attempts at a batch, the newest counts. One of another slot may exist or may still be committed,
        so a look at the store would not suffice.
        """
        earlier = applied.sealed
        if earlier is None or earlier.manifest.attempt >= attempt:
            return
        # The query has stopped: its committer takes no more versions.
        if self._attempt_lock.closed:
            raise query_stopped_error()
        sealed = self.query.sealed.write(seal_again(earlier, attempt), self.task.generation)
        applied.sealed = replace(sealed, same_as=earlier.manifest.id)
        self._submit(applied.sealed)

    def _submit(self, sealed: Sealed) -> None:
        """Submit a sealed version to the committer, and go on from it."""
        if self.query.remote is not None:
            self.query.remote.record_sealed(sealed.manifest)
        self.query.committer.submit(sealed)
        self._manifest = sealed.manifest

    def _output(self, applied: AppliedBatch) -> Iterator[pa.RecordBatch]:
        pieces: Iterator[pa.RecordBatch] | None = None
        while True:
            with self._operator_lock:
                # The lock is held per piece, so that a slow reader does not block the next batch. The epoch shows a
                # changed state.
                if self._epoch != applied.epoch or self._operator is None:
                    raise TransientError(f"Batch {applied.batch} was overtaken while its rows were read.")
                if pieces is None:
                    pieces = self._operator.output()
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def _wait_durable(self, version: int) -> float:
        """Wait until a version is durable; return the time waited in milliseconds."""
        started = time.perf_counter()
        timeout = self.task.settings.commit_timeout
        self.query.committer.wait_durable(self.task.operator, self.number, version, timeout)
        if self.query.remote is not None:
            self.query.remote.mark_durable(self.task.operator, self.number, version)
        return (time.perf_counter() - started) * 1000

    def _open(self, version: int) -> None:
        query, started = self.query, time.perf_counter()
        query.committer.drain(self.task.settings.commit_timeout)  # this slot may still be committing the version
        manifest = query.checkpoint.open_partition(
            self.task.operator, self.number, version, wait=self.task.settings.open_timeout
        )
        query.committer.mark_durable(manifest)
        owns_global = self.task.partition_of(GLOBAL_HASH) == self.number
        tables = Tables(query, self.task, self.number, manifest)
        with self._operator_lock:
            self._epoch += 1
            try:
                self._operator = open_operator(
                    self.task.spec,
                    tables.open,
                    manifest.tables,
                    owns_global=owns_global,
                    memory=self._memory,
                    is_closed=lambda: self._attempt_lock.closed,
                )
                tables.load()
            except BaseException:
                self._operator = None
                tables.discard()
                raise
            self._tables = tables
            self._manifest = manifest
            self._moved = version > 0 and query.checkpoint.base.find_version(version) is None
            self._open_ms += (time.perf_counter() - started) * 1000

    def _figures(self, operator: Operator, version: int) -> dict[str, float]:
        assert self._tables is not None
        figures = self.query.new_figures(version)
        for table_name, table in operator.tables.items():
            counted = self._tables.counted(table_name)
            for name, value in table.stats().items():
                if reducer(name) is max:
                    figures[name] = max(figures.get(name, 0.0), value)
                elif counted or name != "keys":
                    figures[name] = figures.get(name, 0.0) + value
        figures |= operator.extra_metrics
        for name, value in self._hints.figures().items() if self.task.lookaheads else ():
            figures[name] = figures.get(name, 0.0) + value
        moved, self._moved = self._moved, False
        open_ms, self._open_ms = self._open_ms, 0.0
        return figures | {
            MOVED: float(moved),
            OPEN: open_ms,
            "restarts": float(self.task.restarts),
            "state_rows": figures.get("keys", 0.0),
            "state_bytes": figures.get("bytes", 0.0),
            "memory_bytes": figures.get("hot_bytes", 0.0) + figures.get("buffer_bytes", 0.0),
        }

    def _discard(self) -> None:
        with self._operator_lock:
            # Readers of the old state's output see the new epoch and stop.
            self._epoch += 1
            operator, tables = self._operator, self._tables
            # The fields are cleared first: if closing fails, the next attempt must open the version again.
            self._operator = self._tables = self._manifest = self._applied = self.answered_batch = None
            try:
                if operator is not None:
                    operator.close()
            finally:
                if tables is not None:
                    tables.close()

    def close(self) -> None:
        """Cut off the attempt that writes, and release the tables as soon as the lock is free."""
        self._hints.close()
        self._attempt_lock.close()
