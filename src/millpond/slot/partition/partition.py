"""One partition of one operator: takes batches in turn, seals them, and answers repeated attempts."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from millpond.checkpoint.formats.manifest import PartitionManifest, seal
from millpond.errors import TransientError
from millpond.layout import HashRange, Words
from millpond.metrics import DURABLE, GREATEST
from millpond.operators.kinds.registry import open_operator
from millpond.operators.processors.calls import Beginning, Calling
from millpond.operators.protocol import Adopting, Combining, Times
from millpond.slot.batch.initial import read_rows
from millpond.slot.batch.offsets import check_time
from millpond.slot.batch.rows import is_combined
from millpond.slot.batch.task import Lookahead, PipeTask
from millpond.slot.partition.checksum import InputChecksum
from millpond.slot.partition.feed import Feed
from millpond.slot.partition.running import RunningQuery
from millpond.slot.partition.tables import Tables, blame
from millpond.slot.partition.turns import Attempt, Turns, stopped
from millpond.slot.prefetch.announcements import Announcements
from millpond.spec.operators import GLOBAL_HASH
from millpond.stores.aligned.table import AlignedTable
from millpond.stores.memory.spool import Spool

if TYPE_CHECKING:
    from millpond.operators.processors.calls import Caller
    from millpond.operators.protocol import Operator
    from millpond.stores.protocol import TableDelta

_SPOOL = 64 << 20
"""Bytes of a repeated attempt's input that are kept in memory."""

Output = Generator[pa.RecordBatch, None, dict[str, float]]


@dataclass
class Applied:
    """The batch that the partition has applied last.

    Attributes:
        batch: its id.
        input: checksum of its rows, markers excluded.
        epoch: of the state that it left.
        metrics: what it did.
    """

    batch: int
    input: InputChecksum
    epoch: int
    metrics: dict[str, float] = field(default_factory=dict)


