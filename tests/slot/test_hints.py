"""Hints: what is announced is read before its rows come, and makes no difference but time."""

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from millpond.metrics import LOOKAHEADS
from millpond.slot.partition.partitions import PartitionServer
from millpond.slot.prefetch.hints import PrefetchHints
from millpond.slot.prefetch.switch import HintSwitch, requested_hints
from millpond.slot.process.identity import identify
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.messages import Hints, RunBatch
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.spec.operators import Field
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.hints import HintSender
from tests.lookup.tables import Memory, MemoryTable

from .conftest import hashes_in
from .hinting import KEYS, MEMORY, hint, read_ahead, rows_of, run


def test_keys_that_were_announced_are_not_read_when_they_come(server: PartitionServer, large: OperatorTask) -> None:
    everything = np.arange(KEYS)
    run(server, large, 0, everything)
    rng = np.random.default_rng(1)
    for batch, announced in enumerate([0, 2_000, 2_000], 1):
        asked = rng.choice(KEYS, 2_500, replace=False)
        hint(server, large, batch, asked[:announced])
        read_ahead(server)
        rows, figures = run(server, large, batch, asked)
        assert set(rows) == set(asked.tolist())
        assert set(rows.values()) <= {(count, count) for count in range(2, 6)}
        assert figures["cache_misses"] > 500
        assert figures["prefetched_used"] == figures["prefetched_keys"] <= announced
        if announced:
            assert figures["prefetched_keys"] > announced // 4


@pytest.mark.parametrize("kind", ["other keys", "late", "early", "collisions", "twice", "many"])
def test_wrong_hints_change_nothing(server: PartitionServer, large: OperatorTask, kind: str) -> None:
    rng = np.random.default_rng(2)
    run(server, large, 0, np.arange(KEYS))
    counts = np.ones(KEYS, np.int64)
    for batch in range(1, 6):
        asked = rng.choice(KEYS, 20_000, replace=False)
        others = rng.choice(KEYS, 20_000, replace=False)
        if kind == "other keys":
            hint(server, large, batch, others)
        elif kind == "late":
            hint(server, large, batch - 1, asked)
        elif kind == "early":
            hint(server, large, batch + 2, asked)
        elif kind == "collisions":
            hint(server, large, batch, others + KEYS)
        elif kind == "twice":
            for _ in range(3):
                hint(server, large, batch, np.concatenate([asked, asked]))
        else:
            for start in range(0, KEYS, 50_000):
                hint(server, large, batch, np.arange(start, start + 50_000))
        np.add.at(counts, asked, 1)
        rows, figures = run(server, large, batch, asked)
        assert rows == {key: (counts[key], counts[key]) for key in asked.tolist()}
        if kind == "many":
            assert figures["dropped_hints"] > 0


def test_hints_for_what_is_not_there_are_dropped(server: PartitionServer, large: OperatorTask) -> None:
    hint(server, large, 0, np.arange(100))
    run(server, large, 0, np.arange(100))
    hint(server, msgspec.structs.replace(large, generation=7), 1, np.arange(100))
    server.hint(Hints(large, 5, 1, "exchange"), pa.record_batch([pa.array(np.arange(100))], names=["__hash"]))
    rows, figures = run(server, large, 1, np.arange(100))
    assert rows == dict.fromkeys(range(100), (2, 2))
    assert figures["prefetched_keys"] == 0


def test_hints_are_wanted_once_keys_are_missing(tmp_path: Path, large: OperatorTask) -> None:
    task = msgspec.structs.replace(large, exchange="local")
    server = PartitionServer(tmp_path / "slot")
    try:
        partition = server._partition(task, 0)
        learn = partition._hints.adapt

        def asked() -> set[str]:
            return {one for lookaheads in requested_hints(tmp_path / "slot", task).values() for one in lookaheads}

        assert not asked()
        learn({"cache_misses": 0.0, "cache_hits": 1000.0})
        assert not asked()
        learn({"cache_misses": 100.0, "cache_hits": 900.0})
        assert asked() == {"exchange"}
        learn({"cache_misses": 0.0, "cache_hits": 1000.0, "announced_keys": 100.0})
        assert asked() == {"exchange"}
        learn({"cache_misses": 0.0, "cache_hits": 1000.0})
        assert not asked()
    finally:
        server.close()


