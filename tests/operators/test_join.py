"""Joins against Spark's algorithm, row by row."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.spec.kinds.join import JoinSpec
from millpond.spec.operators import Field
from tests.operators.join_rig import JoinRig, Oracle, Row, record_batch, side

KEYS = (Field("a", "string"), Field("b", "int"))
SECOND = 1_000_000
EPOCH = dt.datetime(1970, 1, 1, tzinfo=ZoneInfo("UTC"))


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
                    ["or", ["not", [">=", ["left", 0], ["right", 0]]], ["isnull", ["right", 1]]],
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
    return right["rd"] is None or (order is not None and order < 0)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.booleans())
def test_a_join_equals_sparks_algorithm(case: Any, files: bool) -> None:
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
            got = rig.batch([whole.slice(0, middle), whole.slice(middle)], before, closed)
            assert sorted(map(str, got)) == sorted(map(str, wanted))
            before = closed
        rig.close()


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
