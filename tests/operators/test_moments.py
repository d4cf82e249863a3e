"""Statistics of doubles: exact where numbers are tame, as Spark's where they are not."""

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from millpond.errors import DivideByZeroError
from millpond.spec.operators import AggregateCall
from tests.operators.rig import Rig, record_batch, spec
from tests.operators.test_combine import combined, results

SHAPES = ("skewness", "kurtosis")


def shown(calls: Sequence[AggregateCall], parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The results over values, each part folded on its own; several values of a row are tuples."""
    rows = [[{"k": 1, "v": v, "w": w} for v, w in map(_pair, part)] for part in parts]
    shape = spec("k int", "v double; w double", list(calls))
    rig = combined(shape, rows)
    found = results(shape, rig)[1]
    rig.close()
    return found


def _pair(value: Any) -> tuple[Any, Any]:
    return value if isinstance(value, tuple) else (value, None)


def exact(values: Sequence[float]) -> list[float]:
    """Skewness and kurtosis by their definitions."""
    numbers = [Fraction(value) for value in values]
    mean = sum(numbers) / len(numbers)
    second, third, fourth = (sum((one - mean) ** power for one in numbers) / len(numbers) for power in (2, 3, 4))
    return [float(third) / float(second) ** 1.5, float(fourth / second**2) - 3.0]


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_shape_by_its_definition(parts: int) -> None:
    draw = random.Random(parts)
    values = [draw.choice([draw.gauss(30, 5), draw.expovariate(0.1)]) for _ in range(5000)]
    wanted = exact(values)
    calls = [AggregateCall(name, (0,), "double") for name in SHAPES]
    found = shown(calls, [[*values[part::parts], None] for part in range(parts)])
    assert all(math.isclose(got, right, rel_tol=1e-9) for got, right in zip(found, wanted, strict=True))


def test_what_has_no_shape() -> None:
    calls = [AggregateCall(name, (0,), "double") for name in SHAPES]
    legacy = [
        AggregateCall(name, (0,), "double", options={"null_on_divide_by_zero": False, "eval_mode": "ansi"})
        for name in SHAPES
    ]
    for parts in ([[7.0]], [[0.1, 0.1], [0.1]], [[None], [0.1]]):
        assert shown(calls, parts) == [None, None]
        assert all(map(math.isnan, shown(legacy, parts)))
    assert shown(legacy, [[None], [None, None]]) == [None, None]
    for parts in ([[1.0, math.nan]], [[1.0], [math.inf, 2.0]], [[-math.inf]]):
        assert all(map(math.isnan, shown(calls, parts)))


def test_an_empty_part_changes_nothing_however_large_the_numbers_are() -> None:
    calls = [AggregateCall(name, (0,), "double") for name in ("var_pop", "stddev_samp")]
    assert shown(calls, [[None], [1e200, 1e200]]) == [0.0, 0.0]
    assert shown(calls, [[1e200, 1e200], [None]]) == [0.0, 0.0]


def formerly(name: str, inputs: int = 1, **options: Any) -> AggregateCall:
    """A call as Spark before 4.3 computes it."""
    return AggregateCall(name, tuple(range(inputs)), "double", options={"merges_empty": True, **options})


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(1e76, [0.0, None, None]), (1e78, [0.0, None, None]), (1e155, [math.nan] * 3), (math.inf, [math.nan] * 3)],
)
def test_overflows_before_spark_4_3(value: float, wanted: list[float | None]) -> None:
    calls = [formerly(name) for name in ("var_pop", *SHAPES)]
    assert str(shown(calls, [[None, value]])) == str(wanted)
    assert str(shown(calls, [[value], [None]])) == str(wanted)


def test_overflows_of_distinct_values_before_spark_4_3() -> None:
    calls = [msgspec.structs.replace(formerly(name), distinct=True) for name in ("var_pop", *SHAPES)]
    assert all(map(math.isnan, shown(calls, [[1e200, None, 1e200]])))


def test_powers_overflow_one_by_one_before_spark_4_3() -> None:
    calls = [formerly(name) for name in ("var_pop", *SHAPES)]
    variance, skewness, kurtosis = shown(calls, [[1e80], [3e80]])
    assert math.isclose(variance, 1e160)
    assert skewness == 0.0
    assert math.isnan(kurtosis)


def test_overflows_of_pairs_before_spark_4_3() -> None:
    names = ("covar_pop", "regr_sxy", "corr", "regr_r2", "regr_slope", "regr_intercept")
    found = dict(zip(names, shown([formerly(name, 2) for name in names], [[(1.0, 1.0)], [(2.0, 1e200)]]), strict=True))
    assert found["covar_pop"] == 2.5e199
    assert found["regr_sxy"] == 5e199
    assert all(math.isnan(found[name]) for name in ("corr", "regr_r2", "regr_slope", "regr_intercept"))


def test_a_side_that_does_not_vary_before_spark_4_3() -> None:
    parts = [[(1.0, 7.0), (2.0, 7.0)], [(None, 7.0)]]
    assert shown([formerly("corr", 2), formerly("corr", 2, null_on_divide_by_zero=False)], parts) == [None, None]
    assert shown([AggregateCall("corr", (0, 1), "double", options={"eval_mode": "ansi"})], parts) == [None]
    assert shown([formerly("corr", 2, eval_mode="ansi")], [[(1.0, 7.0)], [(None, 7.0)]]) == [None]
    with pytest.raises(DivideByZeroError, match="DIVIDE_BY_ZERO"):
        shown([formerly("corr", 2, eval_mode="ansi")], parts)


@pytest.mark.parametrize("function", SHAPES)
def test_deviations_too_small_to_be_divided_by(function: str) -> None:
    values = [1e-120, 2e-120, 4e-120]
    assert shown([AggregateCall(function, (0,), "double")], [values]) == [None]
    shape = spec("k int", "v double", [AggregateCall(function, (0,), "double", options={"eval_mode": "ansi"})])
    with pytest.raises(DivideByZeroError, match="DIVIDE_BY_ZERO"):
        Rig(shape).batch(record_batch(shape, [{"k": 1, "v": value} for value in values], ["k"]))
