"""Makes `docs/compatibility.md` from the tables by which plans are decided: `python -m docs.compatibility`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from millpond.plan.catalyst.versions import CALLS_USER_CODE, TESTED
from millpond.plan.reading.reasons import REASONS
from millpond.plan.wrong_in_spark import SHAPES
from millpond.spec.functions import COLLATED, FUNCTIONS, MAX_KEY_COLUMNS, ROWS, unsupported_call, unsupported_key
from millpond.spec.operators import AggregateCall
from millpond.spec.types import parse_type

NOTES = {
    "1": "strings that differ in their bytes may be equal in this collation, and have another order, which only Spark "
    "knows.",
    "2": "Spark groups maps by their sorted entries. It sorts them only in its optimiser, when operators have been "
    "taken over, and its hash, by which rows find their group, does not take them.",
}
"""Why types that Spark compares are not compared here."""

PAGE = Path(__file__).with_name("compatibility.md")

TYPES = {
    "tinyint": "tinyint",
    "smallint": "smallint",
    "int": "int",
    "bigint": "bigint",
    "float": "float",
    "double": "double",
    "decimal": "decimal(38,10)",
    "string": "string",
    "binary": "binary",
    "boolean": "boolean",
    "date": "date",
    "timestamp": "timestamp",
    "timestamp_ntz": "timestamp_ntz",
    "string, other collation": "string collate UTF8_LCASE",
    "struct": "struct<x:int,y:string>",
    "array": "array<int>",
    "map": "map<string,int>",
}
"""Column headings and a type of each kind, as DDL."""


ORDERED_BY = ("min_by", "max_by")
"""Functions of a value and of what it is ordered by."""

COMPARING = ("min", "max", "mode", "approx_count_distinct", "listagg")
"""Functions that Spark computes of strings of any collation, too."""


REPLACED = {"regr_count": "count", "regr_avgx": "avg", "regr_avgy": "avg"}
"""Functions that have no record, since Spark runs another in their place."""

BINARY = ("percentile_approx",)
"""Functions that compute with doubles."""

STAYING: dict[str, tuple[str, ...]] = {
    "their results are in Apache DataSketches' binary form, which only its Java library writes as Spark does": (
        *("hll_sketch_agg", "hll_union_agg", "theta_sketch_agg", "theta_union_agg", "theta_intersection_agg"),
        *(f"tuple_{kind}_agg_{of}" for kind in ("sketch", "union", "intersection") for of in ("double", "integer")),
        *(f"kll_{kind}_agg_{of}" for kind in ("sketch", "merge") for of in ("bigint", "double", "float")),
        *("approx_top_k", "approx_top_k_accumulate", "approx_top_k_combine"),
    ),
    "no accumulator for its bins, which Spark merges by chance where several lie equally close": ("histogram_numeric",),
    "bitmaps have no accumulator": ("bitmap_construct_agg", "bitmap_or_agg", "bitmap_and_agg"),
    "it collects elements of arrays, which are not compared": ("collect_union",),
    "it names a measure of a view: the view's own aggregate counts": ("measure",),
}
"""Spark's aggregate functions that stay there, by the reason."""

VERSIONS = {
    "4.1": "4.1.4, Python 3.11: `make smoke-4.1`",
    "4.2": "4.2.0, Python 3.11, with Delta Lake 4.4.0: `make smoke-4.2`",
    "4.3": "4.3.0, Python 3.11: all tests",
}
"""Each version of Spark and what was tested with it."""

SAME = {**REPLACED, "try_avg": "avg", "try_sum": "sum", "grouping": "a key", "grouping_id": "a key"}
"""Names of Spark's that are something else by the time a plan is read."""


def runs(function: str, ddl: str, *, distinct: bool = False, ordering: bool = False) -> bool:
    """Whether a function over values of a type runs on Millpond.

    Args:
        function: its name. ddl: the type of its first argument.
        distinct: with DISTINCT.
        ordering: the type is that of the last argument, by which values are ordered.
    """
    if function == "count" and not distinct:
        return True  # only nulls count: the plan sends a flag
    if function == "approx_count_distinct":
        return unsupported_key(ddl) is None  # the plan sends Spark's hash of the value
    if function in BINARY and ddl.startswith("decimal"):
        ddl = "double"  # the plan sends it so
    arguments = len(FUNCTIONS[function].arguments) - FUNCTIONS[function].optional
    types = ["int", ddl] if ordering else [ddl, "int"]
    call = AggregateCall(function, tuple(range(arguments)), ddl, distinct=distinct)
    return unsupported_call(call, types[:arguments]) is None


