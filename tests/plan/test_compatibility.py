"""The compatibility page says what is decided."""

import pytest
from docs.compatibility import ORDERED_BY, PAGE, SAME, STAYING, TYPES, page, runs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.functions import PandasUDFType, pandas_udf
from pyspark.sql.types import LongType

from millpond.plan.catalyst.nodes import items
from millpond.plan.catalyst.python import callable_here
from millpond.plan.decide import decide
from millpond.spec.functions import FUNCTIONS, ROWS, key_supported


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_no_function_of_spark_is_forgotten(spark: SparkSession) -> None:
    registry = spark._jsparkSession.sessionState().functionRegistry()
    known = {name for function, record in FUNCTIONS.items() for name in (function, *record.also)} - {ROWS}
    staying = [name for names in STAYING.values() for name in names]
    assert len(staying) == len(set(staying))
    assert not known & set(staying)
    found = set()
    for identifier in items(registry.listFunction()):
        function = registry.lookupFunction(identifier).get()
        if function.getGroup() == "agg_funcs" or ".aggregate." in function.getClassName():
            found.add(str(function.getName()))
    assert found - known - set(staying) - SAME.keys() == set(), "does it run on Millpond, or why not?"
    if tuple(map(int, spark.version.split(".")[:2])) >= (4, 3):
        assert {*known, *staying, *SAME} == found


@pytest.fixture(scope="module")
def typed(stream: DataFrame) -> DataFrame:
    return stream.selectExpr(*(f"cast(null as {ddl}) as `{name}`" for name, ddl in TYPES.items()), "k as group")


CONSTANTS = {"percentile_approx": ", 0.5", "count_min_sketch": ", 0.1D, 0.9D, 1"}
"""Arguments that are no columns."""


@pytest.mark.parametrize("function", [name for name, function in FUNCTIONS.items() if not function.whole])
def test_what_it_promises_is_decided_so(typed: DataFrame, function: str) -> None:
    by = ", group" if function in ORDERED_BY else CONSTANTS.get(function, "")
    calls = [f"{function}(`{name}`{by})" for name, ddl in TYPES.items() if runs(function, ddl)]
    if function in ORDERED_BY:
        calls += [f"{function}(group, `{name}`)" for name, ddl in TYPES.items() if runs(function, ddl, ordering=True)]
    (operator,) = decide(typed.groupBy("group").agg(*map(F.expr, calls)), "update").operators
    assert operator.spec is not None, operator.reason


def test_every_key_it_promises_is_decided_so(typed: DataFrame) -> None:
    keys = [name for name, ddl in TYPES.items() if key_supported(ddl) is None]
    (operator,) = decide(typed.groupBy(*(f"`{name}`" for name in keys)).count(), "complete").operators
    assert operator.spec is not None, operator.reason


@pytest.mark.parametrize("function", [name for name, function in FUNCTIONS.items() if function.whole])
def test_what_it_promises_of_windows_is_decided_so(stream: DataFrame, function: str) -> None:
    names = {name: ddl for name, ddl in TYPES.items() if runs(function, ddl)}
    typed = stream.selectExpr("now() as ts", *(f"cast(null as {ddl}) as `{name}`" for name, ddl in names.items()))
    share = ", 0.5" if function == "percentile" else ""
    calls = [F.expr(f"{function}(`{name}`{share})") for name in names]
    if function == ROWS:
        calls = [pandas_udf(len, LongType(), PandasUDFType.GROUPED_AGG)(*names)]
    windowed = typed.withWatermark("ts", "1 minute").groupBy(F.window("ts", "1 minute"))
    (operator,) = decide(windowed.agg(*calls), "append").operators
    if function == ROWS and not callable_here():
        assert str(operator.reason).startswith("MP-PYTHON")
        return
    assert operator.spec is not None, operator.reason
    (operator,) = decide(windowed.agg(*calls), "update").operators
    assert operator.reason is not None
    assert operator.reason.code == "MP-WHOLE"
