"""Sums and averages at the edges of their types, against Python's integers and fractions."""

import math
from decimal import ROUND_HALF_UP, Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.errors import ArithmeticOverflowError
from millpond.kernels.aggregate import fixed_point
from millpond.operators.columns.encode import ALL, Place
from millpond.operators.protocol import Times
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import OP, AggregateCall, EventTime, Field, Windows
from millpond.spec.types import parse_type
from tests.operators.rig import Rig, Row, fields, record_batch
from tests.operators.values import EXACT

LIMIT = 10**38
WIDE = st.builds(
    lambda digits, power: max(-LIMIT + 1, min(LIMIT - 1, digits * 10**power)), st.integers(-99, 99), st.integers(0, 37)
)
FLOATS = st.floats() | st.floats(width=32) | st.sampled_from([1e300, 1e20, 1.0, 1.7e308, -1.7e308, 5e-324, math.inf])


def calls(dtype: str, mode: str = "legacy") -> tuple[AggregateCall, ...]:
    """Sum and average."""
    each = parse_type(dtype)
    types = {"float": "double", "double": "double", "bigint": "bigint"}.get(dtype), "double"
    if each.name == "decimal":
        types = (
            f"decimal({min(38, each.precision + 10)},{each.scale})",
            f"decimal({min(38, each.precision + 4)},{min(38, each.scale + 4)})",
        )
    options = {"eval_mode": mode}
    return tuple(
        AggregateCall(name, (0,), type_, options=options) for name, type_ in zip(("sum", "avg"), types, strict=True)
    )


def decimal_results(total: int | None, count: int, dtype: str) -> tuple[Decimal | None, Decimal | None]:
    """Spark's sum and average of a total in units of the last place; None: it is beyond its precision."""
    if total is None or not count or abs(total) >= LIMIT:
        return None, None
    scale, result = parse_type(dtype).scale, parse_type(calls(dtype)[1].type)
    with localcontext(EXACT):
        summed = Decimal(total).scaleb(-scale)
        shift = 10 ** (result.scale - scale)
        mean = (Decimal(total * shift) / count).quantize(Decimal(1), ROUND_HALF_UP)
        return summed, mean.scaleb(-result.scale) if abs(mean) < 10**result.precision else None


def float_results(values: list[float]) -> tuple[float, float]:
    """The double nearest to the exact sum, and that divided."""
    if any(map(math.isinf, values)) or any(map(math.isnan, values)):
        total = sum(values)
    else:
        try:
            total = float(sum(map(Fraction, values), Fraction(0)))
        except OverflowError:
            total = math.inf if sum(map(Fraction, values)) > 0 else -math.inf
    return total, total / len(values)


def same(got: Any, wanted: Any) -> bool:
    return repr(got) == repr(wanted) if isinstance(wanted, float) else bool(got == wanted)


SOME = settings(max_examples=150, deadline=None)


@SOME
@given(st.lists(st.lists(WIDE, max_size=5), max_size=5), st.sampled_from(["decimal(38,0)", "decimal(38,6)"]), st.data())
def test_sums_of_wide_decimals_are_checked_when_a_batch_ends(
    batches: list[list[int]], dtype: str, data: st.DataObject
) -> None:
    """Within a batch they may leave their precision and come back; beyond it then, they are null for good."""
    shape = AggregateSpec(fields("k int"), fields(f"v {dtype}"), calls(dtype), "update")
    scale = parse_type(dtype).scale
    rig = Rig(shape)
    total: int | None = 0
    count = 0
    for batch in batches:
        if data.draw(st.booleans()):
            rig.restart()
        rows: list[Row] = [{"k": 1, "v": Decimal(v).scaleb(-scale, EXACT)} for v in batch]
        cut = data.draw(st.integers(0, len(rows)))
        out = rig.batch(*(record_batch(shape, part, ["k"]) for part in (rows[:cut], rows[cut:]))).to_pylist()
        count += len(batch)
        total = None if total is None or abs(total + sum(batch)) >= LIMIT else total + sum(batch)
        if batch:
            assert tuple(out[0].values())[1:] == decimal_results(total, count, dtype)
    rig.close()