def test_each_partition_has_a_switch_of_its_own(tmp_path: Path, large: OperatorTask) -> None:
    """Partitions of one slot do not switch each other's hints off, nor does an earlier process leave them on."""
    task = msgspec.structs.replace(large, exchange="local", partitions=4, slots=1)
    server = PartitionServer(tmp_path / "slot")
    try:
        hints = [server._partition(task, number)._hints for number in range(2)]
        for one in hints:
            one.adapt({"cache_misses": 100.0, "cache_hits": 900.0})
        hints[0].adapt({"cache_misses": 0.0, "cache_hits": 900.0})
        assert requested_hints(tmp_path / "slot", task) == {1: ("exchange",)}
    finally:
        server.close()
    server = PartitionServer(tmp_path / "slot")
    try:
        server._partition(task, 1)
        assert requested_hints(tmp_path / "slot", task) == {}
    finally:
        server.close()


def test_who_sends_hints_starts_no_slot(large: OperatorTask) -> None:
    directory = SlotDirectory.of(large)
    directory.register(identify())
    HintSwitch(directory.path, large, 0).set("exchange")
    hints = HintSender.of(directory, large, 3, "exchange")
    assert hints is not None
    for _ in range(2):
        hints.send(0, pa.record_batch({"__hash": pa.array([5], pa.int64())}))
    hints.close()
    assert not directory.running()


def test_the_latest_lookahead_that_comes_early_enough_is_asked() -> None:
    asked: list[tuple[str, ...]] = []
    hints = PrefetchHints(SimpleNamespace(set=asked.append), ("source", "exchange"), MEMORY)
    missing = {"cache_misses": 100.0, "cache_hits": 0.0, "prefetched_keys": 100.0, "prefetched_used": 100.0}

    def batch(number: int, slack: float, **figures: float) -> tuple[str, ...]:
        hints.store(number, "exchange", np.empty(0, np.uint64))
        hints.store(number, "source", np.arange(3, dtype=np.uint64))
        hints._batches[number].first["exchange"] -= slack
        hints._batches[number].first["source"] -= 3 + slack
        hints.begin(number)
        hints.prefetch(None, number)
        hints.adapt(missing | figures)
        return asked[-1]

    exchange, both = ("exchange",), ("source", "exchange")
    assert batch(1, 0.5, prefetch_ms=100.0) == exchange
    assert batch(2, 0.1, prefetch_ms=300.0) == both
    assert batch(3, 0.1, prefetch_ms=300.0) == both
    assert batch(4, 2.0, prefetch_ms=300.0) == exchange
    assert batch(5, 0.1, prefetch_ms=30_000.0) == both
    assert batch(6, 0.1, prefetch_ms=30_000.0) == both
    assert hints.figures()["lookahead"] == LOOKAHEADS.index("source, exchange")
    assert 3050 < hints.figures()["slack_ms"] < 4000
    assert batch(7, 0.1, prefetch_ms=30_000.0) == both
    assert batch(8, 2.0, prefetch_ms=3000.0, prefetched_used=50.0) == exchange  # it saw other keys: dropped
    assert batch(9, 0.1, prefetch_ms=300.0, prefetched_used=90.0) == exchange
    assert batch(10, 0.1, cache_misses=0.0, cache_hits=9.0) == ()
    assert batch(11, 0.1, prefetch_ms=300.0) == exchange
    assert batch(12, 0.1, prefetched_used=40.0) == ()  # so did this one: no source is left
    assert batch(13, 0.1) == ()


def test_hints_rest_where_most_keys_have_no_room() -> None:
    asked: list[tuple[str, ...]] = []
    hints = PrefetchHints(SimpleNamespace(set=asked.append), ("exchange",), MEMORY)
    flood = {"cache_misses": 900.0, "cache_hits": 0.0, "prefetched_keys": 100.0, "prefetched_used": 100.0}

    def wanted(batches: int, dropped: float) -> list[bool]:
        for _ in range(batches):
            hints.adapt(flood | {"dropped_hints": dropped})
        return [bool(names) for names in asked[-batches:]]

    assert all(wanted(20, 90.0))
    assert all(wanted(7, 800.0))
    assert all(wanted(1, 90.0))
    assert wanted(8, 800.0) == 7 * [True] + [False]
    assert not any(wanted(64, 0.0))
    assert wanted(8, 800.0) == 7 * [True] + [False]
    assert not any(wanted(128, 0.0))
    assert all(wanted(1, 90.0))
    assert wanted(8, 800.0) == 7 * [True] + [False]
    assert not any(wanted(64, 800.0))
    assert all(wanted(1, 800.0))


