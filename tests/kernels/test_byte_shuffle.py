"""Shuffling is a transposition of bytes."""

import numpy as np
import pytest

from millpond.kernels.pointers import address
from millpond.kernels.runs.byte_shuffle import shuffle, unshuffle


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 1365])
def test_there_and_back(count, width):
    rows = np.random.default_rng(1).integers(0, 2**64, (count, width), np.uint64)
    planes = np.empty(count * width * 8, np.uint8)
    shuffle(address(rows), count, width, address(planes))
    assert (planes.reshape(width * 8, count) == rows.view(np.uint8).reshape(count, width * 8).T).all()
    back = np.empty_like(rows)
    unshuffle(address(planes), count, width, address(back))
    assert (back == rows).all()
