"""`millpond.import_checkpoint`: a query goes on from Spark's own state, and shows what it would have shown natively."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.checkpoint.forks.parents import PARENTS_FILE
from millpond.errors import MillpondError, SettingError, StateIncompatibleError, TransientError, UsageError
from millpond.query import importing

SCHEMA = "id bigint, k string, t timestamp, d decimal(6,2), w decimal(34,2), i int, x double, b boolean"
FILES, ROWS = 7, 240
HALF, MORE = 3, 5
"""After how many files the query moves over, and after how many it starts again with other partitions."""

Query = Callable[[DataFrame], DataFrame]
PROVIDERS = {
    "hdfs": {
        "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state."
        "HDFSBackedStateStoreProvider"
    },
    "rocksdb": {
        "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state."
        "RocksDBStateStoreProvider",
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    },
}


@pytest.fixture(scope="module")
def data(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of rows with nulls, out of order, some of them late."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(FILES):
        rows = spark.range(number * ROWS, (number + 1) * ROWS, 1, 1).selectExpr(
            "id",
            "if(id % 17 = 0, null, concat(if(id % 5 = 0, 'a long key that lies in the heap ', 'k'), id * 7919 % 23)) k",
            f"if(id % 29 = 0, null, timestamp_seconds({number} * 10 + id * 31 % 25 - if(id % 13 = 0, 40, 0))) t",
            "if(id % 3 = 0, null, cast(id * 37 % 9000 / 100 as decimal(6,2))) d",
            "if(id % 4 = 0, null, cast(id * 1234567890123 as decimal(34,2))) w",
            "if(id % 6 = 0, null, cast(id * 31 % 997 as int)) i",
            "if(id % 7 = 0, null, id * 31 % 101 / 8) x",
            "if(id % 8 = 0, null, id % 3 = 1) b",
        )
        rows.coalesce(1).write.parquet(str(folder / f"part-{number}"))
        (file,) = (folder / f"part-{number}").glob("*.parquet")
        file.rename(folder / f"{number}.parquet")
        shutil.rmtree(folder / f"part-{number}")
    return folder


@contextmanager
def settings(spark: SparkSession, values: dict[str, str]) -> Iterator[None]:
    """The session's settings, for a while."""
    before = {name: spark.conf.get(name, None) for name in values}
    try:
        for name, value in values.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            spark.conf.unset(name) if old is None else spark.conf.set(name, old)