@SOME
@given(
    st.lists(st.lists(st.sampled_from([2**63 - 1, -(2**63), 2**62, -(2**62), 1, -1, 0]), max_size=5), max_size=5),
    st.data(),
)
def test_try_sum_of_integers_is_checked_when_a_batch_ends(batches: list[list[int]], data: st.DataObject) -> None:
    """Within a batch it may leave 64 bits and come back; beyond them then, it is null for good."""
    shape = AggregateSpec(fields("k int"), fields("v bigint"), calls("bigint", "try")[:1], "update")
    rig = Rig(shape)
    total: int | None = 0
    for batch in batches:
        if data.draw(st.booleans()):
            rig.restart()
        rows: list[Row] = [{"k": 1, "v": v} for v in batch]
        cut = data.draw(st.integers(0, len(rows)))
        out = rig.batch(*(record_batch(shape, part, ["k"]) for part in (rows[:cut], rows[cut:]))).to_pylist()
        total = None if total is None else total + sum(batch)
        if total is not None and not -(2**63) <= total < 2**63:
            total = None
        if batch:
            assert out == [{"k": 1, "sum_0": total}]
    rig.close()


@SOME
@given(st.data())
def test_what_is_taken_back_leaves_no_trace(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["decimal(38,0)", "decimal(38,6)", "decimal(18,2)", "bigint", "double", "float"]))
    shape = AggregateSpec(fields("k int"), fields(f"v {dtype}"), calls(dtype), "update", retracts=True)
    kind = parse_type(dtype)
    one: st.SearchStrategy[Any] = FLOATS
    if kind.name == "decimal":
        one = WIDE.filter(lambda v: abs(v) < 10**kind.precision).map(lambda v: Decimal(v).scaleb(-kind.scale, EXACT))
    elif dtype == "bigint":
        one = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**63 - 1, -(2**63)])
    elif dtype == "float":
        one = st.floats(width=32)
    rig = Rig(shape)
    there: list[Any] = []
    for _ in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            rig.restart()
        gone = [
            there.pop(data.draw(st.integers(0, len(there) - 1))) for _ in range(data.draw(st.integers(0, len(there))))
        ]
        come = data.draw(st.lists(one, max_size=6))
        there += come
        changes = data.draw(st.permutations([(-1, v) for v in gone] + [(1, v) for v in come]))
        rows = [{"k": 1, "v": v, OP.name: sign} for sign, v in changes]
        out = rig.batch(record_batch(shape, rows, ["k"])).to_pylist()
        if not rows:
            continue
        if not there:
            assert out == []
            continue
        summed, mean = tuple(out[0].values())[1:]
        if kind.name == "decimal":
            total = int(sum(Fraction(v) for v in there) * 10**kind.scale)
            if kind.precision < 28:
                assert summed == sum(there)
            else:
                assert (summed, mean) == decimal_results(total, len(there), dtype)
        elif dtype == "bigint":
            assert summed == (sum(there) + 2**63) % 2**64 - 2**63
            assert mean == pytest.approx(float(Fraction(sum(there), len(there))), rel=1e-15)
        else:
            wanted = float_results(there)
            assert same(summed, wanted[0]), (summed, wanted, there)
            assert same(mean, wanted[1])
    rig.close()


def taken_back(dtype: str, mode: str, *batches: list[tuple[int, Any]], number: int = 2) -> list[tuple[Any, ...]]:
    shape = AggregateSpec(fields("k int"), fields(f"v {dtype}"), calls(dtype, mode)[:number], "update", retracts=True)
    rig = Rig(shape)
    try:
        found = []
        for batch in batches:
            rows = [{"k": 1, "v": v, OP.name: sign} for sign, v in batch]
            out = rig.batch(record_batch(shape, rows, ["k"])).to_pylist()
            found.append(tuple(out[0].values())[1:])
        return found
    finally:
        rig.close()


def test_a_sum_that_was_infinite_comes_back() -> None:
    high = 1.7e308
    both, one = taken_back("double", "legacy", [(1, high), (1, high), (1, 0.1)], [(-1, high), (-1, high)])
    assert both == (math.inf, math.inf)
    assert one == (0.1, 0.1)
    assert taken_back("double", "legacy", [(1, 1e300), (1, 1e20), (1, 1.0)], [(-1, 1e20), (-1, 1e300)])[1] == (1, 1)