def test_hints_that_rest_resume_with_small_batches() -> None:
    """State that is loaded in large batches must not keep hints from the small ones that follow."""
    asked: list[tuple[str, ...]] = []
    hints = PrefetchHints(SimpleNamespace(set=asked.append), ("exchange",), MEMORY)
    for missing in 7 * [900.0] + [10.0]:
        hints.adapt({"cache_misses": missing, "prefetched_keys": 9.0, "prefetched_used": 9.0, "dropped_hints": 800.0})
    hints.adapt({"cache_misses": 250.0})
    assert not asked[-1]
    hints.adapt({"cache_misses": 0.0})
    assert not asked[-1]
    hints.adapt({"cache_misses": 200.0})
    assert asked[-1]


def test_what_lookaheads_send_in_different_shapes_is_all_passed_on() -> None:
    """A stage and the exchange name their columns differently, and the one may send hashes alone."""
    told: list[object] = []

    class Told:
        def prefetch(self, hashes: np.ndarray, needed: int) -> None:
            told.append((needed, hashes.tolist()))

        def prefetch_keys(self, keys: pa.RecordBatch, needed: int) -> None:
            assert keys.schema.names[0] == "__hash"
            told.append((needed, [tuple(row.values()) for row in keys.to_pylist()]))

    hints = PrefetchHints(None, ("lookahead(k)", "exchange"), MEMORY)

    def keep(lookahead: str, columns: dict[str, pa.Array]) -> None:
        keys = pa.record_batch(columns)
        hashes = keys.column(0).to_numpy().view(np.uint64)
        hints.store(0, lookahead, hashes, keys if keys.num_columns > 1 else None)

    keep("exchange", {"__hash": pa.array([1, 2]), "__right": pa.array([True, False])})
    keep("lookahead(k)", {"_0": pa.array([3]), "_1": pa.array([True])})
    keep("lookahead(k)", {"_0": pa.array([4]), "_1": pa.array([False]), "_2": pa.array([7])})
    keep("exchange", {"__hash": pa.array([5])})
    hints.prefetch(Told(), 0)  # type: ignore[arg-type]
    assert told == [(0, [(1, True), (2, False), (3, True)]), (0, [(4, False, 7)]), (0, [5])]


def test_keys_come_with_hints_where_hashes_do_not_do(tmp_path: Path, large: OperatorTask) -> None:
    """A lookup join asks its table by key: what its rows are announced by has the key's columns."""
    memory = Memory("hinted")
    memory.rows = {(key,): {"name": f"name {key}"} for key in range(0, 1000, 2)}
    spec = EnrichSpec(
        (Field("k", "bigint"), Field("v", "bigint")),
        (0,),
        ("id",),
        (Field("name", "string"),),
        most=1 << 20,
        ttl_ms=-1,
        timeout_ms=1000,
        concurrency=2,
        request=1000,
        table=pickle.dumps(MemoryTable("hinted")),
        name="hinted",
    )
    task = msgspec.structs.replace(large, spec=spec)
    server = PartitionServer(tmp_path / "slot")
    try:
        keys = np.arange(500)
        run(server, task, 0, keys[:1])
        hashes = hashes_in(0, 1, keys)
        hints = pa.record_batch([pa.array(hashes), pa.array(keys)], names=["__hash", "k"])
        server.hint(Hints(task, 0, 1, "exchange"), hints)
        server.hint(Hints(task, 0, 0, "exchange"), hints)
        answer = server.run(RunBatch(task, 0, 1, 1), rows_of(keys))
        rows = pa.Table.from_batches(_all(answer, figures := {}))
        assert rows.column("name").to_pylist() == [None if key % 2 else f"name {key}" for key in keys.tolist()]
        assert figures["announced_keys"] == 499
        assert memory.asked[(499,)] == 1
    finally:
        server.close()


