"""The compatibility page says what is decided."""

import pytest
from docs.compatibility import ORDERED_BY, PAGE, TYPES, page, runs
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.functions import PandasUDFType, pandas_udf
from pyspark.sql.types import LongType

from millpond.plan.catalyst.python import callable_here
from millpond.plan.decide import decide
from millpond.spec.functions import FUNCTIONS, ROWS, key_supported


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


@pytest.fixture(scope="module")
def typed(stream: DataFrame) -> DataFrame:
    return stream.selectExpr(*(f"cast(null as {ddl}) as `{name}`" for name, ddl in TYPES.items()), "k as group")


@pytest.mark.parametrize("function", [name for name, function in FUNCTIONS.items() if not function.whole])
def test_what_it_promises_is_decided_so(typed: DataFrame, function: str) -> None:
    by = ", group" if function in ORDERED_BY else ""
    calls = [f"{function}(`{name}`{by})" for name, ddl in TYPES.items() if runs(function, ddl)]
    if by:
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
