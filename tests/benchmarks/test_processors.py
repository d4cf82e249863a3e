"""The workloads that are processors: the processors alone, and with their sources."""

from __future__ import annotations

import re
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from benchmarks.measuring.result import Result, Spread
from benchmarks.nexmark.processors import Highest, Last, Sessions
from benchmarks.studies import timers
from benchmarks.workloads.config import RunConfig
from benchmarks.workloads.dataframes import FEW, build
from benchmarks.workloads.processors import COUNTED, ENTRIES, Looking, Waiting
from pyspark.sql import Row
from rich.console import Console

import millpond
from benchmarks import cli
from millpond.testing import ProcessorTester

BID = "price bigint, channel string, url string, at bigint, extra string"


def bid(price: int, time: int = 0, bidder: int = 2) -> tuple[Any, ...]:
    return 1, bidder, price, "c", "u", time, "x"


def test_sessions() -> None:
    schema = "bidder bigint, bid_count bigint, starttime timestamp, endtime timestamp"
    tester = ProcessorTester(
        Sessions(),
        *("bidder bigint", "bidder bigint, at bigint", schema),
        *("append", "eventTime"),
    )

    def came(key: int, *times: int) -> None:
        rows = [Row(at=time) for time in times]
        assert tester.test(key, rows) == []

    def ended(watermark: int) -> list[tuple[int, int, int]]:
        shown = tester.setWatermark(watermark)
        return sorted((row.bidder, row.bid_count, int(row.endtime.timestamp() * 1000)) for row in shown)

    came(1, 30_000, 1_000, 11_000, 1_000)
    came(2, 50_000)
    assert tester.peekListState("open", 1) == [(1_000, 21_000, 3), (30_000, 40_000, 1)]
    assert tester.peekTimers(1) == [21_000]
    came(1, 20_500)
    assert ended(30_499) == []
    assert tester.peekListState("open", 1) == [(1_000, 40_000, 5)]
    came(2, 35_000)
    assert ended(45_000) == [(1, 5, 40_000), (2, 1, 45_000)]
    assert tester.peekListState("open", 1) == tester.peekTimers(1) == []
    assert ended(60_000) == [(2, 1, 60_000)]


def test_the_last_bid() -> None:
    schema = f"auction bigint, bidder bigint, {BID}"
    tester = ProcessorTester(Last(), "bidder bigint, auction bigint", schema, schema, "update")
    assert [row.price for row in tester.test((2, 1), [bid(5, 10), bid(6, 12), bid(7, 11)])] == [6]
    assert tester.test((2, 1), [bid(8, 11)]) == []
    assert [row.price for row in tester.test((2, 1), [bid(9, 12)])] == [9]


def test_the_highest_bids() -> None:
    schema = f"auction bigint, bidder bigint, {BID}"
    tester = ProcessorTester(Highest(), "auction bigint", schema, f"{schema}, rank_number int", "update")

    def ranks(*prices: int) -> list[tuple[int, int]]:
        return [(row.rank_number, row.price) for row in tester.test(1, [bid(price) for price in prices])]

    assert ranks(1, 3, 2) == [(1, 3), (2, 2), (3, 1)]
    assert ranks(*range(10, 90, 10)) == [*enumerate((80, 70, 60, 50, 40, 30, 20, 10, 3, 2), 1)]
    assert ranks(2, 1) == []
    assert ranks(3) == [(10, 3)]
    assert tester.test(1, [bid(35, bidder=9)])[0].bidder == 9


def test_a_key_has_one_timer_at_all_times() -> None:
    schemas = ("key bigint", "key bigint, time timestamp, due bigint", COUNTED)
    tester = ProcessorTester(Waiting(100), *schemas, "update", "eventTime", eventTime="time")
    tester.testBatch([Row(key=key, due=50 + key) for key in range(3)])
    assert sorted(row.key for row in tester.setWatermark(51)) == [0, 1]
    assert tester.test(2, [Row(due=None)]) == []
    assert [tester.peekTimers(key) for key in range(3)] == [[150], [151], [52]]


