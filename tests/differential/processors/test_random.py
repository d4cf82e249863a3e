"""Random programs: what each key's rows do with its state, over several batches and restarts."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.differential.harness import Batches
from tests.differential.processors.checks import ONCE, Query, Turn, compare, script, transformed
from tests.differential.processors.processors import Script, Variables
from tests.differential.processors.wrongs import Killing

WORDS = ["''", "'a'", "'b'", "'ab'", "'a longer word'", "'ä'", "None"]
KEYS = ["a", "a", "a", "b", "b", "c", "d", "e", "f", "g", ""]


def operation(rng: random.Random, timed: bool) -> str:
    """An expression over the state, most of which change it."""
    n, other, word = rng.choice([-300, -1, 0, 1, 2, 3, 256, None]), rng.randint(-3, 3), rng.choice(WORDS)
    entry = f"({word}, {rng.choice([-1, 0, 1, None])})"
    chosen = rng.choice(
        [
            [f"v.update(({n}, {word}))", "v.get()", "v.exists()", "v.clear()"],
            [f"l.appendValue(({n},))", f"l.appendList([({n},), ({other},)])", f"l.put([({n},), ({other},)])"],
            ["l.get()", "l.exists()", "next(l.get(), 'none')", "l.clear()", "[l.appendValue(x) for x in l.get()][8:]"],
            [f"m.updateValue({entry}, ({n},))", f"m.updateValue({entry}, ({other},))", f"m.removeKey({entry})"],
            [f"m.getValue({entry})", f"m.containsKey({entry})", "m.keys()", "m.values()", "m.exists()"],
            ["m.iterator()", "m.iterator()", "m.clear()", "[m.removeKey(one) for one in m.keys() if one[0] == 'a']"],
            [f"register({rng.randint(0, 60)})", f"delete({rng.randint(0, 60)})", "timers()"] if timed else ["v.get()"],
        ]
    )
    return rng.choice(chosen)


def batch(rng: random.Random, number: int, timed: bool) -> pa.Table:
    lines = []
    for _ in range(rng.choice([0, 40, 150])):
        do = ", ".join(operation(rng, timed) for _ in range(rng.randint(1, 3)))
        lines.append((rng.choice(KEYS), f"{do},", number * 10 + rng.randint(-5, 10)))
    return script(*lines)


DUE = (
    "v.get(), l.get(), m.iterator(), timers(), register(at + 7) if at % 3 else delete(at + 3), "
    "v.update((int(at), 'due')) if at % 2 else l.clear(), m.removeKey(('a', 1)), l.appendValue((int(at),))"
)


def query(rng: random.Random, api: str, time: str, kills: bool = False) -> Query:
    """A query whose variables live until the next batch, or for ever, where they may go by the clock.

    With `kills`, Millpond's slots are killed while its code runs.
    """

    def lives() -> tuple[int, ...]:
        return (rng.choice([1, 10**8]),) if time == "processingTime" else ()

    variables: Variables = {
        "v": ("Value", "n int, s string", *lives()),
        "l": ("List", "n int", *lives()),
        "m": ("Map", "s string, n int", "n bigint", *lives()),
    }

    def build(df: DataFrame) -> DataFrame:
        ours = df.sparkSession.conf.get("spark.millpond.partitions", None) is not None
        script = (Killing if kills and ours else Script)(variables, due=DUE).using(api)
        return transformed(df.withWatermark("ts", "3 seconds"), script, time=time)

    return build


def check(found: Batches, time: str) -> None:
    rows = [row for some in found.values() for row in some]
    assert len(rows) > 100
    assert not [row for row in rows if "Error" in row[2]]
    assert any(row[1] < 0 for row in rows) == (time != "none")


@pytest.mark.parametrize(
    ("seed", "api", "time"),
    [(1, "rows", "none"), (2, "pandas", "eventTime"), (3, "rows", "eventTime"), (4, "rows", "processingTime")],
)
def test_random_programs(spark: SparkSession, tmp_path: Path, seed: int, api: str, time: str) -> None:
    rng = random.Random(seed)
    tables = [batch(rng, number, time != "none") for number in range(6)]
    if time == "processingTime":
        turns = [Turn(query(rng, api, time), [table], trigger=ONCE) for table in tables[:4]]
    else:
        same = query(rng, api, time)
        turns = [Turn(same, tables[:3]), Turn(same, tables[3:])]
    check(compare(spark, tmp_path, turns), time)


@pytest.mark.parametrize(
    ("seed", "api", "time", "kills"),
    [
        (5, "rows", "none", False),
        (6, "pandas", "eventTime", False),
        (7, "rows", "eventTime", True),
        (8, "pandas", "processingTime", False),
        (9, "rows", "processingTime", True),
    ],
)
def test_stop_and_start_at_every_batch(
    spark: SparkSession, tmp_path: Path, seed: int, api: str, time: str, kills: bool
) -> None:
    """With another number of partitions, and another time to live where there is one; some slots are killed."""
    rng = random.Random(seed)
    trigger = ONCE if time == "processingTime" else {"availableNow": True}
    turns = [
        Turn(query(rng, api, time, kills), [batch(rng, number, time != "none")], trigger=trigger) for number in range(6)
    ]
    check(compare(spark, tmp_path, turns), time)
