"""What users do wrong, and the error that they see, on the driver or in a worker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.differential.processors.checks import APIS, Turn, compare, script, transformed
from tests.differential.processors.processors import Strict, Variables

ONE: Variables = {"v": ("Value", "n int"), "l": ("List", "n int"), "m": ("Map", "k int", "n int")}

CASES: dict[str, dict] = {
    "twice": {"init": "handle.getValueState('v', 'n int')"},
    "twice with another type": {"init": "handle.getListState('v', 'n int')"},
    "twice but for case": {"init": "handle.getListState('V', 'n int')"},
    "value ttl in mode none": {"init": "handle.getValueState('x', 'n int', 1000)"},
    "ttl in event time": {"init": "handle.getMapState('x', 'k int', 'n int', 1000)", "time": "eventTime"},
    "ttl 0": {"init": "handle.getListState('x', 'n int', 0)", "time": "processingTime"},
    "ttl -1": {"init": "handle.getListState('x', 'n int', -1)", "time": "processingTime"},
    "ttl 0 in mode none": {"init": "handle.getListState('x', 'n int', 0)"},
    "no such type": {"init": "handle.getValueState('x', 'n nonsense')"},
    "no struct": {"init": "handle.getValueState('x', 'int')"},
    "not a schema": {"init": "handle.getValueState('x', 5)"},
    "no name": {"init": "handle.getValueState('', 'n int')"},
    "odd name": {"init": "handle.getValueState('a b/ü', 'n int')"},
    "reserved name": {"init": "handle.getValueState('$x', 'n int')"},
    "default name": {"init": "handle.getValueState('default', 'n int')"},
    "same field twice": {"init": "handle.getValueState('x', 'n int, n int')"},
    "not null": {"init": "handle.getValueState('x', 'n int not null')"},
    "interval": {"init": "handle.getValueState('x', 'n interval day to second')"},
    "no fields": {"init": "handle.getValueState('x', __import__('pyspark.sql.types').sql.types.StructType([]))"},
    "map with a key of maps": {"init": "handle.getMapState('x', 'n map<string, int>', 'n int')"},
    "state in init": {"init": "v.update((1,))"},
    "get in init": {"init": "v.get()"},
    "timer in init": {"init": "register(1)", "time": "eventTime"},
    "timer in mode none": {"do": "register(1)"},
    "delete in mode none": {"do": "delete(1)"},
    "list in mode none": {"do": "timers()"},
    "made late": {"do": "handle.getValueState('x', 'n int')"},
    "made late, twice": {"do": "handle.getValueState('v', 'n int')"},
    "deleted late": {"do": "handle.deleteIfExists('v')"},
    "too few fields": {"do": "v.update(())"},
    "too many fields": {"do": "v.update((1, 2))"},
    "too many fields in a list": {"do": "l.put([(1,), (1, 2)])"},
    "None": {"do": "v.update(None)"},
    "empty put": {"do": "l.put([])"},
    "empty append": {"do": "l.appendList([])"},
    "put of None": {"do": "l.put([(1,), None])"},
    "map value too short": {"do": "m.updateValue((1,), ())"},
    "map key too short": {"do": "m.getValue(())"},
    "decimal too large": {"do": "d.update((Decimal('123456.789'),))"},
    "timer of text": {"do": "handle.registerTimer('soon')", "time": "eventTime"},
    "timer too late": {"do": "handle.registerTimer(2**63)", "time": "eventTime"},
    "state in close": {"close": "v.get()"},
    "update in close": {"close": "v.update((1,))"},
    "timer in close": {"close": "register(1)", "time": "eventTime"},
    "made in a timer": {"do": "register(-1)", "due": "handle.getValueState('x', 'n int')", "time": "eventTime"},
    "error in init": {"init": "1 / 0"},
    "error": {"do": "1 / 0"},
    "error in a timer": {"do": "register(-1)", "due": "{}['missing']", "time": "eventTime"},
    "error in close": {"close": "nothing"},
    "exit": {"do": "__import__('sys').exit(3)"},
    "system exit in init": {"init": "__import__('sys').exit(3)"},
    "killed": {"do": "__import__('os')._exit(3)"},
}


def told(error: str) -> list[str]:
    return [line for line in error.splitlines() if re.match(r"^([\w.]+\.)?\w*(Error|Exception|Exit)\b", line)]


@pytest.mark.parametrize("name", CASES)
def test_errors(spark: SparkSession, tmp_path: Path, name: str) -> None:
    case = dict(CASES[name])
    time, do = case.pop("time", "none"), case.pop("do", "1")
    variables = {**ONE, "d": ("Value", "x decimal(5, 2)")}

    def query(df: DataFrame) -> DataFrame:
        return transformed(df.withWatermark("ts", "1 second"), Strict(variables, **case), time=time)

    try:
        found, errors = compare(spark, tmp_path, [Turn(query, [script(("a", do))], fails=".")])
        print("FOUND", name, "::", told(errors[0]) or errors[0].splitlines()[0][:1000])
    except AssertionError as error:
        print("FOUND", name, "NOT FAILED", str(error)[:200])
