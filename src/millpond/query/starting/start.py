"""The start of a query: the steps between the user's `start()` and Spark's.

`Start.run` has the steps: end an earlier run and wait for its commits; claim the next generation; find the durable
version to build on; make Spark run batches again whose state is not durable; start into the real sink; attach the
threads that accompany the query.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.generation import Restart, check_overtaken, claim, deciding_claim
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.state_schema import QUERY_FILE, overwrite_schema
from millpond.conf import Settings
from millpond.errors import (
    MillpondError,
    StateIncompatibleError,
    TransientError,
)
from millpond.files.backends.retry import SHORT_RETRY
from millpond.files.locations.opening import join_url, open_filesystem
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.session import check_sink, is_on, is_running, qualified, stop_active_run
from millpond.plan.decision.decision import Decision
from millpond.plan.exchange.combining import Combination, Combinations
from millpond.plan.exchange.workers import on_one_host, preload_workers, runs_driver_python
from millpond.plan.replay.fingerprint import fingerprint
from millpond.query.checkpoints.fork import check_fork
from millpond.query.checkpoints.garbage import collect_garbage
from millpond.query.checkpoints.ownership import Ownership, state_of_last_run
from millpond.query.logs.query_logs import QueryLogs, RollBack
from millpond.query.lookahead.runner import lookaheads, start_source_lookahead
from millpond.query.running.commits import watch_commits
from millpond.query.running.runs import end_slots_with_application, release, watch_run
from millpond.query.running.session_settings import unchanged_settings
from millpond.query.schema.matching import StartSchema, check_schema, state_schema_of, write_evolved_schema
from millpond.query.starting.checks import check_speculation
from millpond.query.starting.initial_state import remove_initial_when_committed, remove_left_initial, write_initial
from millpond.query.starting.operator_metadata import update_operator_metadata
from millpond.query.starting.recovery_point import concurrent_run_error, recovery_version, write_base_and_find_replays
from millpond.query.starting.tasks import first_partitions, operator_task
from millpond.slot.process.client import drain, open_partitions, start_slots
from millpond.tasks.operator_task import OperatorTask

log = logging.getLogger("millpond")

VERIFY_METADATA = "spark.sql.streaming.checkpoint.verifyMetadataExists.enabled"
"""Setting with which Spark (since 4.2) refuses logs without the query's id; Millpond applies it to all versions."""

Rewrite = Callable[[list[OperatorTask], int | None, Mapping[int, Combination]], DataFrame]
"""Makes the rewritten query from tasks by operator index, the number of Spark's state stores, and combinations."""


@dataclass(frozen=True)
class Start:
    """One start of one query.

    Attributes:
        spark: the user's session.
        decision: which operators run on Millpond.
        settings: the settings of this query.
        checkpoint: Spark's checkpoint location, in any form that Spark accepts.
        sync_reason: why each batch has to wait for its commit; None if commits may lag.
        sink: the format of the sink, or `foreach`/`foreachBatch`; empty for a table.
        rewrite: makes the rewritten query from tasks, the number of Spark's state stores if its offset log has one, and
            the combinations of rows before the exchanges.
        combinations: the possible combinations.
        session_settings: session settings with which the rewritten query is planned and started.
        runs_planned: whether the sink runs this batch, planned and not committed, when the query starts; None if it is
            not known.
        located: whether the rewritten query has markers with preferred hosts.
    """

    spark: SparkSession
    decision: Decision
    settings: Settings
    checkpoint: str
    sync_reason: str | None
    sink: str
    rewrite: Rewrite
    combinations: Combinations
    session_settings: dict[str, str]
    runs_planned: Callable[[int], bool | None]
    located: bool = False

    def run(
        self, launch: Callable[[DataFrame], StreamingQuery], restart: Restart | None = None, replaced: int = 0
    ) -> StreamingQuery:
        """Recover, then start the rewritten query with `launch`.

        Args:
            launch: starts Spark's query.
            restart: why the application starts the query again; None for a start by the user.
            replaced: generation of the run that a restart replaces.

        Raises:
            FencedError: the user, or another application, has started the query since the run that a restart replaces.
            StateIncompatibleError: the checkpoint belongs to another query, or to Spark's own state store.
            StateDamagedError: state that Spark's offset log and commit log require is missing.
        """
        with ExitStack() as undo:
            startup = _Startup(self, undo, restart, replaced)
            startup.end_earlier_run()
            startup.claim()
            startup.recover()
            startup.replay()
            query = startup.launch(launch)
            undo.pop_all()  # the query runs: an error from here on must not release its slots
            startup.attach(query)
            return query


