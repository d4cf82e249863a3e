"""Processing time: timers and time to live that are over for certain, or certainly not."""

from __future__ import annotations

import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import millpond
from tests.differential.data import write
from tests.differential.harness import on_millpond, stream
from tests.differential.processors.checks import (
    DDL,
    ONCE,
    ROCKSDB,
    Query,
    Turn,
    compare,
    script,
    spoken,
    transformed,
)
from tests.differential.processors.processors import START_MS, Script, Variables

HOUR = 3_600_000


def timed(api: str, variables: Variables, due: str = "at > 0") -> Query:
    def query(df: DataFrame) -> DataFrame:
        time.sleep(0.02)  # what lives for a millisecond is over in the next run
        return transformed(df, Script(variables, due=due).using(api), time="processingTime")

    return query


def test_timers(spark: SparkSession, tmp_path: Path) -> None:
    now = "times.getCurrentProcessingTimeInMs()"
    due = f"at * 1000 + {START_MS} <= {now}, times.getCurrentWatermarkInMs(), v.get(), v.clear(), len(timers())"
    first = script(
        ("now", f"v.update((1,)), handle.registerTimer({now}), handle.registerTimer({now} - 5), len(timers())"),
        ("soon", f"v.update((2,)), handle.registerTimer({now} + 1), len(timers())"),
        ("late", f"v.update((3,)), handle.registerTimer({now} + {HOUR}), len(timers())"),
        ("deleted", f"v.update((4,)), handle.registerTimer({now} + 1), handle.deleteTimer({now} + 1), len(timers())"),
        ("long ago", "v.update((5,)), handle.registerTimer(0), handle.registerTimer(7), len(timers())"),
    )
    second = script(*((key, "v.get(), len(timers())") for key in ("now", "late", "deleted", "new")))
    query = timed("rows", {"v": ("Value", "n int")}, due)
    third = script(("soon", f"v.get(), len(timers()), {now} > 10**12"))
    found = compare(spark, tmp_path, [Turn(query, [table], trigger=ONCE) for table in (first, second, third)])
    assert spoken(found, "now") == [
        ["(None, None, None, 2)", "due: (True, 0, (1,), None, 2)", "due: (True, 0, None, None, 1)"],
        ["(None, 0)"],
        [],
    ]
    assert spoken(found, "soon") == [
        ["(None, None, 1)"],
        ["due: (True, 0, (2,), None, 1)"],
        ["(None, 0, True)"],
    ]
    assert spoken(found, "late")[1:] == [["((3,), 1)"], []]
    assert spoken(found, "deleted")[1:] == [["((4,), 0)"], []]
    assert len(spoken(found, "long ago")[0]) == 3


def test_time_to_live(spark: SparkSession, tmp_path: Path) -> None:
    """Values, elements, entries that live for a millisecond or an hour; after each batch there is a restart."""
    names = [f"{kind}{n}" for kind in "vlm" for n in (1, 2)]
    kinds: dict[str, tuple] = {"v": ("Value", "n int"), "l": ("List", "n int"), "m": ("Map", "k int", "n int")}
    ttl = {"1": 1, "2": HOUR}
    variables: Variables = {name: (*kinds[name[0]], ttl[name[1]]) for name in names}
    told = (
        "v1.get(), v1.exists(), l1.get(), l1.exists(), m1.iterator(), m1.exists(), m1.getValue((1,)), "
        "m1.containsKey((1,)), m1.keys(), m1.values()"
    )
    both = [told, told.replace("1.", "2.")]
    fill = (
        "v1.update((1,)), v2.update((1,)), l1.put([(1,), (2,)]), l2.appendValue((1,)), "
        "m1.updateValue((1,), (1,)), m2.updateValue((1,), (1,))"
    )
    again = (
        "l1.appendValue((3,)), l2.appendValue((3,)), m1.updateValue((2,), (2,)), m2.updateValue((2,), (2,)), "
        "v1.update((9,))"
    )
    tables = [
        script(("a", fill), *(("a", one) for one in both), ("b", "v2.update((2,))")),
        script(*(("a", one) for one in both), ("a", again), *(("a", one) for one in both)),
        script(*(("a", one) for one in both), ("a", "l2.clear(), m2.removeKey((1,)), v2.clear()"), ("a", both[1])),
        script(("a", both[1]), ("a", "m2.updateValue((1,), (5,))"), ("b", both[1])),
    ]
    query = timed("pandas", variables)
    found = compare(spark, tmp_path, [Turn(query, [table], trigger=ONCE) for table in tables])
    one = "((1,), True, [(1,)], True, [((1,), (1,))], True, Row(n=1), True, [(1,)], [(1,)])"
    none = "(None, False, [], False, [], False, None, False, [], [])"
    assert spoken(found, "a")[0][1:] == [one.replace("[(1,)], T", "[(1,), (2,)], T", 1), one]
    assert spoken(found, "a")[1][:2] == [none, one]
    assert spoken(found, "a")[1][3].startswith("((9,), True, [(3,)], True, [((2,), (2,))]")
    assert spoken(found, "a")[2][0] == none
    assert spoken(found, "a")[2][1].startswith("((1,), True, [(1,), (3,)], True, [((1,), (1,)), ((2,), (2,))]")
    assert spoken(found, "a")[3][0] == "(None, False, [], False, [((2,), (2,))], True, None, False, [(2,)], [(2,)])"


