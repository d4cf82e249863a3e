"""Joins against Spark's algorithm, row by row."""

from __future__ import annotations

import datetime as dt
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.errors import UsageError
from millpond.layout import NEVER
from millpond.operators.columns import decode
from millpond.operators.joins.kind import JOIN
from millpond.operators.protocol import Times
from millpond.spec.kinds.join import FROM_TIME, JoinSide, JoinSpec
from millpond.spec.operators import Field
from millpond.stores import delta_backlog
from tests.operators.join_rig import JoinRig, Oracle, Row, hints_for, record_batch, side

KEYS = (Field("a", "string"), Field("b", "int"))
SECOND = 1_000_000
EPOCH = dt.datetime(1970, 1, 1, tzinfo=ZoneInfo("UTC"))


@pytest.fixture(autouse=True)
def _few_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are flushed to files after a few batches."""
    monkeypatch.setattr(delta_backlog, "_MAX_DELTAS", 3)


def join(
    kind: str, expiry: tuple[int | None, int | None], bounds: tuple[int | None, int | None], **more: Any
) -> JoinSpec:
    left = side("lv int; ls string", of="l", keeps=kind in ("left_outer", "full_outer"), expiry_ms=expiry[0], **more)
    right = side("rv int; rd double", of="r", keeps=kind in ("right_outer", "full_outer"), expiry_ms=expiry[1], **more)
    null_safe = (kind == "full_outer", True)  # Spark has nulls meet in full outer joins
    return JoinSpec(kind, KEYS, null_safe, left, right, *bounds)


def shown(spec: JoinSpec, pair: tuple[Row | None, Row | None]) -> tuple[Any, ...]:
    out: list[Any] = []
    for row, mine in zip(pair, (spec.left, spec.right), strict=True):
        if mine is spec.right and spec.kind == "left_semi":
            continue
        if row is None:
            out += [None] * len(mine.columns)
            continue
        at = None if row["t"] is None else EPOCH + dt.timedelta(microseconds=row["t"])
        out += [*row["k"], at, *(row[f.name] for f in mine.values)]
    return tuple(out)


def within(spec: JoinSpec, left: Row, right: Row) -> bool:
    if spec.earliest is None and spec.latest is None:
        return True
    if left["t"] is None or right["t"] is None:
        return False
    apart = left["t"] - right["t"]
    return (spec.earliest is None or apart >= spec.earliest) and (spec.latest is None or apart <= spec.latest)


def values(name: str) -> dict[str, st.SearchStrategy[Any]]:
    if name == "left":
        return {"lv": st.none() | st.integers(0, 3), "ls": st.sampled_from([None, "", "x" * 20, "yy"])}
    return {"rv": st.none() | st.integers(0, 3), "rd": st.sampled_from([None, -0.0, 1.5, float("inf")])}


def rows_of(name: str, times: st.SearchStrategy[int | None], filtered: bool) -> st.SearchStrategy[list[Row]]:
    key = st.tuples(st.sampled_from([None, "a", "b", "c" * 14]), st.sampled_from([None, 1, 2]))
    row = st.fixed_dictionaries(
        {"k": key, "t": times, "able": st.sampled_from([True, True, True, False]) if filtered else st.just(True)}
        | values(name)
    ).map(lambda row: row | {"late": row["t"]})
    return st.lists(row, max_size=14)


@st.composite
def cases(draw: st.DrawFn) -> tuple[JoinSpec, list[tuple[list[Row], list[Row], int, bool]], int]:
    kind = draw(st.sampled_from(["inner", "left_outer", "right_outer", "full_outer", "left_semi"]))
    expiry = draw(st.sampled_from([(0, 0), (-3000, -1000), (2000, -9000), (None, None), (-2000, None)]))
    bounds = draw(
        st.sampled_from([(None, None), (-2 * SECOND, 3 * SECOND), (None, 0), (-SECOND, None), (SECOND, 2 * SECOND)])
    )
    filtered = draw(st.booleans())
    spec = join(kind, expiry, bounds, filtered=filtered)
    if draw(st.booleans()):
        condition = draw(
            st.sampled_from(
                [
                    ["<", ["left", 0], ["right", 0]],
                    ["<=>", ["left", 0], ["right", 0]],
                    ["or", ["not", [">=", ["left", 0], ["right", 0]]], ["=", ["right", 1], ["right", 1]]],
                ]
            )
        )
        spec = msgspec.structs.replace(spec, condition=condition)
    batches, closed = [], 0
    for _ in range(draw(st.integers(1, 7))):
        times = st.integers(closed * 1000 - 4 * SECOND, closed * 1000 + 12 * SECOND)
        some = st.none() | times | times | times | st.just(closed * 1000)
        batches.append(
            (draw(rows_of("left", some, filtered)), draw(rows_of("right", some, filtered)), closed, draw(st.booleans()))
        )
        closed += draw(st.sampled_from([0, 0, 1000, 3000, 8000]))
    if kind == "left_semi":
        spec = msgspec.structs.replace(spec, right_first=draw(st.booleans()))
    return spec, batches, draw(st.sampled_from([2, 8, 64]))


def compare(a: Any, b: Any) -> int | None:
    return None if a is None or b is None else (a > b) - (a < b)


def holds(condition: list[Any] | None, left: Row, right: Row) -> bool | None:
    """The conditions above, in Python."""
    if condition is None:
        return True
    order = compare(left["lv"], right["rv"])
    if condition[0] == "<":
        return None if order is None else order < 0
    if condition[0] == "<=>":
        return left["lv"] == right["rv"]
    return right["rd"] is not None or (order is not None and order < 0)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.booleans(), st.sampled_from(["none", "right", "wrong"]))
def test_a_join_equals_sparks_algorithm(case: Any, files: bool, hints: str) -> None:
    spec, batches, bits = case
    oracle = Oracle(spec, lambda left, right: within(spec, left, right) and holds(spec.condition, left, right))
    with TemporaryDirectory() as folder:
        rig = JoinRig(spec, Path(folder) if files else None)
        before = 0
        for left, right, closed, restart in batches:
            if restart:
                rig.restart()
            wanted = [shown(spec, pair) for pair in oracle.batch(left, right, before, closed)]
            whole = record_batch(spec, left, right, bits)
            middle = whole.num_rows // 3
            announced = [hints_for(spec, whole)] if hints != "none" else []
            if hints == "wrong":
                announced = [_shuffled(announced[0]), announced[0].slice(middle)]
            got = rig.batch([whole.slice(0, middle), whole.slice(middle)], before, closed, announced)
            assert sorted(map(str, got)) == sorted(map(str, wanted))
            before = closed
        rig.close()


def _shuffled(hints: pa.RecordBatch) -> pa.RecordBatch:
    """Hints of which each column is turned by another number of rows."""
    count = hints.num_rows
    turns = [pa.array((np.arange(count) + at) % max(1, count)) for at in range(hints.num_columns)]
    columns = [column.take(turn) for column, turn in zip(hints.columns, turns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=hints.schema.names)


def test_rows_without_time_stay_when_others_expire(tmp_path: Path) -> None:
    """They never expire, also in files that hold no other rows."""
    spec = join("inner", (0, 0), (None, None))
    rig = JoinRig(spec, tmp_path)

    def row(**more: Any) -> Row:
        return {"k": ("a", 1), "t": None, "late": None, "able": True} | more

    rig.batch([record_batch(spec, [row(lv=1, ls=None)], [])])
    for _ in range(3):  # begin and end a flush
        rig.batch([])
    rig.batch([], 0, 1000)
    rig.restart()
    assert [part.rows for part in rig.operator.tables["left"].parts] == [None]
    assert len(rig.batch([record_batch(spec, [], [row(rv=1, rd=None)])], 1000, 1000)) == 1
    rig.close()


@pytest.mark.parametrize("first", ["left", "right", "neither"])
@pytest.mark.parametrize("at", [(1 << 61) + 10 * SECOND, -(1 << 61) - 10 * SECOND, NEVER - 4 * SECOND])
def test_times_far_from_now(at: int, first: str) -> None:
    """Years beyond 75,000: bounds of an interval that is added to such a time must not wrap around, nor be cut off."""
    spec = join("inner", (None, None), (-2 * SECOND, 3 * SECOND), late="none")
    spec = msgspec.structs.replace(spec, left=_without_time(spec.left), right=_without_time(spec.right))
    rig = JoinRig(spec)

    def row(time: int, **more: Any) -> Row:
        return {"k": ("a", 1), "t": time, "late": time, "able": True} | more

    left = [row(at, lv=0, ls=None)]
    right = [row(at + second * SECOND, rv=second, rd=None) for second in (-4, -3, 0, 2, 3)]
    batches: dict[str, list[tuple[list[Row], list[Row]]]] = {
        "left": [(left, []), ([], right)],
        "right": [([], right), (left, [])],
        "neither": [(left, right)],
    }
    got = [pair for batch in batches[first] for pair in rig.batch([record_batch(spec, *batch)])]
    place = [field.name for field in spec.output_fields].index("rv")
    assert sorted(pair[place] for pair in got) == [-3, 0, 2]
    rig.close()


@pytest.mark.parametrize(("at", "which"), [(NEVER, "maximum"), (-(1 << 63), "minimum")])
@pytest.mark.parametrize("late", ["none", "time"])
def test_times_that_stand_for_no_time_are_refused(at: int, which: str, late: str) -> None:
    spec = join("inner", (None, None), (None, SECOND), late=late)
    rig = JoinRig(spec)
    row = {"k": ("a", 1), "t": at, "late": at, "able": True, "lv": 0, "ls": None}
    rows = record_batch(spec, [row], [])
    if (which, late) == ("minimum", "time"):  # late, like any row before the watermark
        assert not rig.batch([rows])
    else:
        with pytest.raises(UsageError, match=f"the {which} of timestamps"):
            rig.batch([rows])
    rig.close()


def test_null_keys_of_adopted_rows_do_not_meet() -> None:
    """Spark's state of an outer join by computed keys has such rows on the side that is not kept."""
    spec = join("left_outer", (None, None), (None, None))
    rig = JoinRig(spec)

    def row(**more: Any) -> Row:
        return {"k": (None, 1), "t": 0, "late": 0, "able": True} | more

    rows = record_batch(spec, [row(lv=1, ls=None)], [row(rv=1, rd=None)])
    rig.operator.begin(0, Times(0, 0, 0))
    rig.operator.adopt(rows.append_column("__matched", pa.array([False, False])))
    for table in rig.operator.tables.values():
        table.build_parts()
    assert {name: len(table.fresh) for name, table in rig.operator.tables.items()} == {"left": 1, "right": 0}
    rig.close()


