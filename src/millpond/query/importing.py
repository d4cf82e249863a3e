"""`millpond.import_checkpoint`: a query that ran on Spark's state store goes on with its state on Millpond.

Spark reads its own state with its state data source. Each operator reads its rows as a batch: the last one that Spark
has committed. So the new checkpoint looks as if Millpond had run that batch. Files are written in this order:

1. `parents.json`, if the location is empty: from then on it is taken, and no query starts on it without an id.
2. `query.json`, a generation, and the state, as commits of the version after the batch.
3. `sources/`, `offsets/`, `commits/`, and last `metadata` with the unchanged id of the query.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millpond.checkpoint.forks.parents import PARENTS_FILE, Parents
from millpond.checkpoint.formats.documents import write_document_once
from millpond.checkpoint.generation import Base, BaseVersion, claim, write_base
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.state_schema import QUERY_FILE
from millpond.conf import Settings, read_settings
from millpond.errors import SettingError, StateDamagedError, StateIncompatibleError, UsageError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.backends.retry import put_once
from millpond.files.locations.opening import join_url, open_filesystem
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.session import is_running, qualified, settings_of
from millpond.plan.decide import decide
from millpond.plan.decision.decision import Decided, Decision, Operator
from millpond.plan.exchange.map_side import exchanged
from millpond.plan.exchange.workers import map_in_arrow, named_function
from millpond.plan.replay.fingerprint import fingerprint
from millpond.plan.spark_state.contradictions import Times
from millpond.plan.spark_state.rows import imported_rows
from millpond.plan.spark_state.stored_operators import (
    StoredOperator,
    below_projections,
    describe_operators,
    describe_stored,
    in_spark_order,
)
from millpond.query.logs.copying import check_finished, check_free, copy_folders, copy_logs, not_retained_error
from millpond.query.logs.query_logs import METADATA, QueryLogs
from millpond.query.running.session_settings import unchanged_settings
from millpond.query.schema.matching import state_schema_of
from millpond.query.starting.checks import check_session, check_stream
from millpond.query.starting.operator_metadata import update_operator_metadata
from millpond.query.starting.tasks import first_partitions, operator_task
from millpond.slot.process.client import drain
from millpond.tasks.ddl import quoted
from millpond.tasks.offset_log import LogEntry
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.slot_stage import SlotStage

_BATCH = "streaming.sql.batchId"
"""The local property in which Spark gives tasks their batch."""


@dataclass(frozen=True)
class Import:
    """An imported checkpoint.

    Attributes:
        checkpoint: its URL.
        query: the query's id, the same as in the old checkpoint.
        version: the version of the state, after the last batch that Spark has committed.
        partitions: the number of partitions of the state.
        operators: the number of operators on Millpond.
    """

    checkpoint: str
    query: str
    version: int
    partitions: int
    operators: int


def import_checkpoint(
    df: DataFrame, source: str | os.PathLike[str], checkpoint: str | os.PathLike[str], output_mode: str = "append"
) -> Import:
    """Make a Millpond checkpoint from a native checkpoint of the query. See `millpond.import_checkpoint`.

    Args:
        df: the query's streaming DataFrame.
        source: the checkpoint location of the native query, which must not run.
        checkpoint: the new checkpoint location, which must be empty.
        output_mode: the output mode of the query.

    Raises:
        UsageError: the checkpoint does not exist, the new location is not empty, or the query is running.
        StateIncompatibleError: the state is of another query, or part of it cannot be imported; nothing was written.
        SettingError: `spark.millpond.state.location` is set.
        TransientError: another thread's start takes too long.
    """
    check_session(df)
    spark = df.sparkSession
    catalyst = Catalyst(spark)
    settings = read_settings(settings_of(spark))
    with unchanged_settings():
        decision = decide(df, output_mode, settings.changes, settings.store_pattern, settings.map_groups)
        check_stream(df, decision)
    if settings.state_location is not None:
        raise SettingError(
            "Imported state lies in the checkpoint, and spark.millpond.state.location is set.",
            action="Unset it, for the import and for the query: the state cannot be moved there later. To have it on "
            "an object store, give a checkpoint there.",
        )
    origin = qualified(spark, os.fspath(source))
    original, target = open_filesystem(origin), open_filesystem(qualified(spark, os.fspath(checkpoint)))
    query_logs = QueryLogs(original)
    query = _check_original(spark, original, query_logs)
    check_free(target)
    batch, planned = query_logs.last_committed, query_logs.last_planned
    imported = _imported_rows(spark, catalyst, decision, origin, batch, _times(query_logs, batch))
    files = open_filesystem(join_url(target.url, "millpond"))
    write_document_once(files, PARENTS_FILE, Parents(files.url, (), making=uuid.uuid4().hex))
    write_document_once(files, QUERY_FILE, state_schema_of(decision, catalyst))
    task = _claim_generation(
        spark, settings, decision, files, query, target.url, origin, batch, fingerprint(catalyst, decision)
    )
    try:
        with _as_batch(spark, batch):
            for decided, rows in imported:
                operator = decided.operator
                assert operator is not None
                assert operator.spec is not None
                assert operator.index is not None
                operator_task = msgspec.structs.replace(task, operator=operator.index, spec=operator.spec)
                frame = exchanged(catalyst, rows.withColumn("__mark", F.lit(False)), task.partitions)
                function = named_function(SlotStage(operator_task), f"import of {operator.title}", 2)
                map_in_arrow(frame, function, "nothing int").collect()
    finally:
        # The imported state has to be durable before Spark's logs say that its batch is committed.
        drain(task)
    missing = Recovery(files).missing(batch + 1)
    if missing:
        raise StateDamagedError(
            "Spark has not run all partitions of the import.",
            action="Delete what there is at the new place, and import again.",
            version=batch + 1,
            file=files.url,
        )
    copy_folders(original, target, ["sources/"])
    copy_logs(original, target, query_logs, batch + 1)
    new_logs = QueryLogs(target)
    new_logs.put("commits", batch, _first_version(new_logs.read("commits", batch)))
    entry = query_logs.read("offsets", batch + 1)
    if entry is not None:
        # A batch that was planned runs again with the same offsets, as Spark would do.
        new_logs.put("offsets", batch + 1, entry)
    update_operator_metadata(target, decision.on_millpond)
    if (query_logs.last_committed, query_logs.last_planned) != (batch, planned):
        raise UsageError(
            "The query has gone on while its state was taken over.",
            action="Stop it, wherever it runs, delete what there is at the new place, and import again.",
            file=original.url,
        )
    put_once(target, METADATA, [original.get(METADATA)])
    return Import(target.url, query, batch + 1, task.partitions, len(decision.on_millpond))


def _check_original(spark: SparkSession, original: FileSystem, query_logs: QueryLogs) -> str:
    """Check that a location holds a native checkpoint that can be imported, and return the query's id."""
    query = query_logs.query_id()
    committed, planned = query_logs.last_committed, query_logs.last_planned
    if query is None or committed < 0:
        check_finished(original)
        query_logs.check_id()
        raise UsageError(
            "There is no query here that has committed a batch.",
            action="Give the checkpointLocation of a query that has run, or start the query with a new one.",
            file=original.url,
        )
    if original.list("millpond/"):
        raise UsageError(
            "The state of this query is Millpond's already.",
            action="Start the query, or fork it (millpond state fork).",
            file=original.url,
        )
    if is_running(spark, query):
        raise UsageError("The query is running.", action="Stop it first.", file=original.url)
    if not committed <= planned <= committed + 1:
        raise StateIncompatibleError(
            f"Batch {planned} is planned, and batch {committed} is the last that was committed.",
            action="Start the query natively, let it commit a batch, and stop it.",
            file=original.url,
        )
    return query


