"""Behaviour of a real query that the tester of processors has, and Spark's own has not; and calls that it refuses."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import ArrayType, DayTimeIntervalType, LongType, MapType, StringType, StructField, StructType

import millpond
from millpond.errors import UsageError
from millpond.testing import PandasProcessorTester, ProcessorTester
from tests.differential.processors.processors import START, START_MS, Frames, Script, Several, Stamped, Strict, Typed
from tests.testing import processors as p

SHAPE = ("k string", "k string, v bigint, at timestamp", "k string, n bigint")
SCRIPT = ("k string", "k string, n int, ts timestamp, do string", Script.ddl)


def for_rows(processor: StatefulProcessor, *modes: str, **more: Any) -> ProcessorTester:
    return ProcessorTester(processor, *SHAPE, *modes, **more)


class Talk:
    """A tester of a script: what its expressions give, in order."""

    def __init__(self, script: Script, *modes: str, **more: Any) -> None:
        self.tester = ProcessorTester(script, *SCRIPT, *modes, **more)

    def __call__(self, *lines: str, at: float = 0) -> list[str]:
        time = START + dt.timedelta(seconds=at)
        rows = [Row(n=number, ts=time, do=line) for number, line in enumerate(lines)]
        return [row.said for row in self.tester.test("a", rows)]


def test_there_is_no_jvm() -> None:
    code = (
        "import sys; from tests.testing import test_tester as t; from pyspark import SparkContext\n"
        "t.test_a_failed_batch_changes_nothing()\n"
        "sys.exit(SparkContext._gateway is not None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": "", "PYTHONPATH": ":".join(sys.path)})


class Connecting(Script):
    """Connects to a server where it is unpickled."""

    server = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not self.server:
            raise ConnectionError("no server")
        self.__dict__.update(state)


def test_a_processor_that_cannot_be_unpickled_is_an_error_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ProcessorTester(Connecting({"v": ("Value", "n int")}), *SCRIPT)
    monkeypatch.setattr(Connecting, "server", False)
    kept = []
    for _ in range(2):
        with pytest.raises(ConnectionError, match="no server") as failure:
            one.testBatch([("a", 1, None, "v.update((row.n,))")])
        kept.append(failure)  # with the frames of the call


def test_a_failed_batch_changes_nothing() -> None:
    """The error is the user's own, and names the key."""
    one = ProcessorTester(Strict({"v": ("Value", "n int")}), *SCRIPT)
    one.testBatch([Row(k=k, n=0, do="v.update((row.n,))") for k in "ab"])
    with pytest.raises(ZeroDivisionError) as failure:
        one.testBatch([("a", 1, None, "v.update((row.n,))"), ("b", 1, None, "v.update((row.n,)), 1/0")])
    assert "a test of Strict, key ('b',)" in failure.value.__notes__[0]
    assert [one.peekValueState("v", key) for key in "ab"] == [(0,), (0,)]
    assert one.test("a", [{"n": 2, "do": "v.get()"}]) == [Row(k="a", n=2, said="(0,)")]


def test_large_lists_and_maps_outlast_a_batch_that_fails_and_an_initial_state() -> None:
    variables = {"l": ("List", "n int"), "m": ("Map", "n int", "n int")}
    fill = "[(l.appendValue((n,)), m.updateValue((n,), (n,))) for n in range(500)]"
    talk = Talk(Strict(variables, first=fill))
    talk(fill)
    with pytest.raises(ZeroDivisionError):
        talk("1/0")
    begun = Talk(Strict(variables, first=fill), initialState=[("a", 1)], initialStateStructType="k string, n int")
    for one in (talk.tester, begun.tester):
        assert one.peekListState("l", "a") == [(n,) for n in range(500)]
        assert one.peekMapState("m", "a") == {(n,): (n,) for n in range(500)}


def test_a_processor_is_new_in_each_batch() -> None:
    talk = Talk(Script({}))
    assert talk("setattr(handle, 'mine', 1)", "handle.mine") == ["None", "1"]
    assert talk("hasattr(handle, 'mine')") == ["False"]


def test_what_spark_refuses() -> None:
    with pytest.raises(PySparkRuntimeError, match="INCORRECT_TIME_MODE_TO_ASSIGN_TTL"):
        for_rows(Script({"v": ("Value", "n int", 5)}))
    talk = Talk(Script({"v": ("Value", "n int"), "l": ("List", "n int")}))
    said = talk("l.put([])", "handle.registerTimer(1)", "v.update('x')")
    assert "EMPTY_LIST_VALUE" in said[0]
    assert "INVALID_TIME_MODE" in said[1]


