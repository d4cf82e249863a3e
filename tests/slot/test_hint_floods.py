"""Floods of hints, hints of nonsense, hints whose reads hang: memory stays within its limits, and rows come in time."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from millpond.slot.partition.attempt_lock import Attempt, AttemptLock
from millpond.slot.partition.partitions import PartitionServer
from millpond.slot.prefetch.hints import PrefetchHints
from millpond.slot.prefetch.switch import MAX_HINTED_KEYS, HintSwitch, requested_hints
from millpond.slot.process.messages import Hints
from millpond.stores.memory.process_memory import anonymous_bytes
from millpond.stores.runs.prefetched_rows import PrefetchedRows
from millpond.tasks.operator_task import OperatorTask

from .conftest import hashes_in
from .hinting import KEYS, MEMORY, held, hint, read_ahead, run

FLOOD = 4_000_000


class Watch:
    """The most that a server's hints have taken, seen from beside."""

    def __init__(self, server: PartitionServer) -> None:
        self.server = server
        self.kept = 0
        self.read = 0.0  # share of the most that a table's reads ahead may take
        self.waiting = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.001):
            partition, table, prefetcher = held(self.server)
            self.kept = max(self.kept, partition._hints._waiting_bytes)
            limit = table._account.limit // 2  # a table's share may have shrunk since it was read for
            self.read = max(self.read, table._runs.prefetched_memory / limit)
            with prefetcher._lock:
                waiting = sum(one.nbytes for one in prefetcher._waiting.values())
            self.waiting = max(self.waiting, waiting / limit)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_a_flood_takes_its_part_of_memory_and_keeps_no_batch_waiting(
    server: PartitionServer,
    large: OperatorTask,
) -> None:
    run(server, large, 0, np.arange(KEYS))
    rng = np.random.default_rng(3)
    counts = np.ones(KEYS, np.int64)
    batch = 0

    def ask() -> None:
        nonlocal batch
        batch += 1
        asked = rng.choice(KEYS, 20_000, replace=False)
        np.add.at(counts, asked, 1)
        rows, figures = run(server, large, batch, asked)
        assert rows == {key: (counts[key], counts[key]) for key in asked.tolist()}
        dropped.append(figures["dropped_hints"])

    dropped: list[float] = []
    for _ in range(5):
        ask()
    assert not any(dropped)
    over = threading.Event()
    sent = 0

    def flood(seed: int) -> None:
        nonlocal sent
        keys = np.random.default_rng(seed)
        while not over.is_set():
            some = keys.integers(0, 2 * KEYS, 16_384)
            hint(server, large, batch + 1 + seed % 2, some)
            sent += len(some)

    before = anonymous_bytes()
    with Watch(server) as watch, ThreadPoolExecutor(3) as pool:
        floods = [pool.submit(flood, seed) for seed in range(3)]
        try:
            while sent < FLOOD or len(dropped) < 5 + 3:  # a batch that waited for its end would wait for ever
                ask()
                assert not any(one.done() for one in floods)
        finally:
            over.set()
        for one in floods:
            one.result()
    ask()
    assert sum(dropped) > sent // 4
    assert watch.kept <= large.settings.memory // 16
    assert 0.0 < watch.read <= 1.0
    assert watch.waiting <= 1.0
    assert anonymous_bytes() - before < MEMORY


