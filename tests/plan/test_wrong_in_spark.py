"""Shapes for which Spark gives wrong rows: which queries have them, what is said of them, and near misses."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.errors import WrongInSparkError
from millpond.plan.decide import decide
from millpond.plan.wrong_in_spark import SHAPES

SETTING = "spark.millpond.onWrongInSpark"
NEAR = "lts between rts - interval 10 seconds and rts + interval 1 minute"
BELOW = "lts >= rts - interval 10 seconds"  # bounds the left time from below
ABOVE = "lts <= rts + interval 1 minute"  # bounds the right time from below
WINDOWS = "select window(lts, '1 minute') as w, count(*) as n from l join r on lk = rk and {} group by 1"


@pytest.fixture(autouse=True)
def views(stream: DataFrame) -> None:
    """The sides `l` and `r` with watermarks, `lplain` and `rplain` without, `lother` and `rother` by another time."""
    times = stream.selectExpr("k", "v", "s", "ts", "ts + make_interval(0, 0, 0, 0, 0, 0, v) as u")
    for side in ("l", "r"):
        columns = [f"{column} as {side}{column}" for column in ("k", "v", "s", "ts", "u")]
        times.selectExpr(*columns).createOrReplaceTempView(f"{side}plain")
        times.withWatermark("ts", "10 seconds").selectExpr(*columns).createOrReplaceTempView(side)
        times.withWatermark("u", "10 seconds").selectExpr(*columns).createOrReplaceTempView(f"{side}other")
    windows = times.withColumn("w", F.window("ts", "1 minute"))
    windows.withWatermark("w", "10 seconds").createOrReplaceTempView("marked")
    windows.createOrReplaceTempView("windows")


@pytest.fixture
def settings(spark: SparkSession) -> Iterator[SparkSession]:
    yield spark
    spark.conf.unset(SETTING)


WRONG = {
    "left, right unmarked": (
        "select * from l left join rplain on lk = rk and lts = rts",
        [("MP-OUTER-WATERMARK", "left outer join")],
    ),
    "left, left unmarked": (
        "select * from lplain left join r on lk = rk and lts = rts",
        [("MP-OUTER-WATERMARK", "left outer join")],
    ),
    "right": (
        "select * from l right join rplain on lk = rk and lts = rts",
        [("MP-OUTER-WATERMARK", "right outer join")],
    ),
    "full": (
        "select * from l full join rplain on lk = rk and lts = rts",
        [("MP-OUTER-WATERMARK", "full outer join")],
    ),
    "left, marked by another time": (
        "select * from l left join rother on lk = rk and lts = rts",
        [("MP-OUTER-WATERMARK", "left outer join")],
    ),
    "below a filter, an alias and a projection": (
        "select a, n from (select lk as a, lts as at, lv as n from l where lv > 0) x "
        "left join (select rk as b, rts as bt from rplain) y on a = b and at = bt where n < 10",
        [("MP-OUTER-WATERMARK", "left outer join")],
    ),
    "within a common table expression with two readers": (
        "with j as (select * from l left join rplain on lk = rk and lts = rts) "
        "select lk from j where lv > 1 union all select lk from j where lv < 1",
        [("MP-OUTER-WATERMARK", "left outer join")],
    ),
    "left on Spark": (  # the condition is not supported
        "select * from l left join rplain on lk = rk and lts = rts and concat(ls, rs) like 'a%'",
        [("MP-OUTER-WATERMARK", "left outer join")],
    ),
    "windows on one side": (
        "select * from (select lk, window(lts, '1 minute') as a from l) "
        "left join (select rk, window(rts, '1 minute') as b from rplain) on lk = rk and a = b",
        [("MP-OUTER-WATERMARK", "left outer join")],
    ),
    "an unmatched side that is kept": (
        f"select * from l full join r on lk = rk and {BELOW}",
        [("MP-OUTER-UNMATCHED", "full outer join")],
    ),
    "unmatched rows without a watermark": (
        f"select * from lplain left join r on lk = rk and {BELOW}",
        [("MP-OUTER-UNMATCHED", "left outer join")],
    ),
    "a constant": (
        f"select * from l left join r on lk = rk and {NEAR} and lv > 2",
        [("MP-OUTER-CONSTANT", "left outer join")],
    ),
    "constants on both sides": (
        f"select * from l full join r on lk = rk and {NEAR} and lv > 2 and rv <> 1 and rv > 3",
        [("MP-OUTER-CONSTANT", "full outer join")] * 2,
    ),
    "inner": (
        "select * from l join rplain on lk = rk and lts = rts",
        [("MP-JOIN-WATERMARK", "inner join")],
    ),
    "semi": (
        "select * from l left semi join rplain on lk = rk and lts = rts",
        [("MP-JOIN-WATERMARK", "left semi join")],
    ),
    "outer, made inner by a filter": (
        "select * from l left join rplain on lk = rk and lts = rts where rv > 0",
        [("MP-JOIN-WATERMARK", "inner join")],
    ),
    "another time": (
        f"select * from l join r on lk = rk and {NEAR.replace('lts', 'lu')}",
        [("MP-JOIN-TIME", "inner join")],
    ),
    "another time, outer": (
        f"select * from l left join r on lk = rk and {BELOW.replace('lts', 'lu')}",
        [("MP-JOIN-TIME", "left outer join")],
    ),
    "windows over a side that is kept": (WINDOWS.format(ABOVE), [("MP-LATE-ROWS", "aggregate by")]),
    "windows over sides that are kept": (WINDOWS.format("lv = rv"), [("MP-LATE-ROWS", "aggregate by")]),
    "sessions over a side that is kept": (
        f"select session_window(lts, '1 minute') as w, lk, count(*) from l join r on lk = rk and {ABOVE} group by 1, 2",
        [("MP-LATE-ROWS", "aggregate by")],
    ),
    "a join over a side that is kept": (
        f"with j as (select lk, lts from l join r on lk = rk and {ABOVE}) "
        "select j.lk from j join (select rk as ok, rts as ots from r) on lk = ok and lts = ots",
        [("MP-LATE-ROWS", "inner join")],
    ),
    "windows over an unmatched side that is kept": (
        f"select window(rts, '1 minute') as w, count(*) from l full join r on lk = rk and {BELOW} group by 1",
        [("MP-OUTER-UNMATCHED", "right outer join"), ("MP-LATE-ROWS", "aggregate by")],
    ),
    "through projections": (
        f"select window(a, '1 minute') as w, n, count(*) from (select at as a, n from (select lts as at, lv + 1 as n "
        f"from l join r on lk = rk and {ABOVE}) where n > 1) group by 1, 2",
        [("MP-LATE-ROWS", "aggregate by")],
    ),
    "a watermark on windows": (
        "select w, count(*) from marked group by w",
        [("MP-STRUCT-WATERMARK", "aggregate by")],
    ),
}
"""Name of a query → the query and what is wrong with it."""

RIGHT = {
    "time is key": "select * from l left join r on lk = rk and lts = rts",
    "time is key, full": "select * from l full join r on lk = rk and lts = rts",
    "windows are keys": "select * from (select lk, window(lts, '1 minute') as a from l) "
    "left join (select rk, window(rts, '1 minute') as b from r) on lk = rk and a = b",
    "range, left": f"select * from l left join r on lk = rk and {NEAR}",
    "range from below, left": f"select * from l left join r on lk = rk and {BELOW}",
    "range from above, right": f"select * from l right join r on lk = rk and {ABOVE}",
    "range, full": f"select * from l full join r on lk = rk and {NEAR}",
    "a constant of the other side": f"select * from l left join r on lk = rk and {NEAR} and rv > 2",
    "a constant of an inner join": f"select * from l join r on lk = rk and {NEAR} and lv > 2",
    "a comparison with a constant below": "select * from (select *, lv > 2 as wanted from l) "
    f"left join r on lk = rk and {NEAR} and wanted",
    "an equal constant": f"select * from l left join r on lk = rk and {NEAR} and lv = 2",
    "a constant time": f"select * from l left join r on lk = rk and {NEAR} and lts > timestamp'2024-01-01'",
    "a constant beside equal times": "select * from l left join r on lk = rk and lts = rts and lv > 2",
    "range, semi": f"select * from l left semi join r on lk = rk and {NEAR}",
    "a semi join keeps its left side": f"select * from lplain left semi join r on lk = rk and {BELOW}",
    "no watermark": "select * from lplain join rplain on lk = rk and lts = rts",
    "one watermark, by which nothing leaves": f"select * from l join rplain on lk = rk and {NEAR}",
    "two bounds, one by another time": f"select * from l join r on lk = rk and {NEAR} and lu > rts",
    "bounds that stand above": f"select * from l join r on lk = rk where {NEAR}",
    "a side that is kept, and nothing above": f"select * from l join r on lk = rk and {ABOVE}",
    "windows over a join": WINDOWS.format(NEAR),
    "windows over a side that is bounded": WINDOWS.format(BELOW),
    "windows over the other side": WINDOWS.format(ABOVE).replace("window(lts", "window(rts"),
    "windows over equal times": WINDOWS.format("lts = rts"),
    "windows below a join": "select a.w, n, m from "
    "(select window(lts, '1 minute') as w, count(*) as n from l group by 1) a left join "
    "(select window(rts, '1 minute') as w, count(*) as m from r group by 1) b on a.w = b.w",
    "windows that only have a name": "select w, count(*) from windows group by w",
    "nothing waits": "select * from marked",
    "a join with a table": "select * from l left join (select 1 as b, timestamp'2024-01-01' as bt) "
    "on lk = b and lts = bt",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(spark: SparkSession, name: str) -> None:
    query, expected = WRONG[name]
    found = decide(spark.sql(query), "append").wrong
    assert [wrong.code for wrong in found] == [code for code, _ in expected]
    for wrong, (_, title) in zip(found, expected, strict=True):
        assert wrong.title.startswith(title)


def test_every_shape_is_tried() -> None:
    assert {code for _, expected in WRONG.values() for code, _ in expected} == SHAPES.keys()


@pytest.mark.parametrize("name", RIGHT)
def test_right(spark: SparkSession, name: str) -> None:
    assert decide(spark.sql(RIGHT[name]), "append").wrong == ()


@pytest.mark.parametrize(
    ("mode", "codes"), [("append", ["MP-STRUCT-WATERMARK"]), ("update", ["MP-STRUCT-WATERMARK"]), ("complete", [])]
)
def test_a_watermark_on_windows_by_mode(spark: SparkSession, mode: str, codes: list[str]) -> None:
    df = spark.table("marked").groupBy("w").count()
    assert [wrong.code for wrong in decide(df, mode).wrong] == codes


def test_operators_that_wait_for_a_watermark_on_windows(spark: SparkSession) -> None:
    marked = spark.table("marked")
    for df in (marked.dropDuplicates(["w", "k"]), marked.dropDuplicatesWithinWatermark(["k"])):
        assert [wrong.code for wrong in decide(df, "append").wrong] == ["MP-STRUCT-WATERMARK"]
    assert decide(marked.groupBy("k").count(), "update").wrong == ()


def test_deduplication_above_a_join(spark: SparkSession) -> None:
    joined = spark.sql(f"select lk, lts from l join r on lk = rk and {ABOVE}")
    (wrong,) = decide(joined.dropDuplicates(["lk", "lts"]), "append").wrong
    assert (wrong.code, wrong.title) == ("MP-LATE-ROWS", "deduplicate by lk, lts")
    # No operator reads the time: it is gone below, and no row is late by it.
    assert decide(joined.dropDuplicates(["lk"]).select("lk"), "append").wrong == ()


@pytest.mark.parametrize(
    "text", ["select * from l left join rplain on lk = rk", "select * from l left join r on lv > rv"]
)
def test_what_spark_refuses_has_sparks_error(spark: SparkSession, tmp_path: Path, text: str) -> None:
    with pytest.raises(AnalysisException):
        start(spark, text, tmp_path)


def start(spark: SparkSession, text: str, folder: Path) -> None:
    """Start a query over no files, and let it end."""
    writer = (
        millpond.writeStream(spark.sql(text)).format("noop").option("checkpointLocation", str(folder / "checkpoint"))
    )
    writer.trigger(availableNow=True).start().awaitTermination()


CERTAIN = "select * from l left join rplain on lk = rk and lts = rts"
BY_DATA = "select * from l join rplain on lk = rk and lts = rts"


@pytest.mark.parametrize(
    ("text", "setting", "refused"),
    [
        (CERTAIN, None, True),
        (CERTAIN, "error", True),
        (CERTAIN, "warn", False),
        (BY_DATA, "auto", False),
        (BY_DATA, "error", True),
        (CERTAIN.replace("rts", "rts and concat(ls, rs) like 'a%'"), None, True),
    ],
)
def test_settings(
    settings: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    setting: str | None,
    refused: bool,
) -> None:
    monkeypatch.setattr("millpond.query.writer.StreamWriter._launch_decided", lambda *_: Started())
    if setting is not None:
        settings.conf.set(SETTING, setting)
    with caplog.at_level(logging.WARNING, "millpond"):
        if not refused:
            start(settings, text, tmp_path)
            assert any("MP-" in line and "gives wrong rows, as in Spark" in line for line in caplog.messages)
            return
        with pytest.raises(WrongInSparkError) as error:
            start(settings, text, tmp_path)
    assert "lts = rts, with a watermark on the left side only" in str(error.value)
    assert "Give both sides a watermark" in error.value.action
    assert f"{SETTING} to 'warn'" in error.value.action
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


class Started:
    """Stands for a query that has been started."""

    def awaitTermination(self) -> None:
        """End at once."""


def test_explain(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    df = spark.sql(CERTAIN)
    (wrong,) = millpond.explain(df, "append", as_dict=True)["wrong"]
    assert (wrong["code"], wrong["title"], wrong["certain"]) == ("MP-OUTER-WATERMARK", "left outer join", True)
    millpond.explain(df, "append")
    text = capsys.readouterr().out
    assert "[wrong in Spark, always] left outer join" in text
    assert wrong["text"] in text
    assert wrong["advice"] in text
    millpond.explain(spark.sql(BY_DATA), "append")
    assert "[wrong in Spark, for some data] inner join" in capsys.readouterr().out
    assert millpond.explain(spark.sql(RIGHT["range, left"]), "append", as_dict=True)["wrong"] == []
