"""Processors as users write them. Spark's workers import this module: it needs no pytest and no session."""

from __future__ import annotations

import datetime as dt
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

START = dt.datetime(2024, 5, 1, 12, tzinfo=dt.UTC)
START_MS = int(START.timestamp() * 1000)
KNOWN = {"Decimal": Decimal, "Row": Row, "dt": dt, "inf": float("inf"), "nan": float("nan")}
"""What expressions may name, beside the state."""

Variables = Mapping[str, tuple[Any, ...]]
"""By name: `Value`, `List` or `Map`, and the arguments that its getter takes after the name."""


class Both(StatefulProcessor):
    """A processor of either API: `answer` and `due` read rows one by one and yield tuples, pandas or not."""

    columns: tuple[str, ...] = ("k", "n", "said")
    ddl = "k string, n int, said string"
    pandas = False

    def using(self, api: str) -> Self:
        """The same processor for an API, `rows` or `pandas`."""
        self.pandas = api == "pandas"
        return self

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle

    def answer(self, key: Any, rows: Iterable[Any], times: Any) -> Iterator[tuple[Any, ...]]:
        return iter(())

    def due(self, key: Any, times: Any, at: int) -> Iterator[tuple[Any, ...]]:
        return iter(())

    def first(self, key: Any, row: Any, times: Any) -> None:
        """One row of the initial state."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        return self.given(self.answer(key, self.each(rows), timerValues))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        return self.given(self.due(key, timerValues, expiredTimerInfo.getExpiryTimeInMs()))

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        for row in self.each([initialState]):
            self.first(key, row, timerValues)

    def each(self, rows: Iterable[Any]) -> Iterable[Any]:
        return (row for frame in rows for row in frame.itertuples(index=False)) if self.pandas else rows

    def given(self, answers: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        if not self.pandas:
            shape = Row(*self.columns)
            yield from (shape(*answer) for answer in answers)
        elif rows := list(answers):
            import pandas as pd  # which takes half a second, and each start has a process that does without

            yield pd.DataFrame(rows, columns=list(self.columns))


def shown(value: Any) -> str:
    """A value as code, with the types of all its parts; maps in the order of their keys, iterators as lists."""
    if isinstance(value, Row) and hasattr(value, "__fields__"):
        return f"Row({', '.join(f'{name}={shown(part)}' for name, part in zip(value.__fields__, value, strict=True))})"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{shown(key)}: {shown(part)}' for key, part in value.items()))}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list | Iterator):
        return f"[{', '.join(map(shown, value))}]"
    return repr(value)


def outcome(run: Callable[[], Any]) -> str:
    """The result of a call, or its error."""
    try:
        return shown(run())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def seconds(at_ms: int) -> float:
    """A time as seconds since the start of all tests' event time."""
    return (at_ms - START_MS) / 1000


class Script(Both):
    """Evaluate the expressions that rows bring (`do`, in the order of `n`) over its state, and report their results.

    Besides the state variables, expressions name `handle`, `key`, `times`, `row`, and timers in seconds from the start:
    `register`, `delete`, `timers()` (sorted: Spark lists them in no order that means anything).
    """

    def __init__(
        self,
        variables: Variables,
        due: str = "at",
        first: str = "None",
        close: str = "",
        init: str = "",
        modules: Sequence[str] = (),
    ) -> None:
        self.variables = dict(variables)
        self.at_due, self.at_first, self.at_close, self.at_init = due, first, close, init
        self.modules = modules

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.scope: dict[str, Any] = {
            **KNOWN,
            **{name: importlib.import_module(name) for name in self.modules},
            "handle": handle,
            "register": lambda second: handle.registerTimer(START_MS + int(second * 1000)),
            "delete": lambda second: handle.deleteTimer(START_MS + int(second * 1000)),
            "timers": lambda: sorted(map(seconds, handle.listTimers())),
        }
        for name, (kind, *arguments) in self.variables.items():
            self.scope[name] = getattr(handle, f"get{kind}State")(name, *arguments)
        if self.at_init:
            eval(self.at_init, self.scope)

    def evaluate(self, expression: str, **names: Any) -> Any:
        self.scope.update(names)
        return eval(expression, self.scope)

    def answer(self, key: Any, rows: Iterable[Any], times: Any) -> Iterator[tuple[Any, ...]]:
        for row in sorted(rows, key=lambda row: row.n):
            yield text(key), row.n, outcome(lambda row=row: self.evaluate(row.do, key=key, row=row, times=times))

    def due(self, key: Any, times: Any, at: int) -> Iterator[tuple[Any, ...]]:
        second = seconds(at)
        said = outcome(lambda: self.evaluate(self.at_due, key=key, times=times, at=second))
        yield text(key), -1, f"due {second:g}: {said}" if abs(second) < 1_000_000 else f"due: {said}"

    def first(self, key: Any, row: Any, times: Any) -> None:
        self.evaluate(self.at_first, key=key, row=row, times=times)

    def close(self) -> None:
        if self.at_close:
            eval(self.at_close, self.scope)


class Strict(Script):
    """A script whose errors are the query's."""

    def answer(self, key: Any, rows: Iterable[Any], times: Any) -> Iterator[tuple[Any, ...]]:
        for row in sorted(rows, key=lambda row: row.n):
            yield text(key), row.n, shown(self.evaluate(row.do, key=key, row=row, times=times))

    def due(self, key: Any, times: Any, at: int) -> Iterator[tuple[Any, ...]]:
        yield text(key), -1, shown(self.evaluate(self.at_due, key=key, times=times, at=seconds(at)))


