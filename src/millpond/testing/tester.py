"""Test harness for `transformWithState` processors: run batches without Spark, and read and write state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec
import pandas as pd
import pyarrow as pa
import pyspark
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.stateful_processor_util import TransformWithStateInPandasUdfUtils
from pyspark.sql.types import StructType

from millpond.conf import read_settings
from millpond.errors import UsageError
from millpond.operators.protocol import Times
from millpond.plan.catalyst.versions import CALLS_USER_CODE, calls_user_code
from millpond.spec.kinds.processor import ProcessorSpec, TimeMode, Variable
from millpond.spec.operators import EventTime
from millpond.tasks.user_processor import UserProcessor
from millpond.testing.batches import Batches
from millpond.testing.rows import (
    Key,
    Rows,
    arrow,
    fields,
    from_frame,
    from_rows,
    struct,
    to_frame,
    to_rows,
    with_keys,
)
from millpond.testing.visits import Visit, initial_state_processor
from millpond.worker.processors.asynchronous.base import check_asynchronous
from millpond.worker.processors.declaration import declare_state

Given = TypeVar("Given")
Shown = TypeVar("Shown")

_TIME_MODES: Mapping[str, TimeMode] = {"none": "none", "processingtime": "processing", "eventtime": "event"}
_OUTPUT_MODES = ("append", "update", "complete")
_ZONE = "spark.sql.session.timeZone"
_NO_TIME = -(1 << 50)
_TIMELESS = Times(_NO_TIME, _NO_TIME, _NO_TIME)
"""Times of a batch in which no timer is due, no row is late, and no state expires."""


class _Tester(ABC, Generic[Given, Shown]):
    """Common base of the testers for rows and for pandas; see `ProcessorTester`."""

    _pandas: ClassVar[bool]

    def __init__(
        self,
        processor: StatefulProcessor,
        keyStructType: StructType | str,
        inputStructType: StructType | str,
        outputStructType: StructType | str,
        outputMode: str = "append",
        timeMode: str = "none",
        *,
        eventTime: str | None = None,
        eventTimeColumnName: str | None = None,
        initialState: Given | None = None,
        initialStateStructType: StructType | str = "",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        if not calls_user_code():
            raise UsageError(
                f"Processors need PySpark {CALLS_USER_CODE}, and this is {pyspark.__version__}.",
                action=f"Install PySpark {CALLS_USER_CODE}.",
            )
        mode = _one_of("timeMode", timeMode, _TIME_MODES)
        self._keys, self._own = struct(keyStructType), struct(inputStructType)
        self._columns, self._output = with_keys(self._keys, self._own), struct(outputStructType)
        self._settings = {_ZONE: "UTC"} | dict(settings or {})
        time = None if eventTime is None else EventTime(_position("eventTime", eventTime, self._columns))
        self._spec = ProcessorSpec(
            columns=fields(self._columns),
            keys=self._places(self._columns),
            outputs=fields(self._output),
            variables=tuple(declare_state(processor, _TIME_MODES[mode]).variables),
            time_mode=_TIME_MODES[mode],
            output_mode=_one_of("outputMode", outputMode, _OUTPUT_MODES),
            time=time if mode == "eventtime" else None,
            marked=True,
            emitted=None
            if eventTimeColumnName is None
            else _position("eventTimeColumnName", eventTimeColumnName, self._output),
        )
        if self._spec.unsupported is not None:
            raise UsageError(
                "The key, the state, a column or the output has a type that is not supported.", action="Use another."
            )
        self._user = self._user_processor(processor, self._spec, self._columns, self._own)
        self._batches = Batches()
        self._processing = self._watermark = 0
        if initialState is not None:
            self._load_initial_state(processor, initialState, struct(initialStateStructType))

    def _places(self, columns: StructType) -> tuple[int, ...]:
        return tuple(columns.names.index(name) for name in self._keys.names)

    def _user_processor(
        self, processor: StatefulProcessor, spec: ProcessorSpec, columns: StructType, own: StructType
    ) -> UserProcessor:
        """Make the user processor that the planner would make."""
        asynchronous = check_asynchronous(processor, pandas=self._pandas)
        function = TransformWithStateInPandasUdfUtils(processor, spec.time_mode).transformWithStateUDF
        return UserProcessor(
            title=type(processor).__name__,
            command=cloudpickle.dumps((function, self._output)),
            pandas=self._pandas,
            columns=columns,
            values=tuple(range(len(columns) - len(own), len(columns))),
            output_schema=self._output,
            spec=spec,
            conf=self._settings,
            in_flight=read_settings(self._settings).async_in_flight if asynchronous else None,
        )

    @abstractmethod
    def _to_table(self, rows: Given, schema: StructType, own: StructType, key: Key | None) -> pa.Table:
        """Convert the test's rows to columns (see `rows.from_rows`)."""

    @abstractmethod
    def _from_table(self, table: pa.Table) -> Shown:
        """Convert output columns to the test's rows."""

    def test(self, key: Any, rows: Given) -> Shown:
        """Run a batch with rows of one key.

        Args:
            key: its value, or a tuple of values if it has several columns.
            rows: the rows. Key columns may be left out; other missing columns are null.

        Returns:
            The processor's whole output of the batch, timers that are due included.

        Raises:
            UsageError: a row has a column that the input does not have, or another key.

        Raises exceptions of the processor, with a note that names the key; the state is then unchanged.
        """
        return self._batch(self._to_table(rows, self._columns, self._own, self._named(key)))

    def testBatch(self, rows: Given) -> Shown:
        """Run a batch with rows of any keys, which the rows name; see `test`. The order of keys is undefined."""
        return self._batch(self._to_table(rows, self._columns, self._own, None))

    def setProcessingTime(self, currentTimeMs: int) -> Shown:
        """Advance the processing time, in milliseconds (initially 0), and fire the timers that are due by it.

        In time mode `eventTime` timers do not fire; processors only see the new time.

        Returns:
            The processor's output.

        Raises:
            UsageError: the time does not advance, or there is no time mode.
        """
        self._check_moves("processing time", self._processing, currentTimeMs)
        self._processing = currentTimeMs
        return (
            self._batch(self._empty_input())
            if self._spec.due_by_processing_time
            else self._from_table(self._empty_output())
        )

    def setWatermark(self, currentWatermarkMs: int) -> Shown:
        """Advance the watermark, in milliseconds (initially 0), and fire the timers that are due by it.

        In time mode `eventTime`, later batches drop rows whose event time is not after the watermark. In output mode
        `complete` timers wait for the next batch with rows, as in Spark.

        Returns:
            The processor's output.

        Raises:
            UsageError: the watermark does not advance, or there is no time mode.
        """
        self._check_moves("watermark", self._watermark, currentWatermarkMs)
        late, self._watermark = self._watermark, currentWatermarkMs
        if self._spec.needs_no_data_batches or self._spec.due_by_processing_time:
            return self._batch(self._empty_input(), late)
        return self._from_table(self._empty_output())

    def updateValueState(self, stateName: str, key: Any, value: tuple[Any, ...]) -> None:
        """Set a key's value, as `ValueState.update` does."""
        self._visit(key, self._variable(stateName, "value"), lambda state: state.update(value))

    def peekValueState(self, stateName: str, key: Any) -> tuple[Any, ...] | None:
        """Return a key's value; None if it has none."""
        value: tuple[Any, ...] | None = self._visit(key, self._variable(stateName, "value"), lambda state: state.get())
        return value

    def updateListState(self, stateName: str, key: Any, value: Sequence[tuple[Any, ...]]) -> None:
        """Replace a key's list."""
        self._visit(
            key, self._variable(stateName, "list"), lambda state: state.put(list(value)) if value else state.clear()
        )

    def peekListState(self, stateName: str, key: Any) -> list[tuple[Any, ...]]:
        """Return a key's list; empty if it has none."""
        values: list[tuple[Any, ...]] = self._visit(
            key, self._variable(stateName, "list"), lambda state: list(state.get())
        )
        return values

    def updateMapState(self, stateName: str, key: Any, value: Mapping[tuple[Any, ...], tuple[Any, ...]]) -> None:
        """Replace a key's map."""

        def update(state: Any) -> None:
            state.clear()
            for entry in value.items():
                state.updateValue(*entry)

        self._visit(key, self._variable(stateName, "map"), update)

    def peekMapState(self, stateName: str, key: Any) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """Return a key's map; empty if it has none."""
        entries: dict[tuple[Any, ...], tuple[Any, ...]] = self._visit(
            key, self._variable(stateName, "map"), lambda state: dict(state.iterator())
        )
        return entries

    def deleteState(self, stateName: str, key: Any) -> None:
        """Clear a key's state variable of any kind."""
        self._visit(key, self._variable(stateName), lambda state: state.clear())

    def peekTimers(self, key: Any) -> list[int]:
        """Return the times of a key's timers, ascending, in milliseconds.

        Raises:
            UsageError: there is no time mode.
        """
        self._check_timed()
        times: list[int] = self._visit(key, None, lambda handle: sorted(handle.listTimers()))
        return times

    def _load_initial_state(self, processor: StatefulProcessor, rows: Given, own: StructType) -> None:
        """Call `handleInitialState` with the initial rows."""
        columns = with_keys(self._keys, own)
        spec = msgspec.structs.replace(
            self._spec, columns=fields(columns), keys=self._places(columns), time=None, emitted=None
        )
        user = self._user_processor(initial_state_processor(processor), spec, columns, own)
        self._batches.run(user, self._to_table(rows, columns, own, None), _TIMELESS, self._seen_times)

    def _batch(self, rows: pa.Table, late: int | None = None) -> Shown:
        times = Times(self._watermark if late is None else late, self._watermark, self._processing)
        return self._from_table(self._batches.run(self._user, rows, times))

    def _visit(self, key: Any, variable: Variable | None, act: Callable[[Any], Any]) -> Any:
        visit = Visit(variable, act)
        # A row of the key makes the operator call the visit for it. The other columns are null: the visit ignores
        # them.
        row = from_rows([self._named(key)], self._keys, self._keys, None)
        columns = [
            row.column(name) if name in row.schema.names else pa.nulls(1, kind)
            for name, kind in zip(self._columns.names, arrow(self._columns).types, strict=True)
        ]
        rows = pa.Table.from_arrays(columns, schema=arrow(self._columns))
        user = self._user_processor(visit, self._spec, self._columns, self._own)
        self._batches.run(user, rows, _TIMELESS, self._seen_times)
        return visit.result

    @property
    def _seen_times(self) -> tuple[int, int]:
        return self._processing, self._watermark

    def _empty_input(self) -> pa.Table:
        return arrow(self._columns).empty_table()

    def _empty_output(self) -> pa.Table:
        return arrow(self._output).empty_table()

    def _named(self, key: Any) -> Key:
        names = self._keys.names
        values = key if type(key) is tuple else (key,)
        if len(values) != len(names):
            raise UsageError(
                f"{key!r} is no key of {len(names)} columns.",
                action=f"Give a tuple with values of {', '.join(names)}.",
            )
        return dict(zip(names, values, strict=True))

    def _variable(self, name: str, kind: Literal["value", "list", "map", ""] = "") -> Variable:
        for variable in self._spec.variables:
            if variable.name == name and kind in ("", variable.kind):
                return variable
        known = ", ".join(f"{variable.name} ({variable.kind})" for variable in self._spec.variables) or "none"
        raise UsageError(f"There is no {kind} state {name!r}.".replace("  ", " "), action=f"There are: {known}.")

    def _check_timed(self) -> None:
        if not self._spec.timed:
            raise UsageError("There are no times without a time mode.", action="Give timeMode.")

    def _check_moves(self, what: str, before: int, now: int) -> None:
        self._check_timed()
        if now <= before:
            raise UsageError(f"The {what} is {before} ms, and moves forward only.", action="Give a later time.")


