"""State whose types change between restarts: Spark can do it where state is encoded as Avro."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, IntegerType, StructField, StructType

import millpond
from tests.differential.processors.checks import ONCE, Query, Turn, compare, script, spoken, transformed
from tests.differential.processors.processors import Script, Variables

ENGINE = "millpond"
"""Which engine runs processors whose state is encoded as Avro."""

AVRO = {"spark.sql.streaming.stateStore.encodingFormat": "avro"}
PLAIN = {"spark.sql.streaming.stateStore.encodingFormat": "unsaferow"}


def of(variables: Variables, by: str = "k") -> Query:
    def query(df: DataFrame) -> DataFrame:
        return transformed(df.withColumn("key", df.k), Script(variables), by=[by])

    return query


def timed(variables: Variables) -> Query:
    return lambda df: transformed(df, Script(variables), time="processingTime")


def all_of(value: str, key: str = "k int", name: str = "") -> Variables:
    return {f"v{name}": ("Value", value), f"l{name}": ("List", value), f"m{name}": ("Map", key, value)}


# Types before and after, a value of each, and what the first has become.
STEPS = {
    "added": ("a int, b string", "a int, b string, c double", "(1, 'x')", "(2, 'y', 2.5)", "(1, 'x', None)"),
    "nested": (
        "a int, b struct<x: int>",
        "a int, b struct<x: int, y: string>",
        "(1, (1,))",
        "(2, (2, 'y'))",
        "(1, Row(x=1, y=None))",
    ),
    "removed": ("a int, b string", "b string", "(1, 'x')", "('y',)", "('x',)"),
    "reordered": ("a int, b string", "b string, a int", "(1, 'x')", "('y', 2)", "('x', 1)"),
    "wider": ("a int, b float", "a bigint, b double", "(1, 0.25)", "(2**40, 0.5)", "(1, 0.25)"),
    "more": (
        "a int, b string, c float",
        "d string, c double, a bigint",
        "(1, 'x', 0.25)",
        "('z', 0.1, 2)",
        "(None, 0.25, 1)",
    ),
    "renamed": ("a int, b string", "x int, b string", "(1, 'x')", "(2, 'y')", "(None, 'x')"),
}


def test_fields(spark: SparkSession, tmp_path: Path) -> None:
    """Fields come, go, move and widen; lists and maps have some of before and some of after."""
    before, after = (
        {name: kind for step, some in STEPS.items() for name, kind in all_of(some[at], name=f"_{step}").items()}
        for at in (0, 1)
    )
    write = "v_{0}.update({1}), l_{0}.appendValue({1}), m_{0}.updateValue(({2},), {1})"
    told = "v_{0}.get(), l_{0}.get(), m_{0}.iterator()"
    first = [(key, write.format(step, some[2], 1)) for step, some in STEPS.items() for key in (step, "as it was")]
    second = [(step, do) for step, some in STEPS.items() for do in (told.format(step), write.format(step, some[3], 2))]
    third = [(key, told.format(step)) for step in STEPS for key in (step, "as it was")]
    steps = ((before, first), (after, second), (after, third))
    turns = [Turn(of(kind), [script(*lines)], conf=AVRO) for kind, lines in steps]
    found = compare(spark, tmp_path, turns, ours_on=ENGINE)
    was = [f"({one[4]}, [{one[4]}], [((1,), {one[4]})])" for one in STEPS.values()]
    assert [spoken(found, step)[1][0] for step in STEPS] == was
    assert spoken(found, "as it was")[2] == was
    assert spoken(found, "added")[2] == [
        "((2, 'y', 2.5), [(1, 'x', None), (2, 'y', 2.5)], [((1,), (1, 'x', None)), ((2,), (2, 'y', 2.5))])"
    ]


@pytest.mark.parametrize(("before", "after"), [("a bigint", "a int"), ("a int", "a string")])
def test_refused(spark: SparkSession, tmp_path: Path, before: str, after: str) -> None:
    fails = "STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION"
    turns = [
        Turn(of(all_of(before)), [script(("a", "v.update((1,))"))], conf=AVRO),
        Turn(of(all_of(after)), [script(("a", "v.get()"))], conf=AVRO, fails=fails, fails_ours="."),
        Turn(of(all_of(before)), [], conf=AVRO),
    ]
    found = compare(spark, tmp_path, turns, ours_on=ENGINE)
    assert spoken(found, "a") == [["None"], ["(1,)"]]


NEVER_NULL = {
    "DDL": ("Value", "a int not null"),
    "struct": ("List", StructType([StructField("a", IntegerType(), False)])),
    "map": ("Map", "k int", "a int not null"),
}


@pytest.mark.parametrize("name", NEVER_NULL)
def test_fields_that_are_never_null(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Refused where the query has begun with Avro, whatever the setting is later; taken where it has not."""
    kind, *arguments = NEVER_NULL[name]
    strict: Variables = {"v": (kind, *arguments)}
    plain: Variables = {"v": (kind, *(one if one == "k int" else "a int" for one in arguments))}
    update = {"Value": "v.update((1,))", "List": "v.put([(1,)])", "Map": "v.updateValue((1,), (1,))"}[kind]
    fails = "TRANSFORM_WITH_STATE_SCHEMA_MUST_BE_NULLABLE"
    turns = [
        Turn(of(strict), [script(("a", update))], conf=AVRO, fails=fails),
        Turn(of(plain), [], conf=AVRO),
        Turn(of(strict), [script(("b", update))], conf=PLAIN, fails=fails),
        Turn(of(plain), [], conf=PLAIN),
    ]
    compare(spark, tmp_path / "avro", turns, ours_on=ENGINE)
    turns = [
        Turn(of(strict), [script(("a", update))], conf=PLAIN),
        Turn(of(strict), [script(("a", "v.exists()"))], conf=AVRO),
    ]
    compare(spark, tmp_path / "plain", turns, ours_on=ENGINE)


