"""Launches of a query: everything from the user's `start()` that a start needs, so that it can be repeated.

After a lost host, the supervisor launches the query again. The user's writer may have been used for another query by
then, so a launch keeps copies of its calls and settings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from millpond.checkpoint.generation import Restart
from millpond.conf import Settings
from millpond.files.locations.opening import on_disk, open_filesystem
from millpond.metrics import COMPACTION_METRICS, HINT_METRICS, HOST_METRICS, OBJECT_STORE_METRICS, OPERATOR_METRICS
from millpond.plan.catalyst.cluster.pings import ExecutorPings
from millpond.plan.catalyst.exchange.forms import ExchangeForms
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Node
from millpond.plan.catalyst.session import copied_session, qualified, settings_of
from millpond.plan.decision.decision import Decision
from millpond.plan.exchange.combining import Combination, Combinations
from millpond.plan.exchange.map_side import MapSides
from millpond.plan.exchange.workers import on_one_host
from millpond.plan.replay.repeatable import needs_sync
from millpond.plan.rewriter import rewrite_plan
from millpond.query.logs.query_logs import QueryLogs
from millpond.query.progress.endpoint import endpoint_of
from millpond.query.running.batches import CompleteBatch
from millpond.query.running.forms import choose_first_forms, exchange_id, remove_forms, watch_forms
from millpond.query.running.handle import RunningQuery
from millpond.query.running.placement import Placement
from millpond.query.running.session_settings import (
    changes_back_to,
    first_store_count,
    running_settings,
    settings_of_user,
    starting_settings,
    unchanged_settings,
)
from millpond.query.running.supervisor import Supervisor
from millpond.query.starting.locations import CheckpointLocation, delete_when_stopped, runs_planned
from millpond.query.starting.start import Start
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.exchange import ExchangeWrite
from millpond.worker.slot_stage import Coverage, SlotStage

WriterCall = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A call of a `DataStreamWriter`: the method's name and its arguments."""


