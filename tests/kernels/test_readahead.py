"""Pages are asked for together, and found in memory afterwards."""

import mmap
import os

import numpy as np
import pytest

from millpond.kernels.pointers import address
from millpond.kernels.runs.readahead import PAGE, probably_cached, request_pages


@pytest.fixture
def mapped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1000 * PAGE))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    data.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(data, np.uint8)


def test_near_pages_are_asked_for_at_once(mapped):
    base = np.uint64(address(mapped))
    at = base + np.array([10, 10 * PAGE, 11 * PAGE + 5, 13 * PAGE, 900 * PAGE], np.uint64)
    assert request_pages(at, 0, 8, 0) == 4
    assert request_pages(at, 0, 8, 2 * PAGE) == 3
    assert request_pages(at, PAGE, 8, 1 << 30) == 1
    assert request_pages(at[:0], 0, 8, 0) == 0


def test_pages_that_were_read_are_cached(mapped):
    at = np.uint64(address(mapped)) + np.arange(0, 1000 * PAGE, 10 * PAGE, dtype=np.uint64)
    request_pages(at, 0, 8, 0)
    assert mapped[:: 10 * PAGE].sum() > 0
    assert probably_cached(at)
