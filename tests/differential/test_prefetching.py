"""State larger than memory, whose keys are announced rightly, wrongly, by this one or that, or not at all: Spark has
the same rows.

The cache policies go along, and restarts with other numbers of partitions.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond.query.launch as launch
from millpond.query.progress.reader import ProgressReader
from tests.differential.data import write
from tests.differential.harness import Batches, assert_equal, on_millpond, order, plain, run, stream
from tests.differential.processors.checks import ROCKSDB
from tests.differential.processors.large_values import LargeValues
from tests.differential.wrong_hints import WrongExchangeWrite, switch_at_random

DDL = "k string, n bigint, id bigint, v bigint, side int, t timestamp"
KEYS = 18_000
ROWS = 6_000
FILLING = 3
"""Batches that fill the state; the others come back to it."""


class Run(NamedTuple):
    """One start of the query: how keys are announced, in how many batches, with which settings."""

    hints: str
    batches: int
    partitions: str
    policy: str


RUNS = (
    Run("wrong", FILLING + 2, "2", "timestamp"),
    Run("switched", 3, "3", "clock"),
    Run("off", 1, "2", "lru"),
    Run("on", 2, "2", "lru"),
)


def table(number: int, keys: int = KEYS, rows: int = ROWS) -> pa.Table:
    rng = np.random.default_rng(number)
    some = keys // FILLING
    fresh = np.arange(number * some, (number + 1) * some) if number < FILLING else np.empty(0, np.int64)
    n = np.concatenate([fresh, rng.integers(0, keys, max(0, rows - len(fresh)))])
    rng.shuffle(n)
    seconds = 1_700_000_000 + 600 * number + np.arange(len(n)) * 600 // len(n)
    return pa.table(
        {
            "k": pa.array([f"{one:08d}" + "k" * 330 for one in n.tolist()]),
            "n": pa.array(n),
            "id": pa.array(number * rows + np.arange(len(n))),
            "v": pa.array(rng.integers(0, 1_000_000, len(n))),
            "side": pa.array(rng.integers(0, 2, len(n)), pa.int32()),
            "t": pa.array(seconds * 1_000_000, pa.timestamp("us", "UTC")),
        }
    )


def short(df: DataFrame) -> DataFrame:
    return df.withColumn("k", F.substring("k", 1, 8))


def groups(df: DataFrame, spark: SparkSession) -> DataFrame:
    return short(df.groupBy("k").agg(F.count("*"), F.sum("v"), F.max("id"), F.min_by("side", "id")))


def first_rows(df: DataFrame, spark: SparkSession) -> DataFrame:
    return short(df.dropDuplicates(["k"]).select("k", "n"))


def first_rows_of_late(df: DataFrame, spark: SparkSession) -> DataFrame:
    return short(df.withWatermark("t", "25 minutes").dropDuplicatesWithinWatermark(["k"]).select("k", "n"))


def sessions(df: DataFrame, spark: SparkSession) -> DataFrame:
    window = F.session_window("t", "17 minutes").alias("w")
    counted = df.withWatermark("t", "1 minute").groupBy("k", window).agg(F.count("*"), F.sum("v"))
    return short(counted.select("k", "w.start", "w.end", *counted.columns[2:]))


def joined(how: str, minutes: int) -> Callable[[DataFrame, SparkSession], DataFrame]:
    def query(df: DataFrame, spark: SparkSession) -> DataFrame:
        sides = [
            df.where(F.col("side") == side)
            .select(*(F.col(name).alias(f"{name}{side}") for name in ("k", "id", "v", "t")))
            .withWatermark(f"t{side}", "1 minute")
            for side in (0, 1)
        ]
        on = F.expr(f"k0 = k1 and t1 >= t0 - interval {minutes} minutes and t1 <= t0 + interval {minutes} minutes")
        return sides[0].join(sides[1], on, how).select("id0", "v0", "id1", "v1")

    return query


def top(df: DataFrame, spark: SparkSession) -> DataFrame:
    df.createOrReplaceTempView("events")
    ranked = "select k, id, v, row_number() over (partition by k order by v desc, id) rn from events"
    return short(spark.sql(f"select * from ({ranked}) where rn <= 2"))


def last_rows(df: DataFrame, spark: SparkSession) -> DataFrame:
    df.createOrReplaceTempView("events")
    frame = "partition by k order by t, id rows between 3 preceding and current row"
    return spark.sql(f"select id, sum(v) over ({frame}) s, count(*) over ({frame}) c from events")


def processors(df: DataFrame, spark: SparkSession) -> DataFrame:
    return df.groupBy("n").transformWithState(
        LargeValues(), "n bigint, count bigint, sum bigint, last string", "update", "none"
    )


@dataclass
class Case:
    """A query, and what its rows are compared with: Spark's stream, or the last of each key with Spark's batch."""

    query: Callable[[DataFrame, SparkSession], DataFrame]
    mode: str = "append"
    keys: tuple[int, ...] | None = None
    most: int = KEYS


CASES = {
    "groups": Case(groups, "update"),
    "deduplication": Case(first_rows),
    "deduplication within the watermark": Case(first_rows_of_late),
    "sessions": Case(sessions),
    "inner join": Case(joined("inner", 45)),
    "full outer join": Case(joined("full_outer", 45)),
    "top-N": Case(top, "update", keys=(0, 3)),
    "last rows": Case(last_rows, "update", keys=(0,)),
    "processors": Case(processors, "update", most=4_500),
}


def last_of(batches: Batches, keys: tuple[int, ...]) -> Batches:
    rows = {tuple(row[at] for at in keys): row for number in sorted(batches) for row in batches[number]}
    return {0: sorted(rows.values(), key=order)}


class Switching:
    """Lets partitions ask for hints of others as long as it lasts."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._switch)

    def _switch(self) -> None:
        random = Random(5)
        while not self._over.wait(0.03):
            try:
                switch_at_random(Path(tempfile.gettempdir()), random)
            except OSError:
                continue  # the slot has changed its mind meanwhile

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_same_whatever_is_announced(
    spark: SparkSession, own_slots: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = CASES[name]
    rows = ROWS if case.most == KEYS else 1_500
    tables = [table(number, case.most, rows) for number in range(sum(one.batches for one in RUNS))]
    expected: Batches = {}
    native = spark.newSession()
    native.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    actual: Batches = {}
    session = spark.newSession()
    session.conf.set("spark.millpond.slot.memory", "16m")
    session.conf.set("spark.millpond.slots", "1")
    session.conf.set("spark.millpond.combine", "auto")  # rows that are combined announce nothing
    folder, checkpoint = tmp_path / "in", tmp_path / "ours"
    number = missed = 0
    for hints, batches, partitions, policy in RUNS:
        session.conf.set("spark.millpond.partitions", partitions)
        session.conf.set("spark.millpond.cache.policy", policy)
        session.conf.set("spark.millpond.prefetch", "off" if hints == "off" else "on")
        for _ in range(batches):
            write(folder, number, tables[number])
            number += 1
        if case.keys is None:
            theirs = case.query(stream(native, folder, DDL), native)
            run(theirs, case.mode, tmp_path / "native", ours=False, into=expected)
        df = case.query(stream(session, folder, DDL), session)
        on_millpond(df, case.mode)
        with monkeypatch.context() as patch, Switching() if hints == "switched" else nullcontext():
            if hints == "wrong":
                patch.setattr(launch, "ExchangeWrite", WrongExchangeWrite)
                # Small batches whose keys are in memory would go without it.
                patch.setattr(launch, "watch_forms", lambda *arguments, **more: None)
            run(df, case.mode, checkpoint, ours=True, into=actual)
        told = [batch.operators[-1] for batch in ProgressReader(str(checkpoint)).read().batches][-batches:]
        missed += sum(one.cache_misses for one in told)
        if hints == "off":
            assert not any(one.prefetched for one in told)
        if hints == "wrong":
            vain = sum(one.prefetched["dropped_hints"] for one in told)
            assert vain + sum(one.prefetched["prefetched_keys"] for one in told) > 0
    assert missed, "all was in memory: nothing was tested"
    if case.keys is None:
        assert_equal(actual, expected)
    else:
        batch = case.query(native.read.schema(DDL).parquet(str(folder)), native)
        expected[0] = sorted((plain(row) for row in batch.collect()), key=order)
        assert_equal(last_of(actual, case.keys), expected)
