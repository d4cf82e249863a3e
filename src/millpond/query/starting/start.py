"""Starting a query: what happens between the user's `start()` and Spark's.

In order: drain what an earlier run left pending, pin the query, claim the next generation, undo a recovery that was
interrupted, look at what is durable, have Spark run a batch again where the state lags behind its ledger, and only then
start into the real sink.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.generation import claim, newest_claim
from millpond.checkpoint.pinned import NAME as PINNED
from millpond.checkpoint.pinned import repin
from millpond.checkpoint.recovery import Recovery
from millpond.conf import Settings
from millpond.errors import (
    MillpondError,
    StateDamagedError,
    StateIncompatibleError,
    TransientError,
)
from millpond.files.backends.filesystem import FileSystem, join_url, open_filesystem
from millpond.files.backends.patience import SOON
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.combining import Combination, Combinations
from millpond.plan.reading.decision import Decision
from millpond.plan.replay.fingerprint import fingerprint
from millpond.plan.workers import load_ahead, on_one_host, run_this_python
from millpond.query.ledger.fork import check_fork
from millpond.query.ledger.garbage import collect_garbage
from millpond.query.ledger.ledger import Ledger, RollBack
from millpond.query.ledger.ownership import Ownership, state_of_last_run
from millpond.query.lookahead.runner import look_ahead, lookaheads
from millpond.query.starting.commits import watch_commits
from millpond.query.starting.initial import forget_initial, write_initial
from millpond.query.starting.pinning import pin_query, pinned_query, settle
from millpond.query.starting.running import end_with, let_go, watch_run
from millpond.query.starting.tasks import first_partitions, pipe_task
from millpond.query.starting.watching import note_watching
from millpond.slot.batch.task import PipeTask
from millpond.slot.pipe.client import drain, open_ahead, start_ahead
from millpond.spec.kinds.union import OperatorSpec
from millpond.words import counted

log = logging.getLogger("millpond")

VERIFY = "spark.sql.streaming.checkpoint.verifyMetadataExists.enabled"
"""By which Spark (since 4.2) refuses logs without the query's id; Millpond does with all versions."""

Transplant = Callable[[list[PipeTask], int | None, Mapping[int, Combination]], DataFrame]
"""Makes the rewritten query whose pipes carry the given tasks, by operator index."""


