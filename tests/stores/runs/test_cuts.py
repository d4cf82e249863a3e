"""Sorted files are cut into intervals of bounded size."""

from __future__ import annotations

import numpy as np

from millpond.stores.runs.cuts import cut_evenly


def files(*blocks: list[tuple[int, int]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Fences and sizes of files, each given as its blocks' fences and sizes."""
    return (
        [np.array([fence for fence, _ in file], np.uint64) for file in blocks],
        [np.array([size for _, size in file], np.int64) for file in blocks],
    )


def test_blocks_of_several_files_are_divided_in_their_common_order() -> None:
    assert cut_evenly(*files([(0, 10), (20, 10), (40, 10)], [(10, 10), (30, 10)]), step=20) == [20, 40]


def test_what_is_small_is_not_cut() -> None:
    assert cut_evenly(*files([(0, 10), (20, 10)], []), step=20) == []
    assert cut_evenly(*files([]), step=20) == []


def test_blocks_of_one_value_stay_together() -> None:
    assert cut_evenly(*files([(5, 10), (5, 10), (5, 10), (9, 10)]), step=10) == [5, 9]


def test_every_interval_has_about_the_size() -> None:
    rng = np.random.default_rng(1)
    fences = [np.sort(rng.integers(0, 1 << 62, 200).astype(np.uint64)) for _ in range(5)]
    sizes = [rng.integers(1, 100, 200) for _ in range(5)]
    ends = cut_evenly(fences, sizes, step=1_000)
    assert ends == sorted(set(ends))
    interval = np.searchsorted(np.array(ends, np.uint64), np.concatenate(fences), "right")
    filled = np.bincount(interval, weights=np.concatenate(sizes))
    assert filled.sum() == np.concatenate(sizes).sum()
    assert filled.max() < 1_000 + 100
