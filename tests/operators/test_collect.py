"""Blobs of state near the largest size that a row of state has a length for."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millpond.errors import UsageError
from millpond.kernels.aggregate import collect as kernels
from millpond.layout import Words
from millpond.operators.columns.encode import ALL
from millpond.operators.functions.collect import GrowingBytes

GIB = 1 << 30
OFFSET = 1
TWICE = np.zeros(2, np.int64)
"""Row 0, twice in a block."""


def large_blob(used: int) -> Words:
    """A row with a full blob; its bytes do not exist."""
    words: Words = np.zeros((1, 4), np.uint64)
    words[0, OFFSET], words[0, OFFSET + 2] = used + kernels.HEADER, used
    return words


def test_a_blob_grows_up_to_the_largest_size() -> None:
    rows, sizes = np.empty(2, np.int64), np.empty(2, np.int64)
    words = large_blob(3 * GIB)
    assert kernels.find_short_by(words, TWICE, OFFSET, np.full(2, GIB // 4), rows, sizes) == 1
    assert (rows[0], sizes[0]) == (0, 0xFFFFFFF0)
    assert words[0, OFFSET + 2] == 3 * GIB


@pytest.mark.parametrize("more", [[GIB, 1], [GIB // 2, GIB // 2], [4 * GIB - 1, 1], [4 * GIB - 1, 4 * GIB - 1]])
def test_a_blob_of_4_gib_is_an_error(more: list[int]) -> None:
    table: Any = SimpleNamespace(words=large_blob(3 * GIB))
    with pytest.raises(UsageError, match="4 GiB"):
        GrowingBytes().make_room_for(table, TWICE, OFFSET, np.array(more))


def test_a_list_of_4_gib_is_an_error() -> None:
    table: Any = SimpleNamespace(words=large_blob(4 * GIB - 64))
    with pytest.raises(UsageError, match="4 GiB"):
        GrowingBytes().make_room(table, TWICE, 0, OFFSET, width=32, valid=ALL)


def test_a_sketch_of_4_gib_is_an_error() -> None:
    table: Any = SimpleNamespace(words=large_blob(0))
    with pytest.raises(UsageError, match="4 GiB"):
        GrowingBytes.grow(table, np.zeros(1, np.int64), OFFSET, np.array([4 * GIB]))
