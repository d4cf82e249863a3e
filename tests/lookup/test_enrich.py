"""`millpond.enrich` on Spark alone and on Millpond, with real servers: the rows are those of a join."""

from __future__ import annotations

import datetime as dt
import importlib
import shutil
import sys
import threading
import time
import zipfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType

import millpond
from millpond.checkpoint.formats.commit import parse_commit_name, read_header
from millpond.errors import StateDamagedError, StateIncompatibleError, UnsupportedError, UsageError
from millpond.files.locations.opening import open_filesystem
from millpond.lookup import Connection, Found, PostgresTable, RedisTable
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.lookups import is_lookup_join, lookup_spec
from millpond.spec.kinds.enrich import EnrichSpec
from tests.differential.harness import Batches, assert_equal, order, plain, run
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer
from tests.servers.wire import wire

pytestmark = pytest.mark.xdist_group("lookup")

DDL = "ad string, n bigint, at timestamp"
ADS = 40


def write(folder: Path, number: int, rows: int = 300, ads: int = ADS) -> None:
    """One file: ads with nulls, and some that no table has."""
    folder.mkdir(parents=True, exist_ok=True)
    start = number * rows
    ids = [None if n % 17 == 0 else f"ad{(n * 7) % (ads + 10)}" for n in range(start, start + rows)]
    times = [dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=n) for n in range(start, start + rows)]
    schema = pa.schema([("ad", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
    table = pa.table([pa.array(ids), pa.array(range(start, start + rows)), pa.array(times)], schema=schema)
    pq.write_table(table, folder / f"{number:04}.parquet")


def stream(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1).parquet(str(folder))


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    made = spark.newSession()
    made.conf.set("spark.millpond.partitions", "3")
    made.conf.set("spark.millpond.onUnsupported", "error")
    return made


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisTable:
    fill(redis_server)
    return RedisTable(redis_server.url, "ad:{id}")


def fill(server: RedisServer, version: int = 0) -> None:
    import redis

    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        for number in range(ADS):
            client.hset(f"ad:ad{number}", mapping={"campaign": str(number % 7), "name": f"c{version}"})


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> PostgresTable:
    import psycopg

    with psycopg.connect(postgres_server.conninfo, autocommit=True) as client:
        client.execute("DROP TABLE IF EXISTS ads")
        client.execute("CREATE TABLE ads (id text PRIMARY KEY, campaign bigint, name text)")
        client.execute(f"INSERT INTO ads SELECT 'ad' || n, n % 7, 'c0' FROM generate_series(0, {ADS - 1}) n")
    return PostgresTable(postgres_server.conninfo, "ads")


def expected(rows: list[tuple[Any, ...]], how: str = "left") -> list[tuple[Any, ...]]:
    out = []
    for row in rows:
        number = int(row[0][2:]) if row[0] is not None else ADS
        if number < ADS:
            out.append((*row, number % 7, "c0"))
        elif how == "left":
            out.append((*row, None, None))
    return sorted(out, key=order)


COLUMNS = "campaign bigint, name string"


@pytest.mark.parametrize("server", ["redis", "postgres"])
@pytest.mark.parametrize("how", ["left", "inner"])
def test_rows_are_those_of_a_join(
    session: SparkSession, tmp_path: Path, request: pytest.FixtureRequest, server: str, how: Any
) -> None:
    """As a batch, as a stream on Spark alone, as a stream on Millpond with a restart and a rescale."""
    table = request.getfixturevalue(server)
    folder = tmp_path / "in"

    def enriched(df: DataFrame) -> DataFrame:
        return millpond.enrich(df, table, on={"ad": "id"}, columns=COLUMNS, how=how, batch=15)

    natively: Batches = {}
    ours: Batches = {}
    for turn in range(2):
        for number in range(2):
            write(folder, 2 * turn + number)
        session.conf.set("spark.millpond.partitions", str(3 - turn))
        run(enriched(stream(session, folder)), "append", tmp_path / "native", ours=False, into=natively)
        run(enriched(stream(session, folder)), "append", tmp_path / "ours", ours=True, into=ours)
    everything = [plain(row) for row in session.read.parquet(str(folder)).collect()]
    wanted = expected(everything, how)
    batch = sorted((plain(row) for row in enriched(session.read.parquet(str(folder))).collect()), key=order)
    assert batch == wanted
    assert sorted((row for rows in ours.values() for row in rows), key=order) == wanted
    assert_equal(ours, natively)


def test_counts_by_what_was_looked_up(session: SparkSession, tmp_path: Path, redis: RedisTable) -> None:
    """A watermark goes through, and windows above close as they do without."""
    folder = tmp_path / "in"

    def query(session: SparkSession) -> DataFrame:
        rows = stream(session, folder).withWatermark("at", "30 seconds")
        found = millpond.enrich(rows, redis, on={"ad": "id"}, columns=COLUMNS)
        return found.groupBy("campaign", F.window("at", "1 minute")).agg(F.count("*"), F.sum("n"))

    natively: Batches = {}
    ours: Batches = {}
    for turn in range(2):
        write(folder, 2 * turn)
        write(folder, 2 * turn + 1)
        run(query(session), "append", tmp_path / "native", ours=False, into=natively)
        run(query(session), "append", tmp_path / "ours", ours=True, into=ours)
    assert_equal(ours, natively)
    assert sum(len(rows) for rows in ours.values()) > 50


def test_no_commit_is_for_it_alone(session: SparkSession, tmp_path: Path, redis: RedisTable) -> None:
    """The lookup join has no state: what it commits goes with the commits of the operator above."""
    for number in range(3):
        write(tmp_path / "in", number)
    rows = millpond.enrich(stream(session, tmp_path / "in"), redis, on={"ad": "id"}, columns=COLUMNS)
    writer = millpond.writeStream(rows.groupBy("campaign").count()).outputMode("update").format("noop")
    query = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
    query.awaitTermination()
    files = open_filesystem(f"file:{tmp_path}/c/millpond")
    held: dict[int, list[set[int]]] = defaultdict(list)
    for info in files.list("commits/"):
        operators = {one.operator for one in read_header(files, info.name, info.size).manifests}
        held[parse_commit_name(info.name)[0]].append(operators)
    # The first commit cannot know which partitions to wait for, and none waits for more than a second.
    quick = [one.batchId + 1 for one in query.recentProgress if one.batchId and one.batchDuration < 1000]
    assert all(1 in operators for version in quick for operators in held[version]), held
    assert any({0, 1} in commits for commits in held.values()), held
    pinned = (tmp_path / "c/millpond/query.json").read_text()
    assert "enrich by ad" in pinned
    assert "redis" not in pinned.lower()


def test_explain_and_figures(session: SparkSession, tmp_path: Path, redis: RedisTable, capsys: Any) -> None:
    write(tmp_path / "in", 0)
    write(tmp_path / "in", 1)
    rows = millpond.enrich(stream(session, tmp_path / "in"), redis, on={"ad": "id"}, columns=COLUMNS, ttl=None)
    counts = rows.groupBy("campaign").count()
    millpond.explain(counts, "update")
    said = capsys.readouterr().out
    assert "2 operators, update mode" in said
    assert "[millpond 0] enrich by ad" in said
    assert f"cache: each key is looked up in {redis.name}, and kept in memory" in said
    assert "commits: sync because 'enrich by ad from Redis" in said
    assert millpond.explain(rows, "append", as_dict=True)["commit_mode"] == "async"
    query = (
        millpond.writeStream(counts)
        .outputMode("update")
        .format("noop")
        .option("checkpointLocation", str(tmp_path / "c"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    figures = [one.observedMetrics["millpond"].asDict() for one in query.recentProgress if one.numInputRows]
    assert figures[0]["fetched_keys"] == figures[0]["cache_misses"] == ADS + 10
    assert 1 <= figures[0]["fetches"] <= 3
    assert figures[0]["fetch_ms"] > 0
    assert figures[0]["cache_hits"] == figures[0]["failed_keys"] == 0
    assert figures[1]["cache_hits"] == ADS + 10
    assert figures[1]["fetches"] == figures[1]["state_rows"] == 0
    for operator in (None, 1):
        assert millpond.read_state(session, tmp_path / "c", operator).count() == 8
    with pytest.raises(UsageError, match=r"0 \(enrich by ad\) has no state .* Those that have state: 1 \(aggregate by"):
        millpond.read_state(session, str(tmp_path / "c"), 0)


def test_hints(session: SparkSession, tmp_path: Path, redis_server: RedisServer, redis: RedisTable) -> None:
    """Keys that are announced are asked for before their rows come, and nothing but time is another."""
    for number in range(4):
        write(tmp_path / "in", number, 4000, ads=1_000_000)  # most of them once, and not in the table
    with wire(redis_server.port, 0.02) as slow:
        table = RedisTable(f"redis://127.0.0.1:{slow.port}", "ad:{id}")
        rows = millpond.enrich(stream(session, tmp_path / "in"), table, on={"ad": "id"}, columns=COLUMNS)
        into: Batches = {}
        query = millpond.writeStream(rows).option("checkpointLocation", str(tmp_path / "c"))
        query = query.foreachBatch(lambda df, number: into.update({number: [plain(row) for row in df.collect()]}))
        started = query.trigger(availableNow=True).start()
        started.awaitTermination()
    everything = [plain(row) for row in session.read.parquet(str(tmp_path / "in")).collect()]
    assert sorted((row for rows in into.values() for row in rows), key=order) == expected(everything)
    announced = sum(one.observedMetrics["millpond"].announced_keys for one in started.recentProgress)
    assert announced > 0


class TestServerInTrouble:
    def test_killed_and_started_again(
        self, session: SparkSession, tmp_path: Path, redis_server: RedisServer, redis: RedisTable
    ) -> None:
        """The batch fails by name; the next start repeats it, and nothing is lost or counted twice."""
        write(tmp_path / "in", 0)

        def counts() -> DataFrame:
            rows = stream(session, tmp_path / "in")
            found = millpond.enrich(
                rows, redis, on={"ad": "id"}, columns=COLUMNS, ttl=0.0, timeout=0.5, retries=1, how="inner"
            )
            return found.groupBy("campaign").count()

        into: Batches = {}
        run(counts(), "update", tmp_path / "c", ours=True, into=into)
        redis_server.kill()
        write(tmp_path / "in", 1)
        with pytest.raises(PySparkException) as caught:
            run(counts(), "update", tmp_path / "c", ours=True, into=into)
        said = str(caught.value)
        for part in ("not be asked for id = 'ad", "unreachable", "partition", "operator 0", "version 1", redis.name):
            assert part in said, part
        assert sorted(into) == [0]
        redis_server.start()
        fill(redis_server)
        run(counts(), "update", tmp_path / "c", ours=True, into=into)
        assert sorted(into) == [0, 1]
        everything = [plain(row) for row in session.read.parquet(str(tmp_path / "in")).collect()]
        wanted = dict.fromkeys(range(7), 0)
        for row in expected(everything, "inner"):
            wanted[row[3]] += 1
        assert dict(into[1]) == wanted

    def test_back_in_time(
        self, session: SparkSession, tmp_path: Path, redis_server: RedisServer, redis: RedisTable
    ) -> None:
        """A server that comes back while a request is tried again costs time only."""
        write(tmp_path / "in", 0)
        redis_server.save()  # a retry must never see the server up but empty: absent keys are no failure
        redis_server.kill()

        rows = millpond.enrich(
            stream(session, tmp_path / "in"), redis, on={"ad": "id"}, columns=COLUMNS, retries=8, timeout=1
        )
        into: Batches = {}
        with ThreadPoolExecutor(1) as beside:
            running = beside.submit(lambda: run(rows, "append", tmp_path / "c", ours=True, into=into))
            time.sleep(4)
            redis_server.start()
            running.result()
        everything = [plain(row) for row in session.read.parquet(str(tmp_path / "in")).collect()]
        assert sorted(into[0], key=order) == expected(everything)

    @pytest.mark.parametrize("ours", [True, False])
    @pytest.mark.parametrize("on_error", ["null", "side"])
    def test_going_on_without(
        self,
        session: SparkSession,
        tmp_path: Path,
        redis_server: RedisServer,
        redis: RedisTable,
        ours: bool,
        on_error: Any,
    ) -> None:
        write(tmp_path / "in", 0)
        with wire(redis_server.port) as slow:
            slow.cut = True
            table = RedisTable(f"redis://127.0.0.1:{slow.port}", "ad:{id}")
            rows = millpond.enrich(
                stream(session, tmp_path / "in"),
                table,
                on={"ad": "id"},
                columns=COLUMNS,
                timeout=0.3,
                retries=0,
                on_error=on_error,
            )
            into: Batches = {}
            run(rows, "append", tmp_path / "c", ours=ours, into=into)
        assert len(into[0]) == 300
        for row in into[0]:
            assert row[3:5] == (None, None)
            if on_error == "side" and row[0] is None:
                assert row[5] is None
            elif on_error == "side":
                assert row[5][0] == "timeout"

    def test_wrong_types(
        self, session: SparkSession, tmp_path: Path, redis_server: RedisServer, redis: RedisTable
    ) -> None:
        write(tmp_path / "in", 0)
        rows = millpond.enrich(stream(session, tmp_path / "in"), redis, on={"ad": "id"}, columns="name bigint")
        with pytest.raises(PySparkException) as caught:
            run(rows, "append", tmp_path / "c", ours=True, into={})
        assert "cannot be read: name is 'c0', which is no bigint" in str(caught.value)
        rows = millpond.enrich(
            stream(session, tmp_path / "in"), redis, on={"ad": "id"}, columns="name bigint", on_error="side"
        )
        into: Batches = {}
        run(rows, "append", tmp_path / "c", ours=True, into=into)
        assert {row[4][0] for row in into[0] if row[4] is not None} == {"unreadable"}


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as what a program defines itself


class Locked:
    """A table that cannot be pickled."""

    name = "locked"

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def connect(self, columns: pa.Schema, timeout: float) -> Connection:
        raise NotImplementedError


class Squares:
    """A table of one's own: it travels with the query."""

    name = "squares"

    def connect(self, columns: pa.Schema, timeout: float) -> Connection:
        class Squaring:
            def fetch(self, keys: pa.RecordBatch) -> Found:
                numbers = keys.column(0).to_pylist()
                there = [at for at, number in enumerate(numbers) if number % 3]
                squares = pa.array([numbers[at] ** 2 for at in there], pa.int64())
                return Found(pa.RecordBatch.from_arrays([squares], schema=columns), there)

            def close(self) -> None:
                pass

        return Squaring()


def test_a_table_of_ones_own(session: SparkSession, tmp_path: Path) -> None:
    write(tmp_path / "in", 0)
    into: Batches = {}
    rows = millpond.enrich(stream(session, tmp_path / "in").select("n"), Squares(), on="n", columns="square bigint")
    run(rows, "append", tmp_path / "c", ours=True, into=into)
    assert sorted(into[0]) == sorted((n, n * n if n % 3 else None) for n in range(300))


class Padded(Squares):
    """A table with much data of its own: Spark sends a function of more than 1 MB as a broadcast variable."""

    def __init__(self) -> None:
        self.data = bytes(2 << 20)


def test_a_table_with_much_data(session: SparkSession, tmp_path: Path) -> None:
    write(tmp_path / "in", 0)
    rows = millpond.enrich(stream(session, tmp_path / "in").select("n"), Padded(), on="n", columns="square bigint")
    operators = millpond.explain(rows, "append", as_dict=True)["operators"]
    assert [one["title"] for one in operators] == ["enrich by n"]
    ours: Batches = {}
    natively: Batches = {}
    run(rows, "append", tmp_path / "ours", ours=True, into=ours)
    run(rows, "append", tmp_path / "native", ours=False, into=natively)
    assert sorted(ours[0]) == sorted((n, n * n if n % 3 else None) for n in range(300))
    assert_equal(ours, natively)


ODD_NAMES = [{"ad": "a.b"}, {"n": "a.b", "at": "c.d"}, {"ad": "__hash"}, {"n": "__HASH"}]


@pytest.mark.parametrize("names", ODD_NAMES, ids=str)
def test_names_of_columns_that_need_backticks_or_are_millponds(
    session: SparkSession, tmp_path: Path, names: dict[str, str]
) -> None:
    """A column that is carried, the key, and the time: rows are right, and the watermark is kept."""
    folder = tmp_path / "in"

    def enriched() -> DataFrame:
        rows = stream(session, folder).withWatermark("at", "30 seconds")
        for old, new in names.items():
            rows = rows.withColumnRenamed(old, new)
        return millpond.enrich(rows, Squares(), on={names.get("n", "n"): "n"}, columns="square bigint")

    def counted() -> DataFrame:
        time, carried = (f"`{names.get(name, name)}`" for name in ("at", "ad"))
        windows = enriched().groupBy(F.window(time, "1 minute"))
        return windows.agg(F.count(carried), F.sum("square"))

    for number in range(2):
        write(folder, number)
    assert enriched().columns == [*(names.get(name, name) for name in ("ad", "n", "at")), "square"]
    everything = [plain(row) for row in session.read.schema(DDL).parquet(str(folder)).collect()]
    wanted = [(*row, row[1] ** 2 if row[1] % 3 else None) for row in everything]
    for what, query in (("rows", enriched), ("counts", counted)):
        ours: Batches = {}
        natively: Batches = {}
        run(query(), "append", tmp_path / f"ours {what}", ours=True, into=ours)
        run(query(), "append", tmp_path / f"native {what}", ours=False, into=natively)
        assert_equal(ours, natively)
        out = sorted((row for rows in ours.values() for row in rows), key=order)
        if what == "rows":
            assert out == sorted(wanted, key=order)
        else:
            assert len(out) > 3


class Mistaken:
    """A table of one's own with a bug."""

    name = "mistaken"

    def connect(self, columns: pa.Schema, timeout: float) -> Connection:
        raise KeyError("n")


@pytest.mark.parametrize("ours", [True, False])
def test_a_bug_in_a_table_of_ones_own(session: SparkSession, tmp_path: Path, ours: bool) -> None:
    """It ends the query, whatever `on_error` says, and the error names the place."""
    write(tmp_path / "in", 0)
    rows = millpond.enrich(
        stream(session, tmp_path / "in"), Mistaken(), on="n", columns="square bigint", on_error="null"
    )
    with pytest.raises(PySparkException) as caught:
        run(rows, "append", tmp_path / "c", ours=ours, into={})
    line = Mistaken.connect.__code__.co_firstlineno + 1
    assert f"The table 'mistaken' has a bug: KeyError: 'n' ({__file__}, line {line}, in connect" in str(caught.value)


class TestPlans:
    def lookup(self, df: DataFrame, **more: Any) -> DataFrame:
        return millpond.enrich(df, Squares(), on="n", columns="square bigint", **more)

    def test_above_what_changes(self, session: SparkSession, tmp_path: Path) -> None:
        """Updates are enriched as the rows that they are, as on Spark alone."""
        write(tmp_path / "in", 0, 50)
        write(tmp_path / "in", 1, 50)

        def query() -> DataFrame:
            counts = stream(session, tmp_path / "in").groupBy((F.col("n") % 7).alias("n")).count()
            return self.lookup(counts)

        natively: Batches = {}
        ours: Batches = {}
        for mode in ("update", "complete"):
            run(query(), mode, tmp_path / f"native {mode}", ours=False, into=natively)
            run(query(), mode, tmp_path / f"ours {mode}", ours=True, into=ours)
            assert_equal(ours, natively)

    def test_between_what_changes_it_is_refused(self, session: SparkSession, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        counts = stream(session, tmp_path / "in").groupBy("ad").agg(F.count("*").alias("n"))
        again = self.lookup(counts).groupBy("square").count()
        reasons = [one["reason"]["text"] for one in millpond.explain(again, "update", as_dict=True)["operators"]]
        assert any("enrich (a row that is taken back may find something else by then)" in one for one in reasons)
        with pytest.raises((UnsupportedError, PySparkException)):
            run(again, "update", tmp_path / "c", ours=True, into={})

    def test_all_changes_do_not_pass(self, session: SparkSession, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        session.conf.set("spark.millpond.changes", "all")
        counts = stream(session, tmp_path / "in").groupBy("ad").agg(F.count("*").alias("n"))
        with pytest.raises(UnsupportedError, match="enrich"):
            run(self.lookup(counts), "update", tmp_path / "c", ours=True, into={})

    def test_what_is_looked_up_may_change_at_a_restart(self, session: SparkSession, tmp_path: Path) -> None:
        write(tmp_path / "in", 0, 50)
        into: Batches = {}
        source = stream(session, tmp_path / "in").select("n")
        run(self.lookup(source).groupBy().count(), "update", tmp_path / "c", ours=True, into=into)
        write(tmp_path / "in", 1, 50)
        other = millpond.enrich(source, Squares(), on="n", columns="other bigint", how="inner", cache=5)
        run(other.groupBy().count(), "update", tmp_path / "c", ours=True, into=into)
        assert into == {0: [(50,)], 1: [(50 + 33,)]}

    def test_one_that_comes_is_another_query(self, session: SparkSession, tmp_path: Path) -> None:
        write(tmp_path / "in", 0, 50)
        source = stream(session, tmp_path / "in").select("n")
        run(source.groupBy().count(), "update", tmp_path / "c", ours=True, into={})
        with pytest.raises(UsageError, match="the query has 'enrich by n'; its checkpoint has none"):
            run(self.lookup(source).groupBy().count(), "update", tmp_path / "c", ours=True, into={})

    def test_several(self, session: SparkSession, tmp_path: Path, redis: RedisTable) -> None:
        write(tmp_path / "in", 0, 50)
        both = millpond.enrich(
            self.lookup(stream(session, tmp_path / "in")), redis, on={"ad": "id"}, columns="campaign bigint"
        )
        into: Batches = {}
        run(both, "append", tmp_path / "c", ours=True, into=into)
        everything = [plain(row) for row in session.read.parquet(str(tmp_path / "in")).collect()]
        wanted = [(*row[:3], row[1] ** 2 if row[1] % 3 else None, row[3]) for row in expected(everything)]
        assert sorted(into[0], key=order) == sorted(wanted, key=order)

    def test_views_and_sql(self, session: SparkSession, tmp_path: Path) -> None:
        write(tmp_path / "in", 0, 50)
        self.lookup(stream(session, tmp_path / "in")).createOrReplaceTempView("enriched")
        into: Batches = {}
        query = session.sql("SELECT square, n FROM enriched WHERE square > 100")
        operators = millpond.explain(query, "append", as_dict=True)["operators"]
        assert [one["title"] for one in operators] == ["enrich by n"]
        run(query, "append", tmp_path / "c", ours=True, into=into)
        assert sorted(into[0]) == [(n * n, n) for n in range(11, 50) if n % 3]


def spec_of(df: DataFrame) -> EnrichSpec:
    """Return the spec that was made of the arguments."""
    catalyst = Catalyst(df.sparkSession)
    spec = lookup_spec(catalyst, next(node for node in catalyst.analyzed(df).walk() if is_lookup_join(node)))
    assert spec is not None
    return spec


class TestArguments:
    @pytest.mark.parametrize(
        ("more", "said"),
        [
            ({"table": object()}, "no table"),
            ({"table": Squares}, "Squares is a class"),
            ({"table": Locked(threading.Lock())}, "'locked' cannot be pickled"),
            ({"on": 1}, "wants names of columns"),
            ({"on": [1]}, "wants names of columns"),
            ({"columns": ["square bigint"]}, "and no text"),
            ({"columns": " "}, "no column to look up"),
            ({"columns": "square bigitn"}, "cannot be read: .*BIGITN"),
            ({"columns": StructType()}, "no column to look up"),
            ({"ttl": "60s"}, "ttl is '60s', which is no number"),
            ({"timeout": None}, "timeout is None, which is no number"),
            ({"on": "m"}, "no column 'm'"),
            ({"on": []}, "no column to look"),
            ({"on": {"n": "id", "m": "id"}}, "Two columns are looked up as id"),
            ({"columns": "n int"}, "a column n already"),
            ({"columns": "no ddl at all <"}, "cannot be read"),
            ({"columns": "x interval"}, "cannot be (read|looked up)"),
            ({"columns": "_error string", "on_error": "side"}, "_error already"),
            ({"how": "right"}, "how is 'right'"),
            ({"on_error": "ignore"}, "on_error is 'ignore'"),
            ({"cache": -1}, "cache is -1"),
            ({"ttl": -1.0}, "ttl is -1"),
            ({"timeout": 0}, "timeout is 0"),
            ({"concurrency": 0}, "concurrency is 0"),
            ({"batch": 0}, "batch is 0"),
            ({"batch": 2.5}, "batch is 2.5, which is no whole number"),
            ({"cache": 10.5}, "cache is 10.5, which is no whole number"),
            ({"concurrency": np.float64(1.5)}, "concurrency is 1.5, which is no whole number"),
            ({"retries": True}, "retries is True, which is no number"),
            ({"retries": np.True_}, "retries is .*True.*, which is no number"),
            ({"retries": "2"}, "retries is '2', which is no number"),
            ({"cache": float("inf")}, r"cache is inf, and is 0 at least, and 1e\+12 at most"),
            ({"batch": float("nan")}, "batch is nan"),
            ({"timeout": 1e9}, "timeout is 1000000000.0"),
            ({"on": {"n": "a", "N": "b"}}, "by the column N twice"),
            ({"columns": "N int"}, "a column N already"),
            ({"table": RedisTable("redis://x", "y:{z}")}, "names z, and rows are looked up by n"),
        ],
    )
    def test_what_does_not_fit_is_told(self, spark: SparkSession, more: dict[str, Any], said: str) -> None:
        given = {"table": Squares(), "on": "n", "columns": "square bigint"} | more
        with pytest.raises(UsageError, match=said):
            millpond.enrich(spark.range(1).withColumnRenamed("id", "n"), **given)

    def test_numbers_are_taken_as_they_are_meant(self, spark: SparkSession) -> None:
        df = spark.range(5).withColumnRenamed("id", "n")
        more: dict[str, Any] = {"cache": 1e6, "batch": np.int64(2), "concurrency": np.float32(3), "retries": 1.0}
        seconds: dict[str, Any] = {"ttl": np.int32(60), "timeout": np.float64(2)}
        found = millpond.enrich(df, Squares(), on="n", columns="square bigint", **more, **seconds)
        assert sorted(map(tuple, found.collect())) == [(n, n * n if n % 3 else None) for n in range(5)]
        spec = spec_of(found)
        assert (spec.most, spec.request, spec.concurrency, spec.retries) == (1_000_000, 2, 3, 1)
        assert (spec.ttl_ms, spec.timeout_ms) == (60_000, 2000)
        given = (spec.most, spec.request, spec.concurrency, spec.retries, spec.ttl_ms, spec.timeout_ms)
        assert {type(one) for one in given} == {int}

    @pytest.mark.parametrize("sensitive", [False, True])
    def test_names_are_told_apart_as_spark_does(self, session: SparkSession, sensitive: bool) -> None:
        session.conf.set("spark.sql.caseSensitive", str(sensitive).lower())
        df = session.createDataFrame([(0,), (1,), (2,)], "n bigint")  # whose session is the active one from then on
        if sensitive:
            with pytest.raises(UsageError, match="no column 'N'"):
                millpond.enrich(df, Squares(), on="N", columns="square bigint")
            found = millpond.enrich(df.withColumn("N", F.lit("x")), Squares(), on="n", columns="Square bigint")
            assert found.columns == ["n", "N", "Square"]
            again = millpond.enrich(found, Squares(), on="n", columns="square bigint")
            assert again.where("n = 2").select("n", "N", "Square", "square").collect() == [(2, "x", 4, 4)]
        else:
            found = millpond.enrich(df, Squares(), on="N", columns="Square bigint")
            assert spec_of(found).named == ("N",)
            assert sorted(map(tuple, found.select("N", "square").collect())) == [(0, None), (1, 1), (2, 4)]

    def test_case_matters_where_spark_takes_it_so(self, session: SparkSession) -> None:
        session.conf.set("spark.sql.caseSensitive", "TRUE")  # as good as `true` for Spark
        df = session.createDataFrame([(0,), (1,), (2,)], "n bigint")
        with pytest.raises(UsageError, match="no column 'N'"):
            millpond.enrich(df, Squares(), on="N", columns="square bigint")
        found = millpond.enrich(df.withColumn("N", F.lit("x")), Squares(), on="n", columns="Square bigint")
        assert found.columns == ["n", "N", "Square"]

    def test_two_columns_that_spark_does_not_tell_apart(self, session: SparkSession) -> None:
        df = session.sql("SELECT 1 AS n, 2 AS N")
        with pytest.raises(UsageError, match="Two columns are called n"):
            millpond.enrich(df, Squares(), on="n", columns="square bigint")

    def test_columns_as_a_struct(self, spark: SparkSession) -> None:
        columns = StructType([StructField("square", LongType(), nullable=False)])
        found = millpond.enrich(spark.range(3).withColumnRenamed("id", "n"), Squares(), on="n", columns=columns)
        assert found.schema["square"] == StructField("square", LongType())
        assert sorted(map(tuple, found.collect())) == [(0, None), (1, 1), (2, 4)]

    def test_a_column_that_errors_would_hide(self, spark: SparkSession) -> None:
        df = spark.range(1).selectExpr("id AS n", "1 AS _error")
        with pytest.raises(UsageError, match="a column _error already"):
            millpond.enrich(df, Squares(), on="n", columns="square bigint", on_error="side")

    def test_what_is_no_dataframe(self) -> None:
        with pytest.raises(UsageError, match="DataFrame"):
            millpond.enrich([1], Squares(), on="n", columns="square bigint")

    def test_keys_that_are_none(self, spark: SparkSession) -> None:
        for sql in ("1.5D", "array(1)", "struct(1)"):
            with pytest.raises(UsageError, match="is no key"):
                millpond.enrich(spark.sql(f"SELECT {sql} AS n"), Squares(), on="n", columns="square bigint")

    def test_nobody_has_the_client(self, spark: SparkSession) -> None:
        together = spark.range(0, 3, numPartitions=1)  # one task, which asks for all of them at once
        table = RedisTable("redis://127.0.0.1:1", "x:{id}")
        df = millpond.enrich(together, table, on="id", columns="name string", retries=0)
        with pytest.raises(PySparkException, match=r"could not be asked for id = 0 and 2 others \(unreachable: "):
            df.collect()


def test_a_query_of_sparks_is_taken_over(session: SparkSession, tmp_path: Path, redis: RedisTable) -> None:
    """The state of the operator above moves; the lookup join has none, on either side."""
    folder = tmp_path / "in"

    def query() -> DataFrame:
        found = millpond.enrich(stream(session, folder), redis, on={"ad": "id"}, columns="campaign bigint")
        return found.groupBy("campaign").count()

    write(folder, 0)
    into: Batches = {}
    run(query(), "update", tmp_path / "native", ours=False, into=into)
    taken = millpond.import_checkpoint(query(), str(tmp_path / "native"), str(tmp_path / "ours"), "update")
    assert taken.version == 1
    write(folder, 1)
    run(query(), "update", tmp_path / "native", ours=False, into=into)
    ours: Batches = {}
    run(query(), "update", tmp_path / "ours", ours=True, into=ours)
    assert_equal(ours, {1: into[1]})


def test_lookups_alone_go_on_with_spark_and_back(session: SparkSession, tmp_path: Path, redis: RedisTable) -> None:
    """There is no state that Spark would miss; of what it has done by itself Millpond knows only by an import."""
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"

    def query() -> DataFrame:
        return millpond.enrich(stream(session, folder), redis, on={"ad": "id"}, columns="campaign bigint")

    into: Batches = {}
    for number, ours in enumerate([True, False, True, False, False]):
        write(folder, number)
        run(query(), "append", checkpoint, ours=ours, into=into)
    assert sorted(into) == list(range(5))
    write(folder, 5)
    with pytest.raises(StateDamagedError, match="has no whole state of"):
        run(query(), "append", checkpoint, ours=True, into=into)
    with pytest.raises(UsageError, match="No operator of the query has state"):
        millpond.read_state(session, checkpoint)
    shutil.rmtree(checkpoint / "millpond")
    with pytest.raises(StateIncompatibleError, match="import_checkpoint"):
        run(query(), "append", checkpoint, ours=True, into=into)
    assert millpond.import_checkpoint(query(), checkpoint, tmp_path / "new").version == 5
    run(query(), "append", tmp_path / "new", ours=True, into=into)
    assert {number: len(rows) for number, rows in into.items()} == dict.fromkeys(range(6), 300)
    by_number = millpond.enrich(stream(session, folder), redis, on={"n": "id"}, columns="campaign bigint")
    differs = r"the query looks up by \(n\); its checkpoint looks up by \(ad\)[\s\S]*state cannot follow this change\.$"
    with pytest.raises(StateIncompatibleError, match=differs):
        run(by_number, "append", tmp_path / "new", ours=True, into=into)


TABLE = """
import pyarrow as pa
from millpond.lookup import Found

class Halves:
    name = "halves"

    def connect(self, columns, timeout):
        self.columns = columns
        return self

    def fetch(self, keys):
        numbers = keys.column(0).to_pylist()
        return Found(pa.record_batch([pa.array([n // 2 for n in numbers])], schema=self.columns), range(len(numbers)))

    def close(self):
        pass
"""


@pytest.mark.parametrize("form", ["py", "zip"])
def test_a_table_of_a_file_that_was_added(session: SparkSession, tmp_path: Path, form: str) -> None:
    """A class in a file of `addPyFile` is found in slots as it is in Spark's workers, also if they run already."""
    write(tmp_path / "in", 0, 50)
    source = stream(session, tmp_path / "in").select("n")
    run(source.groupBy().count(), "update", tmp_path / "before", ours=True, into={})
    module = f"halving_{form}_{tmp_path.name.replace('-', '_')}"
    file = tmp_path / f"{module}.{form}"
    if form == "py":
        file.write_text(TABLE)
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(f"{module}.py", TABLE)
    session.sparkContext.addPyFile(str(file))
    table = importlib.import_module(module).Halves()
    into: Batches = {}
    rows = millpond.enrich(source, table, on="n", columns="half bigint")
    run(rows, "append", tmp_path / "c", ours=True, into=into)
    assert sorted(into[0]) == [(n, n // 2) for n in range(50)]