@dataclass(frozen=True)
class Start:
    """One start of one query.

    Attributes:
        spark: the user's session.
        decision: which operators run on Millpond.
        settings: of this query.
        checkpoint: Spark's checkpoint location, any form that Spark takes.
        sync_reason: why commits may not lag, None if they may.
        sink: the format that is written to, as far as the user has said it.
        transplant: makes the rewritten query, given the number of Spark's state stores if its offset log has one, and
            how rows are combined before the exchanges.
        combinations: how they can be.
        around: session settings that the rewritten query is planned and started under.
        runs_planned: whether the sink is sure to run this batch, planned and not committed, when the query starts.
    """

    spark: SparkSession
    decision: Decision
    settings: Settings
    checkpoint: str
    sync_reason: str | None
    sink: str
    transplant: Transplant
    combinations: Combinations
    around: dict[str, str]
    runs_planned: Callable[[int], bool]

    def run(self, launch: Callable[[DataFrame], StreamingQuery]) -> StreamingQuery:
        """Recover, then start the rewritten query with `launch`.

        Raises:
            StateIncompatibleError: the checkpoint belongs to another query, or to Spark's own state store.
            StateDamagedError: state that Spark's ledger counts on is gone.
        """
        with ExitStack() as opened:
            return self._run(launch, opened)

    def _run(self, launch: Callable[[DataFrame], StreamingQuery], opened: ExitStack) -> StreamingQuery:
        catalyst = Catalyst(self.spark)
        checkpoint = catalyst.qualified(self.checkpoint)
        ledger_files = open_filesystem(checkpoint)
        check_fork(checkpoint, ledger_files)
        ledger = Ledger(ledger_files)
        if self.spark.conf.get(VERIFY, "true") == "true":
            ledger.check_id()
        ledger.check_offsets()
        identity = ledger.identify()
        location = _state_location(self.settings, checkpoint, identity)
        files = open_state(location)
        owner = None
        if location != checkpoint:
            owner = Ownership(checkpoint, ledger_files, location, files)
            owner.check()
        query = pinned_query(self.decision, self.settings.key_groups, catalyst)
        specs = self.decision.specs
        changed, left = self.settings.on_changed_state, len(self.decision.theirs)
        if catalyst.runs(identity) and ledger.last("commits") >= 0:
            # What is to be refused is refused before that ends for it.
            pin_query(files, ledger, ledger_files, query, specs, changed=changed, left=left)
            catalyst.check_sink(self.sink)
        catalyst.stop_active_run(identity)

        task = self._first_task(identity, location, checkpoint, files, ledger)
        try:
            drain(task)
        except MillpondError as error:
            log.warning("commits of an earlier run did not finish and will be repeated: %s", error)
        load_ahead(self.spark.sparkContext)
        local = on_one_host(self.spark.sparkContext)
        if local:
            end_with(self.spark.sparkContext, task)
        if run_this_python(self.spark.sparkContext):
            start_ahead(task)
        ledger.forget_interrupted_start()
        pinned = pin_query(files, ledger, ledger_files, query, specs, changed=changed, left=left)
        anew = pinned.anew

        recovery, task = self._claim(files, task, owner, opened, anew=anew)
        roll_back = RollBack(ledger_files, ledger, files, task.generation)
        roll_back.undo_interrupted()
        entries = ledger.last("commits"), ledger.last("offsets")
        if anew and entries[0] >= 0:
            raise TransientError(
                "An earlier run of the query was still going on, and has committed its first batch meanwhile.",
                action="See that it has ended (only one program may run a query), and start the query again.",
                file=checkpoint,
            )
        plan = fingerprint(catalyst, self.decision)
        version = None
        if not anew:
            version = goes_on_with(recovery, ledger)
            pinned = settle(files, recovery, version, pinned, specs, changed)
        shape, retain = pinned.shape or 0, self.settings.state_retain
        specs = pinned.specs(specs)
        again = begin(
            recovery,
            ledger,
            plan,
            even_if_changed=self.settings.on_changed_replay == "run",
            runs_planned=self.runs_planned,
            shape=shape,
            retain=retain,
            version=version,
            titles=[operator.name for operator in query.operators],
        )
        if anew:
            # Behind the base: a start that ends here leaves nothing of either query to the other.
            repin(files, pinned.query)
        if entries[1] >= 0:
            note_watching(ledger_files, self.decision.operators)
        first = again[0] if again else ledger.next
        if first == 0:
            task = write_initial(catalyst, self.decision, task, files, self.around)
        self._open_ahead(self._tasks(task, specs), first)
        for batch in again:
            log.info("state lags behind Spark's ledger: batch %d runs again, without the sink", batch)
            with roll_back.again(batch):
                self._replay(catalyst, task, specs, ledger, batch)
        if again and entries != (ledger.last("commits"), ledger.last("offsets")):
            raise _still_going_on(checkpoint)
        if self.sync_reason is not None:
            if self.settings.commit_mode is None:
                log.warning("every batch waits for its commit (commit.mode=sync): %s", self.sync_reason)
            if again:
                # The run may see other rows in a primed batch than the priming did: that is no contradiction.
                recovery, task = self._claim(files, task, owner, opened)
                begin(recovery, ledger, plan, shape=shape, retain=retain)
                self._open_ahead(self._tasks(task, specs), ledger.next)
        tasks = self._tasks(task, specs)
        running = launch(self.transplant(tasks, self._stores(ledger), self.combinations.of(specs)))
        opened.pop_all()
        if local:
            watch_run(running, task)
        look_ahead(running, self.spark, self.decision, tasks, ledger_files, self.around)
        watch_commits(running, task)
        forget_initial(running, task, files, ledger)
        collect_garbage(running, files, task.generation, ledger, max(retain, self._retained_batches()))
        return running

    def _claim(
        self, files: FileSystem, task: PipeTask, owner: Ownership | None, opened: ExitStack, *, anew: bool = False
    ) -> tuple[Recovery, PipeTask]:
        generation = claim(
            files,
            run=task.run,
            partitions=task.partitions,
            key_groups=self.settings.key_groups,
            least=time.time_ns() // 1_000_000,
        )
        if owner is not None:
            owner.note(generation.number)
        recovery = Recovery(files, generation, operators=len(self.decision.specs), anew=anew)
        claimed = msgspec.structs.replace(task, generation=generation.number)
        opened.callback(let_go, claimed)
        return recovery, claimed

    def _open_ahead(self, tasks: list[PipeTask], version: int) -> None:
        """Have the slots read what the first batch needs while Spark plans it."""
        if version and run_this_python(self.spark.sparkContext):
            open_ahead(tasks, version)

    def _retained_batches(self) -> int:
        return int(self.spark.conf.get("spark.sql.streaming.minBatchesToRetain", "100") or 100)

    def _first_task(self, query: str, location: str, checkpoint: str, files: FileSystem, ledger: Ledger) -> PipeTask:
        mode = self.settings.commit_mode or ("async" if self.sync_reason is None else "sync")
        partitions = self._partitions(files, ledger)
        spec = self.decision.specs[0]
        return pipe_task(self.spark, self.settings, spec, query, location, checkpoint, partitions, mode)

    def _partitions(self, files: FileSystem, ledger: Ledger) -> int:
        if self.settings.partitions is not None:
            return self.settings.partitions
        claimed = newest_claim(files)
        # As in Spark, `spark.sql.shuffle.partitions` counts until the first batch is planned, and never again.
        if claimed is not None and ledger.last("offsets") >= 0:
            return claimed.partitions
        return first_partitions(self.spark, self.settings)

    def _tasks(self, first: PipeTask, specs: Sequence[OperatorSpec]) -> list[PipeTask]:
        # Also those that open state ahead: what opens it decides who announces keys.
        lookahead = lookaheads(self.decision, first)
        combined = {index: one.fields for index, one in self.combinations.of(specs).items()}
        tasks = [
            msgspec.structs.replace(
                first, operator=index, spec=spec, lookaheads=ahead, combined=combined.get(index, ())
            )
            for index, (spec, ahead) in enumerate(zip(specs, lookahead, strict=True))
        ]
        # Who waits for the commit of an operator above waits for theirs: the committer puts a version as one.
        lagging = msgspec.structs.replace(first.settings, commit_mode="async")
        for index in self.decision.covered:
            tasks[index] = msgspec.structs.replace(tasks[index], settings=lagging)
        return tasks

    def _stores(self, ledger: Ledger) -> int | None:
        """Into how many partitions Spark divides state stores, where it matters and Spark has said so."""
        no_data = any(one.closes or one.ticks for one in self.decision.ours)
        return ledger.stores() if no_data else None

    def _replay(
        self, catalyst: Catalyst, task: PipeTask, specs: Sequence[OperatorSpec], ledger: Ledger, batch: int
    ) -> None:
        """Have Spark run the planned batch into nothing; returns when its state is durable.

        Raises:
            TransientError: somebody has stopped it.
        """
        sync = msgspec.structs.replace(task.settings, commit_mode="sync")
        tasks = self._tasks(msgspec.structs.replace(task, settings=sync), specs)
        frame = catalyst.in_own_session(
            self.transplant(tasks, self._stores(ledger), self.combinations.of(specs)), self.around
        )
        query = (
            frame.writeStream.format("noop")
            .outputMode(self.decision.output_mode)
            .option("checkpointLocation", self.checkpoint)
            .trigger(once=True)
            .start()
        )
        try:
            query.awaitTermination()
        except BaseException:
            with suppress(Exception):
                query.stop()
            raise
        if ledger.read("commits", batch) is None:
            raise TransientError(
                f"Batch {batch}, whose state was not durable, ran again, and was stopped before its end.",
                action="Start the query again.",
                file=self.checkpoint,
            )