def _imported_rows(
    spark: SparkSession, catalyst: Catalyst, decision: Decision, origin: str, batch: int, times: Times
) -> list[tuple[Decided, DataFrame]]:
    """Return each operator with the rows that it imports.

    Raises:
        StateIncompatibleError: part of the state cannot be imported.
    """
    for operator in decision.on_spark:
        raise StateIncompatibleError(
            f"The state of '{operator.title}' cannot be taken over: the operator stays on Spark ({operator.reason}).",
            action="Leave the query on Spark, or begin with a new checkpointLocation.",
        )
    native_state = _stored_operators(spark, origin, batch)
    order = list(in_spark_order(decision.root))
    # Spark numbers stateful operators from the top down, without gaps.
    if sorted(native_state) != list(range(len(order))):
        raise StateIncompatibleError(
            f"The query has {describe_operators(order)}; its checkpoint has {describe_stored(native_state)}.",
            action="Give the query that has made the checkpoint. (Checkpoints of Spark before 4.0 do not say what "
            "operators they have until a batch has run on a newer version.)",
            file=origin,
        )

    def read(number: int, store: str) -> DataFrame:
        reader = spark.read.format("statestore").option("operatorId", number).option("batchId", batch)
        return reader.option("storeName", store).load(origin)

    above = [id(operator) for operator in below_projections(decision.root)]
    with_state = [
        (
            operator,
            imported_rows(
                catalyst, operator, native_state[number], partial(read, number), times, projected=id(operator) in above
            ),
        )
        for number, operator in enumerate(order)
    ]
    return with_state + [
        (operator, _no_rows(spark, operator.operator))
        for operator in decision.root.walk()
        if operator.operator is not None and not operator.operator.stateful
    ]


