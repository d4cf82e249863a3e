"""The sketch of recent keys: hot ones are left out, and none that is not."""

import numpy as np

from millpond.kernels.hints.sketch import Sketch

ONCE = np.ones(5_000, np.int64)


def fresh(random: np.random.Generator, count: int = 5_000) -> np.ndarray:
    return np.unique(random.integers(0, 1 << 63, count).astype(np.uint64))


def test_keys_that_do_not_come_again_are_all_announced() -> None:
    random, sketch = np.random.default_rng(1), Sketch()
    for _ in range(100):
        keys = fresh(random)
        assert len(sketch.rare(keys, ONCE[: len(keys)])) > 0.999 * len(keys)


def test_keys_that_come_again_and_again_are_left_out_until_they_do_not() -> None:
    random, sketch = np.random.default_rng(2), Sketch()
    hot = fresh(random, 50)
    for number in range(20):
        others = fresh(random)
        keys, order = np.unique(np.concatenate([hot, others]), return_index=True)
        times = np.concatenate([np.full(len(hot), 20), np.ones(len(others), np.int64)])[order]
        announced = sketch.rare(keys, times)
        assert not np.isin(hot, announced).any()
        if number:
            assert len(announced) > 0.999 * len(others)
    for _ in range(40):  # they cool down
        others = fresh(random)
        sketch.rare(others, ONCE[: len(others)])
    assert np.array_equal(sketch.rare(hot, ONCE[: len(hot)]), hot)


def test_it_counts_how_often_a_key_came_at_once() -> None:
    sketch = Sketch(hot=8)
    assert len(sketch.rare(np.array([1, 2], np.uint64), np.array([7, 8]))) == 1
    assert len(sketch.rare(np.array([1, 2], np.uint64), np.array([1, 1]))) == 0
