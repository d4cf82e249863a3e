"""Queries with a function over groups, to be run by Spark and by Millpond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from tests.differential.group_state.functions import SAID
from tests.differential.processors.checks import Query


def grouped(
    function: Callable[..., Any],
    *,
    shown: str = SAID,
    state: StructType | str = "n int",
    mode: str = "update",
    timeout: str = "NoTimeout",
    by: Sequence[str] = ("k",),
    delay: str = "",
) -> Query:
    """A query that gives a frame's groups to a function; `delay`: of the watermark, if there is one."""

    def query(df: DataFrame) -> DataFrame:
        marked = df.withWatermark("ts", delay) if delay else df
        return marked.groupBy(*by).applyInPandasWithState(function, shown, state, mode, timeout)

    return query
