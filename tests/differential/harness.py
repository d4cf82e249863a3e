"""One query, run by Spark and by Millpond on the same batches: all rows and schemas of all batches must be equal."""

from __future__ import annotations

import datetime as dt
import math
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import StructType

import millpond
from millpond.plan.catalyst.versions import merges_empty_moments
from tests.differential.data import DDL, write
from tests.differential.recorded import Answer, Oracle, Question
from tests.differential.recorded import Batches as Batches

Query = Callable[[DataFrame, SparkSession], DataFrame]
"""Builds the query from its stream."""
PARTITIONS = ("2", "3", "3", "1", "4")
"""Of Millpond's state, run after run: most restarts rescale it, some do not."""

_COMBINE = os.environ.get("MILLPOND_COMBINE")
_STARTS = 6

NULL_FLOATS_JOIN = pyspark.__version__.startswith("4.2.")
"""Whether Spark takes null for equal to null in joins of streams by floating-point numbers, which is wrong."""

ZEROS_DIFFER = pyspark.__version__.startswith("4.1.")
"""Whether Spark's `dropDuplicates`, and `collect_set` of arrays and structs, take 0.0 and -0.0 for two values."""

PROCESSORS_RUN = True
"""Whether Millpond has to run users' processors, so that queries with them are not compared with themselves."""


def stream(spark: SparkSession, folder: Path, ddl: str = DDL) -> DataFrame:
    """The stream of a folder's files, one file a batch."""
    return spark.readStream.schema(ddl).option("maxFilesPerTrigger", 1).parquet(str(folder))


def allow_equal_values(session: SparkSession) -> None:
    """Have `corr` give null where a column does not vary; before Spark 4.3 that is an error in ANSI mode."""
    if merges_empty_moments():
        session.conf.set("spark.sql.ansi.enabled", "false")


def plain(value: Any) -> Any:
    """A value without identity: rows become tuples, maps their entries, collected arrays are put in order."""
    if isinstance(value, Row):
        return tuple(plain(part) for part in value)
    if isinstance(value, dict):
        return tuple((plain(key), plain(part)) for key, part in value.items())
    if isinstance(value, list):
        return sorted((plain(part) for part in value), key=order)
    return bytes(value) if isinstance(value, bytearray) else value


def order(value: Any) -> tuple[Any, ...]:
    """A sort key for any value, floats coarsely so that rounding does not reorder rows."""
    if isinstance(value, tuple | list):
        return (3, *(order(part) for part in value))
    if isinstance(value, float):
        return (1, f"{value + 0.0:.5g}")
    return (0, "") if value is None else (2, type(value).__name__, str(value))


def same(left: Any, right: Any) -> bool:
    """Equality, of floats up to rounding."""
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float):
        return (math.isnan(left) and math.isnan(right)) or math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-9)
    return type(left) is type(right) and left == right


def run(
    df: DataFrame, mode: str, checkpoint: Path, *, ours: bool, into: Batches, trigger: dict[str, Any] | None = None
) -> list[StructType]:
    """Run a query over the files that are there, to the end; add its output to `into`.

    Spark gives the process that learns a processor's state ten seconds to start. Where a machine has too much to do for
    that, Spark's query goes on where it has failed.

    Where `MILLPOND_COMBINE` says so, Millpond's rows are combined in all batches, or in none.

    Returns:
        The schemas that its batches had.
    """
    conf = df.sparkSession.conf
    if ours and _COMBINE and conf.get("spark.millpond.combine", None) is None:
        conf.set("spark.millpond.combine", _COMBINE)
    for _ in range(0 if ours else _STARTS):
        try:
            return _run_once(df, mode, checkpoint, ours=ours, into=into, trigger=trigger)
        except StreamingQueryException as failure:
            if "Python worker failed to connect back" not in str(failure):
                raise
    return _run_once(df, mode, checkpoint, ours=ours, into=into, trigger=trigger)