def test_hints_for_batches_that_do_not_come_are_not_kept() -> None:
    hints = PrefetchHints(None, ("exchange",), MEMORY)
    keys = np.arange(1000, dtype=np.uint64)
    for number in range(10_000):
        hints.store(number, "exchange", keys)
    assert len(hints._batches) <= 3
    hints.begin(50)
    assert not hints._batches
    for number in range(10_000):
        hints.store(number, "exchange", keys)
    assert sorted(hints._batches) == [50, 51, 52]
    hints.prefetch(None, 50)
    assert hints._waiting_bytes == 0
    assert hints.figures()["dropped_hints"] == 19_997 * len(keys)  # those of batches 50, 51 and 52 were looked at
    for _ in range(2 * MAX_HINTED_KEYS // len(keys)):
        hints.store(51, "exchange", keys)
        hints.prefetch(None, 50)
    assert hints._batches[51].count == MAX_HINTED_KEYS
    assert hints.figures()["dropped_hints"] >= MAX_HINTED_KEYS


def test_rows_that_are_far_larger_than_others_are_not_read_ahead_by_the_thousand(
    server: PartitionServer,
    large: OperatorTask,
) -> None:
    """The length of values is not known before they are read."""
    run(server, large, 0, np.arange(KEYS))
    _, table, prefetcher = held(server)
    limit = 64 << 10  # of which rows of 64 bytes take a thousand
    prefetcher._limit = lambda: limit
    prefetcher._row_bytes = 16.0
    prefetcher._max_keys = 1 << 20
    most = 0
    original = PrefetchedRows.read

    def watched(self: PrefetchedRows) -> None:
        original(self)
        nonlocal most
        most = max(most, table._runs.prefetched_memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefetchedRows, "read", watched)
        hint(server, large, 1, np.arange(KEYS))
        read_ahead(server)
    assert most > limit  # it was not known
    assert table._runs.prefetched_memory <= limit
    rows, figures = run(server, large, 1, np.arange(0, KEYS, 40))
    assert set(rows.values()) == {(2, 2)}
    assert figures["dropped_hints"] > KEYS // 2


def test_nobody_waits_for_reads_that_have_not_begun(server: PartitionServer, large: OperatorTask) -> None:
    """Another query's reads may hang: rows look for their keys themselves, rather than wait behind these."""
    run(server, large, 0, np.arange(KEYS))
    hang = threading.Event()
    try:
        for _ in range(2):
            server._readers.submit(hang.wait)
        hint(server, large, 1, np.arange(10_000))
        assert held(server)[2]._waiting
        started = time.monotonic()
        rows, figures = run(server, large, 1, np.arange(10_000))
        assert time.monotonic() - started < 60
        assert rows == dict.fromkeys(range(10_000), (2, 2))
        assert figures["prefetched_keys"] == 0
    finally:
        hang.set()


def reads_wait(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Have reads ahead wait; an event that one has begun, and one that lets them go on."""
    begun, go_on = threading.Event(), threading.Event()
    original = PrefetchedRows._read

    def slowly(self: PrefetchedRows) -> None:
        begun.set()
        assert go_on.wait(120)
        original(self)

    monkeypatch.setattr(PrefetchedRows, "_read", slowly)
    return begun, go_on


def test_a_row_waits_for_the_read_in_flight_and_does_not_read_again(
    server: PartitionServer,
    large: OperatorTask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(server, large, 0, np.arange(KEYS))
    begun, go_on = reads_wait(monkeypatch)
    _, table, _ = held(server)
    asked = np.arange(250)
    hint(server, large, 1, asked)
    assert begun.wait(60)
    (fetched,) = table._runs.prefetched
    hint(server, large, 1, asked)  # again: it is on its way
    hint(server, large, 2, asked)
    assert not held(server)[2]._waiting
    readers: list[str] = []

    def noted(search: Callable[..., Any]) -> Callable[..., Any]:
        def look(*arguments: Any) -> Any:
            readers.append(threading.current_thread().name)
            return search(*arguments)

        return look

    for one in table._runs.runs:
        monkeypatch.setattr(one, "search", noted(one.search))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(run, server, large, 1, asked)
        time.sleep(0.3)
        assert not answer.done()
        assert not readers
        go_on.set()
        rows, figures = answer.result(60)
    assert rows == dict.fromkeys(asked.tolist(), (2, 2))
    assert figures["prefetched_used"] == figures["prefetched_keys"] == len(fetched.hashes)
    assert readers
    assert all(name.startswith("millpond-read-ahead") for name in readers)


def test_what_was_read_while_its_batch_ended_is_let_go_of(
    server: PartitionServer,
    large: OperatorTask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read that hangs over the end of its batch, which did not ask for its keys, stays for the next one only."""
    run(server, large, 0, np.arange(KEYS))
    begun, go_on = reads_wait(monkeypatch)
    _, table, _ = held(server)
    hint(server, large, 1, np.arange(5_000))
    assert begun.wait(60)
    run(server, large, 1, np.arange(KEYS - 5_000, KEYS))
    go_on.set()
    read_ahead(server)
    rows, _ = run(server, large, 2, np.arange(5_000))
    assert set(rows.values()) == {(2, 2)}
    run(server, large, 3, np.arange(5_000))
    assert not table._runs.prefetched


def test_files_that_cannot_be_read_ahead_cost_the_hints_only(
    server: PartitionServer,
    large: OperatorTask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(server, large, 0, np.arange(KEYS))
    errors: Iterator[Exception] = iter([OSError(5, "gone"), ValueError("mmap closed"), RuntimeError("shut down")])

    def fails(self: PrefetchedRows) -> None:
        raise next(errors)

    for batch in range(1, 4):
        with monkeypatch.context() as patch:
            patch.setattr(PrefetchedRows, "_read", fails)
            hint(server, large, batch, np.arange(500))
            read_ahead(server)
        rows, _ = run(server, large, batch, np.arange(500))
        assert set(rows.values()) == {(batch + 1, batch + 1)}
    hint(server, large, 4, np.arange(500))
    read_ahead(server)
    _, figures = run(server, large, 4, np.arange(500))
    assert figures["prefetched_keys"] in (0, 500)


def test_partitions_of_one_slot_ask_each_for_themselves(tmp_path: Path, large: OperatorTask) -> None:
    task = msgspec.structs.replace(large, partitions=4)
    one, other = HintSwitch(tmp_path, task, 0), HintSwitch(tmp_path, task, 2)
    one.set(("exchange",))
    other.set(("source",))
    other.set(())
    one.set(("exchange",))
    assert requested_hints(tmp_path, task) == {0: ("exchange",)}
    other.set(("source", "exchange"))
    assert requested_hints(tmp_path, task) == {0: ("exchange",), 2: ("exchange", "source")}
    again = HintSwitch(tmp_path, task, 2)  # of the slot that comes after one that died
    assert requested_hints(tmp_path, task) == {0: ("exchange",)}
    again.set(("exchange",))
    again.close()
    assert requested_hints(tmp_path, task) == {0: ("exchange",)}
    one.close()
    assert not list((tmp_path / "hints").iterdir())


def test_at_no_moment_of_a_switch_nothing_is_asked_for(tmp_path: Path, large: OperatorTask) -> None:
    switch = HintSwitch(tmp_path, large, 0)
    switch.set(("exchange",))
    over = threading.Event()

    def back_and_forth() -> None:
        while not over.is_set():
            switch.set(("source", "exchange"))
            switch.set(("source",))
            switch.set(("exchange",))

    thread = threading.Thread(target=back_and_forth)
    thread.start()
    try:
        (folder,) = (tmp_path / "hints").iterdir()
        for _ in range(3000):
            assert any((folder / name).exists() for name in os.listdir(folder)) or requested_hints(tmp_path, large)
            assert set(requested_hints(tmp_path, large).get(0, ("exchange",))) <= {"source", "exchange"}
    finally:
        over.set()
        thread.join()


def test_nothing_of_hints_is_left_by_a_query_that_ends(tmp_path: Path, large: OperatorTask) -> None:
    task = msgspec.structs.replace(large, exchange="local")
    server = PartitionServer(tmp_path / "slot")
    server._partition(task, 0)._hints.adapt({"cache_misses": 9.0})
    assert requested_hints(tmp_path / "slot", task) == {0: ("exchange",)}
    server.close()
    assert not list((tmp_path / "slot" / "hints").iterdir())


def test_hints_of_a_batch_that_is_over_take_no_room() -> None:
    """Also if no row of the batch comes, between which hints would be passed on."""
    hints = PrefetchHints(None, ("exchange",), MEMORY)
    hints.begin(0)
    hints.store(1, "exchange", np.arange(FLOOD, dtype=np.uint64))
    full = hints._batches[1].count
    assert full > 0
    hints.begin(2)
    hints.store(2, "exchange", np.arange(FLOOD, dtype=np.uint64))
    assert hints._batches[2].count == full


def test_what_is_learnt_while_a_partition_is_let_go_of_asks_for_nothing(tmp_path: Path, large: OperatorTask) -> None:
    asking, may = threading.Event(), threading.Event()

    class Slow(HintSwitch):
        def set(self, lookaheads: Any) -> None:
            if lookaheads:
                asking.set()
                assert may.wait(20)
            super().set(lookaheads)

    hints = PrefetchHints(Slow(tmp_path, large, 0), ("exchange",), MEMORY)
    with ThreadPoolExecutor(2) as pool:
        learning = pool.submit(hints.adapt, {"cache_misses": 9.0})
        assert asking.wait(20)
        closing = pool.submit(hints.close)
        time.sleep(0.05)
        may.set()
        learning.result(20)
        closing.result(20)
    assert requested_hints(tmp_path, large) == {}
    hints.adapt({"cache_misses": 9.0})
    assert requested_hints(tmp_path, large) == {}


def test_hints_take_no_turn_that_an_attempt_waits_for() -> None:
    lock = AttemptLock(5.0)
    with ThreadPoolExecutor(1) as pool, lock.hold(Attempt(1, 1, lambda: None)):

        def attempt() -> None:
            with lock.hold(Attempt(2, 2, lambda: None)):
                pass

        second = pool.submit(attempt)
        deadline = time.monotonic() + 60
        while not lock._waiting:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        # As if the first were over, and the second had not woken up.
        with lock._changed:
            first, lock._current = lock._current, None
            with lock.try_hold() as free:
                assert not free
            lock._current = first
    second.result(60)
    with lock.try_hold() as free:
        assert free


def test_hashes_of_hints_need_not_be_of_the_partition(server: PartitionServer, large: OperatorTask) -> None:
    """Any 64 bits: a client that sends them may be wrong about everything."""
    run(server, large, 0, np.arange(KEYS))
    nonsense = np.array([0, 1, 2**64 - 1, 2**63, 2**63 - 1], np.uint64)
    for lookahead, hashes in (("exchange", np.concatenate([nonsense, nonsense])), ("source", np.empty(0, np.uint64))):
        server.hint(Hints(large, 0, 1, lookahead), pa.record_batch([pa.array(hashes)], names=["__hash"]))
    more = [pa.array(hashes_in(0, 1, np.arange(100))), pa.array(range(100))]
    server.hint(Hints(large, 0, 1, "exchange"), pa.record_batch(more, names=["__hash", "x"]))
    rows, _ = run(server, large, 1, np.arange(100))
    assert rows == dict.fromkeys(range(100), (2, 2))