class _Startup:
    """State of one start: each step of `Start.run` sets attributes for the next ones.

    Args:
        start: the start.
        undo: callbacks that run if a step fails.
        restart: why the application starts the query again.
        replaced: generation of the run that a restart replaces.
    """

    def __init__(self, start: Start, undo: ExitStack, restart: Restart | None, replaced: int) -> None:
        self.start, self.undo, self.restart, self.replaced = start, undo, restart, replaced
        self.spark, self.decision, self.settings = start.spark, start.decision, start.settings
        self.context = self.spark.sparkContext
        self.catalyst = Catalyst(self.spark)
        self.checkpoint = qualified(self.spark, start.checkpoint)
        self.checkpoint_files = open_filesystem(self.checkpoint)
        # All refusals come before `identify`, which writes the query's id into the checkpoint.
        check_fork(self.checkpoint, self.checkpoint_files)
        self.query_logs = QueryLogs(self.checkpoint_files)
        if is_on(self.spark, VERIFY_METADATA, True):
            self.query_logs.check_id()
        self.query_logs.check_offsets()
        self.query_id = self.query_logs.identify()
        self.location = _state_location(self.settings, self.checkpoint, self.query_id)
        self.files = open_state(self.location)
        self.owner: Ownership | None = None
        if self.location != self.checkpoint:
            self.owner = Ownership(self.checkpoint, self.checkpoint_files, self.location, self.files)
            self.owner.check()
        self.schema = state_schema_of(self.decision, self.catalyst)
        self.specs = self.decision.specs
        self.local = on_one_host(self.context)

    def end_earlier_run(self) -> None:
        """Stop a run of the query in this application, wait for its commits, and pin the state schema."""
        if is_running(self.spark, self.query_id) and self.query_logs.last_committed >= 0:
            # Check first: a query that is refused must not stop the active run.
            self._check_schema()
            check_sink(self.spark, self.start.sink)
        self.task = self._first_task()
        self._check_overtaken(self.replaced)
        stop_active_run(self.spark, self.query_id)
        try:
            # Commits that the run before has begun become durable here, so that fewer batches have to run again.
            drain(self.task)
        except MillpondError as error:
            log.warning("commits of an earlier run did not finish and will be repeated: %s", error)
        preload_workers(self.context)
        if self.local:
            end_slots_with_application(self.context, self.task)
        if runs_driver_python(self.context):
            start_slots(self.task)
        # Only now: a run of this application that still went on might be writing these files.
        self.query_logs.delete_unfinished_entries()
        # After the drain, since the earlier run may have committed a batch since the first check.
        self.schema_at_start = self._check_schema()

    def claim(self) -> None:
        """Claim the next generation: no earlier run of the query can commit from here on."""
        self._claim(from_scratch=self.schema_at_start.from_scratch)
        # After replays the start claims once more. Garbage collection asks when the run before this start began.
        self.first_claim = self.task.generation
        self.roll_back = RollBack(self.checkpoint_files, self.query_logs, self.files, self.task.generation)
        # Only after the claim: starts of older generations are fenced, and restore nothing any more.
        self.roll_back.undo_interrupted()
        # Compared after the replay: entries that appear meanwhile are those of an older run that still goes on.
        self.logged = self._logged()
        if self.schema_at_start.from_scratch and self.logged[0] >= 0:
            raise TransientError(
                "An earlier run of the query was still going on, and has committed its first batch meanwhile.",
                action="See that it has ended (only one program may run a query), and start the query again.",
                file=self.checkpoint,
            )

    def recover(self) -> None:
        """Find the durable version that the generation builds on, and the batches that Spark has to run again."""
        start, from_scratch = self.start, self.schema_at_start.from_scratch
        self.plan_digest = fingerprint(self.catalyst, self.decision)
        version = None
        schema_at_start = self.schema_at_start
        if not from_scratch:
            # The schema is chosen for this version; writing the base fails if it is another one by then.
            version = recovery_version(self.recovery, self.query_logs)
            changed = self.settings.on_changed_state
            schema_at_start = write_evolved_schema(
                self.files, self.recovery, version, schema_at_start, self.specs, changed
            )
        self.schema_number = schema_at_start.number or 0
        self.specs = schema_at_start.specs(self.specs)
        self.replays = write_base_and_find_replays(
            self.recovery,
            self.query_logs,
            self.plan_digest,
            even_if_changed=self.settings.on_changed_replay == "run",
            evolves=self.settings.on_changed_state == "evolve",
            runs_planned=start.runs_planned,
            schema_number=self.schema_number,
            retain=self.settings.state_retain,
            version=version,
            titles=[operator.name for operator in self.schema.operators],
        )
        if from_scratch:
            # After the base: if the start fails before this, neither query sees state of the other.
            overwrite_schema(self.files, schema_at_start.query)
        if self.logged[1] >= 0:
            update_operator_metadata(self.checkpoint_files, self.decision.operators)

    def replay(self) -> None:
        """Make Spark run batches again whose state is not durable, without the sink."""
        first = self.replays[0] if self.replays else self.query_logs.next_batch
        # Only the query's first batch reads the initial state.
        if first == 0:
            self.task = write_initial(self.catalyst, self.decision, self.task, self.files, self.start.session_settings)
        else:
            remove_left_initial(self.files, self.task.generation)
        self._open_ahead(first)
        for batch in self.replays:
            log.info("state lags behind Spark's commit log: batch %d runs again, without the sink", batch)
            with self.roll_back.replaying(batch):
                self._replay(batch)
        if self.replays and self.logged != self._logged():
            raise concurrent_run_error(self.checkpoint)

    def launch(self, launch: Callable[[DataFrame], StreamingQuery]) -> StreamingQuery:
        """Start the rewritten query into the real sink."""
        if self.start.sync_reason is not None:
            if self.settings.commit_mode is None:
                log.warning("every batch waits for its commit (commit.mode=sync): %s", self.start.sync_reason)
            if self.replays:
                # The run may see other rows in a repeated batch than the replay: it needs its own generation.
                self._claim()
                write_base_and_find_replays(
                    self.recovery,
                    self.query_logs,
                    self.plan_digest,
                    schema_number=self.schema_number,
                    retain=self.settings.state_retain,
                )
                self._open_ahead(self.query_logs.next_batch)
        self.tasks = self._tasks(self.task)
        frame = self._rewritten(self.tasks)
        self._check_overtaken(self.task.generation)  # Spark would stop the newer run
        return launch(frame)

    def attach(self, query: StreamingQuery) -> None:
        """Start the threads that accompany the query: hints, commit checks, garbage collection."""
        if self.local:
            watch_run(query, self.task)
        start_source_lookahead(
            query, self.spark, self.decision, self.tasks, self.checkpoint_files, self.start.session_settings
        )
        watch_commits(query, self.task)
        remove_initial_when_committed(query, self.task, self.files, self.query_logs)
        retained = max(self.settings.state_retain, self._retained_batches())
        collect_garbage(query, self.files, self.first_claim, self.task.generation, self.query_logs, retained)

    def _check_schema(self) -> StartSchema:
        return check_schema(
            self.files,
            self.query_logs,
            self.checkpoint_files,
            self.schema,
            self.specs,
            changed=self.settings.on_changed_state,
            on_spark=len(self.decision.on_spark),
        )

    def _check_overtaken(self, since: int) -> None:
        """Check that a restart has not been overtaken since a generation."""
        if self.restart is not None:
            check_overtaken(self.files, since, self.restart, self.query_id)

    def _claim(self, *, from_scratch: bool = False) -> None:
        self._check_overtaken(self.replaced)
        generation = claim(
            self.files,
            run=self.task.run,
            partitions=self.task.partitions,
            minimum=time.time_ns() // 1_000_000,  # the time also fences runs whose checkpoint was deleted
            restart=self.restart,
        )
        if self.owner is not None:
            # Before the generation has a base: see `Ownership`.
            self.owner.note(generation.number)
        self.recovery = Recovery(self.files, generation, operators=len(self.decision.specs), from_scratch=from_scratch)
        self.task = msgspec.structs.replace(self.task, generation=generation.number)
        # If a later step fails, slots must not keep partitions of a run that never begins.
        self.undo.callback(release, self.task)

    def _logged(self) -> tuple[int, int]:
        """Return the last batches of Spark's commit log and offset log."""
        return self.query_logs.last_committed, self.query_logs.last_planned

    def _open_ahead(self, version: int) -> None:
        """Make the slots open the state of the first batch while Spark plans it."""
        if version and runs_driver_python(self.context):
            open_partitions(self._tasks(self.task), version)

    def _retained_batches(self) -> int:
        return int(self.spark.conf.get("spark.sql.streaming.minBatchesToRetain", "100") or 100)

    def _first_task(self) -> OperatorTask:
        mode = self.settings.commit_mode or ("async" if self.start.sync_reason is None else "sync")
        if mode == "sync":
            check_speculation(self.context)
        spec = self.decision.specs[0]
        return operator_task(
            self.spark,
            self.settings,
            spec,
            self.query_id,
            self.location,
            self.checkpoint,
            self._partitions(),
            mode,
            operators=len(self.decision.specs),
            hinted=bool(self.decision.stages),
            located=self.start.located,
            restarts=self.restart.number if self.restart is not None else 0,
        )

    def _partitions(self) -> int:
        if self.settings.partitions is not None:
            return self.settings.partitions
        # As in Spark, `spark.sql.shuffle.partitions` applies only until the first batch is planned.
        if self.query_logs.last_planned >= 0 and (claimed := deciding_claim(self.files)) is not None:
            return claimed.partitions
        return first_partitions(self.spark, self.settings)

    def _tasks(self, first: OperatorTask) -> list[OperatorTask]:
        """Return the task of each operator. Lookaheads are set here because state that is opened ahead needs them."""
        lookahead = lookaheads(self.decision, first)
        combined = {index: combination.fields for index, combination in self.start.combinations.of(self.specs).items()}
        tasks = [
            msgspec.structs.replace(
                first, operator=index, spec=spec, lookaheads=ahead, combined=combined.get(index, ())
            )
            for index, (spec, ahead) in enumerate(zip(self.specs, lookahead, strict=True))
        ]
        if not first.may_move:
            # A wait for the commit of an operator above covers these: a slot's committer writes a version as a whole.
            # On several hosts the operator above may have run in another slot.
            lagging = msgspec.structs.replace(first.settings, commit_mode="async")
            for index in self.decision.feeding_state:
                tasks[index] = msgspec.structs.replace(tasks[index], settings=lagging)
        return tasks

    def _rewritten(self, tasks: list[OperatorTask]) -> DataFrame:
        no_data = any(
            operator.needs_no_data_batches or operator.due_by_processing_time for operator in self.decision.on_millpond
        )
        # The number of Spark's state stores matters only if Spark has to run no-data batches.
        stores = self.query_logs.store_partitions() if no_data else None
        return self.start.rewrite(tasks, stores, self.start.combinations.of(self.specs))

    def _replay(self, batch: int) -> None:
        """Make Spark run the planned batch into the `noop` sink, and return when its state is durable.

        Raises:
            TransientError: the replay was stopped.
        """
        # Spark's commit of this batch has to mean durable state, or the next start would have to repeat it.
        sync = msgspec.structs.replace(self.task.settings, commit_mode="sync")
        tasks = self._tasks(msgspec.structs.replace(self.task, settings=sync))
        rewritten = self._rewritten(tasks)
        # In a copy of the session, so that the user's listeners do not see a batch twice.
        with unchanged_settings():
            frame = self.catalyst.in_own_session(rewritten, self.start.session_settings)
        # `once` runs the planned batch and no more; other triggers would go on with new data.
        query = (
            frame.writeStream.format("noop")
            .outputMode(self.decision.output_mode)
            .option("checkpointLocation", self.start.checkpoint)
            .trigger(once=True)
            .start()
        )
        try:
            query.awaitTermination()
        except BaseException:
            with suppress(Exception):
                query.stop()
            raise
        if self.query_logs.read("commits", batch) is None:
            raise TransientError(
                f"Batch {batch}, whose state was not durable, ran again, and was stopped before its end.",
                action="Start the query again.",
                file=self.start.checkpoint,
            )


