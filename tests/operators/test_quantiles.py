"""`percentile_approx` of groups with more values than their summaries hold: within the accuracy, come what may."""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.operators.aggregate.running import AggregateOperator
from millpond.operators.functions import quantiles
from millpond.operators.functions.accumulators import BLOCK
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall
from tests.operators.rig import Rig, hash_of, spec
from tests.operators.test_combine import combined, results

SHARES = [0.5, 0.01, 0.99, 0.25, 0.0, 1.0]


def shape(accuracy: int) -> AggregateSpec:
    options = {"percentages": SHARES, "accuracy": accuracy, "array": True}
    return spec("k int", "v double", [AggregateCall("percentile_approx", (0,), "array<double>", options=options)])


def table(values: np.ndarray) -> pa.RecordBatch:
    keys = np.zeros(len(values), np.int32)
    hashes = np.full(len(values), hash_of((0,), 64))
    return pa.RecordBatch.from_arrays([pa.array(hashes), pa.array(keys), pa.array(values)], names=["__hash", "k", "v"])


def check(found: list[float], values: np.ndarray, accuracy: int) -> None:
    """The rank of each quantile is wrong by at most a share of 1 / accuracy of all values."""
    values = np.sort(values)
    for share, value in zip(SHARES, found, strict=True):
        low, high = np.searchsorted(values, value, "left"), np.searchsorted(values, value, "right")
        allowed = len(values) / accuracy + 1
        assert low < high
        assert low + 1 - allowed <= np.ceil(share * len(values)) <= high + allowed, (share, value, low, high)
    assert found[4] == values[0]
    assert found[5] == values[-1]


def data(kind: str, count: int) -> np.ndarray:
    draw = np.random.default_rng(3)
    if kind == "rising":
        return np.arange(count, dtype=float)
    if kind == "falling":
        return -np.arange(count, dtype=float)
    return draw.integers(0, 50, count).astype(float) if kind == "few" else draw.normal(size=count)


@pytest.mark.parametrize("kind", ["random", "rising", "falling", "few"])
@pytest.mark.parametrize("accuracy", [20, 500])
def test_within_the_accuracy(accuracy: int, kind: str) -> None:
    values = data(kind, 60_000)
    rig = Rig(shape(accuracy))
    bounds = [0, 100, 3000, 3001, 40_000, 60_000]
    for first, last in pairwise(bounds):
        (found,) = rig.batch(table(values[first:last])).column(1).to_pylist()
        check(found, values[:last], accuracy)
        rig.restart()
    held: Any = rig.operator.tables["main"]
    (rows,) = held.scan()
    operator = rig.operator
    assert isinstance(operator, AggregateOperator)
    place = operator._groups.calls[0].places[0]
    room, used = int(rows.words[0, place.offset] & np.uint64(0xFFFFFFFF)), int(rows.words[0, place.offset + 2])
    # It does not grow with the rows: samples, a buffer that takes one block more, and half as much again.
    samples, gathered = 4 * accuracy, max(2 * accuracy, 64)
    assert used <= 24 * samples + 8 * gathered
    assert room <= 1.5 * (24 * samples + 8 * (gathered + BLOCK))
    rig.close()


@pytest.mark.parametrize("kind", ["random", "rising", "falling", "few"])
def test_partial_states(kind: str) -> None:
    accuracy, values = 50, data(kind, 8000)
    rows = [{"k": 0, "v": float(value)} for value in values]
    for bounds in ([0, 10, 4000, 8000], [0, 7990, 8000], [0, 40, 80, 120, 160], [0, 2000, 2010, 8000]):
        parts = [rows[first:last] for first, last in pairwise(bounds)]
        rig = combined(shape(accuracy), parts)
        check(results(shape(accuracy), rig)[0][0], values[: bounds[-1]], accuracy)
        rig.close()


def test_integers_that_order_as_doubles_do() -> None:
    doubles = np.array([-np.inf, -1.5, -5e-324, -0.0, 0.0, 5e-324, 1.0, 1e300, np.inf, -np.nan])
    ordered = quantiles._to_ordered_ints(doubles)
    assert (np.diff(ordered) > 0).all()
    back = quantiles._from_ordered_ints(ordered)
    assert np.array_equal(back, doubles, equal_nan=True)
    assert np.signbit(back[3])