def test_time_to_live() -> None:
    variables = {"v": ("Value", "n int", 1000), "l": ("List", "n int", 1000), "m": ("Map", "n int", "n int", 1000)}
    talk = Talk(Script(variables), "update", "processingTime")
    one = talk.tester
    talk("v.update((1,)), l.appendValue((1,)), m.updateValue((1,), (1,))")
    one.setProcessingTime(600)
    one.updateMapState("m", "b", {(5,): (6,)})
    assert talk("l.appendValue((2,)), m.updateValue((2,), (2,)), v.get()") == ["(None, None, (1,))"]
    one.setProcessingTime(1000)
    assert one.peekValueState("v", "a") is None
    assert one.peekListState("l", "a") == [(2,)]
    assert one.peekMapState("m", "a") == {(2,): (2,)}
    assert one.peekMapState("m", "b") == {(5,): (6,)}
    one.setProcessingTime(1600)
    assert (one.peekListState("l", "a"), one.peekMapState("m", "a"), one.peekMapState("m", "b")) == ([], {}, {})


def test_timers_that_are_due_at_once() -> None:
    """They fire in the same batch; those that are set while timers fire wait for the next one."""
    talk = Talk(Script({}, due="timers(), register(at + 1)"), "update", "eventTime", eventTime="ts")
    one = talk.tester
    one.setWatermark(START_MS + 10_000)
    assert talk("register(5), register(12)", at=11) == ["(None, None)", "due 5: ([5.0, 12.0], None)"]
    assert one.peekTimers("a") == [START_MS + 6_000, START_MS + 12_000]
    assert one.peekTimers("b") == []
    assert [row.said for row in one.setWatermark(START_MS + 10_001)] == ["due 6: ([6.0, 12.0], None)"]
    assert talk("times.getCurrentWatermarkInMs()", at=11)[0] == str(START_MS + 10_001)


def test_looking_at_state_fires_no_timers() -> None:
    talk = Talk(Script({"v": ("Value", "n int")}, due="register(at + 1)"), "update", "eventTime", eventTime="ts")
    talk.tester.setWatermark(START_MS + 10_000)
    talk("register(1)", at=11)
    talk.tester.updateValueState("v", "a", (1,))
    assert talk.tester.peekValueState("v", "a") == (1,)
    assert talk.tester.peekTimers("a") == [START_MS + 2_000]


def test_late_rows() -> None:
    for time, kept in (("eventTime", ["None"]), ("processingTime", ["None", "None"]), ("none", ["None", "None"])):
        talk = Talk(Script({}), "update", time, eventTime="ts")
        if time != "none":
            talk.tester.setWatermark(START_MS + 10_000)
        assert talk("None", at=10) + talk("None", at=10.001) == kept


def test_complete_mode() -> None:
    """There are no batches without rows."""
    talk = Talk(Script({}, due="at"), "complete", "eventTime", eventTime="ts")
    talk("register(5)")
    assert talk.tester.setWatermark(START_MS + 6_000) == []
    assert talk("1", at=7) == ["1", "due 5: 5.0"]


def test_processing_time_is_told_with_event_time() -> None:
    talk = Talk(Script({}, due="at"), "append", "eventTime")
    assert talk.tester.setProcessingTime(77) == []
    assert talk("times.getCurrentProcessingTimeInMs(), times.getCurrentWatermarkInMs()") == ["(77, 0)"]


def test_rows_that_are_emitted_late() -> None:
    shape = (*SCRIPT[:2], Stamped.ddl, "append", "eventTime")
    one = ProcessorTester(Stamped(), *shape, eventTime="ts", eventTimeColumnName="at")
    rows = [Row(ts=START, do="x")]
    assert [row.said for row in one.test("a", rows)] == ["got x"]
    assert [row.said for row in one.setWatermark(START_MS + 1000)] == ["kept x until 0.5"]
    late = ProcessorTester(Stamped(back=5), *shape, eventTime="ts", eventTimeColumnName="at")
    late.setWatermark(START_MS)
    with pytest.raises(UsageError, match="EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED"):
        late.test("a", [Row(ts=START + dt.timedelta(seconds=2), do="x")])


