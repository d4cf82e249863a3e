"""Millpond's tester beside Spark's own, which has code of its own in place of the engine: step by step the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.tws_tester import TwsTester

from millpond.testing import PandasProcessorTester, ProcessorTester
from tests.testing import processors as p

SHAPE = ("k string", "k string, v bigint, at timestamp", "k string, n bigint")
Step = tuple[Any, ...]


def rows(key: str, *values: int | None) -> Step:
    return "test", key, [Row(k=key, v=v) for v in values]


def frame(key: str, *values: int) -> Step:
    return "testInPandas", key, pd.DataFrame({"k": [key] * len(values), "v": values})


MAXIMA = [rows("a", 1, 5, 3), rows("b", 2), rows("a", 5, 6, None, 1, 0), ("peekValueState", "best", "a")]
LISTS = [
    ("updateListState", "last", "b", [(1,), (2,)]),
    *(rows("a", 1), rows("a", 2, 3, 4), rows("b", 5, 6), rows("c", 7)),
    *(("peekListState", "last", key) for key in "abd"),
    ("deleteState", "last", "a"),
    ("peekListState", "last", "a"),
    rows("a", 9),
]
APPENDED = [rows("a", 1, 2), rows("a", 3), ("peekListState", "all", "a"), rows("a", -1), rows("a", 4)]
MAPS = [
    rows("a", 1, 2, 2),
    ("updateMapState", "counts", "b", {(7,): (2,), (8,): (1,)}),
    *(rows("b", 7, 8, 9), rows("a", 2, 1, 3)),
    *(("peekMapState", "counts", key) for key in "abc"),
    ("updateMapState", "counts", "b", {(1,): (1,)}),
    rows("b", 2),
    ("deleteState", "counts", "b"),
    ("peekMapState", "counts", "b"),
]
VALUES = [
    *(rows("a", 1), rows("a", 2), rows("b", 1)),
    ("peekValueState", "count", "a"),
    ("peekValueState", "count", "c"),
    ("updateValueState", "count", "c", (40,)),
    *(rows("c", 1, 2), ("deleteState", "count", "a"), rows("a", 3)),
]
CLOCK = [
    *(rows("a", 1), rows("b", 1)),
    ("setProcessingTime", 4_000),
    rows("a", 1),
    ("setProcessingTime", 10_000),
    ("setProcessingTime", 13_999),
    rows("b", 1),
    ("setProcessingTime", 50_000),
    ("peekValueState", "count", "a"),
]
SEVERAL = [
    *(rows("a", 5, 3, 5, 9), ("setProcessingTime", 4), rows("a", 6), ("setProcessingTime", 6)),
    ("setProcessingTime", 100),
]
WATERMARK = [
    *(rows("a", 3, 4), rows("b", 20), ("setWatermark", 13_999), rows("b", 2, 13, 14, 25), ("setWatermark", 14_000)),
    *(rows("a", 15), ("setWatermark", 34_999), ("setWatermark", 35_000)),
]

CASES: list[tuple[Callable[[], StatefulProcessor], str, list[Step]]] = [
    (p.Count, "none", VALUES),
    (p.Highest, "none", MAXIMA),
    (p.Recent, "none", LISTS),
    (p.Appending, "none", APPENDED),
    (p.Tally, "none", MAPS),
    (p.Sums, "none", [rows("a", 1, 2), rows("a", 3), rows("a", 5), rows("b", 0)]),
    (p.Upper, "none", [rows("a", 1, 2), rows("b", 3)]),
    (p.Count, "processingTime", VALUES),
    (p.Pausing, "processingTime", CLOCK),
    (p.Several, "processingTime", SEVERAL),
    (p.Sessions, "eventTime", WATERMARK),
    (p.CountFrames, "none", [frame("a", 1, 2), frame("b", 1), frame("a", 4), ("peekValueState", "count", "a")]),
    (p.PausingFrames, "processingTime", [(one[0], *one[1:]) if one[0] != "test" else frame("a", 1) for one in CLOCK]),
]


def ours(step: Step) -> Step:
    """A step as Millpond's tester takes it; event times are the values, in seconds."""
    name, *arguments = step
    if name == "test":
        key, given = arguments
        times = [None if row.v is None else pd.Timestamp(row.v, unit="s", tz="UTC").to_pydatetime() for row in given]
        return name, key, [Row(**row.asDict(), at=at) for row, at in zip(given, times, strict=True)]
    return ("test" if name == "testInPandas" else name), *arguments


def told(result: Any) -> Any:
    return result.to_dict("records") if isinstance(result, pd.DataFrame) else result


@pytest.mark.parametrize("mode", ["append", "update"])
@pytest.mark.parametrize(("processor", "time", "steps"), CASES, ids=lambda one: getattr(one, "__name__", ""))
def test_each_step_is_the_same(
    processor: Callable[[], StatefulProcessor], time: str, steps: list[Step], mode: str
) -> None:
    pandas = any(step[0] == "testInPandas" for step in steps)
    make = PandasProcessorTester if pandas else ProcessorTester
    mine: Any = make(processor(), *SHAPE, mode, time, eventTime="at" if time == "eventTime" else None)
    sparks = TwsTester(processor(), timeMode=time, outputMode=mode, eventTimeExtractor=lambda row: row.v * 1000)
    for number, step in enumerate(steps):
        (name, *arguments), (other, *others) = ours(step), step
        found, wanted = (
            told(getattr(one, call)(*given)) for one, call, given in [(mine, name, arguments), (sparks, other, others)]
        )
        if name.startswith("set"):  # keys come in no particular order
            found, wanted = sorted(found, key=str), sorted(wanted, key=str)
        assert found == wanted, f"step {number}: {name} {arguments}"


def test_initial_state() -> None:
    first = [("a", Row(first=3)), ("b", Row(first=4)), ("a", Row(first=10))]
    mine = ProcessorTester(
        p.Count(),
        *SHAPE,
        initialState=[Row(k=k, **row.asDict()) for k, row in first],
        initialStateStructType="k string, first int",
    )
    sparks = TwsTester(p.Count(), initialStateRow=first)
    for key in "abc":
        assert mine.peekValueState("count", key) == sparks.peekValueState("count", key)
        assert mine.test(key, [Row(v=1)]) == sparks.test(key, [Row(v=1)])


def test_initial_state_in_pandas() -> None:
    first = pd.DataFrame({"k": ["a", "b", "a"], "first": [3, 4, 10]})
    mine = PandasProcessorTester(
        p.CountFrames(), *SHAPE, initialState=first, initialStateStructType="k string, first int"
    )
    sparks = TwsTester(p.CountFrames(), initialStatePandas=list(first.groupby("k")))
    for key in "abc":
        assert mine.peekValueState("count", key) == sparks.peekValueState("count", key)
        rows = pd.DataFrame({"v": [1, 2]})
        assert told(mine.test(key, rows)) == told(sparks.testInPandas(key, rows))
