"""Aggregates and deduplication by event time against a dictionary, with late rows, restarts and colliding hashes."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.operators.protocol import Times
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.deduplicate import DeduplicateSpec
from millpond.spec.operators import AggregateCall, EventTime, Field, Windows
from tests.operators.rig import Rig, as_rows, fields, record_batch

WINDOW = "struct<start:timestamp,end:timestamp>"
SECOND = 1_000_000
Row = dict[str, Any]


def calls() -> tuple[AggregateCall, ...]:
    return (
        AggregateCall("count", (), "bigint"),
        AggregateCall("sum", (0,), "bigint"),
        AggregateCall("max", (1,), "string"),
        AggregateCall("collect_list", (0,), "array<bigint>"),
    )


def windowed(windows: Windows, mode: str, keys: str = "k int") -> AggregateSpec:
    return AggregateSpec(
        (Field("window", WINDOW), *fields(keys)), fields("v bigint; s string"), calls(), mode, EventTime(0, windows)
    )


rows = st.lists(
    st.fixed_dictionaries(
        {
            "second": st.integers(0, 60),
            "k": st.one_of(st.none(), st.integers(0, 3)),
            "v": st.one_of(st.none(), st.integers(-5, 5)),
            "s": st.sampled_from([None, "a", "a text of more than twelve bytes"]),
        }
    ),
    max_size=25,
)
batches = st.lists(st.tuples(rows, st.integers(0, 25), st.booleans()), min_size=1, max_size=6)


def results(found: list[Row]) -> tuple[Any, ...]:
    values = [row["v"] for row in found if row["v"] is not None]
    texts = [row["s"] for row in found if row["s"] is not None]
    return len(found), sum(values) if values else None, max(texts, default=None), sorted(values)


def moment(seconds: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, tz=dt.UTC)


@pytest.mark.parametrize("mode", ["append", "update"])
@pytest.mark.parametrize(
    ("size", "slide", "offset", "shared"),
    [(10, 10, 0, False), (10, 10, 3, False), (12, 4, 0, False), (12, 4, 1, True), (5, 1, 0, True)],
)
@settings(max_examples=40, deadline=None)
@given(batches=batches, bits=st.sampled_from([2, 64]), budget=st.sampled_from([1 << 20, 64 << 20]))
def test_windows(
    mode: str, size: int, slide: int, offset: int, shared: bool, batches: Any, bits: int, budget: int
) -> None:
    if shared and mode == "update":
        return
    shape = windowed(Windows(size * SECOND, slide * SECOND, offset * SECOND, shared), mode)
    rig = Rig(shape, budget)
    state: dict[tuple[int, Any], list[Row]] = defaultdict(list)
    late = closed = now = 0
    try:
        for found, step, restart in batches:
            late, closed = closed, max(closed, now - 10)
            times = [row["second"] + now for row in found]
            touched = set()
            dropped = 0
            for row, second in zip(found, times, strict=True):
                first = second - (second - offset) % slide
                starts = [first - i * slide for i in range(size // slide)]
                on_time = [start for start in starts if start + size > late]
                dropped += not on_time
                for start in on_time:
                    state[start, row["k"]].append(row)
                    touched.add((start, row["k"]))
            given_rows = [
                row | {"window": (second - (second - offset) % slide) * SECOND}
                for row, second in zip(found, times, strict=True)
            ]
            keys = ["window", "k"] if slide == size else ["k"]
            out = rig.batch(record_batch(shape, given_rows, keys, bits), times=Times(late * 1000, closed * 1000))
            assert rig.operator.late_rows == dropped
            over = {key for key in state if late < key[0] + size <= closed}
            shown = over if mode == "append" else touched
            expected = {(moment(s), moment(s + size), k): results(state[s, k]) for s, k in shown}
            actual = {
                (w["start"], w["end"], k): (n, total, text, sorted(values))
                for w, k, n, total, text, values in as_rows(out)
            }
            assert actual == expected
            assert out.num_rows == len(expected)
            for key in [key for key in state if key[0] + size <= closed]:
                del state[key]
            if restart:
                rig.restart()
            now += step
    finally:
        rig.close()


@settings(max_examples=60, deadline=None)
@given(batches=batches, kind=st.sampled_from(["timestamp", "struct", "late"]))
def test_instants_and_deduplication(batches: Any, kind: str) -> None:
    """Times as keys, bare or at the end of a struct; or beside the keys, when they only tell what is late."""
    key = "t " + (WINDOW if kind == "struct" else "timestamp")
    aggregate = AggregateSpec(fields(f"k int; {key}"), fields("v bigint; s string"), calls(), "append", EventTime(1))
    columns = fields(f"k int; {key}")
    dedup = DeduplicateSpec(columns, (0,) if kind == "late" else (0, 1), EventTime(1))
    rigs = Rig(aggregate), Rig(dedup)
    state: dict[tuple[Any, Any], list[Row]] = defaultdict(list)
    seen: set[tuple[Any, Any]] = set()
    late = closed = now = 0
    try:
        for found, step, restart in batches:
            late, closed = closed, max(closed, now - 10)
            given_rows = []
            fresh = set()
            for row in found:
                second = None if row["s"] is None else row["second"] + now  # some have no time
                on_time = second is None or second > late
                moments = None if second is None else moment(second)
                value = {"start": moment(0), "end": moments} if kind == "struct" else moments
                given_rows.append(row | {"t": value})
                if on_time:
                    state[row["k"], second].append(row)
                    identity = (row["k"], None if kind == "late" else second)
                    if identity not in seen:
                        fresh.add(identity)
            seen |= fresh
            times = Times(late * 1000, closed * 1000)
            out = rigs[0].batch(record_batch(aggregate, given_rows, ["k", "t"], 4), times=times)
            over = {(k, t) for k, t in state if t is not None and late < t <= closed}
            end = (lambda t: t["end"]) if kind == "struct" else (lambda t: t)
            actual = {(k, end(t)): (n, v, s, sorted(c)) for k, t, n, v, s, c in as_rows(out)}
            assert actual == {(k, moment(t)): results(state[k, t]) for k, t in over}
            one = rigs[1].batch(
                record_batch(dedup, given_rows, ["k"] if kind == "late" else ["k", "t"], 4), times=times
            )
            first = [
                (k, None if kind == "late" or end(t) is None else int(end(t).timestamp())) for k, t in as_rows(one)
            ]
            assert sorted(first, key=str) == sorted(fresh, key=str)
            for gone in [key for key in state if key[1] is not None and key[1] <= closed]:
                del state[gone]
            if kind != "late":
                seen = {key for key in seen if key[1] is None or key[1] > closed}
            if restart:
                for rig in rigs:
                    rig.restart()
            now += step
    finally:
        for rig in rigs:
            rig.close()


@pytest.mark.parametrize(
    ("mode", "pattern", "functions"),
    [
        ("append", "auto", ["first", "last", "min_by", "collect_list"]),
        ("append", "rmw", ["first", "last", "max_by", "collect_list"]),
        ("append", "auto", ["any_value", "last", "max_by"]),
        ("append", "append", ["first", "last"]),
        ("update", "auto", ["first", "last", "min_by", "collect_list"]),
    ],
)
def test_rows_reach_overlapping_windows_as_they_came(
    mode: str, pattern: Literal["auto", "append", "rmw"], functions: list[str]
) -> None:
    """Also within a batch, and where rows of later panes come first."""
    types = {"collect_list": "array<bigint>"}
    some = tuple(
        AggregateCall(name, (0, 1) if name.endswith("_by") else (0,), types.get(name, "bigint")) for name in functions
    )
    time = EventTime(0, Windows(20 * SECOND, 5 * SECOND, 0))
    shape = AggregateSpec((Field("window", WINDOW),), fields("v bigint; w int"), some, mode, time, pattern=pattern)
    rig = Rig(shape)
    members: dict[dt.datetime, list[int]] = defaultdict(list)
    shown: dict[dt.datetime, tuple[Any, ...]] = {}

    def show(out: Any) -> None:
        for window, *found in as_rows(out):
            shown[window["start"]] = tuple(found)

    value = 0
    for number, panes in enumerate([[10, 0, 5], [0, 10], [20, 5, 15, 5], [0, 20, 10]]):
        if number == 2:
            rig.restart()
        rows = []
        for second in panes:
            rows.append({"window": moment(second), "v": value, "w": 7})
            for start in range(second - 15, second + 1, 5):
                members[moment(start)].append(value)
            value += 1
        columns = [[7] * len(rows), *([row[name] for row in rows] for name in ("window", "v", "w"))]
        kinds = [pa.int64(), pa.timestamp("us", "UTC"), pa.int64(), pa.int32()]
        arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
        show(rig.batch(pa.RecordBatch.from_arrays(arrays, names=["__hash", "window", "v", "w"])))
    show(rig.batch(times=Times(0, 100_000)))
    rig.close()
    of = {"first": 0, "any_value": 0, "last": -1, "min_by": -1, "max_by": -1}
    assert shown == {
        start: tuple(values if name == "collect_list" else values[of[name]] for name in functions)
        for start, values in members.items()
    }
