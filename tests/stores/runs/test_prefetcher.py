"""Keys that are read ahead: what is waited for, what is not, and how much memory they take."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from millpond.errors import TransientError
from millpond.layout import RowLayout, Rows
from millpond.stores.runs.prefetcher import Prefetcher
from millpond.stores.runs.run import Run, memory_run
from millpond.stores.runs.run_set import RunSet
from tests.stores.shelf import found_rows
from tests.stores.test_rmw_model import Later
from tests.support.rows import layout

NUMBERS = layout("w", "w")
TEXTS = layout("w", "wb")


def rows_of(shape: RowLayout, numbers: np.ndarray, length: Callable[[int], int] = lambda number: 0) -> Rows:
    """Rows of numbers in order, which are their hashes, too; of texts, with values so long."""
    words = np.zeros((len(numbers), shape.width), np.uint64)
    words[:, 0] = words[:, shape.key_start] = numbers
    if shape is NUMBERS:
        return Rows(words, np.empty(0, np.uint8))
    lengths = np.array([length(number) for number in numbers.tolist()], np.uint64)
    words[:, -2] = lengths
    words[:, -1] = np.cumsum(lengths) - lengths
    return Rows(words, np.zeros(int(lengths.sum()), np.uint8))


def keys_of(shape: RowLayout, numbers: np.ndarray) -> Rows:
    return Rows(rows_of(NUMBERS, numbers).words[:, : shape.key_stop], np.empty(0, np.uint8))


def ask(runs: RunSet, numbers: np.ndarray) -> list[int]:
    """Which of the numbers are there; asked for in a thread, so that a lookup that waits for ever fails the test."""
    found: list[int] = []

    def look() -> None:
        positions, _ = found_rows(runs, keys_of(runs.layout, numbers), np.arange(len(numbers)))
        found.extend(numbers[positions].tolist())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for what nobody reads"
    return sorted(found)


def run_of(numbers: np.ndarray) -> Run:
    return memory_run(rows_of(NUMBERS, numbers), NUMBERS)


def test_what_nobody_reads_yet_is_not_waited_for_and_not_read_later() -> None:
    runs, pool = RunSet(NUMBERS, [run_of(np.arange(0, 1000, 2))]), Later()
    prefetcher = Prefetcher(runs, pool, lambda: 1 << 20)
    prefetcher.prefetch(np.arange(100, dtype=np.uint64), 1)
    prefetcher.dequeue(np.arange(40, dtype=np.uint64))
    assert ask(runs, np.arange(40)) == list(range(0, 40, 2))
    pool.work()
    assert ask(runs, np.arange(100)) == list(range(0, 100, 2))
    prefetcher.end_batch(1)
    assert prefetcher.latest[:3] == (60, 60, 0)


def test_keys_that_are_asked_for_while_they_wait_are_taken_out() -> None:
    runs, pool = RunSet(NUMBERS, [run_of(np.arange(1000))]), Later()
    prefetcher = Prefetcher(runs, pool, lambda: 1 << 20)
    prefetcher.prefetch(np.arange(10, dtype=np.uint64), 1)
    prefetcher.prefetch(np.arange(20, 60, dtype=np.uint64), 1)  # waits for the read of the others to end
    prefetcher.dequeue(np.arange(25, 40, dtype=np.uint64))
    prefetcher.prefetch(np.arange(30, 35, dtype=np.uint64), 2)  # by now for the next batch
    pool.work()
    prefetcher.end_batch(3)
    assert prefetcher.latest.read == 10 + 40 - 15 + 5


def test_keys_that_are_asked_for_as_their_read_begins_are_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, pool = RunSet(NUMBERS, [run_of(np.arange(1000))]), Later()
    prefetcher = Prefetcher(runs, pool, lambda: 1 << 20)
    seen: list[int] = []

    def look() -> None:
        prefetcher.dequeue(np.arange(10, dtype=np.uint64))
        seen.append(len(runs.prefetched))

    asking, fetch = threading.Thread(target=look), runs.start_prefetch

    def fetch_meanwhile(*args: Any) -> Any:
        asking.start()
        asking.join(0.2)
        return fetch(*args)

    monkeypatch.setattr(runs, "start_prefetch", fetch_meanwhile)
    prefetcher.prefetch(np.arange(10, dtype=np.uint64), 1)
    pool.work()
    asking.join(60)
    assert seen == [1]


def test_a_read_that_fails_costs_no_later_one() -> None:
    run = run_of(np.arange(1000))
    runs, pool = RunSet(NUMBERS, [run]), Later()
    prefetcher = Prefetcher(runs, pool, lambda: 1 << 20)
    for error in (TransientError("gone"), RuntimeError("cannot schedule new futures after shutdown")):
        search = run.search
        run.search = lambda *_, error=error: (_ for _ in ()).throw(error)  # type: ignore[method-assign, misc]
        prefetcher.prefetch(np.arange(10, dtype=np.uint64), 1)
        pool.work()
        run.search = search  # type: ignore[method-assign]
        assert ask(runs, np.arange(10)) == list(range(10))
        prefetcher.end_batch(1)
        assert prefetcher.latest.read == 0
    prefetcher.prefetch(np.arange(10, dtype=np.uint64), 2)
    pool.work()
    prefetcher.end_batch(3)
    assert prefetcher.latest.read == 10


@pytest.mark.parametrize("kind", ["all alike", "longer and longer", "numbers"])
def test_memory_is_bounded_by_bytes(kind: str) -> None:
    """How long rows are is not known before they are read."""
    count, limit = 20_000, 1 << 20
    length = {"all alike": lambda number: 2000, "longer and longer": lambda number: number // 4, "numbers": None}[kind]
    shape = TEXTS if length else NUMBERS
    limit = limit if length else 20 * count
    numbers = np.arange(count)
    runs = RunSet(shape, [memory_run(rows_of(shape, numbers, length or (lambda number: 0)), shape)])
    pool = Later()
    prefetcher = Prefetcher(runs, pool, lambda: limit)
    prefetcher._row_bytes = 1.0
    prefetcher.prefetch(numbers.astype(np.uint64), 1)
    while pool.waiting:
        pool.waiting.pop(0)()
        assert runs.prefetched_memory <= limit
    assert runs.prefetched_memory > 0.98 * limit  # read after read takes most of what is left, until no row has room
    assert ask(runs, numbers[::7]) == numbers[::7].tolist()
    prefetcher.end_batch(2)
    assert prefetcher.latest.read + prefetcher.latest.dropped == count
    assert not runs.prefetched_memory


def test_nothing_is_read_once_the_limit_is_below_what_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, limit = np.arange(1000), 1 << 20
    runs, pool = RunSet(NUMBERS, [run_of(numbers)]), Later()
    prefetcher = Prefetcher(runs, pool, lambda: limit)
    prefetcher.prefetch(numbers[:100].astype(np.uint64), 1)
    pool.work()
    held = runs.prefetched_memory
    prefetcher.prefetch(numbers[100:].astype(np.uint64), 1)
    limit = held // 2
    monkeypatch.setattr(runs, "start_prefetch", lambda *_: pytest.fail("keys are read without memory for them"))
    pool.work()
    assert runs.prefetched_memory == held
    prefetcher.end_batch(2)
    assert (prefetcher.latest.read, prefetcher.latest.dropped) == (100, 900)


def test_the_filters_of_a_run_are_looked_at_again_whatever_two_threads_do() -> None:
    run = run_of(np.arange(0, 100_000, 2))
    looked: list[Any] = []
    filters = run.source.filters
    run.source.filters = lambda wanted: looked.append(wanted) or filters(wanted)  # type: ignore[method-assign, func-returns-value]
    run._filter_skips = -1  # as two that took the last one away have left it
    assert ask(RunSet(NUMBERS, [run]), np.arange(1, 1000, 2)) == []
    assert looked


def test_nothing_is_read_once_the_table_is_closed() -> None:
    runs, pool = RunSet(NUMBERS, [run_of(np.arange(1000))]), Later()
    prefetcher = Prefetcher(runs, pool, lambda: 1 << 20)
    prefetcher.prefetch(np.arange(10, dtype=np.uint64), 1)
    prefetcher.close()
    prefetcher.prefetch(np.arange(20, 30, dtype=np.uint64), 1)
    pool.work()
    assert not any(one.read_keys for one in runs.prefetched)


def test_keys_that_come_a_batch_late_were_not_read_in_vain() -> None:
    runs, pool = RunSet(NUMBERS, [run_of(np.arange(1000))]), Later()
    prefetcher = Prefetcher(runs, pool, lambda: 1 << 20)
    prefetcher.prefetch(np.arange(10, dtype=np.uint64), 1)
    pool.work()
    assert ask(runs, np.arange(5)) == list(range(5))
    prefetcher.end_batch(1)
    assert prefetcher.latest.read == 0
    assert ask(runs, np.arange(5, 10)) == list(range(5, 10))
    prefetcher.end_batch(2)
    assert prefetcher.latest[:2] == (10, 10)
    prefetcher.prefetch(np.arange(20, dtype=np.uint64), 3)
    pool.work()
    assert ask(runs, np.arange(20)) == list(range(20))
    prefetcher.end_batch(3)  # no lookup will ask for them again
    assert prefetcher.latest[:2] == (20, 20)
    assert not runs.prefetched
