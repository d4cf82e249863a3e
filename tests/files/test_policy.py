"""Copies to the local disk and their eviction, over traces of reads by a clock that is turned by hand."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.files.tiers.policy import HistoryPolicy

MINUTE = 60.0


class Trace:
    """A cache under a trace: copies are made as `LocalCache` and `RunStore` make them.

    Attributes:
        copied: bytes that copying has read. near, far: bytes that were read from copies, and from remote files.
    """

    def __init__(self, limit, threshold=2.0, policy=HistoryPolicy):
        self.now = 1000.0
        self.policy = policy(limit, threshold, lambda: self.now)
        self.held = {}
        self.copied = self.near = self.far = 0.0

    def read(self, name, size, lengths):
        if name in self.held:
            self.near += size * lengths
        else:
            self.far += size * lengths
        self.policy.read(name, lengths)
        if name not in self.held and self.policy.should_copy(name, size):
            self.copied += size
            assert self.take(name, size, written=False)

    def take(self, name, size, *, written):
        victims = self.policy.admit(name, size, written=written)
        if victims is None:
            return False
        for victim in victims:
            del self.held[victim]
        self.held[name] = size
        assert self.policy.bytes == sum(self.held.values()) <= self.policy.limit
        return True


class Always(HistoryPolicy):
    """Copies whatever is read, as a plain LRU cache of files does."""

    def should_copy(self, name, size):
        return size <= self.limit

    def admit(self, name, size, *, written):
        self.remove_copy(name)
        victims = self._victims(size)
        for victim in victims or ():
            self.remove_copy(victim)
        self._copies[name] = size
        self.bytes += size
        return victims


def test_a_file_is_copied_when_it_has_been_read_twice_within_a_minute():
    trace = Trace(100)
    trace.read("a", 10, 1.0)
    trace.now += MINUTE + 10
    trace.read("a", 10, 1.5)
    assert "a" not in trace.held  # the first time is too long ago
    trace.now += 10
    trace.read("a", 10, 0.5)
    assert "a" not in trace.held  # not more than twice
    trace.now += 10
    trace.read("a", 10, 0.1)
    assert "a" in trace.held


def test_the_threshold_is_a_setting():
    for threshold, reads in ((0.5, 5), (3.0, 25)):
        trace = Trace(100, threshold)
        count = 0
        while "a" not in trace.held:
            trace.read("a", 10, 0.125)
            count += 1
        assert count == reads


@pytest.mark.parametrize("times", [2, 5, 20])
def test_a_working_set_larger_than_the_cache_does_not_thrash(times):
    traces = Trace(100), Trace(100, policy=Always)
    for trace in traces:
        for second in range(600):
            trace.now += 1
            for file in range(10 * times):
                trace.read((second * 7 + file) % (10 * times), 10, 0.5)
    ours, lru = traces
    total = ours.near + ours.far
    assert ours.copied <= 2 * 100
    assert ours.near / total > 0.8 / times  # as large a share as fits
    assert lru.copied > 20 * ours.copied


def test_a_scan_washes_nothing_out():
    trace = Trace(100)
    hot = [f"hot{i}" for i in range(10)]
    for second in range(300):
        trace.now += 1
        for name in hot:
            trace.read(name, 10, 0.2)
        if second >= 60:
            for i in range(4):  # each file of another thousand, once
                trace.read(f"scanned{second * 4 + i}", 10, 1.0)
    assert set(trace.held) == set(hot)
    assert trace.copied == 100


def test_idle_copies_make_room_for_what_becomes_hot():
    trace = Trace(100)
    for day in range(3):
        for _ in range(180):
            trace.now += 1
            for i in range(10):
                trace.read(f"{day}-{i}", 10, 0.2)
        assert set(trace.held) == {f"{day}-{i}" for i in range(10)}
    assert trace.copied == 300


def test_a_new_file_comes_in_at_the_cost_of_idle_ones_only():
    trace = Trace(100)
    for name in ("idle", "hot"):
        assert trace.take(name, 40, written=True)
    for _ in range(30):
        trace.now += 1
        trace.read("hot", 40, 1.0)
    assert trace.take("new", 40, written=True)
    assert set(trace.held) == {"hot", "new"}
    for _ in range(30):
        trace.now += 1
        trace.read("new", 40, 1.0)
    assert not trace.take("other", 30, written=True)  # only instead of a larger one that is as hot
    assert not trace.take("huge", 101, written=True)
    assert set(trace.held) == {"hot", "new"}


def test_nothing_fits_into_no_cache():
    trace = Trace(0)
    for _ in range(100):
        trace.read("a", 1, 1.0)
    assert not trace.held
    assert not trace.policy.should_copy_on_open("a", 1)
    assert not trace.take("a", 1, written=True)


def test_a_copy_that_was_forgotten_takes_no_room():
    trace = Trace(100)
    trace.take("a", 60, written=True)
    trace.policy.remove("a")
    assert trace.policy.bytes == 0
    assert trace.policy.should_copy_on_open("b", 100)
    assert not trace.policy.touch("a")


def test_histories_of_files_that_nobody_reads_go():
    trace = Trace(100)
    for i in range(1000):
        trace.now += 1
        trace.read(i, 10, 0.1)
    assert len(trace.policy._reads) < 200


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32), limit=st.integers(1, 200), threshold=st.sampled_from([0.5, 1.0, 2.0]))
def test_no_copy_costs_more_than_it_saves(seed, limit, threshold):
    """A copied file has saved more than its length within a minute, on top of evicted copies, by an exact count."""
    chance = random.Random(seed)
    trace = Trace(limit, threshold)
    sizes = {i: chance.randint(1, 60) for i in range(12)}
    log = []
    for _ in range(400):
        trace.now += chance.choice([0.1, 1.0, 5.0])
        name = chance.choice([*sizes, 0, 0, 1, 1])
        lengths = chance.choice([0.1, 0.5, 1.0])
        before = dict(trace.held)
        log.append((trace.now, name, lengths))
        trace.read(name, sizes[name], lengths)
        gone = before.keys() - trace.held.keys()
        if name in trace.held and name not in before:

            def saved(file, window):
                return sizes[file] * sum(n for at, one, n in log if one == file and trace.now - at <= window)

            # The window moves on in steps of a twelfth of it.
            assert saved(name, MINUTE) - threshold * sizes[name] > sum(saved(f, MINUTE - 5) for f in gone) - 1e-6
        else:
            assert not gone
