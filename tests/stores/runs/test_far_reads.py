"""Requests of lookups to a remote store: how much at a time, in how many rounds, and with how much memory."""

import threading
import time

import numpy as np
import pytest

from millpond.errors import TransientError
from millpond.files.backends import retry
from millpond.files.backends.filesystem import FileSystem
from millpond.files.formats import blocks, run
from millpond.files.formats.blocks import sort_rows
from millpond.files.locations.opening import open_filesystem
from millpond.files.tiers import read_budget
from millpond.layout import HASH, Rows
from millpond.stores.runs.merge import merge
from millpond.stores.runs.run_set import RunSet
from millpond.stores.runs.run_store import RunStore
from tests.stores.shelf import found_rows
from tests.support.rows import FIXED, decode, random_rows
from tests.support.waiting import wait_until

pytestmark = pytest.mark.costly


class Watched:
    """A store that counts requests, and how many of them come one after the other at least.

    Attributes:
        requests: offsets and lengths that were asked for, by name. rounds: the longest chain of requests of which each
            began when the one before had been answered.
    """

    def __init__(self, inner: FileSystem) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.failing = False
        self.forget()

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def forget(self):
        self.requests: list[tuple[str, int, int]] = []
        self.rounds = 0

    def get_range(self, name, offset, length):
        with self._lock:
            mine = self.rounds + 1
            self.requests.append((name, offset, length))
            if self.failing and len(self.requests) > 3:
                raise TransientError("no", action="wait")
        time.sleep(0.02)  # time for concurrent requests
        with self._lock:
            self.rounds = max(self.rounds, mine)
        return self._inner.get_range(name, offset, length)


@pytest.fixture
def far(tmp_path, monkeypatch):
    """Make a store with a given memory in bytes, four runs in it, opened again, and their rows; parts are small."""
    monkeypatch.setattr(blocks, "RUN_BLOCK", 1000)
    monkeypatch.setattr(run, "FILTER_GROUP", 16)
    monkeypatch.setattr(read_budget, "_MIN_BYTES", 1000)
    monkeypatch.setattr("millpond.files.tiers.remote.MAX_GAP_BYTES", 100)
    monkeypatch.setattr("millpond.files.tiers.remote.RUN_BLOCK", 1000)
    stores = []

    def make(memory):
        files = Watched(open_filesystem(f"faults+{tmp_path}/state"))
        stores.append(RunStore(files, f"{tmp_path}/local", disk=0, memory=memory))
        store = stores[-1]
        rows = [sort_rows(random_rows(20_000, FIXED, seed), FIXED) for seed in range(4)]
        refs = [store.write(one, FIXED).ref for one in rows]
        files.forget()
        return files, store, RunSet(FIXED, store.open_all(refs, FIXED)), rows

    yield make
    for store in stores:
        store.close()


