"""The compatibility page says what is decided."""

import pytest
from docs.compatibility import ORDERED_BY, PAGE, REPLACED, SAME, STAYING, TYPES, cast, cell, page, runs
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.functions import PandasUDFType, pandas_udf
from pyspark.sql.types import LongType

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, items
from millpond.plan.catalyst.versions import calls_user_code
from millpond.plan.decide import decide
from millpond.spec.functions import FUNCTIONS, ROWS, unsupported_key
from millpond.spec.kinds.aggregate import AggregateSpec


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_no_function_of_spark_is_forgotten(spark: SparkSession) -> None:
    registry = spark._jsparkSession.sessionState().functionRegistry()
    known = {name for function, record in FUNCTIONS.items() for name in (function, *record.aliases)} - {ROWS}
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
        assert {*known, *staying, *SAME} - {"product"} == found  # which the DataFrame API alone has


@pytest.fixture(scope="module")
def typed(stream: DataFrame) -> DataFrame:
    return stream.selectExpr(*(f"cast(null as {ddl}) as `{name}`" for name, ddl in TYPES.items()), "k as group")


CONSTANTS = {
    "percentile": ["0.5"],
    "percentile_approx": ["0.5"],
    "count_min_sketch": ["0.1D", "0.9D", "1"],
}
"""Arguments that are no columns."""


def called(function: str, *columns: str) -> Column:
    """A call over columns by their names; all functions but `product` have a name in SQL, too."""
    one = f"`{columns[0]}`"
    if function == "product":
        return F.product(F.expr(one))
    more = CONSTANTS.get(function) or [f"`{column}`" for column in columns[1:]]
    return F.expr(f"{function}({', '.join([one, *more])})")


def second(function: str) -> list[str]:
    """The second argument, where a function has one."""
    return ["group"] if function in ORDERED_BY or function.startswith(("corr", "covar_", "regr_")) else []


@pytest.mark.parametrize("function", [name for name, function in FUNCTIONS.items() if not function.whole])
def test_what_it_promises_is_decided_so(typed: DataFrame, function: str) -> None:
    promised = [name for name, ddl in TYPES.items() if runs(function, cast(function, ddl) or ddl)]
    calls = [called(function, name, *second(function)) for name in promised]
    if function in ORDERED_BY:
        calls += [called(function, "group", name) for name, ddl in TYPES.items() if runs(function, ddl, ordering=True)]
    (operator,) = decide(typed.groupBy("group").agg(*calls), "update").operators
    assert operator.spec is not None, operator.reason


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != ROWS])
def test_where_it_has_a_dot_spark_has_no_function(typed: DataFrame, function: str) -> None:
    for name, ddl in TYPES.items():
        other = cast(function, ddl)
        shown = cell(function, name)
        if other is not None:
            assert shown.endswith(f"as {other}")
            ((argument, *_),) = arguments(typed.agg(called(function, name, *second(function))))
            assert (argument.kind, argument.type) == ("Cast", other)
        elif shown == "·":
            with pytest.raises(AnalysisException, match=r"DATATYPE_MISMATCH|UNSUPPORTED_TIME_TYPE"):
                typed.agg(called(function, name, *second(function)))


def arguments(df: DataFrame) -> list[list[Expression]]:
    """The arguments of every aggregate function of a query."""
    parts = Catalyst(df.sparkSession).analyzed(df).list("aggregateExpressions")[0].walk()
    return [part.children[0].children for part in parts if part.kind == "AggregateExpression"]


@pytest.mark.parametrize("function", REPLACED)
def test_what_spark_replaces_is_decided_so(typed: DataFrame, function: str) -> None:
    (operator,) = decide(typed.groupBy("group").agg(called(function, "double", "int")), "update").operators
    assert isinstance(operator.spec, AggregateSpec)
    assert [one.function for one in operator.spec.calls] == [REPLACED[function]]


def test_every_key_it_promises_is_decided_so(typed: DataFrame) -> None:
    keys = [name for name, ddl in TYPES.items() if unsupported_key(ddl) is None]
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
    if function == ROWS and not calls_user_code():
        assert str(operator.reason).startswith("MP-VERSION")
        return
    assert operator.spec is not None, operator.reason
    (operator,) = decide(windowed.agg(*calls), "update").operators
    assert operator.reason is not None
    assert operator.reason.code == "MP-WHOLE"