class Move:
    """One query, its native run and its run that moves over."""

    def __init__(self, spark: SparkSession, data: Path, folder: Path, query: Query, mode: str) -> None:
        self.spark, self.data, self.folder, self.query, self.mode = spark, data, folder, query, mode
        self.source = folder / "in"
        self.source.mkdir(exist_ok=True)
        self.old, self.new = folder / "old", folder / "new"

    def df(self) -> DataFrame:
        """The query."""
        return self.query(
            self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(self.source))
        )

    def files(self, upto: int) -> None:
        """Make the source's first `upto` files available."""
        for number in range(upto):
            if not (self.source / f"{number}.parquet").exists():
                shutil.copyfile(self.data / f"{number}.parquet", self.source / f"{number}.parquet")

    def run(self, checkpoint: Path, *, native: bool) -> dict[int, Counter]:
        """The rows of each batch up to the end of what there is."""
        shown: dict[int, Counter] = {}

        def take(batch: DataFrame, number: int) -> None:
            shown[number] = Counter(tuple(map(plain, row)) for row in batch.collect())

        writer = self.df().writeStream if native else millpond.writeStream(self.df())
        query = (
            writer.outputMode(self.mode)
            .option("checkpointLocation", str(checkpoint))
            .foreachBatch(take)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return shown

    def bring(self) -> Any:
        """Move over."""
        return millpond.import_checkpoint(self.df(), str(self.old), str(self.new), self.mode)

    def check(self, forgotten: int = 0) -> int:
        """Compare what both show; returns how many rows were compared.

        Args:
            forgotten: 1 if the last batch before the move is planned and not committed.
        """
        with settings(self.spark, {"spark.sql.shuffle.partitions": "3"}):
            self.files(HALF)
            first = self.run(self.old, native=True)
            committed = max(first) - forgotten
            if forgotten:  # as if the driver had been killed in the middle of the last batch
                for name in (f"{max(first)}", f".{max(first)}.crc"):
                    (self.old / "commits" / name).unlink(missing_ok=True)
            before = contents(self.old)
            made = self.bring()
        assert contents(self.old) == before
        assert (made.version, made.partitions) == (committed + 1, 3)
        compared = 0
        for files, partitions in ((MORE, None), (FILES, "2")):
            self.files(files)
            expected = self.run(self.old, native=True)
            with settings(self.spark, {} if partitions is None else {"spark.millpond.partitions": partitions}):
                shown = self.run(self.new, native=False)
            if partitions is not None:
                self.spark.conf.unset("spark.millpond.partitions")
            for batch in expected.keys() | shown.keys():
                same(expected.get(batch, Counter()), shown.get(batch, Counter()), batch)
            compared += sum(rows.total() for rows in expected.values())
        assert compared
        assert not list(self.new.glob("state/*/*/*.delta"))
        return compared


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def plain(value: Any) -> Any:
    """A value that can be sorted and compared."""
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return value


def exact(row: tuple[Any, ...]) -> tuple[str, ...]:
    """Values of a row that do not depend on the order of addition."""
    return tuple(repr(value) for value in row if not isinstance(value, float))


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same; doubles, but for the last digits."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def same(expected: Counter, shown: Counter, batch: int) -> None:
    """See that two batches show the same rows."""
    one, other = ((sorted(rows.elements(), key=lambda row: (exact(row), repr(row)))) for rows in (expected, shown))
    different = [pair for pair in zip_longest(one, other) if None in pair or not all(map(alike, *pair))]
    assert not different, f"batch {batch}: {different[:3]}"


FUNCTIONS = [
    "count(*) as a",
    "count(i) as b",
    "count(id) as c",
    *(f"{name}({column}) as {name}_{column}" for name in ("sum", "avg") for column in ("i", "d", "w", "x")),
    *(
        f"{name}({column}) as {name}_{column}"
        for name in ("min", "max")
        for column in ("k", "t", "d", "w", "i", "x", "b")
    ),
    "max_by(k, id)",
    "min_by(w, id)",
    "count_if(i > 300)",
    "approx_count_distinct(id)",
    "bool_and(b)",
    "bool_or(b)",
    "bit_xor(i)",
    "bit_and(i)",
    "bit_or(id)",
    *(f"{name}(x)" for name in ("stddev", "stddev_pop", "var_samp", "var_pop", "skewness", "kurtosis")),
    *(f"{name}(x, i)" for name in ("corr", "covar_pop", "covar_samp")),
    *(f"regr_{name}(x, i)" for name in ("count", "avgx", "avgy", "slope", "intercept", "r2", "sxx", "syy", "sxy")),
    "sum(i) filter (where id % 2 = 0)",
    "sum(i) / count(i) as composed",
]
ORDERED = ["first(i)", "first(i, true)", "last(i)", "last(k, true)", "any_value(x)", "last(i) filter (where i > 5)"]
"""What depends on the order of rows: one file is one partition, so that they come in one order."""


def all_of(functions: list[str]) -> list[Column]:
    return [F.expr(one) for one in functions]


def late(rows: DataFrame) -> DataFrame:
    return rows.withWatermark("t", "8 seconds")


QUERIES: dict[str, tuple[Query, str]] = {
    "update": (lambda rows: rows.groupBy("k", "b").agg(*all_of(FUNCTIONS)), "update"),
    "complete": (
        lambda rows: rows.groupBy(F.col("i") % 7).agg(F.count("*"), F.sum("d"), F.max("k"), F.product("x")),
        "complete",
    ),
    "selected": (
        lambda rows: (
            rows.groupBy("k")
            .agg(F.sum("d").alias("s"), F.count("*").alias("n"), F.max("i").alias("m"))
            .select("m", (F.col("n") + 1).alias("more"), "k", "s")
        ),
        "update",
    ),
    "no keys": (lambda rows: rows.agg(F.count("*"), F.sum("w"), F.min("k"), F.avg("x")), "update"),
    "ordered": (lambda rows: rows.groupBy("b").agg(*all_of(ORDERED)), "update"),
    "windows append": (
        lambda rows: late(rows).groupBy(F.window("t", "10 seconds"), "k").agg(*all_of(FUNCTIONS[:11])),
        "append",
    ),
    "windows update": (
        lambda rows: late(rows).groupBy("k", F.window("t", "10 seconds")).agg(*all_of(FUNCTIONS[:11])),
        "update",
    ),
    "windows complete": (lambda rows: late(rows).groupBy(F.window("t", "10 seconds")).agg(F.count("*")), "complete"),
    "sliding update": (
        lambda rows: late(rows).groupBy(F.window("t", "10 seconds", "5 seconds"), "b").agg(F.count("*"), F.sum("i")),
        "update",
    ),
    "sliding ordered": (
        lambda rows: late(rows).groupBy(F.window("t", "10 seconds", "5 seconds"), "b").agg(F.first("i"), F.count("*")),
        "append",
    ),
    "time as key": (lambda rows: late(rows).groupBy("t").agg(F.count("*"), F.max("k")), "append"),
    "sessions append": (
        lambda rows: (
            late(rows).groupBy("k", F.session_window("t", "3 seconds")).agg(*all_of([*FUNCTIONS[:11], "max(k)"]))
        ),
        "append",
    ),
    "sessions complete": (
        lambda rows: rows.groupBy(F.session_window("t", "3 seconds"), "k").agg(F.count("*")),
        "complete",
    ),
    "keys": (lambda rows: rows.dropDuplicates(["k", "i"]).select("k", "i"), "append"),
    "distinct": (lambda rows: rows.select("k", "b").distinct(), "update"),
    "keys with time": (lambda rows: late(rows).dropDuplicates(["k", "t"]).select("k", "t"), "append"),
    "keys beside time": (lambda rows: late(rows).dropDuplicates(["x", "k"]).select("k", "x", "t"), "append"),
    "within": (lambda rows: late(rows).dropDuplicatesWithinWatermark(["k", "b"]).select("k", "b"), "append"),
    "chain": (
        lambda rows: (
            late(rows)
            .groupBy(F.window("t", "5 seconds"), "k")
            .agg(F.count("*").alias("n"))
            .groupBy(F.window(F.window_time("window"), "10 seconds"))
            .agg(F.sum("n"), F.max("k"))
        ),
        "append",
    ),
}


def sides(rows: DataFrame) -> tuple[DataFrame, DataFrame]:
    left = late(rows).where("id % 3 > 0").select("id", "k", "t", "d")
    right = late(rows).where("id % 3 < 2").selectExpr("id as id2", "k as k2", "t as t2", "i as i2")
    return left, right


def joined(kind: str, condition: str) -> Query:
    def query(rows: DataFrame) -> DataFrame:
        left, right = sides(rows)
        return left.join(right, F.expr(condition), kind)

    return query


RANGE = "k = k2 and t2 between t - interval 4 seconds and t + interval 2 seconds"
QUERIES |= {
    f"{kind} join": (joined(kind, RANGE), "append")
    for kind in ("inner", "leftOuter", "rightOuter", "fullOuter", "leftSemi")
}
QUERIES["inner join for ever"] = (joined("inner", "k = k2 and i2 > 500"), "append")
QUERIES["outer join with a condition"] = (joined("leftOuter", f"{RANGE} and d > 20 and i2 > d"), "append")
WRONG_IN_SPARK = {"outer join with a condition"}
"""Queries whose unmatched rows Spark never shows, for the constant in their condition (`MP-OUTER-CONSTANT`)."""


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_goes_on_as_it_would_have_natively(spark: SparkSession, data: Path, tmp_path: Path, name: str) -> None:
    query, mode = QUERIES[name]
    provider = "rocksdb" if sum(map(ord, name)) % 2 else "hdfs"
    allowed = {"spark.millpond.onWrongInSpark": "warn"} if name in WRONG_IN_SPARK else {}
    with settings(spark, PROVIDERS[provider] | allowed):
        Move(spark, data, tmp_path, query, mode).check()


@pytest.mark.parametrize("name", ["update", "windows append", "leftOuter join"])
def test_a_planned_batch_is_run_by_the_new_query(spark: SparkSession, data: Path, tmp_path: Path, name: str) -> None:
    query, mode = QUERIES[name]
    Move(spark, data, tmp_path, query, mode).check(forgotten=1)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("windows update", "spark.sql.streaming.aggregation.stateFormatVersion", "1"),
        ("sessions append", "spark.sql.streaming.stateStore.checkpointFormatVersion", "2"),
        ("leftOuter join", "spark.sql.streaming.stateStore.checkpointFormatVersion", "2"),
    ],
)
def test_other_formats_of_the_state(
    spark: SparkSession, data: Path, tmp_path: Path, name: str, setting: str, value: str
) -> None:
    query, mode = QUERIES[name]
    with settings(spark, PROVIDERS["rocksdb"] | {setting: value}):
        Move(spark, data, tmp_path, query, mode).check()