def page() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# What runs on Millpond"
    yield ""
    yield "Made by `make docs` from the tables that decide; a test compares them."
    yield ""
    yield from _versions()
    yield "## Functions by the type of their arguments"
    yield ""
    yield "Each runs in update and in complete mode, with `FILTER (WHERE …)`, by any key of the last line. **D**: with"
    yield "`DISTINCT` too. **as** a type: Spark casts to it (strings to booleans in ANSI mode only). A dot: Spark has"
    yield "no such function either. What has a number stays on Spark, and its whole operator with it:"
    whole = " and ".join(f"`{name}`" for name, function in FUNCTIONS.items() if function.whole and name != ROWS)
    yield f"{whole} run in append mode by event time or session only. So do your own pandas and Arrow functions"
    yield "([how](functions.md)), beside any others, but without `FILTER` and `DISTINCT`, and `applyInPandas` and"
    yield "`applyInArrow`, by windows: for them the types are those of all columns. What they return may be of any"
    yield "type that Spark takes from such functions."
    yield ""
    for number, reason in NOTES.items():
        yield f"- {number}: {reason}"
    yield ""
    yield from _row("", *TYPES)
    yield "|---" * (len(TYPES) + 1) + "|"
    for function in FUNCTIONS:
        names = [function, *FUNCTIONS[function].aliases]
        name = "your functions" if function == ROWS else ", ".join(f"`{one}`" for one in names)
        yield from _row(name, *(cell(function, kind) for kind in TYPES))
    by = ["yes" if runs("min_by", ddl, ordering=True) else _stays("min", kind) for kind, ddl in TYPES.items()]
    yield from _row(f"… by, of {' and '.join(f'`{name}`' for name in ORDERED_BY)}", *by)
    keys = ["yes" if unsupported_key(ddl) is None else _note(kind) for kind, ddl in TYPES.items()]
    yield from _row("**key**, also of `dropDuplicates`", *keys)
    yield ""
    yield "`percentile_approx` is exact, as in Spark, while a group has fewer than half as many values as its accuracy"
    yield "says (10000 by default). Beyond, ranks are wrong by at most 1 / accuracy of the values, as in Spark, but"
    yield "which value is given may differ: Spark's depends on how rows are cut into tasks and batches. NaN is the"
    yield "greatest value; Spark loses the order of values when it merges those of several tasks, or batches, with NaN"
    yield "among them. Of values that are as frequent, `mode` gives the least; Spark gives any of them."
    yield "`listagg` may have an order, by expressions of atomic types. `ROLLUP`, `CUBE`"
    yield "and `GROUPING SETS` run as the aggregates that Spark makes of them. So does `pivot` over given values, if"
    yield "any of its results is neither a number nor a boolean; else it is two aggregates, and the upper one,"
    yield "`pivotfirst`, stays."
    yield ""
    yield "Structs, arrays and maps may be of any depth; what holds a string of another collation, or a map, stands"
    yield "as these do. Values of other types (intervals, `variant`, `time`, `void`), or of structs with two fields"
    yield "of one name, stay on Spark (`MP-INPUT-TYPE`, `MP-KEY-TYPE`): they are counted only."
    yield f"A key has at most {MAX_KEY_COLUMNS} columns, the fields of structs counted, an array as one."
    yield "`dropDuplicates` runs in append and in update mode."
    yield ""
    yield f"Over each key's last rows ([how](changes.md#aggregates-over-a-keys-last-rows)): {_with('over')}."
    yield f"Over rows that change ([how](changes.md#between-operators)): {_with('retractable')}."
    said = ", ".join(f"`{name}` as `{function}`" for name, function in REPLACED.items())
    yield f"What Spark makes another function of runs as that: {said}."
    yield ""
    yield "## Aggregate functions that stay on Spark"
    yield ""
    yield "A test compares this list with the functions that Spark has."
    yield ""
    yield from _row("functions", "why")
    yield "|---|---|"
    for reason, staying in STAYING.items():
        yield from _row(", ".join(f"`{name}`" for name in staying), reason)
    yield ""
    yield "## Joins of two streams"
    yield ""
    yield "Inner, left, right and full outer, and left semi joins, by equal keys (of any type of the last line"
    yield "above) and whatever else the condition says, in the output modes in which Spark runs them. Columns of"
    yield "both sides are of any type above. What is left of an inner join's condition beside keys and"
    yield "ranges of time is evaluated by Spark above the join; in other joins it may be any predicates on one"
    yield "side, and comparisons (`=`, `<=>`, `<`, `<=`, `>`, `>=`, `<>`) of an expression over one side with one"
    yield "over the other, joined by `AND`, `OR` and `NOT`."
    yield ""
    yield "## Reasons to stay on Spark"
    yield ""
    yield from _row("code", "reason")
    yield "|---|---|"
    for code, text in REASONS.items():
        yield from _row(f"`{code}`", text.replace("{detail}", "…"))

    yield ""
    yield "## Where Spark is wrong"
    yield ""
    yield "For these shapes of queries Spark gives wrong rows without an error, and Millpond gives the same rows."
    yield "Later versions of Spark refuse some of them. `millpond.explain` names them (`[wrong in Spark, …]`). A"
    yield "query in which rows are wrong **always** is refused at `start()`, with `WRONG_IN_SPARK`; one in which"
    yield "they are wrong for **some data** starts with a warning. The setting `spark.millpond.onWrongInSpark` makes"
    yield "all of them errors, or all of them warnings, also for operators that stay on Spark. Joins by times that"
    yield "have watermarks on both sides, equal or within a range, are not among them."
    yield ""
    yield from _row("code", "rows are wrong", "what goes wrong", "do")
    yield "|---|---|---|---|"
    for code, shape in SHAPES.items():
        yield from _row(f"`{code}`", "always" if shape.certain else "for some data", shape.loss, f"{shape.advice}.")
    yield ""
    yield "A plan does not show three other pitfalls. With several watermarks the slowest one counts, so that a"
    yield "source without rows holds all state. A row exactly as old as the watermark is late, also with a delay of"
    yield "0 seconds. `dropDuplicates` shows late rows with a new key if nothing above it reads the event time."