def test_a_lookahead_has_a_name_of_any_length(tmp_path: Path, large: OperatorTask) -> None:
    """Names of many columns, and of columns with names in other scripts, are too long for a file's."""
    long = [f"lookahead({', '.join(f'Spalte für {letter} {n}' for n in range(20))})" for letter in "AB"]
    task = msgspec.structs.replace(large, lookaheads=(*long, "exchange"))
    switch = HintSwitch(tmp_path, task, 3)
    switch.set(long)
    assert {partition: set(asked) for partition, asked in requested_hints(tmp_path, task).items()} == {3: set(long)}
    switch.set((long[1], "exchange"))
    assert set(requested_hints(tmp_path, task)[3]) == {long[1], "exchange"}
    switch.close()
    assert not list((tmp_path / "hints").iterdir())


def test_files_that_are_none_of_ours_ask_for_nothing(tmp_path: Path, large: OperatorTask) -> None:
    HintSwitch(tmp_path, large, 0).set(("exchange",))
    (folder,) = (tmp_path / "hints").iterdir()
    (folder / ".nfs000000000123").touch()  # as NFS leaves it of a file that somebody still reads
    assert requested_hints(tmp_path, large) == {0: ("exchange",)}


def test_one_sketch_for_each_sender_of_an_operator_until_there_are_many(tmp_path: Path, large: OperatorTask) -> None:
    def sketch(task: OperatorTask, lookahead: str = "exchange") -> object:
        return HintSender(SlotDirectory(tmp_path), task, 0, lookahead, {})._sketch

    first = sketch(large)
    assert sketch(large) is first
    assert sketch(large, "source") is not first
    hotter = msgspec.structs.replace(large, settings=msgspec.structs.replace(large.settings, hot=3))
    assert sketch(hotter) is not first  # after a restart with another setting
    for number in range(100):
        sketch(msgspec.structs.replace(large, query=f"query {number}"))
    assert sketch(large) is not first


def _all(answer: Iterator[pa.RecordBatch], figures: dict[str, float]) -> Iterator[pa.RecordBatch]:
    while True:
        try:
            yield next(answer)
        except StopIteration as end:
            figures.update(end.value.metrics)
            return


class Told:
    """An operator that gets hints for keys, and notes them."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, int | None]] = []

    def prefetch_keys(self, keys: pa.RecordBatch, needed: int) -> None:
        self.keys += zip(keys.column(0).to_pylist(), keys.column(1).to_pylist(), strict=True)


def test_whoever_sends_keys_may_call_their_columns_what_they_like() -> None:
    """A stage and the exchange have names of their own, and do not agree about what can be null."""
    hints = PrefetchHints(None, ("lookahead(k, t)", "exchange"), MEMORY)
    hashes = np.array([3, 4], np.uint64)
    signed, times = pa.array([3, 4], pa.int64()), pa.array([7, None], pa.int64())
    sure = pa.schema([pa.field("__hash", pa.int64(), nullable=False), ("t", pa.int64())])
    for schema in (pa.schema([("_0", pa.int64()), ("_1", pa.int64())]), sure, sure):
        hints.store(5, "exchange", hashes, pa.RecordBatch.from_arrays([signed, times], schema=schema))
    told = Told()
    hints.prefetch(told, 5)  # type: ignore[arg-type]
    assert told.keys == 3 * [(3, 7), (4, None)]


def test_hints_wait_while_the_output_of_a_batch_is_read(
    server: PartitionServer, large: OperatorTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading output may move what a look-up of hints reads: the index, while it grows."""
    run(server, large, 0, np.arange(1000))
    (query,) = server._queries.values()
    (partition,) = query.partitions.values()
    looked_up = threading.Event()
    monkeypatch.setattr(partition._hints, "prefetch", lambda operator, version: looked_up.set())
    announcing = threading.Thread(target=hint, args=(server, large, 1, np.arange(10)))
    with partition._operator_lock:  # as while a piece of output is made
        announcing.start()
        assert not looked_up.wait(0.3)
    assert looked_up.wait(10)
    announcing.join()