def counts(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").agg(F.count("*"))


@pytest.fixture(scope="module")
def natively(spark: SparkSession, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Where a query has run natively over some files, once for all tests: nothing is changed there."""
    made: dict[tuple[Query, str, int], Path] = {}

    def folder(query: Query, mode: str, files: int = 1) -> Path:
        if (query, mode, files) not in made:
            move = Move(spark, data, tmp_path_factory.mktemp("natively"), query, mode)
            move.files(files)
            move.run(move.old, native=True)
            made[query, mode, files] = move.folder
        return made[query, mode, files]

    return folder


@pytest.fixture(scope="module")
def counted(natively: Callable[..., Path]) -> Path:
    """Where `counts` has run."""
    return natively(counts, "update")


REFUSED: dict[str, tuple[Query, Query, str, str]] = {
    "list": (lambda rows: rows.groupBy("k").agg(F.collect_list("i")),) * 2 + ("update", r"collect_list\(int\)"),
    "sketch": (lambda rows: rows.groupBy("k").agg(F.percentile_approx("i", 0.5)),) * 2
    + ("update", "percentile_approx"),
    "sum that may be lost": (lambda rows: rows.groupBy("k").agg(F.expr("try_sum(id)")),) * 2
    + ("update", "try_sum|sum"),
    "sliding": (
        (lambda rows: late(rows).groupBy(F.window("t", "10 seconds", "5 seconds")).agg(F.count("*")),) * 2
        + ("append", "sliding")
    ),
    "sums in another order": (
        (lambda rows: rows.groupBy("k").agg(F.sum("id").alias("a"), F.sum("i").alias("b")).select("k", "b", "a"),) * 2
        + ("update", "another order")
    ),
    "keys of one name": (
        (lambda rows: rows.select(F.col("i").alias("a"), (F.col("i") + 1).alias("a")).dropDuplicates(),) * 2
        + ("update", "one name")
    ),
    "other key": (counts, lambda rows: rows.groupBy("i").agg(F.count("*")), "update", "i int.*k string"),
    "other type": (
        counts,
        lambda rows: rows.select(F.col("i").alias("k")).groupBy("k").agg(F.count("*")),
        "update",
        "k int.*k string",
    ),
    "other function": (counts, lambda rows: rows.groupBy("k").agg(F.max("i")), "update", "max int.*count bigint"),
    "one more function": (counts, lambda rows: rows.groupBy("k").agg(F.count("*"), F.max("i")), "update", "max int"),
    "other kind": (
        counts,
        lambda rows: rows.dropDuplicates(["k"]),
        "update",
        "the query has dropDuplicates there; its checkpoint has groupBy",
    ),
    "one more operator": (
        counts,
        lambda rows: rows.dropDuplicates(["i"]).groupBy("k").agg(F.count("*")),
        "update",
        r"2 stateful operators (.*); its checkpoint has 1 stateful operator \(groupBy\)",
    ),
    "nothing": (
        counts,
        lambda rows: rows.where("i > 3"),
        "append",
        "0 stateful operators; its checkpoint has 1 stateful",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_over_is_refused_before_anything_is_written(
    spark: SparkSession, data: Path, natively: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    before, after, mode, why = REFUSED[name]
    move = Move(spark, data, natively(before, "update" if before is counts else mode), after, mode)
    move.new = tmp_path / "new"
    with pytest.raises(StateIncompatibleError, match=why):
        move.bring()
    assert not move.new.exists()


def windowed(size: str, slide: str | None = None, start: str = "0 seconds", *, marked: bool = True) -> Query:
    def query(rows: DataFrame) -> DataFrame:
        rows = late(rows) if marked else rows
        return rows.groupBy(F.window("t", size, slide or size, start), "b").agg(F.count("*"))

    return query


def sessions(gap: str, function: str = "max(i)") -> Query:
    return lambda rows: late(rows).groupBy("k", F.session_window("t", gap)).agg(F.expr(function))


def within(delay: str) -> Query:
    return lambda rows: rows.withWatermark("t", delay).dropDuplicatesWithinWatermark(["k", "b"]).select("k", "b")


def timed(rows: DataFrame) -> DataFrame:
    return rows.groupBy("t").agg(F.count("*"))


def inner(condition: str) -> Query:
    return joined("inner", f"{condition} and t2 between t - interval 4 seconds and t + interval 2 seconds")


TENS, EACH, COUNTED, KEPT = (
    windowed("10 seconds"),
    inner("k = k2"),
    sessions("8 seconds", "count(*)"),
    within("30 days"),
)
COMPLETE, UNMARKED = windowed("10 seconds"), windowed("10 seconds", marked=False)
CONTRADICTED: dict[str, tuple[Query, str, Query, str, str]] = {
    "size": (
        *(TENS, "update", windowed("20 seconds"), "update"),
        "the query has windows of 20 seconds; its checkpoint has windows of 10 seconds",
    ),
    "size with other results": (
        *(TENS, "update", lambda rows: windowed("20 seconds")(rows).select("window", "b", "count(1)"), "append"),
        "the query has windows of 20 seconds; its checkpoint has windows of 10 seconds",
    ),
    "size of windows from before a projection": (
        *(TENS, "update"),
        lambda rows: (
            late(rows).select(F.window("t", "20 seconds").alias("window"), "b").groupBy("window", "b").agg(F.count("*"))
        ),
        *("update", "the query has windows of 20 seconds; its checkpoint has windows of 10 seconds"),
    ),
    "size in complete mode": (
        *(UNMARKED, "complete", windowed("20 seconds", marked=False), "complete"),
        "the query has windows of 20 seconds; its checkpoint has windows of 10 seconds",
    ),
    "start": (
        *(TENS, "update", windowed("10 seconds", start="3 seconds"), "update"),
        r"windows of 10 seconds \(startTime 3 seconds\), but no window begins at .*:.0; its checkpoint has one from",
    ),
    "slide": (
        *(TENS, "update", windowed("10 seconds", "5 seconds"), "update"),
        "the query has windows of 10 seconds every 5 seconds; its checkpoint has windows of 10 seconds that do not "
        "overlap",
    ),
    "longer slide": (
        *(windowed("10 seconds", "5 seconds"), "update", TENS, "update"),
        "the query has windows of 10 seconds, but no window begins at .*:.5; its checkpoint has one",
    ),
    "windows of keys": (
        lambda rows: late(rows).select(F.window("t", "10 seconds"), "b").dropDuplicates(),
        "append",
        lambda rows: late(rows).select(F.window("t", "5 seconds"), "b").dropDuplicates(),
        "append",
        "the query has windows of 5 seconds; its checkpoint has windows of 10 seconds",
    ),
    "longer gap": (
        *(sessions("3 seconds"), "append", sessions("30 seconds"), "append"),
        "the query has sessions with a gap of 30 seconds; its checkpoint has sessions of",
    ),
    "shorter gap": (
        *(COUNTED, "append", sessions("3 seconds", "count(*)"), "append"),
        r"the query has sessions with a gap of 3 seconds; its checkpoint has one of \d rows? and 8 seconds",
    ),
    "output mode": (
        *(COMPLETE, "complete", TENS, "append"),
        "the query removes groups that the watermark has passed; its checkpoint still has some of",
    ),
    "no watermark any more": (
        *(TENS, "update", UNMARKED, "update"),
        "the query has no watermark on window; its checkpoint has one of 8 seconds",
    ),
    "a new watermark": (
        *(UNMARKED, "update", TENS, "update"),
        "the query has a watermark of 8 seconds on window; its checkpoint has none",
    ),
    "a watermark on a time": (
        *(timed, "update", lambda rows: timed(late(rows)), "update"),
        "the query has a watermark of 8 seconds on t; its checkpoint has none",
    ),
    "keys of a join": (
        *(EACH, "append", inner("id = id2"), "append"),
        r"the query joins by \(id\) on its left side; its checkpoint joins by \(something string\) there"
        r"|the query joins by \(id\) on its left side; its checkpoint joins by \(k\) there",
    ),
    "more keys of a join": (
        *(inner("id % 1000 = id2 % 1000"), "append", inner("id % 1000 = id2 % 1000 and k = k2"), "append"),
        r"joins by \(\(id % .*, k\) on its left side; its checkpoint joins by \(id\) there",
    ),
    "a shorter delay": (
        *(KEPT, "append", within("8 seconds"), "append"),
        "the query keeps keys for 8 seconds, the delay of its watermark; its checkpoint keeps some until",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTED)
def test_rows_of_another_query_are_refused_before_anything_is_written(
    spark: SparkSession, data: Path, natively: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """A schema has neither how long windows are nor what a join compares: rows that never were would come out."""
    before, mode, after, new_mode, why = CONTRADICTED[name]
    move = Move(spark, data, natively(before, mode, 2), after, new_mode)
    move.new = tmp_path / "new"
    with pytest.raises(StateIncompatibleError, match=why):
        move.bring()
    assert not move.new.exists()


def test_joins_of_a_format_that_is_not_known_are_refused(spark: SparkSession, data: Path, tmp_path: Path) -> None:
    query, mode = QUERIES["inner join"]
    with settings(spark, PROVIDERS["rocksdb"] | {"spark.sql.streaming.join.stateFormatVersion": "3"}):
        move = Move(spark, data, tmp_path, query, mode)
        move.files(1)
        move.run(move.old, native=True)
        with pytest.raises(StateIncompatibleError, match="a format that has no left-keyWithIndexToValue"):
            move.bring()
    assert not move.new.exists()


def test_a_place_that_is_taken_or_wrong_is_refused(spark: SparkSession, data: Path, tmp_path: Path) -> None:
    move = Move(spark, data, tmp_path, counts, "update")
    with pytest.raises(UsageError, match="no query here"):
        move.bring()
    move.files(1)
    move.run(move.old, native=True)
    spark.conf.set("spark.millpond.state.location", str(tmp_path / "states"))
    try:
        with pytest.raises(SettingError, match=r"Unset it, .* give a checkpoint there"):
            move.bring()
    finally:
        spark.conf.unset("spark.millpond.state.location")
    move.bring()
    with pytest.raises(UsageError, match="something here already"):
        move.bring()
    with pytest.raises(UsageError, match="Millpond's already"):
        millpond.import_checkpoint(move.df(), str(move.new), str(tmp_path / "third"), "update")
    assert not (tmp_path / "third").exists()
    query = (
        move.df().writeStream.format("noop").outputMode("update").option("checkpointLocation", str(move.old)).start()
    )
    try:
        with pytest.raises(UsageError, match="running"):
            millpond.import_checkpoint(move.df(), str(move.old), str(tmp_path / "third"), "update")
    finally:
        query.stop()


@pytest.mark.parametrize("step", ["write_document_once", "_claim_generation", "drain", "copy_folders", "copy_logs"])
def test_no_query_starts_where_an_import_was_interrupted(
    spark: SparkSession, data: Path, counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    move = Move(spark, data, counted, counts, "update")
    move.new = tmp_path / "new"

    real = getattr(importing, step)

    def dying(*arguments: Any, **named: Any) -> Any:
        if PARENTS_FILE in arguments:  # else there is nothing yet
            return real(*arguments, **named)
        raise TransientError("The driver dies.")

    monkeypatch.setattr(importing, step, dying)
    with pytest.raises(TransientError, match="dies"):
        move.bring()
    with pytest.raises(MillpondError, match="interrupted"):
        move.run(move.new, native=False)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="something here already"):
        move.bring()
    shutil.rmtree(move.new)
    move.bring()
