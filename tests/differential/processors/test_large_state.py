"""Large maps and lists of one key: their parts, over restarts with other numbers of partitions."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import millpond
from tests.differential.processors.checks import APIS, ONCE, Query, Turn, compare, script, spoken, transformed
from tests.differential.processors.processors import Script, Variables

HOUR = 3_600_000
MANY = 100_000  # elements that are appended at a time
ENTRIES = 20_000  # Spark takes a round trip for each
VARIABLES: Variables = {"m": ("Map", "k string, n int", "v double"), "l": ("List", "n int, s string")}


def digest(what: str) -> str:
    return f"zlib.crc32(repr([tuple(one) for one in {what}]).encode())"


def over(variables: Variables, mode: str = "none") -> Query:
    def query(df: DataFrame) -> DataFrame:
        time.sleep(0.02)  # what lives for a millisecond is over in the next run
        return transformed(df, Script(variables, modules=("zlib",)), time=mode)

    return query


@pytest.mark.timeout(600)
def test_a_map_of_many_entries(spark: SparkSession, tmp_path: Path) -> None:
    every = f"len(list(m.keys())), {digest('m.iterator()')}, m.exists()"
    first = script(
        ("k", f"[m.updateValue((str(n), n), (n / 7,)) for n in range({ENTRIES})] and m.exists()"),
        ("k", every),
        ("small", "m.updateValue(('a', None), (1.0,))"),
    )
    second = script(
        ("k", "m.getValue(('77', 77)), m.containsKey(('77', 78)), m.getValue(('x', None))"),
        ("k", "m.updateValue(('77', 77), (None,)), m.removeKey(('78', 78)), m.updateValue(('x', None), (0.5,))"),
        ("k", "m.getValue(('77', 77)), m.containsKey(('78', 78)), m.getValue(('x', None))"),
        ("k", every),
        ("small", every),
    )
    third = script(
        ("k", f"[m.removeKey((str(n), n)) for n in range(50, {ENTRIES}, {ENTRIES // 4})]"),
        ("k", f"{every}, m.clear(), m.exists(), m.updateValue(('y', 1), (1.0,)), list(m.keys())"),
    )
    fourth = script(("k", every))
    query = over(VARIABLES)
    found = compare(spark, tmp_path, [Turn(query, [table]) for table in (first, second, third, fourth)])
    assert str(ENTRIES) in spoken(found, "k")[0][1]
    shown = millpond.read_state(spark, str(tmp_path / "ours"), variable="m")
    assert {row.k: len(row.m) for row in shown.collect()} == {"k": 1, "small": 1}


@pytest.mark.parametrize("api", APIS)
def test_a_key_whose_rows_come_in_pieces(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """More than 64 MB of them, between those of other keys; frames are cut as Spark cuts them."""
    wide = f"v.update(((v.get() or (0,))[0] + len('{'x' * 100_000}'),)), v.get()"
    lines = [("heavy" if n % 8 else f"light {n}", wide) for n in range(900)]

    def query(df: DataFrame) -> DataFrame:
        return transformed(df, Script({"v": ("Value", "n bigint")}).using(api))

    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": "70"} if api == "pandas" else {}
    found = compare(spark, tmp_path, [Turn(query, [script(*lines), script(("heavy", "v.get()"))], conf=conf)])
    assert spoken(found, "heavy")[1] == ["(78700000,)"]


@pytest.mark.timeout(600)
def test_a_list_of_two_hundred_thousand_elements(spark: SparkSession, tmp_path: Path) -> None:
    every = f"{digest('l.get()')}, l.exists()"
    fill = f"l.appendList([(n, str(n) * 3) for n in range({MANY})])"
    tables = [
        script(("k", fill), ("small", "l.appendValue((1, None))")),
        script(("k", fill), *[("k", f"l.appendValue(({n}, None))") for n in range(20)], ("k", every), ("small", every)),
        script(("k", f"next(l.get()), l.put([(n, 'x') for n in range({MANY})])"), ("other", fill)),
        script(("k", f"{every}, l.clear(), {every}, l.appendValue((1, 'y'))"), ("other", every)),
    ]
    compare(spark, tmp_path, [Turn(over(VARIABLES), [table]) for table in tables])
    shown = {row.k: row.l for row in millpond.read_state(spark, str(tmp_path / "ours"), variable="l").collect()}
    assert [(row.n, row.s) for row in shown["other"]] == [(n, str(n) * 3) for n in range(MANY)]
    assert [tuple(row) for row in shown["k"]] == [(1, "y")]
    assert len(shown) == 3


@pytest.mark.timeout(600)
def test_parts_expire(spark: SparkSession, tmp_path: Path) -> None:
    """Entries with an hour to live are there in the next run; those with a millisecond are gone."""

    def living(milliseconds: int) -> Query:
        return over(
            {"m": ("Map", "k string", "v int", milliseconds), "l": ("List", "n int", milliseconds)}, "processingTime"
        )

    every = f"len(list(m.keys())), len(list(l.get())), {digest('l.get()')}, m.exists(), l.exists()"

    def fill(start: int, count: int) -> str:
        some = f"range({start}, {start + count})"
        return f"[m.updateValue((str(n),), (n,)) for n in {some}] and l.appendList([(n,) for n in {some}])"

    turns = [
        Turn(living(HOUR), [script(("k", fill(0, 1000)), ("gone", "1"))], trigger=ONCE),
        Turn(living(1), [script(("k", fill(600, 1000)), ("gone", fill(0, 1000)))], trigger=ONCE),
        Turn(living(HOUR), [script(("k", every), ("gone", every))], trigger=ONCE),
        Turn(living(HOUR), [script(("k", fill(100, 10)), ("k", every), ("gone", fill(0, 5)))], trigger=ONCE),
        Turn(living(HOUR), [script(("k", every), ("gone", every))], trigger=ONCE),
    ]
    found = compare(spark, tmp_path, turns)
    assert spoken(found, "gone")[2][0].startswith("(0, 0, ")
    assert spoken(found, "k")[2][0].startswith("(600, 1000, ")
    shown = {row.k: row.m for row in millpond.read_state(spark, str(tmp_path / "ours"), variable="m").collect()}
    assert {key: len(entries) for key, entries in shown.items()} == {"k": 600, "gone": 5}