@dataclass(eq=False)
class Launch:
    """One query that runs on Millpond. `run` may be called again once the run before has ended.

    Attributes:
        df: the user's DataFrame.
        decision: which operators run on Millpond.
        settings: the settings of the query.
        checkpoint: Spark's checkpoint location.
        calls: the calls of the user's writer.
        sink: format of the sink, or `foreach`/`foreachBatch`; empty for a table.
        path: the sink's path, if the user has set one.
        start_writer: starts Spark's writer with these calls: `start` or `toTable`.
        tasks: the operators as they were last started.
        restarts: the starts after lost hosts.
    """

    df: DataFrame
    decision: Decision
    settings: Settings
    checkpoint: CheckpointLocation
    calls: list[WriterCall]
    sink: str
    path: str | None
    start_writer: Callable[[DataStreamWriter], StreamingQuery]
    tasks: list[OperatorTask] = field(init=False, default_factory=list)
    restarts: list[Restart] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.spark: SparkSession = self.df.sparkSession
        context = self.spark.sparkContext
        for_each_batch = any(name == "foreachBatch" for name, _, _ in self.calls)
        self._coverage = context.accumulator([], Coverage()) if for_each_batch else None
        self._initial_settings = settings_of(self.spark)
        self._session_settings = running_settings(self.settings, self.decision.specs, self._initial_settings)
        self._user_settings = settings_of_user(self._session_settings, self._initial_settings)
        # Compiled while the query is checked.
        self._forms = functools.cache(lambda: ExchangeForms.install(self.spark))
        placed = self.settings.placement == "auto" and not on_one_host(context)
        self._placement = Placement.of(self.spark) if placed else None
        self._start = Start(
            self.spark,
            self.decision,
            self.settings,
            self.checkpoint.path,
            needs_sync(self.decision),
            self.sink,
            functools.partial(self._rewrite, self.df),
            Combinations(self.decision.root, lambda: self.settings.combine != "off" and self._forms() is not None),
            self._session_settings,
            lambda batch: runs_planned(self.spark, self.sink, self.path, batch),
            located=self._placement is not None,
        )

    def supervise(self) -> RunningQuery:
        """Start the query, and start it again after a lost host; raise the errors of `Start.run`."""
        query = self.run()
        if self.checkpoint.temporary:
            delete_when_stopped(query, self.spark, self.checkpoint.path, self.tasks[0])
        if self._placement is None:
            return RunningQuery.of(query)
        logs = QueryLogs(open_filesystem(qualified(self.spark, self.checkpoint.path)))
        running = RunningQuery.of(query, supervised=True)
        # A temporary checkpoint is deleted when the first run ends.
        restarts = 0 if self.checkpoint.temporary else self.settings.restarts
        pings = ExecutorPings.of(Catalyst(self.spark), self.settings.executor_timeout)
        Supervisor(running, self._placement, pings, self.tasks, logs, self.run, restarts).start()
        return running

    def run(self, restart: Restart | None = None, replaced: int = 0) -> StreamingQuery:
        """Start the query once, after lost hosts as `restart` of the generation `replaced`; raise as `Start.run`."""
        with endpoint_of(self.settings) as endpoint:
            try:
                if restart is None:
                    query = self._start.run(self._start_rewritten)
                else:
                    start_again = functools.partial(self._start_rewritten, again=True)
                    query = self._start_as_before().run(start_again, restart, replaced)
            except BaseException:
                if forms := self._forms():
                    remove_forms(forms, self.tasks)
                raise
            if restart is not None:
                self.restarts.append(restart)
            if endpoint is not None:
                titles = [operator.title for operator in self.decision.on_millpond]
                checkpoint = qualified(self.spark, self.checkpoint.path)
                endpoint.show(query, self.spark, checkpoint, self.tasks, titles, self.restarts)
        if forms := self._forms():
            watch_forms(query, self.spark, forms, self.tasks, always=self.settings.combine == "on")
        return query

    def _start_as_before(self) -> Start:
        """Return the start in a copy of the session with its settings at the first start.

        A query runs with the settings of its start, whatever the user sets later. Rewriting the plan, comparing it with
        the checkpoint's and repeating batches depend on them, too.
        """
        with unchanged_settings():
            session = copied_session(self.spark, changes_back_to(self.spark, self._initial_settings))
        df = DataFrame(self.df._jdf, session)
        return dataclasses.replace(self._start, spark=session, rewrite=functools.partial(self._rewrite, df))

    def _rewrite(
        self, df: DataFrame, tasks: list[OperatorTask], stores: int | None, combined: Mapping[int, Combination]
    ) -> DataFrame:
        # Recorded here, as a start may rewrite the query several times; the last tasks are those that run.
        self.tasks[:] = tasks
        first = tasks[0]
        stages = [SlotStage(task, self._coverage, metrics=True) for task in tasks]
        writes = [ExchangeWrite(task) for task in tasks] if first.exchange == "local" else []
        ids = [exchange_id(task) for task in tasks]
        located = None if self._placement is None else self._placement.located(first)
        if forms := self._forms():
            choose_first_forms(forms, tasks)
        metrics: tuple[str, ...] = OPERATOR_METRICS
        metrics += () if on_disk(first.location) else OBJECT_STORE_METRICS
        metrics += HINT_METRICS if first.lookaheads else ()
        metrics += COMPACTION_METRICS if self.settings.compaction == "remote" else ()
        metrics += HOST_METRICS if located is not None else ()
        return rewrite_plan(
            df,
            self.decision,
            first.partitions,
            stages,
            MapSides(writes, forms, ids, combined, located),
            metrics,
            tasks,
            stores or first_store_count(self._initial_settings | self._session_settings),
        )

    def _start_rewritten(self, frame: DataFrame, *, again: bool = False) -> StreamingQuery:
        """Start Spark's query; `again`: restart it with the session's settings of the first start."""
        if again:
            # From the copy to the user's session: its `streams` and listeners have to know the query.
            frame = Catalyst(self.spark).dataframe(Node(frame._jdf.queryExecution().analyzed()))
        writer = DataStreamWriter(frame)
        for name, args, kwargs in self.calls:
            if name == "foreachBatch" and self._coverage is not None:
                (function,) = (*args, *kwargs.values())
                running_values = {setting: self._session_settings[setting] for setting in self._user_settings}
                complete = CompleteBatch(
                    function, list(self.tasks), self._coverage, running_values, self._user_settings
                )
                args, kwargs = (complete,), {}
            getattr(writer, name)(*args, **kwargs)
        # Set last: the user may have set none, or a base folder by a setting.
        writer.option("checkpointLocation", self.checkpoint.path)
        earlier = self._initial_settings if again else None
        with starting_settings(self.spark, self._session_settings, earlier):
            return self.start_writer(writer)