def _versions() -> Iterator[str]:
    yield "## Versions of Spark"
    yield ""
    yield from _row("Spark", "tested with", "your functions over windows, processors")
    yield "|---|---|---|"
    for version in reversed(TESTED):
        called = tuple(map(int, version.split("."))) >= tuple(map(int, CALLS_USER_CODE.split(".")))
        yield from _row(version, VERSIONS[version], "run" if called else "do not run")
    yield ""
    yield "Other versions are refused at the start. The smoke tests compare one query of each kind of operator with"
    yield "Spark, each with a restart. Where the last column says so, `explain` gives the reason (`MP-VERSION`):"
    yield ""
    yield "- Aggregates by your pandas and Arrow functions are errors at the start, since Spark does not run them on"
    yield "  streams either; and so are `applyInPandas` and `applyInArrow` over closed windows"
    yield "  (`spark.millpond.mapGroups=window`)."
    yield "- `transformWithState`, `transformWithStateInPandas` and `applyInPandasWithState` stay on Spark's state"
    yield "  store, which needs the RocksDB provider and the packages protobuf, grpcio and googleapis-common-protos."
    yield "  A `millpond.AsyncStatefulProcessor`, which Spark cannot run, is an error at the start, and so are the"
    yield "  testers of `millpond.testing`."
    yield ""
    yield "Statistics (`variance`, `skewness`, `corr`, `regr_*` and their like) follow the version of Spark that runs."
    yield "Before Spark 4.3, they are NaN where a value's square (`skewness`: cube, `kurtosis`: fourth power) is beyond"
    yield "a double, and `corr` of a column that does not vary is an error in ANSI mode. Spark 4.1 and 4.2 may give an"
    yield "infinity in place of this NaN, where the values of one task and batch nearly cancel out."
    yield ""
    yield "Millpond matches null keys only in full outer joins, as Spark does. Spark also matches nulls of computed"
    yield "keys in other joins (`ON get_json_object(l.j, '$.id') = get_json_object(r.j, '$.id')`). Spark 4.2.0 also"
    yield "matches nulls of floating-point keys there."
    yield ""
    yield "Spark 4.1 itself takes 0.0 and -0.0 for two values in `dropDuplicates`, and in `collect_set` of arrays and"
    yield "structs. In Millpond, they are equal."
    yield ""
    yield "Spark 4.2.0 itself hangs in a plain Python function (`udf`) right above a scan of Parquet files, also in"
    yield "batch: set `spark.sql.execution.pythonUDF.arrow.enabled` to `false` there."
    yield ""
    yield "Delta Lake is tested as a sink: `MERGE` in `foreachBatch` on Spark 4.2"
    yield "([example](examples.md#delta_mergepy)), the newest for which `delta-spark` is released."
    yield ""


def _with(attribute: str) -> str:
    return ", ".join(f"`{name}`" for name, function in FUNCTIONS.items() if getattr(function, attribute))


def cast(function: str, ddl: str) -> str | None:
    """The type to which Spark casts a function's argument of this type; None if it does not."""
    dtype = parse_type(ddl)
    return FUNCTIONS[function].casts.get(COLLATED if dtype.collation else dtype.name)


def cell(function: str, kind: str) -> str:
    """The table's cell for a function over a type, by the column's heading."""
    ddl = TYPES[kind]
    if other := cast(function, ddl):
        return f"{cell(function, other)}, as {other}"
    if FUNCTIONS[function].distinct and runs(function, ddl, distinct=True):
        return "D" if runs(function, ddl) else "D only"
    if not runs(function, ddl):
        return _stays(function, kind)
    distinct = FUNCTIONS[function].distinct and _note(kind) != "·"
    return f"yes, D: {_note(kind)}" if distinct else "yes"


def _stays(function: str, kind: str) -> str:
    """Why a function of Spark's over a type stays there."""
    ordered = function in ("min", "max", "listagg") and kind == "map"  # maps have no order
    return _note(kind) if function in COMPARING and not ordered else "·"


def _note(kind: str) -> str:
    return "2" if kind == "map" else "1" if kind == "string, other collation" else "·"


def _row(*cells: str) -> Iterator[str]:
    yield "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