def _without_time(whole: JoinSide) -> JoinSide:
    """The same side without its time among the columns that come out: Python has no such times."""
    shown = [(column, place) for column, place in zip(whole.columns, whole.places, strict=True) if place != FROM_TIME]
    columns, places = zip(*shown, strict=True)
    return msgspec.structs.replace(whole, columns=columns, places=places)


@pytest.mark.parametrize("kind", ["inner", "left_outer", "left_semi"])
def test_a_hot_key(kind: str) -> None:
    """100 k rows of one key on one side: a range of time finds its rows without looking at the others."""
    spec = join(kind, (-20_000, -20_000), (0, 0))
    rig = JoinRig(spec)

    def row(at: int, **more: Any) -> Row:
        return {"k": ("hot", 1), "t": at, "late": at, "able": True} | more

    left = [row(SECOND + i, lv=i, ls=None) for i in range(100_000)]
    assert rig.batch([record_batch(spec, left, [])]) == []
    right = [row(SECOND + i, rv=i, rd=None) for i in range(0, 100_000, 10)]
    got = rig.batch([record_batch(spec, [], right)])
    assert sorted(r[3] for r in got) == [r["rv"] for r in right]
    if kind == "left_outer":
        gone = rig.batch([], 0, 40_000)
        assert len(gone) == 90_000
        assert all(r[3] % 10 for r in gone)
    rig.close()