@pytest.mark.parametrize("dtype", ["decimal(38,0)", "bigint"])
def test_sums_over_changes_overflow_only_when_shown(dtype: str) -> None:
    high: Any = Decimal(9 * 10**37) if dtype != "bigint" else 2**63 - 1
    many = [(1, high)] * 50
    assert taken_back(dtype, "ansi", [*many, *[(-1, high)] * 49], number=1)[0][0] == high
    with pytest.raises(ArithmeticOverflowError, match="ARITHMETIC_OVERFLOW"):
        taken_back(dtype, "ansi", many, number=1)
    assert taken_back(dtype, "try", many, [(-1, high)] * 49, number=1) == [(None,), (high,)]


def test_sums_of_wide_decimals_fail_in_ansi_mode_when_they_are_shown() -> None:
    shape = AggregateSpec(fields("k int"), fields("v decimal(38,0)"), calls("decimal(38,0)", "ansi")[:1], "update")

    def rows(*values: int) -> pa.RecordBatch:
        return record_batch(shape, [{"k": 1, "v": Decimal(v * 10**37)} for v in values], ["k"])

    rig = Rig(shape)
    rig.batch(rows(9))
    assert rig.batch(rows(3, -4)).to_pylist() == [{"k": 1, "sum_0": Decimal(8 * 10**37)}]
    with pytest.raises(ArithmeticOverflowError, match="try_sum"):
        rig.batch(rows(3, 3))
    rig.close()


def test_panes_keep_what_is_beyond() -> None:
    """A pane may hold more than the sum that it is a part of."""
    high = Decimal(9 * 10**37)
    window = "struct<start:timestamp,end:timestamp>"
    some = calls("decimal(38,0)")
    time = EventTime(0, Windows(10_000_000, 5_000_000, 0, shared=True))
    sliding = AggregateSpec((Field("window", window),), fields("v decimal(38,0)"), some, "append", time)

    def at(seconds: list[tuple[int, Decimal]]) -> pa.RecordBatch:
        rows = [{"window": s * 1_000_000, "v": v} for s, v in seconds]
        times = pa.array([row["window"] for row in rows], pa.timestamp("us", "UTC"))
        values = pa.array([row["v"] for row in rows], pa.decimal128(38, 0))
        return pa.RecordBatch.from_arrays(
            [pa.array([7] * len(rows), pa.int64()), times, values], names=["__hash", "window", "v"]
        )

    rig = Rig(sliding)
    rig.batch(at([(2, high), (7, -high)]))
    rig.batch(at([(2, high), (7, -high)]))
    rig.batch(at([(2, Decimal(1))]))
    out = rig.batch(times=Times(0, 100_000)).to_pylist()
    rig.close()
    # Only the window of both panes is within the limit.
    assert [row["sum_0"] for row in sorted(out, key=lambda row: row["window"]["start"])] == [None, Decimal(1), None]


@settings(max_examples=300, deadline=None)
@given(st.lists(FLOATS.filter(math.isfinite), min_size=1, max_size=8), st.booleans())
def test_the_nearest_double(values: list[float], single: bool) -> None:
    width = fixed_point.FLOATS if single else fixed_point.DOUBLES
    if single:
        with np.errstate(over="ignore"):
            values = [float(np.float32(v)) for v in values]
        values = [v for v in values if math.isfinite(v)] or [0.0]
    words, place = np.zeros((1, width.words + 4), dtype=np.uint64), Place(0, 0, np.uint64(0))
    rows, signs = np.zeros(len(values), dtype=np.int64), np.ones(len(values), dtype=np.int8)
    fixed_point.sum_floats(words, rows, 0, *place, ALL, np.array(values), signs, *width)
    out = np.empty(1)
    fixed_point.nearest(np.ascontiguousarray(words[:, : width.words]), width.base, out)
    assert same(float(out[0]), float_results(values)[0])
    fixed_point.sum_floats(words, rows, 0, *place, ALL, np.array(values[::-1]), -signs, *width)
    assert not words.any()
