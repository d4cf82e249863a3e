"""A query with a processor, run by Spark and by Millpond, perhaps with another processor after each restart."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from millpond.errors import MillpondError
from tests.differential.data import write
from tests.differential.harness import PARTITIONS, Batches, assert_equal, on_millpond, run, stream
from tests.differential.processors.processors import START, Both
from tests.differential.recorded import Answer, Oracle, Question

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int32()), ("ts", pa.timestamp("us", tz="UTC")), ("do", pa.string())])
DDL = "k string, n int, ts timestamp, do string"
APIS = ("rows", "pandas")

Query = Callable[[DataFrame], DataFrame]
ONCE = {"once": True}
"""One batch a run: what goes by the clock never ends by itself."""


@dataclass(frozen=True)
class Turn:
    """One run of a query, over batches that are new.

    Attributes:
        query: builds it.
        tables: the batches.
        fails: a pattern that the error has which ends the run.
        fails_ours: the same for Millpond's, if it is another.
        mode: the output mode. trigger: as given to the writer.
        conf: settings of the session.
    """

    query: Query
    tables: Sequence[pa.Table]
    fails: str = ""
    fails_ours: str = ""
    mode: str = "update"
    trigger: dict[str, Any] = field(default_factory=lambda: {"availableNow": True})
    conf: dict[str, str] = field(default_factory=dict)


def script(*lines: tuple[Any, ...]) -> pa.Table:
    """A batch of rows: key, expression and, if it matters, the event time in seconds from the start."""
    times = [START + dt.timedelta(seconds=line[2] if len(line) > 2 else 0) for line in lines]
    columns = [[line[0] for line in lines], list(range(len(lines))), times, [line[1] for line in lines]]
    return pa.table([pa.array(column, one.type) for column, one in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def transformed(
    df: DataFrame,
    processor: Both,
    mode: str = "update",
    time: str = "none",
    by: Sequence[Any] = ("k",),
    **more: Any,
) -> DataFrame:
    """A frame's groups, given to a processor through the API that it is for."""
    groups = df.groupBy(*by)
    call = groups.transformWithStateInPandas if processor.pandas else groups.transformWithState
    return call(processor, processor.ddl, mode, time, **more)


def compare(
    spark: SparkSession, folder: Path, turns: Sequence[Turn], ddl: str = DDL, ours_on: str = "millpond"
) -> Batches:
    """Run both engines, turn by turn, and compare the rows of all batches and whether runs fail, and how.

    Args:
        spark: the session.
        folder: an empty one.
        turns: the runs.
        ddl: columns of the input.
        ours_on: the engine that `millpond.explain` has to name for the processors.

    Returns:
        The rows of each batch.
    """
    (folder / "in").mkdir(parents=True, exist_ok=True)
    native, ours = spark.newSession(), spark.newSession()

    def prepare(session: SparkSession, turn: Turn) -> None:
        session.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
        for name, value in turn.conf.items():
            session.conf.set(name, value)

    def ask(question: Question) -> None:
        session = spark.newSession()
        for turn in turns:
            prepare(session, turn)
            question.add(ddl, turn.mode, turn.trigger, turn.fails)
            question.add_tables(turn.tables)
            question.add_query(lambda turn=turn: turn.query(stream(session, folder / "in", ddl)))

    def answer(turn: Turn, millpond: bool) -> Answer:
        found = Answer()
        try:
            df = turn.query(stream((native, ours)[millpond], folder / "in", ddl))
            place = folder / ("ours" if millpond else "native")
            run(df, turn.mode, place, ours=millpond, into=found.batches, trigger=turn.trigger)
        except (AnalysisException, MillpondError, StreamingQueryException) as failure:
            found.error = str(failure)
        except Exception as failure:  # Millpond reports at the start what a processor does wrong on the driver
            if not millpond:
                raise
            found.error = f"{type(failure).__name__}: {failure}"
        return found

    oracle = Oracle(spark, ask)
    expected: Batches = {}
    actual: Batches = {}
    number = 0
    for at, turn in enumerate(turns):
        for session in (native, ours):
            prepare(session, turn)
        ours.conf.set("spark.millpond.partitions", PARTITIONS[at % len(PARTITIONS)])
        for table in turn.tables:
            write(folder / "in", number, table)
            number += 1
        if not turn.fails:
            on_millpond(turn.query(stream(ours, folder / "in", ddl)), turn.mode, ours_on)
        with ThreadPoolExecutor(1) as beside:
            natively = beside.submit(oracle.answer, partial(answer, turn, False))
            outcomes = answer(turn, True), natively.result()
        for engine, outcome in zip(("millpond", "spark"), outcomes, strict=True):
            assert bool(outcome.error) == bool(turn.fails), f"run {at} on {engine}: {outcome.error or 'no error'}"
            pattern = turn.fails if engine == "spark" else turn.fails_ours or turn.fails
            assert re.search(pattern, outcome.error), f"run {at} on {engine}: {outcome.error}"
        actual |= outcomes[0].batches
        expected |= outcomes[1].batches
    assert_equal(actual, expected)
    oracle.close(assert_equal)
    return actual


def spoken(found: Batches, key: str) -> list[list[str]]:
    """A script's reports of a key, batch by batch: in the order of its rows, then for timers."""
    batches = [sorted(rows, key=lambda row: (row[1] < 0, row[1:])) for _, rows in sorted(found.items())]
    return [[row[2] for row in rows if row[0] == key] for rows in batches]


def values(found: Batches) -> list[list[tuple[Any, ...]]]:
    """All rows, batch by batch, in order."""
    return [sorted(rows, key=repr) for _, rows in sorted(found.items())]