def test_full_fields_at_any_depth(spark: SparkSession, tmp_path: Path) -> None:
    """Those of structs in fields, and of keys of maps, are taken."""
    inner = StructType([StructField("x", IntegerType(), False)])
    deep = StructType([StructField("s", inner), StructField("l", ArrayType(IntegerType(), False))])
    variables: Variables = {"v": ("Value", deep), "m": ("Map", "k int not null", "a int")}
    do = "v.update((Row(x=1), [1])), m.updateValue((1,), (2,)), v.get(), m.keys()"
    compare(spark, tmp_path, [Turn(of(variables), [script(("a", do))], conf=AVRO)], ours_on=ENGINE)


def test_read_at_versions(spark: SparkSession, tmp_path: Path) -> None:
    """State is shown as the run that made it has it; Spark's setting counts as it was when the query was new."""
    before, after, last = "a int", "b string, a bigint", "a double"
    lives: Variables = {"v": ("Value", before, 10_000_000), "l": ("List", before, 10_000_000)}
    becomes: Variables = {name: (kind[0], after, kind[2]) for name, kind in lives.items()}
    turns = [
        Turn(timed(lives), [script(("a", "v.update((1,)), l.put([(1,)])"))], conf=AVRO, trigger=ONCE),
        Turn(timed(becomes), [script(("b", "v.update(('x', 2)), l.put([('x', 2)])"))], conf=AVRO, trigger=ONCE),
        Turn(timed({}), [script(("c", "None"))], conf=PLAIN, trigger=ONCE),
        Turn(timed({"v": ("Value", last, 10_000_000)}), [script(("a", "v.get()"))], conf=PLAIN, trigger=ONCE),
    ]
    found = compare(spark, tmp_path, turns)
    assert spoken(found, "a")[3] == ["(1.0,)"]
    shown = {
        (version, name): sorted(
            (row.k, str(row[name]).partition(", expiry")[0])
            for row in millpond.read_state(spark, str(tmp_path / "ours"), variable=name, version=version).collect()
        )
        for version, name in [(1, "v"), (2, "v"), (2, "l"), (4, "v"), (4, "l")]
    }
    assert shown == {
        (1, "v"): [("a", "Row(value=Row(a=1)")],
        (2, "v"): [("a", "Row(value=Row(b=None, a=1)"), ("b", "Row(value=Row(b='x', a=2)")],
        (2, "l"): [("a", "[Row(value=Row(b=None, a=1)"), ("b", "[Row(value=Row(b='x', a=2)")],
        (4, "v"): [("a", "Row(value=Row(a=1.0)"), ("b", "Row(value=Row(a=2.0)")],
        (4, "l"): [("a", "[Row(value=Row(b=None, a=1)"), ("b", "[Row(value=Row(b='x', a=2)")],
    }


def test_renamed(spark: SparkSession, tmp_path: Path) -> None:
    """Without Avro, other names of the same types are the same: of keys, values, and keys of maps."""
    write = "v.update((1, 'x')), m.updateValue((1,), (1, 'x'))"
    turns = [
        Turn(of(all_of("a int, b string")), [script(("a", write))]),
        Turn(of(all_of("c int, d string", "k2 int"), "key"), [script(("a", "v.get(), m.keys(), m.getValue((1,))"))]),
    ]
    found = compare(spark, tmp_path, turns)
    assert spoken(found, "a")[1] == ["((1, 'x'), [(1,)], Row(c=1, d='x'))"]


@pytest.mark.parametrize("last", ["a int, b bigint", "a int, b struct<x: int>"])
def test_back_as_another_type(spark: SparkSession, tmp_path: Path, last: str) -> None:
    """A field that was gone cannot come back as what the values that are still there cannot be read as."""
    fails = "STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION"
    turns = [
        Turn(of(all_of("a int, b string")), [script(("a", "v.update((1, 'x'))"))], conf=AVRO),
        Turn(of(all_of("a int")), [script(("b", "v.update((2,))"))], conf=AVRO),
        Turn(of(all_of(last)), [script(("a", "v.get()"))], conf=AVRO, fails=fails, fails_ours="."),
        Turn(of(all_of("a int, b string")), [script(("b", "v.get()"))], conf=AVRO),
    ]
    found = compare(spark, tmp_path, turns, ours_on=ENGINE)
    assert [spoken(found, "a")[2], spoken(found, "b")[3]] == [["(1, 'x')"], ["(2, None)"]]
