"""`millpond.import_checkpoint`: a query that ran on Spark's state store goes on with its state on Millpond.

Spark reads its own state, by its data source for that; each operator takes up what was its own as if it were a batch:
the last one that Spark has committed. So the new checkpoint is as if Millpond had run that batch, in this order:

1. `parents.json`, if nothing is there: from then on the place is taken, and no query starts on it without an id.
2. `query.json`, a generation, and the state, as commits of the version that follows on the batch.
3. `sources/`, `offsets/`, `commits/`, and last `metadata` with the id of the query, which stays what it was.
"""

from __future__ import annotations

import json
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

from millpond.checkpoint.forks.parents import NAME as PARENTS
from millpond.checkpoint.forks.parents import Parents
from millpond.checkpoint.formats.documents import write_own_document
from millpond.checkpoint.generation import Base, BaseVersion, claim, write_base
from millpond.checkpoint.pinned import NAME as QUERY
from millpond.checkpoint.recovery import Recovery
from millpond.conf import Settings, read_settings
from millpond.ddl import quoted
from millpond.errors import SettingError, StateDamagedError, StateIncompatibleError, UsageError
from millpond.files.backends.filesystem import FileSystem, join_url, open_filesystem
from millpond.files.backends.patience import put_own
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.decide import decide
from millpond.plan.exchange import exchanged
from millpond.plan.reading.decision import Decided, Decision, Operator
from millpond.plan.replay.fingerprint import fingerprint
from millpond.plan.spark_state.contradictions import Times
from millpond.plan.spark_state.rows import (
    Held,
    carried_rows,
    describe_held,
    describe_operators,
    in_sparks_order,
    projected,
)
from millpond.plan.workers import map_in_arrow, named
from millpond.query.ledger.copying import check_finished, check_free, copy_folders, copy_ledger, out_of_reach
from millpond.query.ledger.ledger import METADATA, Ledger
from millpond.query.starting.checks import check_session, check_stream
from millpond.query.starting.pinning import pinned_query
from millpond.query.starting.tasks import first_partitions, pipe_task
from millpond.query.starting.watching import note_watching
from millpond.slot.batch.task import PipeTask
from millpond.slot.pipe.client import drain
from millpond.slot.pipe.pipe import Pipe

_BATCH = "streaming.sql.batchId"
"""The local property by which Spark tells tasks their batch."""


@dataclass(frozen=True)
class Import:
    """What was made.

    Attributes:
        checkpoint: where. query: its id, which is that of the old one.
        version: of the state: that after the last batch that Spark has committed.
        partitions: of the state. operators: how many took theirs up.
    """

    checkpoint: str
    query: str
    version: int
    partitions: int
    operators: int


def import_checkpoint(
    df: DataFrame, source: str | os.PathLike[str], checkpoint: str | os.PathLike[str], output_mode: str = "append"
) -> Import:
    """Make a checkpoint of Millpond's that goes on from one that the query has made natively.

    Args:
        df: the query's streaming DataFrame.
        source: the checkpoint location of the native query, which must not run.
        checkpoint: the new one, where there is nothing yet.
        output_mode: of the query.

    Raises:
        UsageError: there is no such checkpoint, something is at the new place, or the query is running.
        StateIncompatibleError: the state is of another query, or some of it cannot be taken over; nothing was written.
    """
    check_session(df)
    spark = df.sparkSession
    catalyst = Catalyst(spark)
    settings = read_settings(catalyst.settings)
    decision = decide(df, output_mode, settings.changes, settings.store_pattern, settings.map_groups)
    check_stream(df, decision)
    if settings.state_location is not None:
        raise SettingError(
            "Imported state lies in the checkpoint, and spark.millpond.state.location is set.",
            action="Unset it, for the import and for the query: the state cannot be moved there later. To have it on "
            "an object store, give a checkpoint there.",
        )
    origin = catalyst.qualified(os.fspath(source))
    original, place = open_filesystem(origin), open_filesystem(catalyst.qualified(os.fspath(checkpoint)))
    ledger = Ledger(original)
    query = _check_original(catalyst, original, ledger)
    check_free(place)
    batch, planned = ledger.last("commits"), ledger.last("offsets")
    carried = _carried(spark, catalyst, decision, origin, batch, _times(ledger, batch))
    files = open_filesystem(join_url(place.url, "millpond"))
    write_own_document(files, PARENTS, Parents(files.url, (), making=uuid.uuid4().hex))
    write_own_document(files, QUERY, pinned_query(decision, settings.key_groups, catalyst))
    task = _begin(spark, settings, decision, files, query, place.url, origin, batch, fingerprint(catalyst, decision))
    try:
        with _as_batch(spark, batch):
            for decided, rows in carried:
                operator = decided.operator
                assert operator is not None
                assert operator.spec is not None
                assert operator.index is not None
                own = msgspec.structs.replace(task, operator=operator.index, spec=operator.spec)
                sent = exchanged(catalyst, rows.withColumn("__mark", F.lit(False)), task.partitions)
                function = named(Pipe(own), f"import of {operator.title}", 2)
                map_in_arrow(sent, function, "nothing int").collect()
    finally:
        drain(task)
    missing = Recovery(files).missing(batch + 1)
    if missing:
        raise StateDamagedError(
            "Spark has not run all partitions of the import.",
            action="Delete what there is at the new place, and import again.",
            version=batch + 1,
            file=files.url,
        )
    copy_folders(original, place, ["sources/"])
    copy_ledger(original, place, ledger, batch + 1)
    made = Ledger(place)
    made.put("commits", batch, _first_version(made.read("commits", batch)))
    entry = ledger.read("offsets", batch + 1)
    if entry is not None:
        made.put("offsets", batch + 1, entry)
    note_watching(place, decision.ours)
    if (ledger.last("commits"), ledger.last("offsets")) != (batch, planned):
        raise UsageError(
            "The query has gone on while its state was taken over.",
            action="Stop it, wherever it runs, delete what there is at the new place, and import again.",
            file=original.url,
        )
    put_own(place, METADATA, [original.get(METADATA)])
    return Import(place.url, query, batch + 1, task.partitions, len(decision.ours))


