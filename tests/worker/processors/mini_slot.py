"""A slot as small as can be: it keeps what processors change, and hands it to them again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.streaming.stateful_processor_util import TransformWithStateInPandasUdfUtils
from pyspark.sql.types import StructType

from millpond.layout import NEVER
from millpond.slot.process.messages import Call
from millpond.spec.kinds.processor import HEAD, TIMERS, InitialState, ProcessorSpec, TimeMode
from millpond.spec.operators import Field
from millpond.spec.types import parse_type
from millpond.tasks.ddl import ddl as ddl_of
from millpond.tasks.user_processor import InitialColumns, UserProcessor
from millpond.worker.processors.declaration import declare_state
from millpond.worker.processors.processor import RunningProcessor
from millpond.worker.processors.start import start_processor
from millpond.worker.processors.state.schemas import spark_type

_scripts: dict[int, dict[str, Callable[..., Any]]] = {}
_numbers = itertools.count()
_HEAD = parse_type(HEAD).arrow


class Scripted(StatefulProcessor):
    """A processor made of functions that stay where they are when it is pickled; each is given the processor first."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.number = next(_numbers)
        _scripts[self.number] = functions

    def _run(self, name: str, *arguments: Any) -> Any:
        function = _scripts[self.number].get(name)
        return iter([]) if function is None else function(self, *arguments)

    def init(self, handle: Any) -> None:
        self.handle = handle
        self._run("init", handle)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._run("initial", key, initialState, timerValues)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return self._run("rows", key, rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        return self._run("timer", key, timerValues, expiredTimerInfo)

    def close(self) -> None:
        self._run("close")


def few_at_a_time(patch: pytest.MonkeyPatch, at_once: int) -> None:
    """Let keys have parts beside their rows as soon as they have two elements or entries; ask for two parts at a time.

    Args:
        patch: undoes it. at_once: bytes of a variable that are read at once; more is read piece by piece.
    """
    processors = "millpond.worker.processors.state"
    for module, name in (("buckets", "MAX_ENTRIES"), ("maps", "MAX_ENTRIES"), ("lists", "_MAX_SENT_ELEMENTS")):
        patch.setattr(f"{processors}.{module}.{name}", 1)
    for module in ("parts", "maps"):
        patch.setattr(f"{processors}.{module}.MAX_FETCH_BYTES", at_once)
    for module, name in (
        ("lists", "_MAX_PART_ELEMENTS"),
        ("parts", "_KEYS_PER_READ"),
        ("parts", "_MAX_PARTS_PER_REQUEST"),
    ):
        patch.setattr(f"{processors}.{module}.{name}", 2)
    patch.setattr(f"{processors}.parts._PREFETCH_AFTER", 1)
    patch.setattr("millpond.operators.processors.parts._PARTS_PER_REMOVAL", 2)


def struct(ddl: str) -> StructType:
    made = spark_type(parse_type(f"struct<{ddl}>"))
    assert isinstance(made, StructType)
    return made


def fields(ddl: str) -> tuple[Field, ...]:
    return tuple(Field(one.name, ddl_of(one.dataType)) for one in struct(ddl).fields)


def user_processor(
    processor: StatefulProcessor,
    *,
    columns: str = "k string, v bigint",
    keys: Sequence[int] = (0,),
    beside: int = 0,
    shown: str = "k string, n bigint",
    mode: TimeMode = "none",
    pandas: bool = False,
    initial: str = "",
    in_flight: int | None = None,
    **conf: str,
) -> UserProcessor:
    """A processor as the planner makes it.

    Args:
        beside: how many columns, the first ones, are of the key and not data.
        initial: columns of an initial state, those of the key first.
    """
    spec = ProcessorSpec(
        columns=fields(columns),
        keys=tuple(keys),
        outputs=fields(shown),
        variables=tuple(declare_state(processor, mode).variables),
        time_mode=mode,
        output_mode="update",
        initial=InitialState(fields(initial), tuple(range(len(keys)))) if initial else None,
    )
    names = {"none": "None", "processing": "ProcessingTime", "event": "EventTime"}
    util = TransformWithStateInPandasUdfUtils(processor, names[mode])
    function = util.transformWithStateWithInitStateUDF if initial else util.transformWithStateUDF
    settings = {"spark.sql.session.timeZone": "UTC"} | {
        f"spark.sql.{name.replace('_', '.')}": value for name, value in conf.items()
    }
    values = tuple(range(beside, len(spec.columns)))
    command = cloudpickle.dumps((function, struct(shown)))
    first = struct(initial)
    return UserProcessor(
        title="a title",
        command=command,
        pandas=pandas,
        columns=struct(columns),
        values=values,
        output_schema=struct(shown),
        spec=spec,
        conf=settings,
        in_flight=in_flight,
        initial=InitialColumns(first, tuple(range(len(keys))), tuple(range(len(first)))) if initial else None,
    )


def unasked(table: str, asked: pa.RecordBatch) -> pa.Array:
    """For processors that need not ask for parts."""
    raise AssertionError(f"{table} has no parts")


class MiniSlot:
    """Runs batches over state that it keeps; `together`: how many keys a call has."""

    def __init__(self, user: UserProcessor, together: int = 3) -> None:
        self.user = user
        self.together = together
        self.types = {one.table: parse_type(one.stored).arrow for one in user.spec.variables}
        if user.spec.timed:
            self.types[TIMERS] = parse_type("array<bigint>").arrow
        self.state: dict[str, dict[tuple[Any, ...], pa.Array]] = {name: {} for name in self.types}
        self.expiries: dict[str, dict[tuple[Any, ...], int]] = {name: {} for name in self.types}
        self.heads: dict[str, dict[tuple[Any, ...], Any]] = {name: {} for name in self.types}
        self.parts: dict[str, dict[tuple[Any, ...], pa.Array]] = {one.parts: {} for one in user.spec.variables}
        self.asks = 0
        self.asked_parts = 0
        self._keys: Sequence[Any] = ()

    def of(self, table: str) -> dict[tuple[Any, ...], Any]:
        return {key: value.to_pylist()[0] for key, value in self.state[table].items()}

    def batch(
        self,
        rows: Iterable[tuple[Any, ...]],
        processing: int = -1,
        watermark: int = -1,
        close: bool = True,
        initial: Iterable[tuple[Any, ...]] = (),
    ) -> list[dict[str, Any]]:
        """Run a batch and return its output: the initial state (which has none), then rows, timers, and the end."""
        running = start_processor(self.user, self._answer)
        firsts: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        for row in initial:
            firsts.setdefault(row[: len(self.user.spec.keys)], []).append(row)
        assert not list(self._calls(running, "initial", firsts, processing, watermark))
        groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        for row in rows:
            groups.setdefault(tuple(row[at] for at in self.user.spec.keys), []).append(row)
        shown = list(self._calls(running, "rows", groups, processing, watermark))
        if self.user.spec.timed:
            limit = processing if self.user.spec.time_mode == "processing" else watermark
            due = {key: [t for t in times if t <= limit] for key, times in self.of(TIMERS).items()}
            shown += self._calls(
                running, "timers", {key: times for key, times in due.items() if times}, processing, watermark
            )
        if close:
            shown += self._call(running, Call("end", processing, watermark, []), {})
        return shown

    def _calls(self, running: RunningProcessor, phase: Any, groups: Any, *times: int) -> Iterator[dict[str, Any]]:
        keys = list(groups)
        for start in range(0, len(keys), self.together):
            some = keys[start : start + self.together]
            columns = {one.name: one for one in self.user.spec.columns}
            names = [one.name for one in self.user.spec.key_fields]
            arrays = [
                pa.array([key[at] for key in some], parse_type(columns[name].type).arrow)
                for at, name in enumerate(names)
            ]
            tables = {"keys": pa.record_batch([*arrays, pa.array([len(groups[k]) for k in some])], [*names, "count"])}
            parts = [part for key in some for part in groups[key]]
            if phase != "timers":
                of = self.user.initial.columns if phase == "initial" and self.user.initial else self.user.columns
                wanted = [parse_type(ddl_of(one.dataType)).arrow for one in of]
                lists = zip(*parts, strict=True)
                tables["rows"] = pa.record_batch(list(map(pa.array, lists, wanted)), of.names)
            else:
                tables["due"] = pa.record_batch([pa.array(parts, pa.int64())], ["time"])
            for table, kind in self.types.items():
                held = [self.state[table].get(key, pa.nulls(1, kind)) for key in some]
                columns = {"value": pa.concat_arrays(held)}
                if heads := self.heads[table]:
                    columns["head"] = pa.array([heads.get(key) for key in some], _HEAD)
                tables[table] = pa.record_batch(columns)
            yield from self._call(running, Call(phase, times[0], times[1], list(tables)), tables, some)

    def _answer(self, table: str, asked: pa.RecordBatch) -> pa.Array:
        self.asks += 1
        pairs = [(row["at"], row["part"]) for row in asked.to_pylist()]
        assert len(pairs) == len(set(pairs))
        self.asked_parts += len(pairs)
        kind = next(self.types[one.table] for one in self.user.spec.variables if one.parts == table)
        held = self.parts[table]
        return pa.concat_arrays([held.get((self._keys[at], part), pa.nulls(1, kind)) for at, part in pairs])

    def _drop(self, table: str, key: Any, head: Any) -> None:
        held = self.parts[next(one.parts for one in self.user.spec.variables if one.table == table)]
        before = self.heads[table].pop(key, None) or {"first": 0, "stop": 0}
        kept = range(head["first"], head["stop"]) if head else range(0)
        for part in {*range(before["first"], before["stop"])} - {*kept}:
            held.pop((key, part), None)
        if head:
            self.heads[table][key] = head

    def _call(self, running: RunningProcessor, call: Call, tables: Any, keys: Any = ()) -> Iterator[dict[str, Any]]:
        schema = pa.schema([(one.name, parse_type(one.type).arrow) for one in self.user.spec.outputs])
        self._keys = keys
        for batch in running.call(call, tables):
            assert batch.schema == schema
            assert batch.num_rows
            batch.validate(full=True)
            yield from batch.to_pylist()
        for table, changed in running.changes():
            changed.validate(full=True)
            at, expiries = changed.column("at").to_pylist(), changed.column("expiry").to_pylist()
            if table in self.parts:
                numbers = changed.column("part").to_pylist()
                assert len({*zip(at, numbers, strict=True)}) == len(at)
                for number, place in enumerate(zip((keys[one] for one in at), numbers, strict=True)):
                    value = changed.column("value").slice(number, 1)
                    self.parts[table].pop(place, None)
                    if not value.null_count:
                        self.parts[table][place] = value
                continue
            assert changed.schema.names[:3] == ["at", "value", "expiry"]
            assert len(set(at)) == len(at)
            heads = changed.column("head").to_pylist() if changed.num_columns > 3 else [None] * len(at)
            if any(heads) or self.heads[table]:
                for one, head in zip(at, heads, strict=True):
                    self._drop(table, keys[one], head)
            for number, (one, expiry) in enumerate(zip(at, expiries, strict=True)):
                value = changed.column("value").slice(number, 1)
                assert value.type == self.types[table]
                if value.null_count:
                    self.state[table].pop(keys[one], None)
                    assert expiry == NEVER
                else:
                    assert not pa.types.is_list(value.type) or value.to_pylist()[0] or heads[number]
                    self.state[table][keys[one]] = value
                self.expiries[table][keys[one]] = expiry