def test_another_time_to_live_after_restart(spark: SparkSession, tmp_path: Path) -> None:
    """Expired elements at the beginning and in the middle of a list; entries of a map."""

    def variables(ttl: int) -> Variables:
        return {"l": ("List", "n int", ttl), "m": ("Map", "k int", "n int", ttl), "v": ("Value", "n int", ttl)}

    told = "l.get(), l.exists(), m.iterator(), v.get()"
    write = (
        "l.appendList([({0},), ({0} + 1,)]), m.updateValue(({0},), (0,)), m.updateValue(({0} + 1,), (0,)), "
        "v.update(({0},))"
    )
    tables = [script(("a", told), ("a", write.format(n * 10)), ("a", told)) for n in range(4)]
    lives = (1, HOUR, 1, HOUR)
    turns = [
        Turn(timed("rows", variables(ttl)), [table], trigger=ONCE) for ttl, table in zip(lives, tables, strict=True)
    ]
    found = compare(spark, tmp_path, turns)
    at = [[some.split("]")[0][2:] for some in batch[::2]] for batch in spoken(found, "a")]
    assert at == [
        ["", "(0,), (1,)"],
        ["", "(10,), (11,)"],
        ["(10,), (11,)", "(10,), (11,), (20,), (21,)"],
        ["(10,), (11,)", "(10,), (11,), (30,), (31,)"],
    ]
    assert [batch[0].split()[-1] for batch in spoken(found, "a")] == ["None)", "None)", "(10,))", "None)"]


def test_batches_without_rows(spark: SparkSession, tmp_path: Path) -> None:
    """There is always another batch, so that timers come due without rows, time and again."""
    again = "(v.get() or (0,))[0] < 4 and (v.update(((v.get() or (0,))[0] + 1,)), handle.registerTimer({}), v.get())"
    now = "times.getCurrentProcessingTimeInMs() + 1"
    write(tmp_path / "in", 0, script(("a", again.format(now)), ("b", f"handle.registerTimer({now} + {HOUR})")))
    query = timed("rows", {"v": ("Value", "n int")}, again.format(now))
    told = []
    for ours in (False, True):
        session = spark.newSession()
        session.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
        df = query(stream(session, tmp_path / "in", DDL))
        if ours:
            on_millpond(df, "append")
        rows: list[tuple] = []
        writer = millpond.writeStream(df) if ours else df.writeStream
        running = (
            writer.outputMode("append")
            .option("checkpointLocation", str(tmp_path / str(ours)))
            .foreachBatch(lambda batch, _, rows=rows: rows.extend(tuple(row) for row in batch.collect()))
            .trigger(processingTime="0 seconds")
            .start()
        )
        until = time.monotonic() + 60
        while len(rows) < 6 and time.monotonic() < until and running.isActive:
            time.sleep(0.1)
        running.stop()
        told.append(sorted(rows))
    assert told[0] == told[1]
    due = [f"due: (None, None, ({n},))" for n in (2, 3, 4)]
    assert told[1] == [("a", -1, said) for said in [*due, "due: False"]] + [
        ("a", 0, "(None, None, (1,))"),
        ("b", 1, "None"),
    ]
