"""Runs stay few, and what is rewritten for it stays in proportion."""

import random

from hypothesis import given
from hypothesis import strategies as st

from millpond.stores.runs.pick import Extent, group_layers, pick

ALL = 2**64 - 1


def full(*sizes: int) -> list[Extent]:
    return [Extent(0, ALL, size) for size in sizes]


def test_few_runs_are_left_alone():
    assert pick([]) is None
    assert pick(full(1, 1, 1, 1)) is None


def test_a_huge_old_run_is_left_alone_until_the_newer_ones_have_grown():
    chosen = pick(full(1, 1, 1, 1, 1000))
    assert (chosen.begin, chosen.end, chosen.whole) == (0, 4, False)
    assert not pick(full(100, 100, 100, 100, 1000)).whole
    assert pick(full(100, 100, 100, 200, 1000)).whole


def test_runs_that_do_not_overlap_count_as_one():
    parts = [Extent(i * 100, i * 100 + 99, 10) for i in range(8)]
    assert group_layers(parts) == [(0, 8)]
    assert pick(parts + full(1000)) is None
    chosen = pick(parts + full(80, 80, 80, 1000))
    assert (chosen.begin, chosen.end, chosen.whole) == (0, 11, False)


EXTENTS = st.builds(
    lambda a, b, n: Extent(min(a, b), max(a, b), n), st.integers(0, 9), st.integers(0, 9), st.integers(1, 99)
)


@given(st.lists(EXTENTS))
def test_a_pick_is_a_proper_slice_and_layers_do_not_overlap(runs):
    layers = group_layers(runs)
    assert [i for begin, end in layers for i in range(begin, end)] == list(range(len(runs)))
    for begin, end in layers:
        part = runs[begin:end]
        assert all(a is b or a.last < b.first or b.last < a.first for a in part for b in part)
    chosen = pick(runs)
    if chosen is None:
        assert len(layers) <= 4
    else:
        assert 0 <= chosen.begin < chosen.end <= len(runs)
        assert chosen.whole == (chosen.end == len(runs))
        assert len({i for i, (b, _) in enumerate(layers) if chosen.begin <= b < chosen.end}) >= 2


def written(flushes: int, keys: int, per_flush: int) -> float:
    """Bytes written for each byte flushed, when every flush holds random keys of a fixed set."""
    rng = random.Random(1)
    runs: list[set[int]] = []
    total = flushed = 0
    for _ in range(flushes):
        runs.insert(0, {rng.randrange(keys) for _ in range(per_flush)})
        flushed += len(runs[0])
        while (chosen := pick(full(*map(len, runs)))) is not None:
            merged = set().union(*runs[chosen.begin : chosen.end])
            runs[chosen.begin : chosen.end] = [merged]
            total += len(merged)
        assert len(runs) <= 4
    return 1 + total / flushed


def test_write_amplification_is_bounded():
    assert written(300, 20_000, 500) < 5  # forty flushes make up the state
    assert written(200, 1_000_000, 500) < 8  # growing only