def _times(query_logs: QueryLogs, batch: int) -> Times:
    """Return the watermarks of a committed batch and of the next batch."""
    ran, done = query_logs.read("offsets", batch), query_logs.read("commits", batch)
    if ran is None or done is None:
        raise not_retained_error(batch + 1)
    watermark = LogEntry.parse(ran).metadata["batchWatermarkMs"]
    return Times(int(watermark), int(LogEntry.parse(done).metadata["nextBatchWatermarkMs"]))


def _no_rows(spark: SparkSession, operator: Operator) -> DataFrame:
    """Return an empty DataFrame of the input columns of an operator without state."""
    assert operator.spec is not None
    columns = [*(f"{quoted(field.name)} {field.type}" for field in operator.spec.input_fields), "__hash bigint"]
    return spark.createDataFrame([], ", ".join(columns))


def _stored_operators(spark: SparkSession, origin: str, batch: int) -> dict[int, StoredOperator]:
    rows = spark.read.format("state-metadata").load(origin).collect()
    names = {row.operatorId: row.operatorName for row in rows}
    return {
        number: StoredOperator(name, frozenset(row.stateStoreName for row in rows if row.operatorId == number))
        for number, name in names.items()
    }


def _claim_generation(
    spark: SparkSession,
    settings: Settings,
    decision: Decision,
    files: FileSystem,
    query: str,
    location: str,
    origin: str,
    batch: int,
    plan: str,
) -> OperatorTask:
    """Claim a generation that begins at the batch without state, and return the task that imports into it."""
    partitions = first_partitions(spark, settings)
    task = operator_task(spark, settings, decision.specs[0], query, location, origin, partitions, "sync")
    generation = claim(
        files,
        run=task.run,
        partitions=partitions,
        minimum=time.time_ns() // 1_000_000,  # the time also fences runs whose checkpoint was deleted
    )
    nothing = BaseVersion(batch, (), generation.ranges)
    write_base(files, Base(generation.number, len(decision.specs), (nothing,), plan, retain=settings.state_retain))
    return msgspec.structs.replace(task, generation=generation.number, exchange="spark", adopts=True)


@contextmanager
def _as_batch(spark: SparkSession, batch: int) -> Iterator[None]:
    """Run Spark jobs as those of a batch, without re-planning, so that each partition runs."""
    context = spark.sparkContext
    before = context.getLocalProperty(_BATCH)
    context.setLocalProperty(_BATCH, str(batch))
    try:
        yield
    finally:
        context.setLocalProperty(_BATCH, before)


def _first_version(entry: bytes | None) -> bytes:
    """Convert a commit to version 1 of the commit log: the additions of version 2 name Spark's state."""
    assert entry is not None
    commit = LogEntry.parse(entry)
    if commit.version == "v1":
        return entry
    return b"v1\n" + msgspec.json.encode({"nextBatchWatermarkMs": commit.metadata.get("nextBatchWatermarkMs", 0)})