@pytest.mark.parametrize("kind", ["inner", "left_outer", "left_semi"])
def test_long_values_come_in_bounded_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of a hot key has a copy of its values, which together exceed the limit of a column by far."""
    monkeypatch.setattr(decode, "LIMIT", 3 << 20)
    spec = join(kind, (-20_000, -20_000), (None, None))
    spec = msgspec.structs.replace(spec, condition=["<=>", ["left", 1], ["left", 1]])
    rig = JoinRig(spec)
    limit = rig.operator.tables["left"].portion_bytes

    def row(key: str, at: int, **more: Any) -> Row:
        return {"k": (key, 1), "t": at, "late": at, "able": True} | more

    def largest_piece() -> int:
        return max(piece.nbytes for piece in rig.operator.output())

    left = [row(key, SECOND + i, lv=i, ls=f"{i:8}" * 1000) for key in ("hot", "cold") for i in range(600)]
    right = [row("hot", SECOND + i, rv=i, rd=None) for i in range(3)]
    got = rig.batch([record_batch(spec, left, right)])
    pairs: list[tuple[int, ...]] = [(i, r["rv"]) for i in range(600) for r in right]
    assert sorted((out[3], *out[8:9]) for out in got) == ([(i,) for i in range(600)] if kind == "left_semi" else pairs)
    assert all(out[4] == f"{out[3]:8}" * 1000 for out in got)
    assert largest_piece() < limit + (64 << 10)
    stored = rig.operator.tables["left"].scan()
    pieces = [piece for rows in stored for piece in JOIN.read(spec, "left", rows)]
    assert sum(piece.num_rows for piece in pieces) == (600 if kind == "left_semi" else 1200)
    if kind == "left_outer":
        assert len(rig.batch([], 0, 40_000)) == 600
        assert largest_piece() < limit + (64 << 10)
    rig.close()


def test_hints_read_what_rows_can_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side, in the times that the condition allows; for late rows nothing."""
    spec = join("inner", (-SECOND // 1000, -SECOND // 1000), (-SECOND, SECOND))
    rig = JoinRig(spec, tmp_path)
    monkeypatch.setattr(delta_backlog, "_MAX_DELTAS", 100)  # files are not merged

    def row(key: str, at: int, **more: Any) -> Row:
        return {"k": (key, 1), "t": at, "late": at, "able": True} | more

    keys = [f"key {number}" for number in range(300)]
    for second in (10, 20, 30):
        left = [row(key, second * SECOND, lv=1, ls=None) for key in keys]
        right = [row(key, second * SECOND, rv=2, rd=None) for key in keys]
        assert len(rig.batch([record_batch(spec, left, right)])) == len(keys)
        for table in rig.operator.tables.values():
            assert table._files is not None
            table._files.spill(table.fresh, lambda: False)
    rig.operator.begin(rig.version, Times(15_000, 15_000, 0))
    brought: list[tuple[str, int]] = []
    for name, table in rig.operator.tables.items():
        for part in table.parts:
            assert part.rows is None
            part.preload_blocks = lambda _, at=(name, part.oldest // SECOND): brought.append(at)  # type: ignore[method-assign]

    def read(rows: pa.RecordBatch) -> set[tuple[str, int]]:
        brought.clear()
        rig.operator.prefetch_keys(hints_for(spec, rows), rig.version)
        return set(brought)

    def rights(at: int) -> pa.RecordBatch:
        return record_batch(spec, [], [row("key 7", at, rv=3, rd=None)])

    assert read(rights(21 * SECOND)) == {("left", 20)}
    assert read(record_batch(spec, [row("key 7", 30 * SECOND, lv=3, ls=None)], [])) == {("right", 30)}
    assert read(rights(25 * SECOND)) == set()
    assert read(rights(15 * SECOND)) == set(), "late"
    unknown = hints_for(spec, rights(0)).set_column(2, "__time", pa.array([None], pa.int64()))
    brought.clear()
    rig.operator.prefetch_keys(unknown, rig.version)
    assert set(brought) == {("left", 10), ("left", 20), ("left", 30)}
    rig.operator.finish()
    rig.close()


def test_both_sides_and_all_files_are_asked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks come by requests, a batch waits for one round of them, not for one a file."""
    spec = join("full_outer", (None, None), (None, None))
    rig = JoinRig(spec, tmp_path)
    monkeypatch.setattr(delta_backlog, "_MAX_DELTAS", 100)  # files are not merged

    def rows(at: int) -> pa.RecordBatch:
        left = [{"k": (f"key {n}", 1), "t": at, "late": at, "able": True, "lv": 1, "ls": None} for n in range(50)]
        right = [{"k": (f"key {n}", 1), "t": at, "late": at, "able": True, "rv": 2, "rd": None} for n in range(50)]
        return record_batch(spec, left, right)

    files = 3
    for number in range(files):
        rig.batch([rows((1 + number) * SECOND)])
        for table in rig.operator.tables.values():
            assert table._files is not None
            table._files.spill(table.fresh, lambda: False)
    together = threading.Barrier(2 * files, timeout=60)
    operator = rig.operator
    operator.begin(rig.version, Times())
    for table in operator.tables.values():
        assert len(table.parts) == files
        for part in table.parts:
            part.run.source.resident = False  # type: ignore[union-attr]
            part.preload_blocks = lambda _: together.wait()  # type: ignore[method-assign]
    operator.process(rows(9 * SECOND))
    operator.finish()  # breaks if they are asked one after the other
    assert sum(batch.num_rows for batch in operator.output()) == 50 * (2 * files + 1)
    rig.close()