class Misused(Script):
    """Does another wrong thing at each attempt of the task, and writes down the error."""

    def __init__(self, variables: Variables, folder: str, wrongs: Sequence[str]) -> None:
        super().__init__(variables)
        self.folder, self.wrongs = Path(folder), wrongs

    def answer(self, key: Any, rows: Iterable[Any], times: Any) -> Iterator[tuple[Any, ...]]:
        attempt = TaskContext.get().attemptNumber()
        try:
            self.evaluate(self.wrongs[attempt], key=key, times=times)
        except Exception as error:
            (self.folder / str(attempt)).write_text(f"{type(error).__name__}: {error}")
            raise
        yield text(key), -1, "no error"


def text(key: Any) -> str:
    """A key of several columns as one text."""
    return "|".join(map(str, key))


class Count(Both):
    """Count the rows of each key, over all batches and in the batch, and report the key."""

    columns = ("said", "total", "now")
    ddl = "said string, total bigint, now int"

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "n bigint")

    def answer(self, key: Any, rows: Iterable[Any], times: Any) -> Iterator[tuple[Any, ...]]:
        now = sum(1 for _ in rows)
        before = self.total.get()
        total = now + (before[0] if before else 0)
        self.total.update((total,))
        yield shown(key), total, now


class Typed(Both):
    """Gives out all types, with nulls, nested; the odder ones for one key."""

    columns = ("k", "i8", "i32", "f32", "d", "dec", "s", "bin", "day", "ts", "tsn", "a", "m", "st", "rows")
    ddl = (
        "k string, i8 tinyint, i32 int, f32 float, d double, dec decimal(20, 3), s string, bin binary, day date, "
        "ts timestamp, tsn timestamp_ntz, a array<int>, m map<string, int>, st struct<x: int, y: array<string>>, "
        "rows array<struct<z: string>>"
    )

    def answer(self, key: Any, rows: Iterable[Any], times: Any) -> Iterator[tuple[Any, ...]]:
        day, moment = dt.date(2024, 2, 29), dt.datetime(2024, 3, 10, 12, 30, 0, 5)
        zoned = moment.replace(tzinfo=dt.UTC)
        nested: tuple[Any, ...] = ([1, None], {"x": 1, "y": None}, {"x": 1, "y": ["a", None]}, [{"z": "z"}, None])
        if not self.pandas:
            nested = (*nested[:2], Row(x=1, y=["a", None]), [Row(z="z"), None])
        numbers = (-128, 2**31 - 1, 0.1, float("nan"), Decimal("12345678901234567.891"))
        yield key[0], *numbers, "Ö", b"\x00", day, zoned, moment, *nested
        if key[0] != "a":
            yield (key[0], *[None] * 14)


class Several(Both):
    """Gives out as many rows as the first that it reads says; some keys are not read, some in part."""

    columns = ("k", "at", "seen")
    ddl = "k string, at int, seen int"

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.seen = handle.getValueState("seen", "n int")

    def answer(self, key: Any, rows: Iterable[Any], times: Any) -> Iterator[tuple[Any, ...]]:
        seen = (self.seen.get() or (0,))[0] + 1
        self.seen.update((seen,))
        if key[0] == "unread":
            yield key[0], -1, seen
        elif key[0] == "first":
            yield key[0], next(iter(rows)).n, seen
        else:
            for row in rows:
                yield from ((key[0], at, seen) for at in range(int(row.do or 0)))


class Frames(StatefulProcessor):
    """Report the frames of a call: how large, and the types of columns and values; for pandas."""

    pandas = True
    ddl = "key string, size int, types string, held string"

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        import pandas as pd

        for frame in rows:
            types = ", ".join(f"{name} {kind}" for name, kind in frame.dtypes.items())
            values = ", ".join("|".join(sorted({type(one).__name__ for one in frame[name]})) for name in frame)
            yield pd.DataFrame({"key": [str(key)], "size": len(frame), "types": types, "held": values})


class Stateless(Both):
    """Has no state."""

    def answer(self, key: Any, rows: Iterable[Any], times: Any) -> Iterator[tuple[Any, ...]]:
        return ((key[0], row.n, row.do.upper()) for row in rows)


class Stamped(Both):
    """Gives out rows at once and again when the watermark passes them, each with a time that is not late yet."""

    columns = ("k", "at", "said")
    ddl = "k string, at timestamp, said string"

    def __init__(self, back: float = 0) -> None:
        self.back = back

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.rows = handle.getMapState("rows", "at bigint", "said string")

    def answer(self, key: Any, rows: Iterable[Any], times: Any) -> Iterator[tuple[Any, ...]]:
        for row in rows:
            at = row.ts.replace(tzinfo=dt.UTC)
            until = int(at.timestamp() * 1000) + 500
            self.rows.updateValue((until,), (row.do,))
            self.handle.registerTimer(until)
            yield key[0], at - dt.timedelta(seconds=self.back), f"got {row.do}"

    def due(self, key: Any, times: Any, at: int) -> Iterator[tuple[Any, ...]]:
        after = dt.datetime.fromtimestamp(times.getCurrentWatermarkInMs() / 1000 + 1, dt.UTC)
        yield key[0], after, f"kept {self.rows.getValue((at,))[0]} until {seconds(at)}"
        self.rows.removeKey((at,))
