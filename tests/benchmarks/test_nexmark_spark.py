"""Spark's source makes the generator's events, and the queries give the results that pandas gives."""

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from benchmarks.nexmark.generator import AUCTION, BID, PERSON, Nexmark, NexmarkConfig
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.spark import auctions, bids, events, numbers, numbers_between, persons

import millpond

# Slow event time, so that a few thousand events span more than a day.
CONFIG = NexmarkConfig(seed=5, rate=1)
START, STOP = 70_000, 73_000
ROWS, BATCHES = 1_000, 3


def generated(start: int, stop: int, kind: str = "bid") -> pa.Table:
    table = Nexmark(CONFIG).events(start, stop)
    return table.filter(table["event_type"].to_numpy() == ("person", "auction", "bid").index(kind))


KINDS = {"person": (persons, PERSON), "auction": (auctions, AUCTION), "bid": (bids, BID)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 1_000_000_007])
def test_rows_equal_those_of_the_generator(spark: Any, start: int, kind: str) -> None:
    make, schema = KINDS[kind]
    actual = make(numbers_between(spark, start, start + 2_000, 1), CONFIG).toArrow()
    expected = generated(start, start + 2_000, kind)[kind].combine_chunks()
    assert len(expected) > 0
    for name in schema.names:
        assert actual[name].to_pylist() == expected.field(name).to_pylist()


def test_events_equal_those_of_the_generator(spark: Any) -> None:
    actual = events(numbers_between(spark, 100, 400, 1), CONFIG).toArrow()
    assert actual.to_pylist() == Nexmark(CONFIG).events(100, 400).to_pylist()


def test_batches_have_the_exact_size_and_are_repeatable(spark: Any, tmp_path: Path) -> None:
    seen: dict[int, list[int]] = {}

    def keep(batch: Any, number: int) -> None:
        seen[number] = sorted(row.n for row in batch.collect())

    def one_batch() -> None:
        stream = numbers(spark, 50, 2).writeStream.foreachBatch(keep).trigger(once=True)
        stream.option("checkpointLocation", str(tmp_path)).start().awaitTermination(120)

    for _ in range(3):
        one_batch()
    first = dict(seen)
    assert first == {b: list(range(b * 50, b * 50 + 50)) for b in range(3)}
    # Take the last batch back: Spark runs it again.
    for name in ("2", ".2.crc"):
        (tmp_path / "commits" / name).unlink()
    seen.clear()
    one_batch()
    assert seen == {2: first[2]}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    table = pa.Table.from_struct_array(generated(START, STOP)["bid"].combine_chunks())
    rows = table.to_pandas()
    rows["day"] = rows["dateTime"].dt.strftime("%Y-%m-%d")
    rows["minute"] = rows["dateTime"].dt.strftime("%H:%M")
    rows["rank"] = 1 + (rows["price"] >= 10_000).astype(int) + (rows["price"] >= 1_000_000)
    return rows


def statistics(group: pd.DataFrame) -> dict[str, int]:
    row = {"total_bids": len(group)}
    row |= {f"rank{r}_bids": int((group["rank"] == r).sum()) for r in (1, 2, 3)}
    for column in ("bidder", "auction"):
        row[f"total_{column}s"] = group[column].nunique()
        row |= {f"rank{r}_{column}s": group.loc[group["rank"] == r, column].nunique() for r in (1, 2, 3)}
    return row


def truth_q2(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return frame[frame["auction"] % 123 == 0][["auction", "price"]].to_dict("records")


def truth_q14(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows = []
    for bid in frame.to_dict("records"):
        if 1_000_000 < 0.908 * bid["price"] < 50_000_000:
            hour = bid["dateTime"].hour
            kind = "dayTime" if 8 <= hour <= 18 else "nightTime" if hour <= 6 or hour >= 20 else "otherTime"
            rows.append({"auction": bid["auction"], "bidTimeType": kind, "c_counts": bid["extra"].count("c")})
    return rows


def truth_q15(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{"day": day, **statistics(group)} for day, group in frame.groupby("day")]


def truth_q16(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {"channel": channel, "day": day, "minute": group["minute"].max(), **statistics(group)}
        for (channel, day), group in frame.groupby(["channel", "day"])
    ]


def truth_q17(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {
            "auction": auction,
            "day": day,
            "total_bids": len(group),
            **{f"rank{r}_bids": int((group["rank"] == r).sum()) for r in (1, 2, 3)},
            "min_price": group["price"].min(),
            "max_price": group["price"].max(),
            "avg_price": int(group["price"].sum() // len(group)),
            "sum_price": group["price"].sum(),
        }
        for (auction, day), group in frame.groupby(["auction", "day"])
    ]


def truth_q21(frame: pd.DataFrame) -> list[dict[str, Any]]:
    known = {"apple": "0", "google": "1", "facebook": "2", "baidu": "3"}
    rows = []
    for bid in frame.to_dict("records"):
        _, _, tail = bid["url"].partition("channel_id=")
        channel_id = known.get(bid["channel"].lower(), tail)
        if channel_id:
            rows.append({"auction": bid["auction"], "channel": bid["channel"], "channel_id": channel_id})
    return rows


def truth_q22(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {"auction": bid["auction"], **dict(zip(("dir1", "dir2", "dir3"), bid["url"].split("/")[3:6], strict=True))}
        for bid in frame.to_dict("records")
    ]


TRUTHS = {
    "q2": truth_q2,
    "q14": truth_q14,
    "q15": truth_q15,
    "q16": truth_q16,
    "q17": truth_q17,
    "q21": truth_q21,
    "q22": truth_q22,
}


def ordered(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in rows)


@pytest.mark.parametrize("name", sorted(TRUTHS))
def test_query_results_match_pandas(spark: Any, frame: pd.DataFrame, name: str) -> None:
    expected = TRUTHS[name](frame)
    assert expected, "the events must make the query answer"
    actual = QUERIES[name].over(numbers_between(spark, START, STOP), CONFIG).select(*expected[0]).collect()
    assert ordered([row.asDict() for row in actual]) == ordered(expected)


def test_q1_converts_exactly(spark: Any, frame: pd.DataFrame) -> None:
    actual = QUERIES["q1"].over(numbers_between(spark, START, STOP), CONFIG).select("price").collect()
    thousandths = sorted(int(row.price * 1_000) for row in actual)
    assert thousandths == sorted((frame["price"] * 908).tolist())


@pytest.mark.parametrize("name", ["q0", "q15", "q16", "q17"])
def test_a_query_streams_to_the_batch_result(spark: Any, tmp_path: Path, name: str) -> None:
    query = QUERIES[name]
    last: dict[Any, tuple[Any, ...]] = {}
    stateless: list[tuple[Any, ...]] = []
    keys = len(query.keys)
    done = set()

    def keep(batch: Any, number: int) -> None:
        if number >= BATCHES:
            return
        rows = [tuple(row) for row in batch.collect()]
        if query.stateless:
            stateless.extend(rows)
        else:
            last.update({row[:keys]: row for row in rows})
        done.add(number)

    stream = query.over(numbers(spark, ROWS, 2), CONFIG)
    running = (
        millpond.writeStream(stream)
        .foreachBatch(keep)
        .outputMode(query.mode)
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    while len(done) < BATCHES and running.isActive:
        running.awaitTermination(0.1)
    running.stop()
    expected = query.over(numbers_between(spark, 0, ROWS * BATCHES), CONFIG).collect()
    actual = stateless if query.stateless else list(last.values())
    assert sorted(actual) == sorted(tuple(row) for row in expected)
