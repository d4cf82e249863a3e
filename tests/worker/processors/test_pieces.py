"""Keys with more rows than one table should have: they travel in pieces, of which the user's code sees nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import Row

import millpond
from millpond.errors import UsageError
from millpond.operators.processors.calls import Changes, Phase
from millpond.spec.kinds.group_state import STATE, GroupStateSpec
from millpond.spec.kinds.processor import Variable
from millpond.tasks.user_processor import UserGroups, UserProcessor
from millpond.worker.processors.frames import _whole_frames
from tests.worker.processors.beside import Beside
from tests.worker.processors.mini_slot import Scripted, fields, struct, user_processor

COLUMNS = "k string, v bigint, text string"
SHOWN = "k string, n bigint"
Told = list[tuple[Any, ...]]


def lower(patch: pytest.MonkeyPatch) -> None:
    """Let pieces be small, and tables that hold more than some of them fail as those of more than 2 GB do."""
    patch.setattr("millpond.operators.processors.input._MAX_WHOLE_BYTES", 20_000)
    patch.setattr("millpond.operators.processors.input._PIECE_BYTES", 5_000)
    patch.setattr("millpond.operators.columns.decode.LIMIT", 40_000)


def some_rows(*keys: str, heavy: int = 1500) -> list[dict[str, Any]]:
    """Rows of keys that have few, and of those of long names, which have many."""
    counts = {key: heavy if len(key) > 5 else 3 for key in keys}
    numbers = [(n, key) for key, count in counts.items() for n in range(count)]
    return [{"k": key, "v": n, "text": f"{key} {n} " * (n % 20)} for n, key in sorted(numbers)]


class Calls(Beside):
    """Calls and their output.

    Attributes:
        output: that of the last batch.
        calls: the phases of its calls, and how many pieces of rows each has asked for.
    """

    def __init__(self, user: UserProcessor, bits: int = 64) -> None:
        super().__init__(user)
        self.bits = bits
        self.output: Told = []
        self.calls: list[tuple[Phase, int]] = []

    def batch(self, rows: list[dict[str, Any]], now: int = 0, initial: list[dict[str, Any]] | None = None) -> Told:
        """Run a batch and return its output."""
        self.output = []
        self.run(rows, now, self.bits, initial)
        return self.output

    def shown(self, rows: pa.RecordBatch) -> None:
        self.output += [tuple(row.values()) for row in rows.to_pylist()]

    def called(
        self, phase: Phase, tables: Mapping[str, pa.RecordBatch], asked: tuple[int, int], changed: Changes
    ) -> None:
        assert asked[1] == 0  # no rows are asked for when they are not read any more
        self.calls.append((phase, asked[0]))


def both(
    user: Callable[[], UserProcessor], rows: list[dict[str, Any]], patch: pytest.MonkeyPatch, bits: int = 64
) -> tuple[Told, list[tuple[Phase, int]]]:
    """Return a batch's output in pieces, which has to equal the output without pieces, and its calls."""
    wanted = Calls(user(), bits).batch(rows)
    with patch.context() as lowered:
        lower(lowered)
        calls = Calls(user(), bits)
        assert sorted(calls.batch(rows)) == sorted(wanted)
    return wanted, calls.calls


def counting(self: Any, handle: Any) -> None:
    self.count = handle.getValueState("count", "n bigint")