def test_keys() -> None:
    """Keys of several columns, of columns that rows do not have, null, and floats, of which 0.0 is not −0.0."""
    one = ProcessorTester(
        Script({"v": ("Value", "n int")}), "k string, g double", "k string, n int, do string", Script.ddl
    )
    do = "v.update(((v.get() or (0,))[0] + 1,)), v.get(), repr(row)"
    assert one.test(("a", -0.0), [Row(n=0, do=do)])[0].said.startswith("(None, (1,), \"Row(g=-0.0, k='a', n=0")
    assert one.test(("a", 0.0), [Row(n=0, do=do)])[0].said.startswith("(None, (1,)")
    assert one.test(("a", -0.0), [Row(n=0, do=do)])[0].said.startswith("(None, (2,)")
    assert one.test((None, float("nan")), [Row(n=0, do=do)])[0].said.startswith("(None, (1,)")
    assert one.testBatch([Row(k=None, g=float("nan"), n=0, do=do)])[0].said.startswith("(None, (2,)")
    assert [one.peekValueState("v", ("a", zero)) for zero in (0.0, -0.0)] == [(1,), (2,)]
    with pytest.raises(UsageError, match="'a' is no key of 2 columns"):
        one.test("a", [])


def test_all_types() -> None:
    one = ProcessorTester(Typed(), "k string", SCRIPT[1], Typed.ddl)
    first, second = one.test("b", [Row(n=1)])
    assert (first.dec, first.bin, first.day) == (Decimal("12345678901234567.891"), b"\x00", dt.date(2024, 2, 29))
    assert (first.m, first.st, first.rows) == ({"x": 1, "y": None}, Row(x=1, y=["a", None]), [Row(z="z"), None])
    assert first.ts == dt.datetime(2024, 3, 10, 12, 30, 0, 5, dt.UTC).astimezone().replace(tzinfo=None)
    assert set(second[1:]) == {None}
    frames = PandasProcessorTester(Typed().using("pandas"), "k string", SCRIPT[1], Typed.ddl)
    shown = frames.test("a", pd.DataFrame({"n": [1]}))
    assert shown.i32.tolist() == [2**31 - 1]
    assert str(shown.ts[0]) == "2024-03-10 12:30:00.000005"


def test_frames_are_as_in_spark() -> None:
    settings = {"spark.sql.execution.arrow.maxRecordsPerBatch": "2"}
    one = PandasProcessorTester(Frames(), "k string", "k string, n int, f float", Frames.ddl, settings=settings)
    shown = one.testBatch(pd.DataFrame({"k": ["a"] * 3, "n": [1, 2, None], "f": [1.5, 2.5, 3.5]}))
    assert shown["size"].tolist() == [2, 1]
    assert shown.types[0] == "k object, n float64, f float64"


def test_much_output_of_a_key() -> None:
    one = ProcessorTester(Several(), SCRIPT[0], SCRIPT[1], Several.ddl)
    assert len(one.test("a", [Row(do="25000")])) == 25_000


def test_many_keys_and_batches() -> None:
    one = for_rows(p.Count())
    for _ in range(3):
        shown = one.testBatch([Row(k=str(number % 5000)) for number in range(10_000)])
    assert {row.n for row in shown} == {6}
    assert len(shown) == 5000


def test_batches_leave_no_memory_accounts() -> None:
    """With rows and due timers, whose temporary tables have different columns."""
    tester = ProcessorTester(Script({}), *SCRIPT, "update", "processingTime")
    accounts, counts = tester._batches._tables._budget._accounts, set()
    for now in range(1, 5):
        tester.test("a", [Row(do=f"handle.registerTimer({now})")])
        assert len(tester.setProcessingTime(now)) == 1
        counts.add(len(accounts))
    assert len(counts) == 1


class Nulls(StatefulProcessor):
    """Says what it sees."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield Row(said=str([(row.w, row.l, row.m) for row in rows]))


class NullFrames(Nulls):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        seen = [(frame.w[0], list(frame.l[0]), frame.m[0]) for frame in rows]
        yield pd.DataFrame({"said": [str(seen)]})


def test_null_structs_of_fields_that_are_never_null() -> None:
    full = StructType([StructField("a", LongType(), False)])
    fields = [("w", full), ("l", ArrayType(full)), ("m", MapType(StringType(), full))]
    columns = StructType([StructField("k", StringType()), *(StructField(name, kind) for name, kind in fields)])
    row = {"k": "a", "w": None, "l": [None], "m": {"x": None}}
    (shown,) = ProcessorTester(Nulls(), "k string", columns, "said string").testBatch([row])
    assert shown.said == "[(None, [None], [('x', None)])]"
    shown = PandasProcessorTester(NullFrames(), "k string", columns, "said string").testBatch(pd.DataFrame([row]))
    assert shown.said.tolist() == ["[(None, [None], {'x': None})]"]


class Unused(StatefulProcessor):
    """Fails where Spark calls it on the driver."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        raise LookupError("in init")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        return iter(())