def test_entries_are_looked_up() -> None:
    tester = ProcessorTester(Looking(), "key bigint", "key bigint, first boolean, at int", COUNTED, "update")
    assert tester.testBatch([(key, True, 0) for key in range(3)]) == []
    assert tester.test(2, [Row(first=False, at=7)]) == [Row(key=2, count=2 * ENTRIES + 7)]


def batches(spark: Any, config: RunConfig, count: int, folder: Path) -> list[list[Any]]:
    """Return the rows of a workload's first batches on Millpond."""
    spark = spark.newSession()
    spark.conf.set("spark.millpond.onUnsupported", "error")
    seen: dict[int, list[Any]] = {}
    frame = build(spark, config)
    writer = millpond.writeStream(frame).foreachBatch(lambda rows, number: seen.update({number: rows.collect()}))
    running = writer.outputMode("update").option("checkpointLocation", str(folder)).start()
    while len(seen) < count and running.isActive:
        running.awaitTermination(0.1)
    running.stop()
    if (failure := running.exception()) is not None:
        raise failure
    return [seen[number] for number in range(count)]


def config(workload: str, tmp_path: Path, *more: str) -> RunConfig:
    arguments = [workload, "--engines", "millpond", "--work", str(tmp_path / "work"), *more]
    return cli.configs(cli.parser().parse_args(arguments))[0]


def test_a_hundredth_of_the_timers_is_due_in_each_batch(spark: Any, tmp_path: Path) -> None:
    """All rows have to be there first, and the watermark has to reach the first timers."""
    run = config("processor_timers", tmp_path, "--keys", "20000", "--rows-per-batch", "2000")
    assert (run.left_out, run.rows_per_batch // FEW) == (10, 20)
    shown = batches(spark, run, 34, tmp_path)
    due = [len(rows) for rows in shown]
    assert due[:30] == [0] * 30, "four seconds of watermark are twenty batches"
    assert set(due[31:]) <= {199, 200, 201}
    assert max(Counter(row.key for rows in shown for row in rows).values()) == 1


@pytest.mark.parametrize("workload", ["processor_map", "processor_map_async"])
def test_lookups_read_entries_of_their_keys(spark: Any, tmp_path: Path, workload: str) -> None:
    run = config(workload, tmp_path, "--keys", "500", "--rows-per-batch", "250")
    shown = batches(spark, run, 4, tmp_path)
    assert [len(rows) for rows in shown] == [0, 0, 250, 250]
    asked = [row for rows in shown for row in rows]
    assert all(row.key * ENTRIES <= row["count"] < (row.key + 1) * ENTRIES for row in asked)
    assert len({row["count"] for row in asked}) > 450


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["processor", "--engines", "flink-forst"], "processors are for the engines on Spark"),
        (["nexmark", "--query", "q11-processor", "--engines", "flink-rocksdb"], "processors are for the engines"),
        (["processor_timers", "--rate", "5"], "processor_timers has batches of a fixed size"),
    ],
)
def test_arguments_that_conflict(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_shares_of_due_timers() -> None:
    runs: list[RunConfig] = []

    def measure(run: RunConfig, *, keep: bool) -> Result:
        runs.append(run)
        ms = run.rows_per_batch * 1000 / run.event_rate / 20
        return Result(engine=run.engine, workload=run.workload, batch_ms=Spread(ms, ms, ms, ms))

    printed = StringIO()
    assert timers.main(["--keys", "1m"], measure, Console(width=100, file=printed)) == 0
    assert [run.rows_per_batch * 1000 / run.event_rate for run in runs] == [1_000, 10_000, 100_000] * 2
    assert [run.left_out for run in runs] == [19, 15, 15] * 2
    assert re.findall(r"millpond │ +([\d,]+) │ +([\d,]+) │ +([\d.]+)", printed.getvalue()) == [
        ("1,000", "50", "50.0"),
        ("10,000", "500", "50.0"),
        ("100,000", "5,000", "50.0"),
    ]
    runs.clear()
    assert timers.main(["--engines", "spark", "--shares", "50", "100"], measure, Console(file=printed)) == 0
    assert [run.rows_per_batch * 1000 / run.event_rate for run in runs] == [20_000, 10_000]
