"""What users do wrong, and the errors that they see."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.differential.processors.checks import APIS, ONCE, Turn, compare, script, spoken, transformed
from tests.differential.processors.processors import Script, Strict, Variables

VARIABLES: Variables = {
    "v": ("Value", "n int"),
    "l": ("List", "n int"),
    "m": ("Map", "k int", "n int"),
    "d": ("Value", "x decimal(5, 2)"),
}
LENGTH = "[STRUCT_ARRAY_LENGTH_MISMATCH] Input row doesn't have expected number of values required by the schema."
EMPTY = (
    "[ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE] Illegal value provided to the State Store "
    "Cannot write empty list values to State Store for StateName l."
)
TTL = (
    "[STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL] Cannot use TTL for state=x in timeMode=EventTime, "
    "use TimeMode.ProcessingTime() instead."
)
NOT_POSITIVE = "[STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE] TTL duration must be greater than zero"
RESERVED = (
    "[STATE_STORE_CANNOT_CREATE_COLUMN_FAMILY_WITH_RESERVED_CHARS] "
    "Failed to create column family with unsupported starting character and name=$x."
)
INVALID_MODE = (
    "[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE] "
    "Failed to perform stateful processor operation=register_timer with invalid timeMode=NoTime"
)
LATE = (
    "[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE] "
    "Failed to perform stateful processor operation={} with invalid handle state=INITIALIZED."
)
RUNTIME = "PySparkRuntimeError"

# What is done, where, in which time mode; the class of the error and what it says.
IN_WORKERS: dict[str, tuple[str, str, str, str, str]] = {
    "timer in mode none": ("do", "register(1)", "none", RUNTIME, INVALID_MODE),
    "ttl of events": ("init", "handle.getMapState('x', 'k int', 'n int', 9)", "eventTime", RUNTIME, TTL),
    "negative ttl": ("init", "handle.getListState('x', 'n int', -1)", "processingTime", RUNTIME, NOT_POSITIVE),
    "reserved name": ("init", "handle.getValueState('$x', 'n int')", "none", RUNTIME, RESERVED),
    "made late": ("do", "handle.getValueState('x', 'n int')", "none", RUNTIME, LATE.format("get_value_state")),
    "made in a timer": ("due", "handle.getValueState('v', 'n int')", "eventTime", RUNTIME, "state v already exists"),
    "deleted late": ("do", "handle.deleteIfExists('v')", "none", RUNTIME, LATE.format("delete_if_exists")),
    "few fields": ("do", "v.update(())", "none", RUNTIME, f"{LENGTH} 1 fields are required while 0 values"),
    "short key of a map": ("do", "m.getValue(())", "none", RUNTIME, LENGTH),
    "empty put": ("do", "l.put([])", "none", RUNTIME, EMPTY),
    "empty append": ("do", "l.appendList([])", "none", RUNTIME, EMPTY),
    "large decimal": ("do", "d.update((Decimal('123456.789'),))", "none", RUNTIME, "[NUMERIC_VALUE_OUT_OF_RANGE"),
    "no time": ("do", "handle.registerTimer('soon')", "eventTime", "TypeError", "'str' object cannot be interpreted"),
    "error in a timer": ("due", "{}['missing']", "eventTime", "KeyError", "'missing'"),
    "exit": ("do", "__import__('sys').exit(3)", "none", "SystemExit", "3"),
}


@pytest.mark.parametrize("name", IN_WORKERS)
def test_errors(spark: SparkSession, tmp_path: Path, name: str) -> None:
    where, what, time, kind, text = IN_WORKERS[name]
    api = APIS[len(name) % 2]

    def query(df: DataFrame) -> DataFrame:
        processor = Strict(VARIABLES, **({where: what} if where != "do" else {})).using(api)
        return transformed(df.withWatermark("ts", "1 second"), processor, time=time)

    do = {"do": what, "due": "handle.registerTimer(0)"}.get(where, "v.update((1,))")
    fails = rf"(?m)^([\w.]+\.)?{kind}: .*{re.escape(text)}"
    compare(spark, tmp_path, [Turn(query, [script(("a", do))], fails=fails, trigger=ONCE)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"init": "handle.getValueState('v', 'n int')"},
        {"init": "handle.getValueState('x', 'n nonsense')"},
        {"init": "v.update((1,))"},
        {"init": "1 / 0"},
        {"close": "v.get()"},
    ],
    ids=lambda wrong: next(iter(wrong.values())),
)
def test_errors_before_the_first_row(spark: SparkSession, tmp_path: Path, wrong: dict[str, Any]) -> None:
    """On the driver, where `init` and `close` run too; Spark does not say what was wrong."""

    def query(df: DataFrame) -> DataFrame:
        return transformed(df.withWatermark("ts", "1 second"), Strict(VARIABLES, **wrong), time="eventTime")

    compare(spark, tmp_path, [Turn(query, [script(("a", "1"))], fails=".", trigger=ONCE)])


def test_what_is_no_misuse(spark: SparkSession, tmp_path: Path) -> None:
    """Odd names, names that differ in case, a time to live of 0 in any mode, fields that are not null."""
    odd: Variables = {
        "v": ("Value", "n int", 0),
        "V": ("List", "n int not null", 0),
        "a b/ü`$": ("Map", "k int", "n int", 0),
    }
    do = "v.update((1,)), V.appendValue((2,)), globals()['a b/ü`$'].updateValue((3,), (4,))"
    told = "v.get(), V.get(), globals()['a b/ü`$'].iterator()"

    def query(df: DataFrame) -> DataFrame:
        return transformed(df, Script(odd))

    found, _ = compare(spark, tmp_path, [Turn(query, [script(("a", do))]), Turn(query, [script(("a", told))])])
    assert spoken(found, "a")[1] == ["((1,), [(2,)], [((3,), (4,))])"]