def refuse_own_state(spark: SparkSession, settings: Settings, checkpoint: str) -> None:
    """Refuse a query that has nothing on Millpond, where the checkpoint is of one that had.

    Args:
        spark: the user's session. settings: of this query.
        checkpoint: its checkpoint location, any form that Spark takes.

    Raises:
        StateIncompatibleError: Spark would skip the batches that the other query has done, and go on without its state.
    """
    try:
        checkpoint = Catalyst(spark).qualified(checkpoint)
        ledger_files = open_filesystem(checkpoint, retry_config=SOON)
        query = Ledger(ledger_files).query_id()
        if query is None:
            return
        location = _state_location(settings, checkpoint, query)
        here = open_filesystem(join_url(location, "millpond"), retry_config=SOON).exists(PINNED)
        if not here and state_of_last_run(ledger_files) is None:
            return
    except (MillpondError, OSError) as error:  # what only Spark can read is none of Millpond's
        log.debug("whether %s holds state of Millpond was not found out: %s", checkpoint, error)
        return
    raise StateIncompatibleError(
        "The checkpoint holds state of Millpond's, and nothing of this query runs on Millpond.",
        action="Start with a new checkpointLocation, or change the query back (millpond.explain says what runs where).",
        file=checkpoint,
    )


def _state_location(settings: Settings, checkpoint: str, query_id: str | None) -> str:
    """Below which the state lies: queries of a session share the setting, the id goes where the checkpoint goes."""
    if settings.state_location is None or query_id is None:
        return checkpoint
    return join_url(settings.state_location, query_id)