def test_wrong_arguments() -> None:
    count = p.Count()
    for arguments, more, message in (
        ((*SHAPE, "upsert"), {}, "'upsert' is no outputMode"),
        ((*SHAPE, "append", "clock"), {}, "'clock' is no timeMode. There are none, processingtime, eventtime"),
        (SHAPE, {"eventTime": "time"}, "The column 'time' of eventTime is not there. Columns are k, v, at"),
        (("k int", *SHAPE[1:]), {}, "The column 'k' is int in the key and string in the rows"),
        (("k strings", *SHAPE[1:]), {}, "There is no type 'strings'"),
        (("k string,", *SHAPE[1:]), {}, "Not a type"),
        (("k map<int,int>", "v int", "n int"), {}, "a type that is not supported"),
        ((*SHAPE[:2], StructType([StructField("d", DayTimeIntervalType())])), {}, "a type that is not supported"),
    ):
        with pytest.raises(UsageError, match=message):
            ProcessorTester(count, *arguments, **more)
    with pytest.raises(LookupError, match="in init"):
        for_rows(Unused())


def test_wrong_calls() -> None:
    one, timed = for_rows(p.Count()), for_rows(p.Pausing(), "append", "processingTime")
    for call, message in (
        (lambda: one.test("a", [Row(w=1)]), "There is no column 'w'. Columns are k, v, at"),
        (lambda: one.test("a", [("a", 1)]), "has 2 values, not 3"),
        (lambda: one.test("a", [Row(k="b")]), "is no row of the key {'k': 'a'}"),
        (lambda: one.peekListState("count", "a"), "There is no list state 'count'. There are: count \\(value\\)"),
        (lambda: one.deleteState("other", "a"), "There is no state 'other'"),
        (lambda: one.setProcessingTime(5), "no times without a time mode"),
        (lambda: one.setWatermark(5), "no times without a time mode"),
        (lambda: one.peekTimers("a"), "no times without a time mode"),
        (lambda: timed.setProcessingTime(0), "is 0 ms, and moves forward only"),
    ):
        with pytest.raises(UsageError, match=message):
            call()
    frames = PandasProcessorTester(p.CountFrames(), *SHAPE)
    with pytest.raises(UsageError, match="another key"):
        frames.test("a", pd.DataFrame({"k": ["a", "b"]}))
    with pytest.raises(UsageError, match="There is no column 'w'"):
        frames.test("a", pd.DataFrame({"w": [1]}))


def test_no_rows() -> None:
    """A key without rows is not called, as in Spark."""
    assert for_rows(p.Count()).test("a", []) == []
    assert len(PandasProcessorTester(p.CountFrames(), *SHAPE).test("a", pd.DataFrame({"v": []}))) == 0


def test_columns_as_types() -> None:
    key, value = StructField("k", StringType()), StructField("v", LongType(), nullable=False)
    one = ProcessorTester(p.Highest(), StructType([key]), StructType([key, value]), SHAPE[2])
    assert one.test("a", [("a", 5)]) == [Row(k="a", n=5)]


class Awaiting(millpond.AsyncStatefulProcessor):
    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n bigint")

    async def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        await self.count.update((initialState.n,))

    async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
        held = await self.count.get()
        total = (held[0] if held else 0) + len(list(rows))
        await self.count.update((total,))
        yield Row(k=key[0], n=total)


def test_an_asynchronous_processor() -> None:
    tester = ProcessorTester(
        Awaiting(),
        keyStructType="k string",
        inputStructType="v int",
        outputStructType="k string, n bigint",
        initialState=[Row(k="a", n=10)],
        initialStateStructType="k string, n bigint",
    )
    assert tester.test("a", [Row(v=1), Row(v=2)]) == [Row(k="a", n=12)]
    assert tester.test("b", [Row(v=1)]) == [Row(k="b", n=1)]
    assert tester.peekValueState("count", "a") == (12,)