class ProcessorTester(_Tester[Rows, list[Row]]):
    """Test harness for a row processor (`transformWithState`): runs in this process, without Spark and JVM.

    It uses the same operator and the same calling code as a query. As in Spark, the processor is copied for each
    batch, so that its attributes do not survive the batch. The methods are those of Spark's `TwsTester`.

    Args:
        processor: the processor.
        keyStructType: the grouping columns, as DDL or as a type.
        inputStructType: the columns of the rows, usually with the grouping columns among them.
        outputStructType: the columns of the output.
        outputMode: `append`, `update` or `complete`.
        timeMode: `none`, `processingTime` or `eventTime`.
        eventTime: the input column with the watermark, if any; it decides which rows are late.
        eventTimeColumnName: the output's event time column, if any; its rows must not be late.
        initialState: rows with the grouping columns; `handleInitialState` is called with them before the first batch.
        initialStateStructType: the columns of `initialState`.
        settings: Spark settings that Python workers obey; the session's time zone is UTC by default.

    Raises:
        UsageError: an argument is wrong.

    Raises exceptions of `init`, `close` and `handleInitialState`.

    Examples:
        >>> from millpond.testing import ProcessorTester
        >>> from pyspark.sql import Row
        >>> from pyspark.sql.streaming import StatefulProcessor
        >>> class Count(StatefulProcessor):
        ...     def init(self, handle):
        ...         self.total = handle.getValueState("total", "n bigint")
        ...
        ...     def handleInputRows(self, key, rows, timerValues):
        ...         total = self.total.get() or (0,)
        ...         count = total[0] + sum(1 for _ in rows)
        ...         self.total.update((count,))
        ...         yield Row(word=key[0], n=count)
        >>> tester = ProcessorTester(Count(), "word string", "word string", "word string, n bigint", "update")
        >>> tester.test("a", [Row(word="a"), Row(word="a")])
        [Row(word='a', n=2)]
        >>> tester.peekValueState("total", "a")
        (2,)
    """

    _pandas = False

    def _to_table(self, rows: Rows, schema: StructType, own: StructType, key: Key | None) -> pa.Table:
        return from_rows(rows, schema, own, key)

    def _from_table(self, table: pa.Table) -> list[Row]:
        return to_rows(table, self._output)