class Partition:
    """One partition of one operator in a running query. `run` may be called from any thread.

    Args:
        query: the running query.
        task: the operator.
        number: the partition.

    Attributes:
        answered: the last batch of which the output may be read, as what it waits for is durable; None if the state was
            opened since.
    """

    def __init__(self, query: RunningQuery, task: PipeTask, number: int) -> None:
        self.query = query
        self.task = task
        self.number = number
        self._turns = Turns(task.settings.attempt_timeout, self._discard)
        self._memory = task.settings.memory * task.slots // max(task.slots, task.partitions)
        self._hints = Announcements(query.hint_switch(task, number), task.lookaheads, self._memory)
        self._busy = threading.Lock()  # held for each step that reads or replaces the operator
        self._epoch = 0  # changes whenever the state does, so that output of an older state stops
        self._operator: Operator | None = None
        self._tables: Tables | None = None
        self._manifest: PartitionManifest | None = None
        self._applied: Applied | None = None
        self.answered: int | None = None

    @property
    def version(self) -> int | None:
        """The version that the partition holds, sealed or from the store."""
        manifest = self._manifest
        return None if manifest is None else manifest.version

    def open_ahead(self, version: int) -> None:
        """Open the version before the batch that reads it comes; that waits until this is done.

        Raises:
            MillpondError: it cannot be opened. The batch will try again.
        """
        with self._turns.taken(Attempt(version, -1, lambda: None, fed=True)):
            if self._manifest is None:
                self._open(version)

    def hint(self, batch: int, lookahead: Lookahead, hashes: Words, keys: pa.RecordBatch | None = None) -> None:
        """Take note of keys that a batch will ask for; they are looked at now, or as soon as the partition can."""
        self._hints.keep(batch, lookahead, hashes, keys)
        with self._turns.if_free() as free:
            if free and self._manifest is not None:
                self._hints.pass_on(self._operator, self._manifest.version)

    def run(
        self,
        attempt: Attempt,
        batches: Iterator[pa.RecordBatch],
        *,
        sync: bool = False,
        unsure: bool = False,
        caller: Caller | None = None,
    ) -> Output:
        """Run a batch, or answer it again; yields its output once its own state is sealed and the last one durable.

        Args:
            attempt: the attempt; its batch reads the version of the same number.
            batches: input with hash and mark columns; its rows, or with the local exchange their parcels.
            sync: whether to wait for the version that the batch makes, instead of the one that it reads.
            unsure: whether the marker's time has to be that of the batch: its id was not told, or may be an older one.
            caller: calls the user's processor, where the operator is one.

        Returns:
            The batch's figures.
        """
        self.query.committer.release(attempt.batch)
        check = partial(check_time, self.task, attempt.batch) if unsure else None
        feed = Feed(attempt, batches, self.task, check)
        applied = self._apply_first(attempt, feed, caller) or self._apply_again(attempt, feed, caller)
        metrics = dict(applied.metrics)
        metrics["commit_lag_ms"] = self._wait_durable(attempt.batch + sync)
        with self._busy:
            if self._epoch == applied.epoch:
                self.answered = attempt.batch
        metrics["output_rows"] = 0.0
        for batch in () if self.task.adopts else self._output(applied):
            metrics["output_rows"] += batch.num_rows
            yield batch
        return metrics

    def _apply_first(self, attempt: Attempt, feed: Feed, caller: Caller | None) -> Applied | None:
        """Apply the batch, unless it has been applied already."""
        with self._turns.taken(attempt):
            if self._applied is not None and self._applied.batch == attempt.batch:
                return None
            return self._apply(attempt.batch, feed.passes(self._passes), caller)

    def _apply_again(self, attempt: Attempt, feed: Feed, caller: Caller | None) -> Applied:
        """Answer from memory if the input is the same, else apply the batch to the version that it reads.

        The input is read without holding the turn: two readers of one batch may be joined to each other in one task.
        """
        spool = Spool(self.query.spill, min(_SPOOL, self.task.settings.memory // 16))
        try:
            seen = InputChecksum()
            for rows in feed:
                seen.add(rows)
                spool.add(rows)
            with self._turns.taken(attempt):
                applied = self._applied
                if applied is not None and applied.batch == attempt.batch and applied.input == seen:
                    return applied
                self._discard()
                return self._apply(attempt.batch, ((None, rows) for rows in spool.read()), caller)
        finally:
            spool.close()

    def _apply(
        self, batch: int, passes: Iterable[tuple[HashRange | None, pa.RecordBatch]], caller: Caller | None
    ) -> Applied:
        if self._applied is not None and self._applied.batch > batch:
            raise TransientError(f"Batch {batch} was overtaken by batch {self._applied.batch}.")
        if self._manifest is None or self._manifest.version != batch:
            self._discard()
            self._open(batch)
        operator, manifest = self._operator, self._manifest
        assert operator is not None
        assert manifest is not None
        started = time.perf_counter()
        try:
            with self._busy:
                self._epoch += 1
                self._applied = None
                operator.begin(batch, self._times(batch))
                if isinstance(operator, Calling):
                    operator.caller = caller
                if isinstance(operator, Beginning):
                    begins = batch == 0 and self.task.initial
                    operator.initial_rows = read_rows(self.query.files, self.task, self.number) if begins else ()
            self._hints.begin(batch)
            self.query.forget_batches(batch)
            seen = InputChecksum()
            rows_in = combined = 0
            take = operator.process
            if self.task.adopts:
                assert isinstance(operator, Adopting)
                take = operator.adopt
            for range_, rows in passes:
                self.query.means.arrow.force(pa.total_allocated_bytes())
                seen.add(rows)
                if range_ is not None:
                    operator.narrow(range_)
                self._hints.pass_on(operator, batch)
                if self.task.combined and is_combined(rows):
                    assert isinstance(operator, Combining)
                    combined += operator.process_combined(rows)
                else:
                    rows_in += rows.num_rows
                    take(rows)
            if self._turns.closed:
                raise stopped()
            rows_in += combined
            sealing = time.perf_counter()
            deltas = operator.finish()
            figures = self._figures(operator, batch + 1) | {
                "input_rows": float(rows_in),
                "exchanged_rows": float(seen.rows),
                "combined_rows": float(combined),
                "changed_rows": float(sum(delta.rows for delta in deltas.values())),
                "late_rows": float(operator.late_rows),
                "process_ms": (sealing - started) * 1000,
            }
            size = self._seal(operator, manifest, seen, rows_in, deltas, figures)
        except BaseException as error:
            self.query.note_lost_call(operator, self.task.operator, self.number, batch)
            blame(error, self.task.spec, manifest)
            self._discard()  # half a batch is in the tables
            lost = isinstance(error, OSError) and error.errno is None  # its input: nobody listens any more
            if self._turns.closed and isinstance(error, Exception) and not lost:
                raise stopped() from error  # what it works with has been closed
            raise
        figures |= {"seal_ms": (time.perf_counter() - sealing) * 1000, "delta_bytes": float(size)}
        self._hints.learn(figures)
        self._applied = Applied(batch, seen, self._epoch, figures)
        return self._applied

    def _passes(self, rows: int) -> int:
        """In how many passes to work through a batch of so many rows."""
        with self._busy:
            return 1 if self._operator is None else self._operator.passes(rows)

    def _times(self, batch: int) -> Times:
        """The batch's times as they reach the operator; zeros if it does not ask for any."""
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
    ) -> int:
        sealed = seal(
            parent,
            {
                name: (table.manifest(), deltas[name].pieces if name in deltas else [])
                for name, table in operator.tables.items()
            },
            input_checksum=seen.value,
            input_rows=rows,
            rows={name: delta.rows for name, delta in deltas.items()},
            metrics={name: round(figures[name]) for name in DURABLE if name in figures},
            shape=self.query.checkpoint.base.shape,
        )
        sealed = self.query.sealed.write(sealed, self.task.generation)
        for name, table in operator.tables.items():
            if isinstance(table, AlignedTable) and name in deltas:
                (data,) = sealed.pieces[name]
                table.placed(data)
        if self.query.remote is not None:
            self.query.remote.sealed(sealed.manifest)
        self.query.committer.submit(sealed)
        self._manifest = sealed.manifest
        return sealed.bytes

    def _output(self, applied: Applied) -> Iterator[pa.RecordBatch]:
        pieces: Iterator[pa.RecordBatch] | None = None
        while True:
            with self._busy:
                if self._epoch != applied.epoch or self._operator is None:
                    raise TransientError(f"Batch {applied.batch} was overtaken while its rows were read.")
                if pieces is None:
                    pieces = self._operator.output()
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def _wait_durable(self, version: int) -> float:
        """Wait until a version is durable; milliseconds waited."""
        started = time.perf_counter()
        timeout = self.task.settings.commit_timeout
        self.query.committer.wait_durable(self.task.operator, self.number, version, timeout)
        if self.query.remote is not None:
            self.query.remote.durable(self.task.operator, self.number, version)
        return (time.perf_counter() - started) * 1000

    def _open(self, version: int) -> None:
        query = self.query
        query.committer.drain(self.task.settings.commit_timeout)  # the version may be on its way from here
        manifest = query.checkpoint.open_partition(
            self.task.operator, self.number, version, wait=self.task.settings.open_timeout
        )
        query.committer.opened(manifest)
        owns_global = self.task.partition_of(GLOBAL_HASH) == self.number
        tables = Tables(query, self.task, self.number, manifest)
        with self._busy:
            self._epoch += 1
            try:
                self._operator = open_operator(
                    self.task.spec,
                    tables.open,
                    manifest.tables,
                    owns_global=owns_global,
                    memory=self._memory,
                )
                tables.load()
            except BaseException:
                self._operator = None
                tables.discard()
                raise
            self._tables = tables
            self._manifest = manifest

    def _figures(self, operator: Operator, version: int) -> dict[str, float]:
        assert self._tables is not None
        figures = self.query.new_figures(version)
        for table_name, table in operator.tables.items():
            counted = self._tables.counted(table_name)
            for name, value in table.stats().items():
                if name in GREATEST:
                    figures[name] = max(figures.get(name, 0.0), value)
                elif counted or name != "keys":
                    figures[name] = figures.get(name, 0.0) + value
        figures |= operator.figures
        for name, value in self._hints.figures().items() if self.task.lookaheads else ():
            figures[name] = figures.get(name, 0.0) + value
        return figures | {
            "state_rows": figures.get("keys", 0.0),
            "state_bytes": figures.get("bytes", 0.0),
            "memory_bytes": figures.get("hot_bytes", 0.0) + figures.get("buffer_bytes", 0.0),
        }

    def _discard(self) -> None:
        with self._busy:
            self._close_operator()

    def _close_operator(self) -> None:
        self._epoch += 1
        if self._operator is not None:
            self._operator.close()
        if self._tables is not None:
            self._tables.close()
            self._tables = None
        self._operator = self._manifest = self._applied = self.answered = None

    def close(self) -> None:
        """Cut off whoever writes, and let go of the tables as soon as nobody does."""
        self._hints.close()
        self._turns.close()