def ask(runs, rows, count):
    """Look keys up of which some are in one of the runs, and see that what is found is right."""
    some = [Rows(one.words[:: max(1, len(one.words) // count)], one.heap) for one in rows]
    for one in some:
        found, got = found_rows(runs, one, np.arange(one.count))
        assert sorted(found.tolist()) == list(range(one.count))
        assert decode(got, FIXED) == decode(Rows(one.words[found], one.heap), FIXED)


def test_rounds_are_few_though_parts_are_small(far):
    files, store, runs, rows = far(40_000)
    files.forget()
    ask(runs, rows[:1], 300)
    assert len(files.requests) > 300
    # A part takes a quarter of the memory, some blocks; eight requests go side by side. One part after the other, each
    # run by itself, would make hundreds of rounds.
    assert files.rounds < len(files.requests) / 4
    assert store._read_budget.used == 0


def test_a_scan_asks_all_runs_at_once_and_for_the_next_piece_while_one_is_used(far):
    files, _, runs, rows = far(0)
    files.forget()
    pieces = merge([one.view for one in runs.runs], FIXED, drop_tombstones=False, size=4_000)
    first = next(pieces)
    last = int(first.words[-1, HASH])
    behind = {}
    for one in runs.runs:
        directory = one.source.remote().directory
        behind[one.ref.name] = int(directory.offsets[directory.index.span(last, last)[1]])
    asked = files.requests
    wait_until(lambda: {name for name, offset, size in asked if offset + size > behind[name]} == set(behind))
    found = [first, *pieces]
    assert len(found) > 10
    assert len(files.requests) > 3 * len(found)
    assert files.rounds < len(files.requests) / 4
    words = np.concatenate([one.words for one in rows])
    np.testing.assert_array_equal(np.concatenate([one.words for one in found]), words[np.argsort(words[:, HASH])])


def test_filters_are_read_once_whatever_blocks_come(far):
    files, store, runs, rows = far(800_000)
    ask(runs, rows, 300)
    directories = {one.ref.name: one.source.remote().directory for one in runs.runs}
    filters = {(name, int(at)) for name, directory in directories.items() for at in directory.filter_offsets}
    asked = [(name, offset) for name, offset, _ in files.requests]
    assert sorted(one for one in asked if one in filters) == sorted(filters)
    files.forget()
    ask(runs, rows, 500)
    assert not [one for one in files.requests if one[:2] in filters]
    assert 0 < store.cache.filter_bytes <= store.cache.filter_limit


@pytest.mark.parametrize("memory", [0, 3_000, 30_000, 100_000])
def test_filters_and_blocks_keep_to_one_limit(far, memory):
    _, store, runs, rows = far(memory)
    for count in (3, 100):
        ask(runs, rows, count)
        assert store.cache.filter_bytes <= store.cache.filter_limit <= memory
        assert store.cache.bytes <= memory
    store.cache.limit = memory // 2
    assert store.cache.filter_bytes <= store.cache.filter_limit
    assert store.cache.bytes <= memory // 2
    for one in runs.runs:
        store.drop(one)
    assert store.cache.bytes == store.cache.filter_bytes == 0


def test_what_is_under_way_keeps_to_its_limit(far, monkeypatch):
    _, store, runs, rows = far(40_000)
    highest, reserve = 0, store._read_budget.reserve

    def watched(size, *, force=False):
        nonlocal highest
        reserved = reserve(size, force=force)
        highest = max(highest, store._read_budget.used)
        return reserved

    store._read_budget.reserve = watched
    ask(runs, rows, 1000)
    assert 20_000 < highest <= 40_000 + 4 * 2 * store._read_budget.step
    assert store._read_budget.used == 0


def test_filters_under_way_keep_to_the_limit(far):
    """Though the filters of one run are larger."""
    _, store, runs, _ = far(40_000)
    budget, source = store._read_budget, runs.runs[0].source.remote()
    groups = len(source.directory.filter_offsets)
    assert sum(source.directory.filter_size(group) for group in range(groups)) > budget.limit
    numbers, end = np.arange(source.index.count), 0
    for part in source.filters(numbers):
        assert part.begin == end
        end = part.end
        assert np.flatnonzero(part.addresses).tolist() == list(range(part.begin, part.end))
        assert 0 < budget.used <= budget.limit
    assert end == len(numbers)
    assert budget.used == 0
    begun, unused = source.filters(numbers), source.filters(numbers)
    next(begun)
    assert budget.used > 0
    del begun, unused
    assert budget.used == 0


def test_a_lookup_that_fails_gives_back_what_it_took(far, monkeypatch):
    monkeypatch.setattr(retry, "_FIRST_PAUSE_SECONDS", 0.0)
    files, store, runs, rows = far(40_000)
    files.forget()
    files.failing = True
    with pytest.raises(TransientError):
        ask(runs, rows, 300)
    files.failing = False
    assert store._read_budget.used == 0
    ask(runs, rows, 300)