class PandasProcessorTester(_Tester[pd.DataFrame, pd.DataFrame]):
    """Test harness for a pandas processor (`transformWithStateInPandas`); see `ProcessorTester`. Rows are frames.

    Examples:
        >>> import pandas as pd
        >>> from millpond.testing import PandasProcessorTester
        >>> from pyspark.sql.streaming import StatefulProcessor
        >>> class Sum(StatefulProcessor):
        ...     def init(self, handle):
        ...         self.total = handle.getValueState("total", "n bigint")
        ...
        ...     def handleInputRows(self, key, rows, timerValues):
        ...         total = (self.total.get() or (0,))[0] + sum(int(frame["n"].sum()) for frame in rows)
        ...         self.total.update((total,))
        ...         yield pd.DataFrame({"word": [key[0]], "n": [total]})
        >>> columns = "word string, n bigint"
        >>> tester = PandasProcessorTester(Sum(), "word string", columns, columns, "update")
        >>> tester.test("a", pd.DataFrame({"n": [2, 3]}))
          word  n
        0    a  5
    """

    _pandas = True

    def _to_table(self, rows: pd.DataFrame, schema: StructType, own: StructType, key: Key | None) -> pa.Table:
        return from_frame(rows, schema, key, self._settings[_ZONE])

    def _from_table(self, table: pa.Table) -> pd.DataFrame:
        return to_frame(table, self._output, self._settings[_ZONE])


def _one_of(what: str, given: str, known: Any) -> str:
    if given.lower() not in known:
        raise UsageError(f"{given!r} is no {what}.", action=f"There are {', '.join(known)}.")
    return given.lower()


def _position(what: str, name: str, columns: StructType) -> int:
    if name not in columns.names:
        raise UsageError(
            f"The column {name!r} of {what} is not there.", action=f"Columns are {', '.join(columns.names)}."
        )
    return list(columns.names).index(name)
