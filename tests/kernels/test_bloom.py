"""Filters never hide a row, and seldom let through what is not there."""

import numpy as np
import pytest

from millpond.files.formats.blocks import MemorySource, sort_rows
from millpond.kernels.runs.bloom import admit
from millpond.kernels.runs.search import locate
from tests.support.rows import FIXED, random_rows


def admitted(source: MemorySource, hashes: np.ndarray) -> int:
    index, select = source.index, np.arange(len(hashes), dtype=np.int32)
    blocks, kept = np.empty(len(hashes), np.int32), np.empty(len(hashes), np.int32)
    locate(hashes, select, len(hashes), index.fence, blocks)
    (part,) = source.filters(blocks)
    return admit(hashes, select, len(hashes), blocks, index.fence, index.lines, part.addresses, kept)


@pytest.mark.parametrize("top", [0, 10])
def test_false_positives_are_rare(top):
    rows = random_rows(50_000, FIXED, 1)
    rows.words[:, 0] >>= np.uint64(top)  # a partition's hashes share their top bits
    source = MemorySource(sort_rows(rows, FIXED), FIXED)
    assert admitted(source, source.rows.words[:, 0].copy()) == 50_000
    others = np.sort(np.random.default_rng(2).integers(0, 2**64, 50_000, np.uint64) >> np.uint64(top))
    assert admitted(source, others) < 0.02 * 50_000
