"""Mistakes of users, and the errors that they see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.differential.group_state.checks import grouped
from tests.differential.group_state.functions import Script
from tests.differential.processors.checks import ONCE, Turn, compare, script, spoken

WRONG = [
    "state.setTimeoutDuration(1000)",
    "state.setTimeoutDuration('1 hour')",
    "state.setTimeoutDuration(0)",
    "state.setTimeoutDuration(-1)",
    "state.setTimeoutDuration(None)",
    "state.setTimeoutTimestamp(0)",
    "state.setTimeoutTimestamp(-1)",
    "state.setTimeoutTimestamp(1)",
    "state.setTimeoutTimestamp('soon')",
    "state.setTimeoutTimestamp(dt.datetime(2039, 1, 1))",
    "state.setTimeoutTimestamp(dt.datetime(1999, 1, 1))",
    "state.getCurrentWatermarkMs() > 0",
    "state.getCurrentProcessingTimeMs() > 10**12",
    "state.get",
    "state.update(None)",
    "state.update(7)",
    "state.exists()",
    "state.unknown",
]


@pytest.mark.parametrize("timeout", ["NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"])
@pytest.mark.parametrize("delay", ["", "5 seconds"])
def test_of_the_state(spark: SparkSession, tmp_path: Path, timeout: str, delay: str) -> None:
    if timeout == "EventTimeTimeout" and not delay:
        turns = [Turn(grouped(Script(), timeout=timeout), [script(("a", "1"))], fails="Watermark must be specified")]
        compare(spark, tmp_path, turns)
        return
    query = grouped(Script("'due'"), timeout=timeout, delay=delay)
    wrong = script(*((f"k{number}", one, 100) for number, one in enumerate(WRONG)))
    found = compare(spark, tmp_path, [Turn(query, [table], trigger=ONCE) for table in (wrong, wrong)])
    assert spoken(found, "k1")[0][0].startswith("PySparkTypeError: [NOT_EXPECTED_TYPE]")


RESULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "a frame": (lambda pd: pd.DataFrame({"k": ["a"]}), "UDF_RETURN_TYPE|iterable of pandas.DataFrame"),
    "nothing": (lambda pd: None, "UDF_RETURN_TYPE|iterable"),
    "rows": (lambda pd: [("a", 1, "b")], "UDF_RETURN_TYPE|iterator of pandas.DataFrame"),
    "columns": (lambda pd: [pd.DataFrame({"k": ["a"]})], "RESULT_COLUMN_SCHEMA_MISMATCH|number of columns"),
    "error": (lambda pd: [1 / 0], "ZeroDivisionError"),
    "stop": (lambda pd: next(iter(())), "StopIteration"),
    "twins": (lambda pd: [pd.DataFrame([["a", 1, "b"]], columns=["k", "k", "n"])], "."),
    "exit": (lambda pd: __import__("sys").exit(3), "exit|SystemExit|crashed"),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_of_results(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """The query fails, with the state as it was."""
    wrong, fails = RESULTS[kind]

    def function(key: Any, frames: Any, state: Any) -> Any:
        import pandas as pd

        state.update((2,))
        return wrong(pd)

    good = grouped(Script())
    turns = [
        Turn(good, [script(("a", "state.update((1,))"))]),
        Turn(grouped(function), [script(("a", ""))], fails=fails),
    ]
    compare(spark, tmp_path, turns)


@pytest.mark.parametrize(("function", "query"), [("append", "update"), ("update", "append"), ("update", "complete")])
def test_of_output_modes(spark: SparkSession, tmp_path: Path, function: str, query: str) -> None:
    turn = Turn(grouped(Script(), mode=function), [script(("a", "1"))], mode=query, fails="output mode")
    compare(spark, tmp_path, [turn])