def refuse_own_state(spark: SparkSession, settings: Settings, checkpoint: str) -> None:
    """Refuse a query without operators on Millpond if its checkpoint has state of Millpond.

    Args:
        spark: the user's session.
        settings: the settings of this query.
        checkpoint: its checkpoint location, in any form that Spark accepts.

    Raises:
        StateIncompatibleError: Spark would skip the batches that the earlier query has done, and lose its state.
    """
    try:
        checkpoint = qualified(spark, checkpoint)
        checkpoint_files = open_filesystem(checkpoint, retry_config=SHORT_RETRY)
        query = QueryLogs(checkpoint_files).query_id()
        if query is None:
            return
        location = _state_location(settings, checkpoint, query)
        has_state = open_filesystem(join_url(location, "millpond"), retry_config=SHORT_RETRY).exists(QUERY_FILE)
        if not has_state and state_of_last_run(checkpoint_files) is None:
            return
    except (MillpondError, OSError) as error:  # a location that only Spark can read has no state of Millpond
        log.debug("whether %s holds state of Millpond was not found out: %s", checkpoint, error)
        return
    raise StateIncompatibleError(
        "The checkpoint holds state of Millpond's, and nothing of this query runs on Millpond.",
        action="Start with a new checkpointLocation, or change the query back (millpond.explain says what runs where).",
        file=checkpoint,
    )


def _state_location(settings: Settings, checkpoint: str, query_id: str | None) -> str:
    """Return the URL of the state. With the setting, which queries share, the query's id names the folder."""
    if settings.state_location is None or query_id is None:
        return checkpoint
    return join_url(settings.state_location, query_id)