def told(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
    total = (self.count.get() or (0,))[0]
    for row in rows:
        assert row.k == key[0]
        assert row.text == f"{row.k} {row.v} " * (row.v % 20)
        total += 1
        yield Row(k=key[0], n=row.v)
    self.count.update((total,))


@pytest.mark.parametrize("bits", [64, 0])
def test_rows(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """In their order, also where several keys have one hash."""
    rows = some_rows("a", "a heavy key", "b", "c", "another one")
    shown, calls = both(lambda: processor(init=counting, rows=told), rows, monkeypatch, bits)
    for key in ("a", "a heavy key", "another one"):
        assert [n for k, n in shown if k == key] == [row["v"] for row in rows if row["k"] == key]
    assert [pieces > 20 for _, pieces in calls].count(True) == 2


def processor(columns: str = COLUMNS, **functions: Any) -> UserProcessor:
    return user_processor(Scripted(**functions), columns=columns, shown=SHOWN)


def test_rows_that_are_not_read_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are those of a key that is over, if its rows are kept."""
    kept: list[Any] = []

    def first(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        for before in kept:
            assert list(before) == []
        kept.append(rows)
        yield Row(k=key[0], n=next(rows).v)

    rows = some_rows("a", "a heavy key", "b", "another one")
    shown, calls = both(lambda: processor(init=counting, rows=first), rows, monkeypatch)
    assert sorted(shown) == sorted((key, 0) for key in ("a", "a heavy key", "b", "another one"))
    assert {pieces for _, pieces in calls} == {0}
    assert len(calls) > 3


def test_each_row_of_a_key_that_is_no_number_has_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = float("nan")
    numbers = [{"k": nan if n % 3 else float(n), "v": n, "text": "x" * 100} for n in range(1000)]

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        yield Row(k=str(key[0]), n=len(list(rows)))

    shown, calls = both(
        lambda: processor("k double, v bigint, text string", init=counting, rows=rows), numbers, monkeypatch
    )
    assert shown.count(("nan", 1)) == 666
    assert max(pieces for _, pieces in calls) > 5


@pytest.mark.parametrize("single", [False, True])
def test_asynchronous(monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    class Several(millpond.AsyncStatefulProcessor):
        def init(self, handle: Any) -> None:
            self.count = handle.getValueState("count", "n bigint")
            self.map = handle.getMapState("map", "n bigint", "n bigint")

        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            for row in rows:
                await self.map.getValue((row.v,))
                await self.count.update((row.v,))
                yield Row(k=key[0], n=row.v)

    class Single(millpond.AsyncStatefulProcessor):
        init = Several.init

        async def handleInputRow(self, key: Any, row: Any, timerValues: Any) -> Any:
            await self.count.update(((await self.count.get() or (0,))[0] + 1,))
            yield Row(k=key[0], n=row.v)

    kind = Single if single else Several
    rows = some_rows("a", "a heavy key", "b")
    shown, calls = both(lambda: user_processor(kind(), columns=COLUMNS, shown=SHOWN, in_flight=10), rows, monkeypatch)
    assert [n for k, n in shown if k == "a heavy key"] == list(range(1500))
    assert max(pieces for _, pieces in calls) > 20


def sizes(self: Any, key: Any, frames: Any, times: Any) -> Iterator[pd.DataFrame]:
    start = 0
    for frame in frames:
        assert list(frame.v) == list(range(start, start + len(frame)))
        assert list(frame.index) == list(range(len(frame)))
        start += len(frame)
        yield pd.DataFrame({"k": [key[0]], "n": [len(frame)]})


@pytest.mark.parametrize("most", [1, 7, 70, 1499, 1500, 10_000])
def test_frames(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """They are cut as Spark cuts them, wherever pieces end."""

    def user() -> UserProcessor:
        conf = {"execution_arrow_maxRecordsPerBatch": str(most)}
        return user_processor(Scripted(init=counting, rows=sizes), columns=COLUMNS, shown=SHOWN, pandas=True, **conf)

    shown, calls = both(user, some_rows("a", "a heavy key", "b"), monkeypatch)
    whole, rest = divmod(1500, most)
    assert [n for k, n in shown if k == "a heavy key"] == [most] * whole + [rest] * (rest > 0)
    assert max(pieces for _, pieces in calls) > 20


@pytest.mark.parametrize("pieces", [(2, 1), (2, 2, 1, 1), (1, 1, 1), (4,), (5, 3, 1), ()])
def test_no_row_is_lost_where_a_piece_ends_with_a_frame(pieces: tuple[int, ...]) -> None:
    starts = [sum(pieces[:number]) for number in range(len(pieces))]
    batches = [pa.record_batch({"v": range(start, start + rows)}) for start, rows in zip(starts, pieces, strict=True)]
    frames = list(_whole_frames(iter(batches), 2))
    assert [v for frame in frames for v in frame.column("v").to_pylist()] == list(range(sum(pieces)))
    assert all(frame.num_rows % 2 == 0 for frame in frames[:-1])


def test_a_frame_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.worker.processors.frames._MAX_COLUMN_BYTES", 30_000)
    lower(monkeypatch)
    for most, fails in ((70, False), (1000, True)):
        conf = {"execution_arrow_maxRecordsPerBatch": str(most)}
        user = user_processor(Scripted(init=counting, rows=sizes), columns=COLUMNS, shown=SHOWN, pandas=True, **conf)
        calls = Calls(user)
        rows = some_rows("a", "a heavy key", "b")
        if fails:
            with pytest.raises(UsageError, match=r"more than 2 GB.*maxRecordsPerBatch"):
                calls.batch(rows)
        else:
            assert len(calls.batch(rows)) == 2 + -(-1500 // most)


def test_functions_over_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames have the types that their rows give them: numbers are floats in those that have nulls."""

    def function(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
        for frame in frames:
            total = (state.getOption or (0,))[0] + len(frame)
            state.update((total,))
            yield pd.DataFrame({"k": [f"{key[0]} {frame.v.dtype} {len(frame)}"], "n": [total]})

    def user() -> UserProcessor:
        spec = GroupStateSpec(
            columns=fields(COLUMNS),
            keys=(0,),
            outputs=fields(SHOWN),
            variables=(Variable(STATE, "value", "struct<n:bigint>"),),
            time_mode="none",
            output_mode="update",
        )
        return UserGroups(
            title="a title",
            command=cloudpickle.dumps((function, struct(SHOWN))),
            pandas=True,
            columns=struct(COLUMNS),
            values=(0, 1, 2),
            output_schema=struct(SHOWN),
            spec=spec,
            conf={"spark.sql.session.timeZone": "UTC", "spark.sql.execution.arrow.maxRecordsPerBatch": "100"},
            state=struct("n bigint"),
        )

    rows = some_rows("a", "a heavy key", "b")
    for row in rows:
        row["v"] = None if row["v"] == 350 else row["v"]
    shown, calls = both(user, rows, monkeypatch)
    kinds = [k.removeprefix("a heavy key ") for k, _ in shown if k.startswith("a heavy")]
    assert kinds == [f"{'float64' if at == 3 else 'int64'} 100" for at in range(15)]
    assert max(pieces for _, pieces in calls) > 20


def test_an_initial_state_and_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    lower(monkeypatch)
    seen: list[Any] = []

    def init(self: Any, handle: Any) -> None:
        self.handle = handle

    def initial(self: Any, key: Any, row: Any, times: Any) -> None:
        seen.append((key[0], row.v))
        self.handle.registerTimer(1 + row.v)

    def timer(self: Any, key: Any, times: Any, info: Any) -> Iterator[Row]:
        yield Row(k=key[0], n=info.getExpiryTimeInMs())

    user = user_processor(
        Scripted(init=init, initial=initial, timer=timer),
        columns=COLUMNS,
        shown=SHOWN,
        mode="processing",
        initial=COLUMNS,
    )
    calls = Calls(user)
    rows = some_rows("a", "a heavy key", "b")
    shown = calls.batch(rows, now=5000, initial=rows)
    for key, count in (("a", 3), ("a heavy key", 1500)):
        assert [n for k, n in seen if k == key] == list(range(count))
        assert [n for k, n in shown if k == key] == list(range(1, count + 1))
    assert max(pieces for phase, pieces in calls.calls if phase == "initial") > 20
