"""Values, lists and maps: all operations, over batches and restarts, in both APIs."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.differential.processors.checks import APIS, Query, Turn, compare, script, spoken, transformed, values
from tests.differential.processors.processors import Count, Script, Variables

VARIABLES: Variables = {
    "v": ("Value", "n int, s string"),
    "l": ("List", "n int"),
    "m": ("Map", "k string, n int", "v double"),
    "other": ("Value", "d double"),
}
EVERYTHING = "v.get(), l.get(), m.iterator(), other.get()"


def over(variables: Variables, api: str) -> Query:
    def query(df: DataFrame) -> DataFrame:
        return transformed(df, Script(variables, modules=("numpy", "pandas")).using(api))

    return query


@pytest.mark.parametrize("api", APIS)
def test_counts(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """Keys come in several places of a batch, and again after restarts; one batch is empty."""

    def query(df: DataFrame) -> DataFrame:
        return transformed(df, Count().using(api))

    tables = [script(*((key, "") for key in batch)) for batch in ("abacab", "cad", "", "bbbbz")]
    found = compare(spark, tmp_path, [Turn(query, tables[:2]), Turn(query, tables[2:3]), Turn(query, tables[3:])])
    assert values(found) == [
        [("('a',)", 3, 3), ("('b',)", 2, 2), ("('c',)", 1, 1)],
        [("('a',)", 4, 1), ("('c',)", 2, 1), ("('d',)", 1, 1)],
        [],
        [("('b',)", 6, 4), ("('z',)", 1, 1)],
    ]


@pytest.mark.parametrize("api", APIS)
def test_what_reads_give(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """Tuples, but a map's `getValue` a row. A list's iterator has what there is when its first element is asked for."""
    fill = "v.update((1, 'x')), l.put([(1,), (2,)]), m.updateValue(('k', 1), (0.5,))"
    table = script(
        ("a", fill),
        ("a", "v.get(), l.get(), m.getValue(('k', 1)), m.getValue(('k', 1)).v, m.keys(), m.values(), m.iterator()"),
        ("a", "(it := l.get()), l.appendValue((3,)), list(it)"),
        ("a", "(it := l.get()), next(it), l.appendValue((4,)), l.put([(5,)]), list(it), list(l.get())"),
        ("a", "[l.appendValue((n + 10,)) for (n,) in l.get()], list(l.get()), [l.clear() for _ in l.get()], l.get()"),
    )
    found = compare(spark, tmp_path, [Turn(over(VARIABLES, api), [table])])
    assert spoken(found, "a") == [
        [
            "(None, None, None)",
            "((1, 'x'), [(1,), (2,)], Row(v=0.5), 0.5, [('k', 1)], [(0.5,)], [(('k', 1), (0.5,))])",
            "([], None, [(1,), (2,), (3,)])",
            "([], (1,), None, None, [(2,), (3,)], [(5,)])",
            "([None], [(5,), (15,)], [None, None], [])",
        ]
    ]


@pytest.mark.parametrize("api", APIS)
def test_operations(spark: SparkSession, tmp_path: Path, api: str) -> None:
    entries = "[m.updateValue((k, n), (n and 1 / n,)) for k in ('b', 'a', 'ab', '', None) for n in (1, -1, None)]"
    first = script(
        ("value", "v.exists(), v.get(), v.clear()"),
        ("value", "v.update((1, 'x')), v.exists(), v.get()"),
        ("kinds", "v.update([2, None]), v.get()"),
        ("kinds", "v.update(Row(n=3, s='row')), v.get()"),
        ("kinds", "v.update((numpy.int32(4), numpy.str_('numpy'))), v.get()"),
        ("kinds", "v.update({'n': 1, 's': 'x'}), v.get()"),
        ("kinds", "v.update('ab'), v.get()"),
        ("kinds", "v.update((None, None)), v.get(), v.exists()"),
        ("kinds", "v.update(None)"),
        ("kinds", "v.update(5), v.get()"),
        ("kinds", "other.get(), other.update((0.5,))"),
        ("cleared", "v.update((7, 'seven')), v.clear(), v.exists(), v.get()"),
        ("list", "l.exists(), l.get(), l.clear()"),
        ("list", "l.appendValue((1,)), l.appendValue((None,)), l.exists(), l.get()"),
        ("list", "l.appendList([(2,), (3,)]), l.appendValue([4]), l.get()"),
        ("list", "next(l.get()), list(zip(l.get(), l.get()))"),
        ("list", "[l.appendValue((n,)) for (n,) in l.get()], l.get()"),
        ("list", "l.put(None)"),
        ("list", "l.appendList([(1,), None])"),
        ("list", "l.get()"),
        ("put", "l.put([(5,), (4,), (5,)]), l.get(), l.put(iter([(9,)])), l.get()"),
        ("put and cleared", "l.put([(5,)]), l.clear(), l.exists(), l.get()"),
        ("put and cleared", "l.appendValue((6,)), l.get()"),
        ("map", "m.exists(), m.iterator(), m.keys(), m.values(), m.getValue(('a', 1)), m.containsKey(('a', 1))"),
        ("map", entries),
        ("map", "m.exists(), m.getValue(('a', 1)), m.getValue(('a', None)), m.containsKey(('b', None))"),
        ("map", "m.updateValue(('a', 300), (300.0,)), m.containsKey(('a', 301))"),
        ("map", "m.keys()"),
        ("map", "m.values()"),
        ("map", "m.iterator()"),
        ("map", "m.removeKey(('a', 1)), m.removeKey(('no', 1)), m.updateValue(('b', 1), (9.0,)), len(list(m.keys()))"),
        ("map", "[m.updateValue((k, 7), (0.0,)) for k, n in m.keys() if n == -1], m.iterator()"),
        ("map", "m.updateValue(None, (1.0,))"),
        ("map", "m.getValue(None)"),
        ("map cleared", "m.updateValue(('a', 1), (1.0,)), m.clear(), m.exists(), m.iterator()"),
        ("map emptied", "m.updateValue(('a', 1), (1.0,)), m.removeKey(('a', 1)), m.exists(), m.keys()"),
    )
    keys = sorted(set(first["k"].to_pylist()))
    second = script(
        *((key, EVERYTHING) for key in keys),
        ("value", "v.update((5, 'y')), v.get()"),
        ("list", "l.appendList([(10,), (11,)]), l.get()"),
        ("put", "l.put([(1,)]), l.get()"),
        ("map", "m.updateValue(('a', 1), (8.0,)), m.removeKey(('', 300)), m.iterator()"),
        ("map cleared", "m.updateValue(('z', 1), (1.0,)), m.iterator()"),
        ("cleared", "v.update((8, 'eight')), v.get()"),
    )
    third = script(
        *((key, EVERYTHING) for key in keys),
        *((key, "v.clear(), l.clear(), m.clear(), other.clear()") for key in ("value", "list", "map", "kinds")),
    )
    fourth = script(*((key, EVERYTHING) for key in keys))
    query = over(VARIABLES, api)
    found = compare(spark, tmp_path, [Turn(query, [first, second]), Turn(query, [third, fourth])])
    assert spoken(found, "value") == [
        ["(False, None, None)", "(None, True, (1, 'x'))"],
        ["((1, 'x'), [], [], None)", "(None, (5, 'y'))"],
        ["((5, 'y'), [], [], None)", "(None, None, None, None)"],
        ["(None, [], [], None)"],
    ]
    assert spoken(found, "kinds")[0][3:] == [
        "(None, (None, 's'))",
        "(None, (None, 'b'))",
        "(None, (None, None), True)",
        "TypeError: 'NoneType' object is not iterable",
        "TypeError: 'int' object is not iterable",
        "(None, None)",
    ]
    assert spoken(found, "list")[0][3:5] == [
        "((1,), [((1,), (1,)), ((None,), (None,)), ((2,), (2,)), ((3,), (3,)), ((4,), (4,))])",
        "([None, None, None, None, None], [(1,), (None,), (2,), (3,), (4,), (1,), (None,), (2,), (3,), (4,)])",
    ]
    assert spoken(found, "put and cleared")[1:] == [["(None, [(6,)], [], None)"]] * 3
    order = [("", 1), ("", -1), (None, 1), (None, -1), ("", None), (None, None), ("a", 1), ("b", 1), ("a", 300)]
    order += [("a", -1), ("b", -1), ("ab", 1), ("ab", -1), ("a", None), ("b", None), ("ab", None)]
    assert spoken(found, "map")[0][4] == repr(order)
    assert spoken(found, "map")[3] == ["(None, [], [], None)"]


TYPES = {
    "b": ("boolean", ["True", "False"]),
    "i8": ("tinyint", ["-128", "127"]),
    "i16": ("smallint", ["-32768"]),
    "i32": ("int", ["-2**31"]),
    "i64": ("bigint", ["2**63 - 1", "-2**63"]),
    "f32": ("float", ["0.1", "-0.0", "nan", "-inf", "1e300"]),
    "f64": ("double", ["0.1", "-0.0", "nan", "inf", "5e-324"]),
    "dec9": ("decimal(9, 2)", ["Decimal('1234567.89')", "Decimal('1.005')", "Decimal('-0.00')", "Decimal('1E+3')"]),
    "dec38": ("decimal(38, 10)", ["Decimal('12345678901234567890.1234567891')"]),
    "s": ("string", ["''", "'a' * 300", "'ÅÄÖ ✓ \\U0001f986'", "'\\0'"]),
    "bin": ("binary", ["b''", "b'\\x00\\xff'", "bytearray(b'array')"]),
    "d": ("date", ["dt.date(1, 1, 1)", "dt.date(9999, 12, 31)", "dt.date(1969, 12, 31)"]),
    "ts": ("timestamp", ["dt.datetime(2024, 3, 31, 1, 30, 0, 5, dt.UTC)", "dt.datetime(1950, 1, 1)"]),
    "tsn": ("timestamp_ntz", ["dt.datetime(2024, 3, 31, 2, 30, 0, 5)", "dt.datetime(1950, 1, 1)"]),
    "a": ("array<int>", ["[]", "[1, None, 3]"]),
    "texts": ("array<array<string>>", ["[None, [], ['x', None, '']]"]),
    "m": ("map<string, double>", ["{}", "{'b': 1.5, 'a': None}"]),
    "st": ("struct<x: int, y: struct<z: string, w: array<date>>>", ["(1, ('z', [dt.date(2024, 2, 29), None]))"]),
    "rows": ("array<struct<k: string, v: decimal(5, 1)>>", ["[Row(k='k', v=Decimal('1.5')), (None, None), None]"]),
    "deep": ("map<string, array<map<string, bigint>>>", ["{'b': [{'x': 2**40}, None, {}], '': None}"]),
}


def test_types(spark: SparkSession, tmp_path: Path) -> None:
    """All types as fields of values, elements and entries; those that Spark takes as keys of maps."""
    odd = {"m", "deep"}
    fields = ", ".join(f"{name} {kind}" for name, (kind, _) in TYPES.items())
    variables: Variables = {
        "v": ("Value", fields),
        "l": ("List", fields),
        "m": ("Map", ", ".join(f"{name} {kind}" for name, (kind, _) in TYPES.items() if name not in odd), fields),
    }
    many = max(len(some) for _, some in TYPES.values())
    lines = []
    for turn in range(many + 1):
        row = [(name, some[turn] if turn < len(some) else "None") for name, (_, some) in TYPES.items()]
        value = "".join(f"{one}, " for _, one in row)
        key = "".join(f"{one}, " for name, one in row if name not in odd)
        lines += [
            ("same", f"v.update(({value})), l.appendValue(({value})), m.updateValue(({key}), ({value}))"),
            ("same", "v.get()"),
            (f"key {turn}", f"v.update(({value})), l.put([({value})] * 2), m.updateValue(({key}), ({value}))"),
        ]
    keys = [f"key {turn}" for turn in range(many + 1)]
    again = [script(*((key, f"{what}") for key in keys for what in ("v.get()", "l.get()", "m.iterator()")))]
    again.append(script(*(("same", what) for what in ("v.get()", "l.get()", "m.keys()", "m.values()"))))
    query = over(variables, "rows")
    conf = {"spark.sql.session.timeZone": "Europe/Berlin"}
    found = compare(spark, tmp_path, [Turn(query, [script(*lines)], conf=conf), Turn(query, again, conf=conf)])
    assert "Decimal('12345678901234567890.1234567891')" in spoken(found, "key 0")[1][0]
    assert len(spoken(found, "same")[2]) == 4


SILENT = {
    "boolean tinyint smallint int bigint float double decimal(5,2) string binary array<int> map<string,int>": [
        "None", "True", "7", "-1", "300", "2**31", "2**40 + 3", "2**63", "1.5", "nan", "'text'", "'7'", "'true'",
        "Decimal('1.25')", "Decimal('1.255')", "dt.timedelta(1, 2)", "[1, 2]", "[None, 'x']", "{'a': 1}", "{1: 2}",
        "numpy.float32(1.5)", "numpy.int64(9)", "numpy.bool_(True)", "[]", "[1.5, True]", "{'a': 1.5}",
    ],
    "tinyint int double binary array<int> array<string>": [
        "b'bytes'", "(1, 'b')", "dt.date(2024, 2, 29)", "dt.datetime(2024, 2, 29, 12)", "object",
    ],
    "date timestamp timestamp_ntz struct<a:int,b:string>": [
        "None", "7", "1.5", "'2024-01-01'", "dt.date(2024, 2, 29)", "dt.datetime(2024, 2, 29, 12, 30, 1, 5)",
        "dt.datetime(2024, 2, 29, 12, 30, tzinfo=dt.UTC)", "pandas.Timestamp(2024, 1, 1)", "pandas.Timedelta(days=1)",
        "dt.timedelta(1, 2)", "[1, 2]", "(1, 'b')", "{'a': 1}", "Row(a=1, b='x')", "Row(b='x', a=1)", "(None, 7)",
    ],
}  # fmt: skip


def test_silent_conversions(spark: SparkSession, tmp_path: Path) -> None:
    """A value for a field of another type: null, another value, or an error before anything is stored."""
    lines, variables = [], {}
    for kinds, odd in SILENT.items():
        for kind in kinds.split():
            name = f"v{len(variables)}"
            variables[name] = ("Value", f"x {kind}")
            lines += [(kind, one, f"{name}.update(({one},)), {name}.get()") for one in odd]
    query = over(variables, "pandas")
    found = compare(spark, tmp_path, [Turn(query, [script(*((kind, do) for kind, _, do in lines))])])
    rows = sorted(found[0], key=lambda row: row[1])
    told = {line[:2]: row[2] for line, row in zip(lines, rows, strict=True)}
    wanted = {
        ("float", "7"): "(None, (None,))",
        ("int", "2**40 + 3"): "(None, (3,))",
        ("bigint", "2**63"): "(None, (None,))",
        ("tinyint", "300"): "(None, (44,))",
        ("string", "1.5"): "(None, ('1.5',))",
        ("string", "True"): "(None, ('true',))",
        ("decimal(5,2)", "7"): "(None, (None,))",
        ("binary", "'text'"): "(None, (b'text',))",
        ("array<int>", "b'bytes'"): "(None, ([98, 121, 116, 101, 115],))",
        ("date", "'2024-01-01'"): "AttributeError: 'str' object has no attribute 'toordinal'",
    }
    assert {what: told[what] for what in wanted} == wanted


def test_large(spark: SparkSession, tmp_path: Path) -> None:
    """Values of 512 KB, lists of 10,000 elements and maps of 3,000 entries; most rows have one key."""
    variables: Variables = {
        "v": ("Value", "b binary, s string"),
        "l": ("List", "n int, s string"),
        "m": ("Map", "n int", "s string"),
    }
    first = script(
        ("a", "v.update((b'x' * 512 * 1024, 'y' * 512 * 1024))"),
        ("a", "l.put([(n, 'element' * (n % 7)) for n in range(10_000)])"),
        ("a", "[m.updateValue((n,), (str(n) * 20,)) for n in range(3_000)][:1]"),
        ("b", "[l.appendList([(n, None)] * 100) for n in range(100)][:1]"),
        *(("a", "l.appendValue((row.n, 'more'))") for _ in range(500)),
        *((f"c{n}", f"v.update((bytes([{n}]) * 100_000, None))") for n in range(20)),
    )
    told = [
        ("a", "v.get() == (b'x' * 512 * 1024, 'y' * 512 * 1024)"),
        ("a", "len(list(l.get())), list(l.get())[::700]"),
        ("a", "[k for (k,) in m.keys()][::100], m.getValue((2_999,)), m.getValue((3_000,))"),
        ("b", "len(list(l.get())), list(l.get())[::900]"),
        ("c7", "len(v.get()[0]), v.get()[0][:3]"),
    ]
    more = ("a", "l.appendList([(n, 'end') for n in range(2_000)]), m.removeKey((2_999,))")
    second = script(*told, more, *told)
    query = over(variables, "rows")
    found = compare(spark, tmp_path, [Turn(query, [first]), Turn(query, [second, script(*told)])])
    assert spoken(found, "c7")[1:] == [["(100000, b'\\x07\\x07\\x07')"] * 2, ["(100000, b'\\x07\\x07\\x07')"]]
    assert spoken(found, "a")[2][1].startswith("(12500, [(0, ''), (700, ''), ")
