"""Restarts: with a mended processor, with other variables, modes and types; state is as the last batch left it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.differential.processors.checks import APIS, ONCE, Query, Turn, compare, script, spoken, transformed
from tests.differential.processors.processors import Script, Strict, Variables


def of(variables: Variables, mode: str = "update", time: str = "none", **more: Any) -> Query:
    def query(df: DataFrame) -> DataFrame:
        return transformed(df.withWatermark("ts", "0 seconds"), Script(variables, **more), mode, time)

    return query


def test_a_failure_and_a_mended_processor(spark: SparkSession, tmp_path: Path) -> None:
    """Changes of the failed batch are undone: values, lists, maps and timers; the batch is repeated."""
    variables: Variables = {"v": ("Value", "n int"), "l": ("List", "n int"), "m": ("Map", "k int", "n int")}

    def query(broken: bool) -> Query:
        def build(df: DataFrame) -> DataFrame:
            due = "at, v.get(), l.get(), m.iterator(), timers()"
            processor = Strict(variables, due=due, init=f"globals().update(broken={broken})").using("pandas")
            return transformed(df.withWatermark("ts", "0 seconds"), processor, time="eventTime")

        return build

    write = "v.update((row.n,)), l.appendValue((row.n,)), m.updateValue((row.n,), (row.n,)), m.removeKey((0,))"
    told = "v.get(), l.get(), m.iterator(), timers()"
    tables = [
        script(("a", f"{write}, register(10)", 2), ("b", f"{write}, register(4)", 2)),
        script(
            ("a", f"{write}, register(3), delete(10)", 5),
            ("b", f"{write}, register(1), {told}", 5),
            ("b", f"{write}, 1 / (not broken)", 5),
        ),
        script(("a", told, 6), ("b", told, 6)),
    ]
    turns = [
        Turn(query(True), tables[:2], fails=r"(?m)^ZeroDivisionError: division by zero"),
        Turn(query(False), [], trigger={"availableNow": True}),
        Turn(query(False), tables[2:]),
    ]
    found = compare(spark, tmp_path, turns)
    assert spoken(found, "a")[2:4] == [["(3.0, (0,), [(0,), (0,)], [], [3.0])"], ["((0,), [(0,), (0,)], [], [])"]]
    assert spoken(found, "b")[1] == [
        "(None, None, None, None, None, (1,), [(1,), (1,)], [((1,), (1,))], [1.0, 4.0])",
        "(None, None, None, None, 1.0)",
        "(1.0, (2,), [(1,), (1,), (2,)], [((1,), (1,)), ((2,), (2,))], [1.0, 4.0])",
    ]
    assert spoken(found, "b")[3] == ["((2,), [(1,), (1,), (2,)], [((1,), (1,)), ((2,), (2,))], [])"]


def test_variables_come_and_go(spark: SparkSession, tmp_path: Path) -> None:
    """A deleted variable is gone; one that is only left out for a while is as it was."""
    one: Variables = {"a": ("Value", "n int"), "b": ("List", "n int"), "c": ("Map", "k int", "n int")}
    two: Variables = {"a": ("Value", "n int"), "d": ("Map", "k int", "n int")}
    three: Variables = {**one, "d": ("Map", "k int", "n int"), "e": ("Value", "n int")}
    delete = "handle.deleteIfExists('b'), handle.deleteIfExists('never')"
    turns = [
        Turn(of(one), [script(("x", "a.update((1,)), b.put([(1,)]), c.updateValue((1,), (1,))"))]),
        Turn(of(two, init=delete), [script(("x", "a.get(), d.exists(), d.updateValue((2,), (2,))"))]),
        Turn(of(two), [script(("x", "a.get(), d.iterator()"))]),
        Turn(of(three), [script(("x", "a.get(), b.get(), c.iterator(), d.iterator(), e.get()"))]),
    ]
    found = compare(spark, tmp_path, turns)
    assert [batch[0] for batch in spoken(found, "x") if batch][1:] == [
        "((1,), False, None)",
        "((1,), [((2,), (2,))])",
        "((1,), [], [((1,), (1,))], [((2,), (2,))], None)",
    ]


@pytest.mark.parametrize("api", APIS)
def test_a_variable_that_begins_anew(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """A variable that is deleted and then asked for is empty at the next batch, for keys with and without rows."""
    kinds = {"v": ("Value", "'n int'"), "l": ("List", "'n int'"), "m": ("Map", "'k int', 'n int'")}
    made = (f"{name}=handle.get{kind}State('{name}', {types})" for name, (kind, types) in kinds.items())
    deleted = (f"handle.deleteIfExists('{name}')" for name in kinds)
    anew = f"{', '.join(deleted)}, globals().update({', '.join(made)})"
    kept: Variables = {"kept": ("Value", "n int")}
    all_kept: Variables = {**kept, **{name: (kind, *eval(f"[{types}]")) for name, (kind, types) in kinds.items()}}
    do = (
        "kept.get(), v.get(), list(l.get()), list(m.keys()), kept.update((row.n,)), v.update((row.n,)), "
        "l.appendList([(n,) for n in range(600)]), [m.updateValue((n,), (n,)) for n in range(70 + row.n)] and None, "
        "v.get(), sum(1 for _ in l.get()), sum(1 for _ in m.keys())"
    )

    def query(variables: Variables, init: str = "") -> Query:
        return lambda df: transformed(df, Script(variables, init=init).using(api))

    tables = [script(("a", do), ("a", do), (other, do)) for other in "bcdbb"]
    turns = [
        Turn(query(all_kept), tables[:1]),
        Turn(query(kept, anew), tables[1:3]),
        Turn(query(kept, anew), tables[3:4]),
        Turn(query(all_kept), tables[4:]),
    ]
    found = compare(spark, tmp_path, turns)
    empty = [said[0].startswith("((1,), None, [], []") for said in spoken(found, "a")]
    assert empty == [False, True, True, True, False]


@pytest.mark.parametrize("api", APIS)
def test_a_variable_that_is_deleted_once_it_is_there(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """The query runs, and what the variable had is gone; only its uses fail, but for those that go through it."""
    variables: Variables = {
        "kept": ("Value", "n int"),
        "v": ("Value", "n int"),
        "l": ("List", "n int"),
        "m": ("Map", "k int", "n int"),
    }
    write = "kept.update((1,)), v.update((1,)), l.put([(1,)]), m.updateValue((1,), (1,))"
    read = "kept.get(), v.get(), l.get(), m.iterator()"
    uses = [
        *("kept.get(), l.get(), m.iterator(), m.keys(), m.values()", "v.exists()", "v.get()", "v.update((2,))"),
        *("v.clear()", "l.exists()", "l.put([(2,)])", "l.appendValue((2,))", "l.appendList([(2,)])", "l.clear()"),
        *("m.exists()", "m.getValue((1,))", "m.containsKey((1,))", "m.updateValue((2,), (2,))", "m.removeKey((1,))"),
        "m.clear()",
    ]

    def query(init: str = "") -> Query:
        return lambda df: transformed(df, Script(variables, init=init).using(api))

    deleting = ", ".join(f"handle.deleteIfExists('{name}')" for name in "vlm")
    turns = [
        Turn(query(), [script(("a", write), ("b", write))]),
        Turn(query(deleting), [script(*(("a", use) for use in uses))]),
        Turn(query(), [script(("a", read), ("b", read))]),
    ]
    found = compare(spark, tmp_path, turns)
    first, *others = spoken(found, "a")[1]
    assert first == "((1,), [], [], [], [])"
    assert len(others) == 15
    assert all("state" in said and "is not initialized" in said for said in others)
    assert spoken(found, "b")[2] == ["((1,), None, [], [])"]


@pytest.mark.parametrize("time", ["none", "eventTime"])
def test_watermarks_come_and_go(spark: SparkSession, tmp_path: Path, time: str) -> None:
    """Batches without data come with the watermark and go with it; timers that it would make due wait for it."""

    def of(delay: str | None) -> Query:
        def query(df: DataFrame) -> DataFrame:
            marked = df.withWatermark("ts", delay) if delay else df
            return transformed(marked, Script({"v": ("Value", "n int")}, due="at, v.get()"), time=time)

        return query

    do = "v.get(), v.update((row.n,))" + (", register(int(row.ts.timestamp()) % 60 + 1)" if time == "eventTime" else "")
    tables = [script(("a", do, second), ("b", do, second)) for second in range(8)]
    delays = [None, "0 seconds", None, "1 second"]
    turns = [Turn(of(one), tables[2 * at : 2 * at + 2]) for at, one in enumerate(delays)]
    found = compare(spark, tmp_path, turns)
    assert len(found) > len(tables)
    assert any(row[1] < 0 for rows in found.values() for row in rows) == (time == "eventTime")


VALUE: Variables = {"v": ("Value", "n int")}
MAP: Variables = {"v": ("Map", "k int", "n int")}
LIVES: Variables = {"v": ("Value", "n int", 10_000_000)}


def by(key: str) -> Query:
    return lambda df: transformed(df.withColumn("number", F.lit(1)), Script(VALUE), by=[key])


CHANGES: dict[str, tuple[Query, Query, str]] = {
    "output mode": (of(VALUE), of(VALUE, mode="append"), "STATE_STORE_INVALID_CONFIG_AFTER_RESTART.*outputMode"),
    "time mode": (of(VALUE), of(VALUE, time="eventTime"), "STATE_STORE_INVALID_CONFIG_AFTER_RESTART.*timeMode"),
    "kind": (of(VALUE), of({"v": ("List", "n int")}), "STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE"),
    "type": (of(VALUE), of({"v": ("Value", "n string")}), "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE"),
    "key of map": (of(MAP), of({"v": ("Map", "k string", "n int")}), "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE"),
    "time to live": (
        of(VALUE, time="processingTime"),
        of(LIVES, time="processingTime"),
        "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE",
    ),
    "no time to live": (
        of(LIVES, time="processingTime"),
        of(VALUE, time="processingTime"),
        "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE",
    ),
    "key": (by("k"), by("number"), "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_are_refused(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Millpond says so in its own words; the query goes on with its state when the change is taken back."""
    before, after, fails = CHANGES[name]
    update, told = "v.update((1,))", "v.get()"
    if name == "key of map":
        update, told = "v.updateValue((1,), (1,))", "v.getValue((1,))"
    turns = [
        Turn(before, [script(("a", update))], trigger=ONCE),
        Turn(after, [script(("a", told))], fails=fails, fails_ours=".", trigger=ONCE),
    ]
    if name in ("type", "key of map", "output mode"):
        turns.append(Turn(before, [], trigger=ONCE))
    found = compare(spark, tmp_path, turns)
    assert spoken(found, "a")[1:] == [["Row(n=1)" if name == "key of map" else "(1,)"]] * (len(turns) - 2)
