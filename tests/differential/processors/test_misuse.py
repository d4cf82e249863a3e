"""Mistakes of users, and the errors that they see."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.differential.processors.checks import APIS, ONCE, Turn, compare, script, spoken, transformed
from tests.differential.processors.processors import Misused, Script, Strict, Variables

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

# What the processor does, and the beginning of what the error says, in each of the attempts of a task.
IN_ATTEMPTS = [
    [
        ("register(1)", INVALID_MODE),
        ("handle.getValueState('x', 'n int')", LATE.format("get_value_state")),
        ("handle.deleteIfExists('v')", LATE.format("delete_if_exists")),
        ("v.update(())", f"{LENGTH} 1 fields are required while 0 values are provided."),
    ],
    [
        ("l.put([])", EMPTY),
        ("l.appendList([])", EMPTY),
        ("m.updateValue((1,), (1, 2))", f"{LENGTH} 1 fields are required while 2 values are provided."),
        ("d.update((Decimal('123456.789'),))", "[NUMERIC_VALUE_OUT_OF_RANGE"),
    ],
]


@pytest.mark.parametrize("wrongs", IN_ATTEMPTS, ids=("handles", "values"))
def test_errors(spark: SparkSession, tmp_path: Path, wrongs: list[tuple[str, str]]) -> None:
    """Spark's handle is of no use after an error, so there is one for each attempt of the task."""

    def query(df: DataFrame) -> DataFrame:
        folder = tmp_path / "told" / uuid.uuid4().hex
        folder.mkdir(parents=True)
        return transformed(df, Misused(VARIABLES, str(folder), [what for what, _ in wrongs]))

    last = re.escape(wrongs[-1][1])
    fails = rf"(?m)^([\w.]+\.)?PySparkRuntimeError: .*{last}"
    compare(spark, tmp_path, [Turn(query, [script(("a", ""))], fails=fails)])
    told = [folder for folder in (tmp_path / "told").iterdir() if any(folder.iterdir())]
    assert len(told) == 2
    for folder in told:
        for attempt, (_, text) in enumerate(wrongs):
            error = (folder / str(attempt)).read_text()
            assert error.startswith("PySparkRuntimeError: ")
            assert text in error


# Where something is done, what, in which time mode; the class of the error and what it says.
ONCE_EACH = {
    "ttl": ("init", "handle.getMapState('x', 'k int', 'n int', 9)", "eventTime", "PySparkRuntimeError", TTL),
    "negative": (
        "init",
        "handle.getListState('x', 'n int', -1)",
        "processingTime",
        "PySparkRuntimeError",
        NOT_POSITIVE,
    ),
    "reserved name": ("init", "handle.getValueState('$x', 'n int')", "none", "PySparkRuntimeError", RESERVED),
    "error in a timer": ("due", "{}['missing']", "eventTime", "KeyError", "'missing'"),
    "made in a timer": (
        "due",
        "handle.getListState('x', 'n int')",
        "eventTime",
        "PySparkRuntimeError",
        LATE.format("get_list_state").replace("INITIALIZED", "DATA_PROCESSED"),
    ),
    "exit": ("do", "__import__('sys').exit(3)", "none", "SystemExit", "3"),
}


@pytest.mark.parametrize("name", ONCE_EACH)
def test_errors_elsewhere(spark: SparkSession, tmp_path: Path, name: str) -> None:
    where, what, time, kind, text = ONCE_EACH[name]
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

    found = compare(spark, tmp_path, [Turn(query, [script(("a", do))]), Turn(query, [script(("a", told))])])
    assert spoken(found, "a")[1] == ["((1,), [(2,)], [((3,), (4,))])"]