def _run_once(
    df: DataFrame, mode: str, checkpoint: Path, *, ours: bool, into: Batches, trigger: dict[str, Any] | None
) -> list[StructType]:
    schemas: list[StructType] = []

    callbacks = set()

    def keep(batch: DataFrame, number: int) -> None:
        callbacks.add(batch.sparkSession.sparkContext._gateway._gateway_client.get_thread_connection())
        if batch.schema not in schemas:
            schemas.append(batch.schema)
        into[number] = [plain(row) for row in batch.collect()]

    writer = millpond.writeStream(df) if ours else df.writeStream
    query = (
        writer.outputMode(mode)
        .option("checkpointLocation", str(checkpoint))
        .foreachBatch(keep)
        .trigger(**(trigger or {"availableNow": True}))
        .start()
    )
    try:
        query.awaitTermination()
    finally:
        for callback in callbacks:  # Spark leaves one behind for each query, and a thread that reads it
            callback.socket.shutdown(socket.SHUT_RDWR)
    return schemas


def compare(
    spark: SparkSession,
    folder: Path,
    query: Query,
    mode: str,
    rounds: Sequence[Sequence[pa.Table]],
    *,
    ddl: str = DDL,
    **conf: str,
) -> Batches:
    """Run both engines over the batches, with a restart between rounds, and compare everything.

    Restarts give Millpond's state other partitions (see `PARTITIONS`), unless `conf` has a number of them.

    Args:
        spark: the session.
        folder: an empty folder.
        query: builds the query.
        mode: output mode.
        rounds: the batches, grouped by run.
        ddl: their columns.
        conf: settings of Millpond, without their prefix.

    Returns:
        Millpond's output.
    """
    (folder / "in").mkdir(parents=True, exist_ok=True)
    native, ours = spark.newSession(), spark.newSession()
    ours.conf.set("spark.millpond.onUnsupported", "error")  # nothing is compared with itself
    for name, value in conf.items():
        ours.conf.set(f"spark.millpond.{name}", value)

    def ask(question: Question) -> None:
        session = spark.newSession()
        question.add(mode, ddl)
        question.add_query(lambda: query(stream(session, folder / "in", ddl), session))
        for tables in rounds:
            question.add(len(tables))
            question.add_tables(tables)

    def natively() -> Answer:
        answer = Answer()
        df = query(stream(native, folder / "in", ddl), native)
        answer.schemas = run(df, mode, folder / "native", ours=False, into=answer.batches)
        return answer

    oracle = Oracle(spark, ask)
    expected: Batches = {}
    actual: Batches = {}
    number = 0
    for turn, tables in enumerate(rounds):
        ours.conf.set("spark.millpond.partitions", conf.get("partitions", PARTITIONS[turn % len(PARTITIONS)]))
        for table in tables:
            write(folder / "in", number, table)
            number += 1
        with ThreadPoolExecutor(1) as beside:
            answering = beside.submit(oracle.answer, natively)
            schemas = run(query(stream(ours, folder / "in", ddl), ours), mode, folder / "ours", ours=True, into=actual)
        answer = answering.result()
        assert schemas == answer.schemas
        expected |= answer.batches
    assert_equal(actual, expected)
    oracle.close(assert_equal)
    return actual


def on_millpond(df: DataFrame, mode: str, engine: str = "millpond") -> None:
    """Check which engine runs all operators of a query, and let none stay on Spark that should not."""
    if not PROCESSORS_RUN:
        return
    df.sparkSession.conf.set("spark.millpond.onUnsupported", "error" if engine == "millpond" else "spark")
    operators = millpond.explain(df, mode, as_dict=True)["operators"]
    assert operators
    assert {operator["engine"] for operator in operators} == {engine}, operators


def assert_equal(actual: Batches, expected: Batches) -> None:
    """Compare batch by batch, rows as multisets."""
    assert sorted(actual) == sorted(expected)
    for number, wanted in expected.items():
        left, right = sorted(actual[number], key=order), sorted(wanted, key=order)
        if len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True)):
            continue
        lines = [f"batch {number}: {len(left)} rows, Spark has {len(right)}"]
        odd = [(a, b) for a, b in zip(left, right, strict=False) if not same(a, b)][:5]
        lines += [f"  millpond {_show(a)}\n  spark    {_show(b)}" for a, b in odd]
        raise AssertionError("\n".join(lines))


def _show(row: tuple[Any, ...]) -> str:
    return ", ".join(str(v) if isinstance(v, Decimal | dt.datetime | dt.date) else repr(v) for v in row)
