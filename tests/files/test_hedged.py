"""Slow answers are overtaken by second requests: few, bounded, harmless."""

import random
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from millpond.errors import TransientError
from millpond.files.backends.filesystem import MissingFileError
from millpond.files.locations.counted import CountedFiles
from millpond.files.locations.faults import Faults, FaultyFiles
from millpond.files.locations.hedged import MAX_HEDGE_SHARE, HedgedFiles
from millpond.files.locations.opening import open_filesystem

DATA = random.Random(1).randbytes(8 << 20)


def memory():
    files = open_filesystem(f"memory:{uuid.uuid4().hex}")
    files.put("x", [DATA])
    return files


def part(offset, length=1000):
    return DATA[offset : offset + length]


class Scripted:
    """A store whose range requests do what the next function says."""

    def __init__(self):
        self.inner = memory()
        self.url = self.inner.url
        self.script = []
        self.asked = 0
        self._lock = threading.Lock()

    def get_ranges(self, name, ranges):
        with self._lock:
            act = self.script.pop(0) if self.script else None
            self.asked += 1
        if act is not None:
            act()
        return self.inner.get_ranges(name, ranges)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def fail():
    raise TransientError("no", action="Again.")


def fail_late():
    time.sleep(0.2)
    fail()


@pytest.fixture
def scripted():
    """A hedged store that knows its times (all short), and has requests to spare."""
    store = Scripted()
    files = HedgedFiles(store)
    for _ in range(200):
        assert bytes(files.get_range("x", 0, 1000)) == part(0)
    store.asked = 0
    files.hedges = files.won = 0
    files._saved_hedges = 8.0
    yield store, files
    files.close()


def test_the_slowest_in_a_hundred_become_fast():
    faults = Faults(latency_ms=4, stall=0.02, stall_s=0.2, seed=3)
    plain, slow = FaultyFiles(memory(), faults), FaultyFiles(memory(), faults)
    counted = CountedFiles(slow)
    hedged = HedgedFiles(counted)
    times = {}
    for files in (plain, hedged):
        taken = []
        for i in range(600):
            began = time.monotonic()
            assert bytes(files.get_range("x", i * 1000, 1000)) == part(i * 1000)
            taken.append(time.monotonic() - began)
        times[files] = taken
    before, after = np.percentile(times[plain], 99), np.percentile(times[hedged], 99)
    print(f"p99 {before * 1000:.0f} ms alone, {after * 1000:.0f} ms hedged, {hedged.hedges} second requests")
    assert before > 0.2
    assert after < 0.1
    assert 0 < hedged.hedges <= 600 * MAX_HEDGE_SHARE
    assert counted.counts()["gets"] == 600 + hedged.hedges
    hedged.close()


def test_a_second_request_wins(scripted):
    store, files = scripted
    gate = threading.Event()
    store.script = [lambda: gate.wait(120)]
    began = time.monotonic()
    assert bytes(files.get_range("x", 5000, 1000)) == part(5000)
    assert time.monotonic() - began < 60
    assert (store.asked, files.hedges, files.won) == (2, 1, 1)
    gate.set()


def test_a_first_request_that_is_answered_after_all_wins(scripted):
    store, files = scripted
    gate = threading.Event()
    store.script = [lambda: time.sleep(0.2), lambda: gate.wait(120)]
    assert bytes(files.get_range("x", 5000, 1000)) == part(5000)
    assert (store.asked, files.hedges, files.won) == (2, 1, 0)
    gate.set()


@pytest.mark.parametrize("script", [[fail_late, None], [lambda: time.sleep(0.2), fail]])
def test_one_failure_of_two_does_no_harm(scripted, script):
    store, files = scripted
    store.script = list(script)
    assert bytes(files.get_range("x", 5000, 1000)) == part(5000)
    assert store.asked == 2


def test_two_failures_are_one(scripted):
    store, files = scripted
    store.script = [fail_late, fail]
    with pytest.raises(TransientError):
        files.get_range("x", 5000, 1000)
    assert store.asked == 2


def test_a_failure_at_once_is_said_at_once(scripted):
    store, files = scripted
    store.script = [fail]
    with pytest.raises(TransientError):
        files.get_range("x", 5000, 1000)
    assert store.asked == 1
    with pytest.raises(MissingFileError):
        files.get_range("y", 0, 1)


def test_ranges_far_apart_are_waited_for_one_by_one(scripted):
    store, files = scripted
    gate = threading.Event()
    store.script = [None, lambda: gate.wait(120)]
    wanted = [(7 << 20, 900), (0, 1000), (1000, 1000), (3 << 20, 1000), (500, 1000), (5 << 20, 1000)]
    assert [bytes(data) for data in files.get_ranges("x", wanted)] == [part(*each) for each in wanted]
    assert store.asked == 4 + 1
    assert files.get_ranges("x", []) == []
    gate.set()


def test_many_ranges_come_in_their_order(scripted):
    _, files = scripted
    wanted = [(i * 64 * 1024 % len(DATA), 10 + i) for i in range(300)]
    random.Random(5).shuffle(wanted)
    assert [bytes(data) for data in files.get_ranges("x", wanted)] == [part(*each) for each in wanted]


def test_a_store_that_is_slow_throughout_is_not_asked_twice_for_everything(scripted):
    store, files = scripted
    store.script = [lambda: time.sleep(0.03)] * 1000
    for _ in range(100):
        files.get_range("x", 0, 1000)
    assert files.hedges <= 8 + 100 * MAX_HEDGE_SHARE


def test_requests_that_are_never_answered_are_few_and_hold_up_nobody(scripted):
    store, files = scripted
    gate = threading.Event()
    for _ in range(40):
        files._saved_hedges = 8.0
        if files._cancelled < 16:
            store.script = [lambda: gate.wait(120)]
        assert bytes(files.get_range("x", 0, 1000)) == part(0)
    assert files._cancelled == 16
    store.script = [lambda: time.sleep(0.2)]
    before = files.hedges
    files.get_range("x", 0, 1000)
    assert files.hedges == before
    gate.set()
    deadline = time.monotonic() + 60
    while files._cancelled:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_closing_waits_for_nobody_and_leaves_no_thread():
    store = Scripted()
    files = HedgedFiles(store)
    for _ in range(60):
        files.get_range("x", 0, 1000)
    gate = threading.Event()
    store.script = [lambda: gate.wait(120)]
    files.get_range("x", 0, 1000)
    threads = list(files._pool._threads)
    began = time.monotonic()
    files.close()
    assert time.monotonic() - began < 60
    gate.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_threads_that_read_together(scripted):
    store, files = scripted
    store.script = [(lambda: time.sleep(0.1)) if i % 50 == 0 else None for i in range(2000)]

    def read(seed):
        chance = random.Random(seed)
        for _ in range(40):
            wanted = [(chance.randrange(7 << 20), chance.randrange(1, 5000)) for _ in range(5)]
            assert [bytes(data) for data in files.get_ranges("x", wanted)] == [part(*each) for each in wanted]

    with ThreadPoolExecutor(8) as readers:
        for done in [readers.submit(read, seed) for seed in range(8)]:
            done.result(120)


def test_a_share_of_nothing_turns_it_off():
    store = Scripted()
    files = HedgedFiles(store, 0.0)
    for _ in range(100):
        files.get_range("x", 0, 1000)
    store.script = [lambda: time.sleep(0.1)]
    files.get_range("x", 0, 1000)
    assert (store.asked, files.hedges) == (101, 0)
    assert not files._pool._threads