def goes_on_with(recovery: Recovery, ledger: Ledger) -> int:
    """The version that a start goes on with."""
    committed = max(ledger.last("commits"), ledger.last("offsets") - 1)
    return committed + 1 if recovery.durable(committed + 1) else committed


def begin(
    recovery: Recovery,
    ledger: Ledger,
    plan: str = "",
    *,
    even_if_changed: bool = True,
    runs_planned: Callable[[int], bool] = lambda batch: False,
    shape: int = 0,
    retain: int = 0,
    version: int | None = None,
    titles: Sequence[str] = (),
) -> list[int]:
    """Name what the generation builds on; returns the batches that Spark has to run again, in order.

    Args:
        recovery: with a generation just claimed. ledger: Spark's.
        plan: a digest of what the run computes up to its operators.
        even_if_changed: whether a batch that the sink has may be repeated by a run that computes something else.
        runs_planned: whether the sink is sure to run a batch that is planned and not committed.
        shape, retain: see `Base`.
        version: that the shape was made for; None if it fits any. titles: of the operators, for people.
    """
    planned = ledger.last("offsets")
    committed = ledger.next - 1
    built_on, again = [committed + 1], []
    if not recovery.durable(committed + 1):
        missing = recovery.missing(committed)
        if missing:
            operator, partition = missing[0]
            raise StateDamagedError(
                f"Spark has committed batch {committed}, and commits/ has no whole state of "
                f"{'the operator' if operator >= len(titles) else repr(titles[operator])} as of then: "
                f"{counted(sum(place[0] == operator for place in missing), 'partition')} "
                f"of version {committed} or {committed + 1} cannot be put together"
                + (f"; damaged: {', '.join(recovery.damaged)}" if recovery.damaged else "")
                + ".",
                action="Restore the missing files below millpond/, or start with a new checkpointLocation; if "
                "Spark has run the query without Millpond since, `millpond docs troubleshooting` says what to do.",
                operator=str(operator),
                partition=partition,
                version=committed,
                file=recovery.files.locate("commits/"),
            )
        if plan != recovery.plan and not even_if_changed:
            raise StateIncompatibleError(
                f"The state of batch {committed}, which the sink has, was not durable when the last run ended: it has "
                "to run once more, but what the query computes up to its stateful operators has changed since.",
                action="Start the query as it was, let it end by stop(), and change it then; or set "
                "spark.millpond.onChangedReplay to 'run' to make the state from the query as it is now.",
                version=committed,
                file=recovery.files.locate("generations/"),
            )
        built_on, again = [committed], [committed]
    if planned > committed:
        # A sink that has the planned batch already will skip it, and the state must not depend on that.
        # What the query as it was has made of that batch is not what it makes of it now.
        if not again and recovery.durable(planned + 1) and recovery.shape(planned + 1) == shape:
            built_on.append(planned + 1)
        elif not runs_planned(planned):
            again.append(planned)
    if version is not None and built_on[0] != version:
        raise _still_going_on(recovery.files.url)  # it has committed a batch meanwhile
    recovery.begin(built_on, plan, shape=shape, retain=retain)
    before, now = len(recovery.ranges(built_on[0])), recovery.partitions
    if built_on[0] and before != now:
        log.info("the state goes on in %s, each with its part of the %d before", counted(now, "partition"), before)
    return again


def _still_going_on(checkpoint: str) -> TransientError:
    return TransientError(
        "An earlier run of the query was still going on while this one recovered.",
        action="See that it has ended (only one program may run a query), and start the query again.",
        file=checkpoint,
    )
