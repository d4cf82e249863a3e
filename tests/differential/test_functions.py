"""Every function over every type, several functions a query."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.differential.data import batch
from tests.differential.harness import allow_equal_values, compare

INTEGERS = ["i8", "i16", "i32", "i64"]
FLOATS = ["f32", "f64"]
DECIMALS = ["dec9", "dec18", "dec38"]
OTHERS = ["b", "s", "bin", "d", "ts", "tsn"]
ATOMIC = INTEGERS + FLOATS + DECIMALS + OTHERS


def each(function: str, columns: list[str]) -> list[str]:
    return [function.format(c) for c in columns]


CASES = {
    "count": ["count(*)", "count(1)", "count(i64, s)", *each("count({})", ATOMIC), "count(st)"],
    "count_if": ["count_if(b)", "count_if(i32 > 10)", "count_if(s is null)"],
    "sum integers": each("sum({})", INTEGERS),
    "sum floats": each("sum({})", FLOATS),
    "sum decimals": each("sum({})", DECIMALS),
    "avg integers": each("avg({})", INTEGERS),
    "avg floats": each("avg({})", FLOATS),
    "avg decimals": each("avg({})", DECIMALS),
    "min numbers": each("min({})", INTEGERS + FLOATS + DECIMALS),
    "max numbers": each("max({})", INTEGERS + FLOATS + DECIMALS),
    "min others": each("min({})", OTHERS),
    "max others": each("max({})", OTHERS),
    "first": each("first({})", ATOMIC),
    "first ignore nulls": each("first({}, true)", ATOMIC),
    "last": each("last({})", ATOMIC),
    "last ignore nulls": each("last({}) ignore nulls", ATOMIC),
    "any_value": each("any_value({})", ATOMIC) + each("any_value({}, true)", ATOMIC),
    "booleans": ["bool_and(b)", "bool_or(b)", "every(i32 > 0)", "some(i32 > 900)"],
    "stddev": [
        *each("stddev({})", INTEGERS),
        *each("stddev_samp({})", FLOATS),
        *each("stddev_pop({})", ["i32", "f64"]),
    ],
    "variance": [*each("variance({})", INTEGERS), *each("var_samp({})", FLOATS), *each("var_pop({})", ["i32", "f64"])],
    "stddev decimals": ["stddev(dec9)", "var_pop(dec18)"],
    "shape": [*each("skewness({})", INTEGERS + FLOATS), *each("kurtosis({})", INTEGERS + FLOATS)],
    "pairs": [
        *(
            f"{name}({x}, {y})"
            for name in ("corr", "covar_pop", "covar_samp")
            for x, y in (("f64", "i32"), ("i8", "f32"))
        ),
        "corr(dec9, i64)",
    ],
    "regression": [
        *(
            f"{name}(f64, i16)"
            for name in ("regr_slope", "regr_intercept", "regr_r2", "regr_sxx", "regr_syy", "regr_sxy")
        ),
        *(
            f"{name}({y}, {x})"
            for name in ("regr_count", "regr_avgx", "regr_avgy")
            for y, x in (("f64", "dec18"), ("i8", "i64"))
        ),
    ],
    "min_by": [*each("min_by({}, i64)", ATOMIC), *each("min_by(s, {})", ATOMIC)],
    "max_by": [*each("max_by({}, i64)", ATOMIC), *each("max_by(s, {})", ATOMIC)],
    "approx_count_distinct": [*each("approx_count_distinct({})", ATOMIC), "approx_count_distinct(i64, 0.1)"],
    "collect_list": each("collect_list({})", ATOMIC),
    "collect_set": each("collect_set({})", [c for c in ATOMIC if c not in FLOATS]),
    "percentile_approx": [
        *each("percentile_approx({}, 0.4)", INTEGERS + DECIMALS + ["d", "ts", "tsn"]),
        *each("approx_percentile({}, array(0.9, 0.1, 0.5, 0.0, 1.0), 500)", ["i64", "dec38", "ts"]),
        *each("percentile_approx(nanvl({}, 1), array(0.3))", FLOATS),
        "percentile_approx(dec38, 0.3) + 1",
    ],
    "count_min_sketch": [
        *each("count_min_sketch({}, 0.1D, 0.9D, 1)", [*INTEGERS, "s", "bin"]),
        "count_min_sketch(i64, 0.001D, 0.99D, -7) filter (where b)",
        "count_min_sketch(s, 0.01D, 0.99D, 7L)",
    ],
    "listagg": [*each("listagg({})", ["s", "bin"]), "string_agg(s, ', ') filter (where b)", "listagg(bin, X'2c')"],
    "listagg in order": [
        "listagg(s, ', ') within group (order by s)",
        "listagg(bin, X'2c') within group (order by bin desc)",
        "listagg(s) within group (order by f64 desc, i32, dec38 nulls last, d desc, s, i64)",
        "listagg(i32, '/') within group (order by i32)",
    ],
    "filter": [
        "count(*) filter (where i32 > 0)",
        "sum(i64) filter (where b)",
        "max(s) filter (where f64 is not null)",
        "avg(dec9) filter (where s like '%a%')",
        "count(s) filter (where b)",
    ],
    "try": [*each("try_sum({})", INTEGERS + FLOATS + DECIMALS), *each("try_avg({})", INTEGERS + FLOATS + DECIMALS)],
    "bits": [f"bit_{operation}({column})" for operation in ("and", "or", "xor") for column in INTEGERS],
    "cast by Spark": ["sum(cast(i8 as string))", "skewness(dec18)", "corr(dec9, cast(i16 as string))"],
    "arithmetic": ["sum(i32 * 2) + max(i64) - 1", "cast(avg(i32) as decimal(20,3))", "sum(i32) / count(i32)", "k + 1"],
    "twice": ["sum(i32)", "sum(i32) as again", "sum(i32) + sum(i32)", "max(s)", "max(s) || '!'"],
}


ORDERED = {"first", "first ignore nulls", "last", "last ignore nulls", "any_value", "min_by", "max_by", "listagg"}
"""Functions whose result depends on the order of rows, which Spark keeps only from batch to batch."""


SEVERAL = [
    names[first : first + 5]
    for names in ([name for name in CASES if name not in ORDERED], [name for name in CASES if name in ORDERED])
    for first in range(0, len(names), 5)
]
"""Several cases a query: beside each other functions are computed as alone."""


@pytest.mark.parametrize("names", SEVERAL, ids=", ".join)
@pytest.mark.parametrize("mode", ["update", "complete"])
def test_functions(spark: SparkSession, tmp_path: Path, mode: str, names: list[str]) -> None:
    calls = dict.fromkeys(call for name in names for call in CASES[name])

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        df.createOrReplaceTempView("events")
        if any(call.startswith("corr(") for call in calls):
            allow_equal_values(session)
        return session.sql(f"select k, {', '.join(calls)} from events group by k")

    seed = sum(map(ord, "".join(names) + mode))
    once = names[0] in ORDERED
    batches = [batch(seed, 60, once=once), batch(seed + 1, 0), batch(seed + 2, 40, once=once)]
    # What a restart restores does not depend on the mode.
    rounds = [batches[:2], batches[2:]] if mode == "update" else [batches]
    compare(spark, tmp_path, query, mode, rounds)
