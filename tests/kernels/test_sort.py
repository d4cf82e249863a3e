"""The hash sort against NumPy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.kernels.runs.sort import order_by_hash
from tests.support.rows import HASHES


def check(hashes: np.ndarray) -> None:
    ordered, order = order_by_hash(hashes)
    expected = np.argsort(hashes, kind="stable")
    assert (ordered == hashes[expected]).all()
    assert (order == expected).all()


@given(st.lists(HASHES))
def test_any_hashes(hashes):
    check(np.array(hashes, np.uint64))


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h,
        lambda h: h >> np.uint64(56),
        lambda h: h >> np.uint64(56) << np.uint64(56),
        lambda h: h >> np.uint64(20) | np.uint64(1 << 63),
        lambda h: np.where(h % 1000 == 0, h, h >> np.uint64(40)),  # clustered, with a few far away
        lambda h: np.sort(h),
        lambda h: np.sort(h)[::-1],
    ],
)
def test_many_hashes(change):
    check(change(np.random.default_rng(1).integers(0, 2**64, 20_000, np.uint64)))