def _check_original(catalyst: Catalyst, original: FileSystem, ledger: Ledger) -> str:
    """See that there is a native query's checkpoint that can be gone on with; returns the query's id."""
    query = ledger.query_id()
    committed, planned = ledger.last("commits"), ledger.last("offsets")
    if query is None or committed < 0:
        check_finished(original)
        ledger.check_id()
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
    if catalyst.runs(query):
        raise UsageError("The query is running.", action="Stop it first.", file=original.url)
    if not committed <= planned <= committed + 1:
        raise StateIncompatibleError(
            f"Batch {planned} is planned, and batch {committed} is the last that was committed.",
            action="Start the query natively, let it commit a batch, and stop it.",
            file=original.url,
        )
    return query


def _carried(
    spark: SparkSession, catalyst: Catalyst, decision: Decision, origin: str, batch: int, times: Times
) -> list[tuple[Decided, DataFrame]]:
    """What each operator takes up.

    Raises:
        StateIncompatibleError: some of it cannot be taken over.
    """
    for operator in decision.theirs:
        raise StateIncompatibleError(
            f"The state of '{operator.title}' cannot be taken over: the operator stays on Spark ({operator.reason}).",
            action="Leave the query on Spark, or begin with a new checkpointLocation.",
        )
    held = _held(spark, origin, batch)
    order = list(in_sparks_order(decision.root))
    if sorted(held) != list(range(len(order))):
        raise StateIncompatibleError(
            f"The query has {describe_operators(order)}; its checkpoint has {describe_held(held)}.",
            action="Give the query that has made the checkpoint. (Checkpoints of Spark before 4.0 do not say what "
            "operators they have until a batch has run on a newer version.)",
            file=origin,
        )

    def read(number: int, store: str) -> DataFrame:
        reader = spark.read.format("statestore").option("operatorId", number).option("batchId", batch)
        return reader.option("storeName", store).load(origin)

    above = [id(one) for one in projected(decision.root)]
    found = [
        (one, carried_rows(catalyst, one, held[number], partial(read, number), times, projected=id(one) in above))
        for number, one in enumerate(order)
    ]
    return found + [
        (one, _no_rows(spark, one.operator))
        for one in decision.root.walk()
        if one.operator is not None and not one.operator.stateful
    ]


def _times(ledger: Ledger, batch: int) -> Times:
    """The watermarks by which a committed batch ran, and by which the next one will."""
    ran, done = ledger.read("offsets", batch), ledger.read("commits", batch)
    if ran is None or done is None:
        raise out_of_reach(batch + 1)
    watermark, following = (json.loads(entry.decode().splitlines()[1]) for entry in (ran, done))
    return Times(int(watermark["batchWatermarkMs"]), int(following["nextBatchWatermarkMs"]))


def _no_rows(spark: SparkSession, operator: Operator) -> DataFrame:
    """What an operator without state takes up."""
    assert operator.spec is not None
    columns = [*(f"{quoted(field.name)} {field.type}" for field in operator.spec.input_fields), "__hash bigint"]
    return spark.createDataFrame([], ", ".join(columns))


def _held(spark: SparkSession, origin: str, batch: int) -> dict[int, Held]:
    rows = spark.read.format("state-metadata").load(origin).collect()
    names = {row.operatorId: row.operatorName for row in rows}
    return {
        number: Held(name, frozenset(row.stateStoreName for row in rows if row.operatorId == number))
        for number, name in names.items()
    }


def _begin(
    spark: SparkSession,
    settings: Settings,
    decision: Decision,
    files: FileSystem,
    query: str,
    location: str,
    origin: str,
    batch: int,
    plan: str,
) -> PipeTask:
    """Claim a generation that begins without state, at the batch; returns the task that takes it up."""
    partitions = first_partitions(spark, settings)
    task = pipe_task(spark, settings, decision.specs[0], query, location, origin, partitions, "sync")
    generation = claim(
        files,
        run=task.run,
        partitions=partitions,
        key_groups=settings.key_groups,
        least=time.time_ns() // 1_000_000,
    )
    nothing = BaseVersion(batch, (), generation.ranges)
    write_base(files, Base(generation.number, len(decision.specs), (nothing,), plan, retain=settings.state_retain))
    return msgspec.structs.replace(task, generation=generation.number, exchange="spark", adopts=True)


@contextmanager
def _as_batch(spark: SparkSession, batch: int) -> Iterator[None]:
    """Have jobs run as those of a batch, without re-planning: each partition is to run."""
    context = spark.sparkContext
    before = context.getLocalProperty(_BATCH)
    context.setLocalProperty(_BATCH, str(batch))
    try:
        yield
    finally:
        context.setLocalProperty(_BATCH, before)


def _first_version(entry: bytes | None) -> bytes:
    """A commit in the first version of the log: what the second adds names Spark's state."""
    assert entry is not None
    version, *lines = entry.decode().splitlines()
    if version == "v1":
        return entry
    record = msgspec.json.decode(lines[0])
    return b"v1\n" + msgspec.json.encode({"nextBatchWatermarkMs": record.get("nextBatchWatermarkMs", 0)})
