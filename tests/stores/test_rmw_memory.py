"""Tables larger than their memory: batches, states, and what the process really takes."""

import errno
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from millpond.errors import SettingError, TransientError, UsageError
from millpond.files.formats.blocks import sort_rows
from millpond.files.formats.segment import decode_rows
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import TableManifest, interval_of
from millpond.kernels.hot_table.state import DIRTY
from millpond.layout import HashRange, RowLayout, Rows
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.memory.reserved_mapping import ReservedMapping
from millpond.stores.rmw.hot import table as hot_table
from millpond.stores.rmw.policy import Policy, PrefetchShare
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.prefetcher import PrefetchFigures
from millpond.stores.runs.run import memory_run
from millpond.stores.runs.run_set import RunSet
from millpond.stores.runs.run_store import RunStore
from millpond.stores.table_resources import TableResources
from tests.stores.shelf import Shelf
from tests.support.rows import Entry, encode, layout, random_rows

NUMBERS = layout("w", "ww")
TEXTS = layout("b", "wwb")
_SMALL = 1 << 20
_MIX = np.uint64(0x9E3779B97F4A7C15)


@pytest.fixture
def pools() -> Iterator[tuple[ThreadPoolExecutor, ThreadPoolExecutor]]:
    merges, writers = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    yield merges, writers
    merges.shutdown()
    writers.shutdown()


def keys(shape: RowLayout, numbers: np.ndarray) -> Rows:
    """Keys made from numbers: themselves, or 20 bytes that end with them."""
    numbers = numbers.astype(np.uint64)
    words = np.zeros((len(numbers), shape.key_stop), np.uint64)
    words[:, 0] = numbers * _MIX
    at = shape.key_start
    if shape is NUMBERS:
        words[:, at] = numbers
        return Rows(words, np.empty(0, np.uint8))
    heap = np.full((len(numbers), 20), ord("k"), np.uint8)
    heap[:, 12:] = numbers.view(np.uint8).reshape(-1, 8)
    words[:, at] = 20 | 0x6B6B6B6B << 32
    words[:, at + 1] = np.arange(len(numbers), dtype=np.uint64) * np.uint64(20)
    return Rows(words, heap.reshape(-1))


def numbers_of(shape: RowLayout, rows: Rows) -> np.ndarray:
    if shape is NUMBERS:
        return rows.words[:, shape.key_start]
    tails = rows.words[:, shape.key_start + 1, None] + np.arange(12, 20, dtype=np.uint64)
    return rows.heap[tails].view(np.uint64)[:, 0]


def count_up(table: RmwTable, shape: RowLayout, numbers: np.ndarray, version: int, block: int = 4096) -> int:
    """Add one to the count of each key; returns the most bytes that the budget said were in use."""
    value = shape.offsets[1]
    used = 0
    for start in range(0, len(numbers), block):
        rows = table.upsert(keys(shape, numbers[start : start + block]), version).rows
        np.add.at(table.words[:, value], rows, np.uint64(1))
        used = max(used, table.stats()["hot_bytes"] + table.stats()["buffer_bytes"])
    return used


def counts(shape: RowLayout, pieces: Iterator[Rows], size: int) -> np.ndarray:
    total = np.zeros(size, np.int64)
    for rows in pieces:
        numbers = numbers_of(shape, rows).astype(np.int64)
        assert not total[numbers].any()  # each key once
        total[numbers] = rows.words[:, shape.offsets[1]]
    return total


def anonymous() -> int:
    """Bytes of memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def fresh(shape: RowLayout) -> np.ndarray:
    return np.zeros(shape.width, np.uint64)


@pytest.mark.parametrize("shape", [NUMBERS, TEXTS], ids=["numbers", "texts"])
def test_a_batch_larger_than_memory_yields_each_changed_key_once(shape, pools, tmp_path) -> None:
    size = 50_000
    table = RmwTable(
        shape.schema,
        fresh(shape),
        RunSet(shape),
        TableResources(MemoryBudget(_SMALL), pools[0], writers=pools[1]),
        store=Shelf(tmp_path),
    )
    rng = np.random.default_rng(7)
    truth = np.zeros(size, np.int64)
    log = []
    for version in range(3):
        table.begin(version)
        numbers = rng.integers(0, size, 2 * size)
        np.add.at(truth, numbers, 1)
        assert count_up(table, shape, numbers, version, 2048) < 1.25 * _SMALL
        want = np.where(np.bincount(numbers, minlength=size) > 0, truth, 0)
        assert (counts(shape, table.touched(5000), size) == want).all()
        delta = table.seal()
        data = b"".join(bytes(piece) for piece in delta.pieces)
        assert (counts(shape, decode_rows(data, shape, "delta"), size) == want).all()
        assert delta.rows == (want > 0).sum()
        assert (counts(shape, table.touched(), size) == want).all()
        assert (counts(shape, table.scan(), size) == truth).all()
        log.append((version + 1, data))
    manifest = table.manifest()
    table.close()
    store = Shelf(tmp_path)
    again = RmwTable(
        shape.schema, fresh(shape), RunSet(shape), TableResources(MemoryBudget(_SMALL), pools[0]), store=store
    )
    for version, data in log:
        if version > manifest.flushed:
            for rows in decode_rows(data, shape, "delta"):
                again.load(rows)
    assert (counts(shape, again.scan(), size) == truth).all()
    again.close()


def test_a_state_of_twenty_times_the_budget_stays_within_it(pools, tmp_path) -> None:
    budget, size = 2 << 20, 900_000  # rows of 48 bytes: 43 MB
    store = RunStore(open_filesystem(f"file://{tmp_path}/store"), str(tmp_path / "local"), disk=1 << 30, memory=1 << 20)
    shape = NUMBERS

    def open_table(manifest: TableManifest) -> RmwTable:
        return RmwTable.open(
            shape.schema,
            fresh(shape),
            manifest,
            store,
            TableResources(MemoryBudget(budget), pools[0], writers=pools[1]),
        )

    table = open_table(TableManifest())
    rng = np.random.default_rng(3)
    truth = np.zeros(size, np.int64)
    pieces, before, most = [], 0, 0
    parts = np.array_split(rng.permutation(size), 16) + [rng.integers(0, size, 50_000) for _ in range(4)]
    for version, numbers in enumerate(parts):
        if version == 3:
            before = anonymous()  # kernels, threads and buffers of all kinds are in use by now
        table.begin(version)
        assert count_up(table, shape, numbers, version, 16384) <= 1.1 * budget
        np.add.at(truth, numbers, 1)
        delta = table.seal()
        pieces.append((version + 1, b"".join(bytes(piece) for piece in delta.pieces)))
        most = max(most, anonymous() - sum(len(data) for _, data in pieces))
    assert most - before < 8 * budget  # of which the state would be twenty
    assert (counts(shape, table.scan(), size) == truth).all()

    manifest = table.manifest()
    assert table.stats()["keys"] == size
    table.close()
    table = open_table(manifest)
    for number, data in pieces:
        if number > manifest.flushed:
            for rows in decode_rows(data, shape, "delta"):
                table.load(rows)
    assert table.stats()["keys"] == size
    assert (counts(shape, table.scan(), size) == truth).all()
    table.close()
    store.close()


def test_a_shared_file_counts_by_parts(pools, tmp_path) -> None:
    """After a rescale, each of several partitions has a part of one file."""
    store = RunStore(open_filesystem(f"file://{tmp_path}/store"), str(tmp_path / "local"), disk=1 << 30, memory=1 << 20)
    ref = store.write([sort_rows(random_rows(100_000, NUMBERS, 1), NUMBERS)], NUMBERS).ref
    assert ref is not None
    sizes = []
    for range_ in (HashRange(0, 1 << 62), HashRange(1 << 62, 1 << 63), HashRange(1 << 63)):
        shared = msgspec.structs.replace(ref, visible=interval_of(range_))
        manifest = TableManifest((shared,), 1, 1)
        resources = TableResources(MemoryBudget(_SMALL), pools[0], writers=pools[1])
        table = RmwTable.open(NUMBERS.schema, fresh(NUMBERS), manifest, store, resources, range_)
        stats = table.stats()
        sizes.append(stats["bytes"] - stats["hot_bytes"])
        table.close()
    assert ref.bytes * 0.99 < sum(sizes) < ref.bytes * 1.05
    assert sizes[2] > 1.9 * sizes[0]
    store.close()


def test_rows_are_found_while_their_file_is_being_written(pools, tmp_path) -> None:
    shelf = Shelf(tmp_path)
    table = RmwTable(
        NUMBERS.schema,
        fresh(NUMBERS),
        RunSet(NUMBERS),
        TableResources(MemoryBudget(8 << 20), pools[0], writers=pools[1]),
        store=shelf,
    )
    table.begin(0)
    count_up(table, NUMBERS, np.arange(5000), 0)
    table.seal()
    shelf.gate.clear()
    table._memory.evict(table._eviction_buffer, 1.0)
    table.begin(1)
    assert table.stats()["hot_rows"] == 0
    assert table.manifest().runs == ()
    located = table.upsert(keys(NUMBERS, np.arange(4000, 6000)), 1)
    assert located.created.sum() == 1000
    assert (table.words[located.rows, NUMBERS.offsets[1]] == (~located.created).astype(np.uint64)).all()
    table.seal()
    shelf.gate.set()
    table._eviction_buffer.drain(0)
    table.begin(2)
    assert len(table.manifest().runs) == 1
    assert (counts(NUMBERS, table.scan(), 6000)[:5000] == 1).all()
    table.close()


def test_a_flush_covers_deltas_once_its_files_are_written(pools, tmp_path) -> None:
    shelf = Shelf(tmp_path)
    table = RmwTable(
        NUMBERS.schema,
        fresh(NUMBERS),
        RunSet(NUMBERS),
        TableResources(MemoryBudget(64 << 20), pools[0], writers=pools[1]),
        store=shelf,
    )
    for version in range(70):
        table.begin(version)
        count_up(table, NUMBERS, np.arange(100), version)
        table.seal()
        assert table.manifest().flushed == 0 or version > 63
        table._eviction_buffer.drain(0)
    assert table.manifest().flushed == 64
    assert table.stats()["hot_rows"] == 100
    table.close()


def test_a_failure_to_write_is_raised_between_batches(pools, tmp_path) -> None:
    shelf = Shelf(tmp_path)
    shelf.failure = TransientError("the disk is full")
    table = RmwTable(
        NUMBERS.schema,
        fresh(NUMBERS),
        RunSet(NUMBERS),
        TableResources(MemoryBudget(8 << 20), pools[0], writers=pools[1]),
        store=shelf,
    )
    table.begin(0)
    count_up(table, NUMBERS, np.arange(100), 0)
    table.seal()
    table._memory.evict(table._eviction_buffer, 1.0)
    with pytest.raises(TransientError, match="disk is full"):
        table._eviction_buffer.drain(0)


def test_growth_never_pauses(pools) -> None:
    table = RmwTable(NUMBERS.schema, fresh(NUMBERS), RunSet(NUMBERS), TableResources(MemoryBudget(1 << 30), pools[0]))
    table.begin(0)
    moved = []
    for start in range(0, 400_000, 4096):
        cursor = int(table._hot.state[20])
        slots = int(table._hot.state[14])
        table.upsert(keys(NUMBERS, np.arange(start, start + 4096)), 0)
        if slots > 65536:
            moved.append(max(0, int(table._hot.state[20]) - cursor))
    assert max(moved) <= 8 * 4096 + 64  # slots that moved during one call, of hundreds of thousands
    assert table.seal().rows == 98 * 4096
    table.close()


def test_a_hash_of_another_partition_is_refused(pools) -> None:
    table = RmwTable(
        NUMBERS.schema,
        fresh(NUMBERS),
        RunSet(NUMBERS),
        TableResources(MemoryBudget(8 << 20), pools[0]),
        HashRange(1 << 62, 1 << 63),
    )
    table.begin(0)
    inside = keys(NUMBERS, np.arange(100))
    inside.words[:, 0] = inside.words[:, 0] >> np.uint64(2) | np.uint64(1 << 62)
    table.upsert(inside, 0)
    for stray in (0, (1 << 62) - 1, 1 << 63, 2**64 - 1):
        outside = keys(NUMBERS, np.arange(1))
        outside.words[0, 0] = stray
        with pytest.raises(UsageError, match="range"):
            table.upsert(outside, 0)
    table.close()


def test_hints_keep_rows_in_memory(pools, tmp_path) -> None:
    table = RmwTable(
        NUMBERS.schema,
        fresh(NUMBERS),
        RunSet(NUMBERS),
        TableResources(MemoryBudget(8 << 20), pools[0]),
        store=Shelf(tmp_path),
    )
    table.begin(0)
    count_up(table, NUMBERS, np.arange(1000), 10)
    table.seal()
    hinted = keys(NUMBERS, np.arange(0, 1000, 7)).words[:, 0]
    table._memory.complete = False
    table.prefetch(hinted, 500, 1)
    table._memory.evict(table._eviction_buffer, 0.7)
    left = np.concatenate([table.words[ids, 0] for ids in table._hot.walk(4096)])
    assert 200 < len(left) < 400
    assert np.isin(hinted, left).all()
    table.close()


@pytest.mark.parametrize("policy", get_args(Policy))
def test_what_leaves_memory_first(pools, tmp_path, policy) -> None:
    table = RmwTable(
        NUMBERS.schema,
        fresh(NUMBERS),
        RunSet(NUMBERS),
        TableResources(MemoryBudget(8 << 20), pools[0]),
        store=Shelf(tmp_path),
        policy=policy,
    )

    def left() -> set[int]:
        return set(np.concatenate([table.words[ids, NUMBERS.key_start] for ids in table._hot.walk(4096)]).tolist())

    thirds = np.arange(0, 300), np.arange(300, 600), np.arange(600, 900)
    for version, some in enumerate((np.concatenate(thirds), thirds[2], np.concatenate([thirds[0], thirds[2]]))):
        table.begin(version)
        for start in range(0, len(some), 300):
            count_up(table, NUMBERS, some[start : start + 300], version)
        table.seal()
    table._memory.complete = False
    table.prefetch(keys(NUMBERS, thirds[1]).words[:, 0], 9, 9)
    table._memory.evict(table._eviction_buffer, 1 / 3)
    gone = set(range(900)) - left()
    if policy == "timestamp":  # those that are announced stay, the others were used in one batch
        assert not gone & set(thirds[1].tolist())
    elif policy == "lru":
        assert len(gone - set(thirds[1].tolist())) < 20
    if policy == "clock":
        table.begin(3)
        count_up(table, NUMBERS, thirds[2], 3)
        table.seal()
        table._memory.evict(table._eviction_buffer, 0.3)
        assert set(thirds[2].tolist()) <= left()
    table.close()


def test_two_tables_share_a_budget(pools, tmp_path) -> None:
    budget = MemoryBudget(4 << 20)
    shelf = Shelf(tmp_path)
    tables = [
        RmwTable(
            NUMBERS.schema,
            fresh(NUMBERS),
            RunSet(NUMBERS),
            TableResources(budget, pools[0], writers=pools[1]),
            store=shelf,
        )
        for _ in range(2)
    ]
    truth = [np.zeros(40_000, np.int64) for _ in tables]
    rng = np.random.default_rng(5)
    for version in range(6):
        for number, table in enumerate(tables):
            small = version < 2 and number == 1  # so that the other one takes the pool
            numbers = rng.integers(0, 40, 100) if small else rng.integers(0, 40_000, 20_000)
            table.begin(version)
            count_up(table, NUMBERS, numbers, version)
            np.add.at(truth[number], numbers, 1)
            table.seal()
            assert budget.used <= budget.total
    for table, want in zip(tables, truth, strict=True):
        assert (counts(NUMBERS, table.scan(), 40_000) == want).all()
        table.close()
    assert budget.used == 0


def test_tables_at_rest_leave_memory_to_others(pools, tmp_path) -> None:
    budget = MemoryBudget(16 << 20)
    shelf = Shelf(tmp_path)
    tables: list[RmwTable] = []
    for version in range(8):  # a table a batch, as windows follow each other
        table = RmwTable(NUMBERS.schema, fresh(NUMBERS), RunSet(NUMBERS), TableResources(budget, pools[0]), store=shelf)
        for other in tables:
            other.set_idle(True)
            if other.over_budget:
                other.begin(version)
                other.seal()
        table.begin(version)
        count_up(table, NUMBERS, np.arange(40_000), version)
        assert table.passes(40_000) == 1  # all of it is in memory
        assert table.stats()["hot_bytes"] * 8 > budget.tables
        table.seal()
        tables.append(table)
        assert budget.used <= budget.total
    assert sum(table.stats()["hot_bytes"] > 0 for table in tables) > 2  # what fits stays
    for table in tables:
        assert (counts(NUMBERS, table.scan(), 40_000) == 1).all()
        table.close()
    assert budget.used == 0


@pytest.mark.parametrize("found_again", [False, True])
def test_passes_go_by_the_different_keys(pools, tmp_path, found_again: bool) -> None:
    """Lookups that are not counted do not change the number of passes."""
    budget = MemoryBudget(4 << 20)
    table = RmwTable(
        NUMBERS.schema, fresh(NUMBERS), RunSet(NUMBERS), TableResources(budget, pools[0]), store=Shelf(tmp_path)
    )
    passes = []
    for version, times in enumerate((1, 1, 4, 80_000)):  # that each key comes
        table.begin(version)
        passes.append(table.passes(80_000))
        numbers = np.repeat(np.arange(80_000 // times), times) + version * 80_000
        count_up(table, NUMBERS, numbers, version)
        for start in range(0, 8_000 if found_again else 0, 4_000):
            table.find(keys(NUMBERS, np.unique(numbers)[start : start + 4_000]), version, counted=False)
        table.seal()
    table.begin(4)
    passes.append(table.passes(80_000))
    table.seal()
    assert passes[0] == 1  # nothing is in runs
    assert passes[1] == passes[2] > 4
    assert passes[3] * 2 <= passes[2]
    assert passes[4] == 1
    table.close()


def test_passes_go_by_the_keys_that_are_looked_up(pools, tmp_path) -> None:
    """Sessions fold the rows of a key before they look it up."""
    table = RmwTable(
        NUMBERS.schema, fresh(NUMBERS), RunSet(NUMBERS), TableResources(MemoryBudget(4 << 20), pools[0]),
        store=Shelf(tmp_path),
    )  # fmt: skip
    passes = []
    for version in range(12):
        table.begin(version)
        passes.append(table.passes(400_000))
        count_up(table, NUMBERS, np.arange(8_000) + version * 8_000, version)
        table.seal()
    assert table.stats()["cache_misses"] == 8_000, "none of them is in memory"
    assert max(passes) <= 2, "they fit in memory, although as many keys as rows would not"
    table.close()


def test_what_fits_is_worked_through_in_order_and_stays(pools, tmp_path) -> None:
    budget = MemoryBudget(4 << 20)
    table = RmwTable(
        NUMBERS.schema,
        fresh(NUMBERS),
        RunSet(NUMBERS),
        TableResources(budget, pools[0], readers=pools[1]),
        store=Shelf(tmp_path),
    )
    for version in range(3):
        table.begin(version)
        numbers = np.random.default_rng(version).permutation(np.arange(60_000))
        count_up(table, NUMBERS, numbers, version)
        table.seal()
    few = np.arange(0, 60_000, 20)
    for version in (3, 4):  # the first is not known to be small
        table.begin(version)
        passes = table.passes(len(few))
        table.restrict(HashRange(0, 1 << 63))
        count_up(table, NUMBERS, few + version, version)
        table.seal()
    assert passes == 2
    assert table.stats()["hot_rows"] > 2 * len(few), "the others are still there"
    table.begin(5)
    assert table.passes(500_000) > 2
    table.restrict(HashRange(0, 1 << 63))
    assert table.stats()["hot_rows"] == 0
    # Every block will be read anyway: none is for the sake of hints.
    assert table.prefetch(keys(NUMBERS, few).words[:, 0].copy(), 6, 6) == len(few)
    table.seal()
    assert table.stats()["dropped_hints"] == len(few)
    assert table.stats()["prefetched_keys"] == 0
    table.close()


def test_memory_for_what_is_read_ahead_goes_by_what_became_of_it() -> None:
    share = PrefetchShare()
    begun = share.value
    share.learn(PrefetchFigures(read=100, used=100, dropped=0))
    share.learn(PrefetchFigures(read=0, used=0, dropped=100))
    assert share.value == begun
    for _ in range(9):
        share.learn(PrefetchFigures(read=100, used=99, dropped=1))
    assert share.value == 0.5
    share.learn(PrefetchFigures(read=100, used=90, dropped=1))
    assert begun < share.value < 0.5
    for _ in range(9):
        share.learn(PrefetchFigures(read=100, used=90, dropped=1))
    assert share.value == 0.125


def test_a_table_reserves_address_space_by_the_memory_of_its_slot(pools) -> None:
    memory = 1 << 30
    table = RmwTable(TEXTS.schema, fresh(TEXTS), RunSet(TEXTS), TableResources(MemoryBudget(memory), *pools))
    hot = table._hot
    mappings = (hot._slab, hot._free, hot._touched, hot.heap._mapping)
    assert sum(mapping.size for mapping in mappings) < 5.5 * memory
    table.close()


def test_values_beyond_the_address_space_are_an_error(pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_table, "_MIN_SPACE", 0)
    shape = layout("b", "w")
    table = RmwTable(shape.schema, fresh(shape), RunSet(shape), TableResources(MemoryBudget(1 << 20), *pools))
    table.begin(0)
    for number in range(15):
        rows = encode([Entry(number << 58, (bytes([number]) * 100_000,), (0,))], shape)
        table.upsert(Rows(rows.words[:, : shape.key_stop].copy(), rows.heap), 0)
    assert table.heap.used <= table.heap.capacity < 2_200_000
    rows = encode([Entry(1, (b"v" * 1_000_000,), (0,))], shape)
    with pytest.raises(SettingError, match=r"slot\.memory"):
        table.upsert(Rows(rows.words[:, : shape.key_stop].copy(), rows.heap), 0)
    table.close()


def test_a_process_without_address_space_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(SettingError, match=r"3\.0 GiB of address space.*slot\.memory"):
        ReservedMapping(3 << 30)


def test_a_kernel_without_huge_pages_is_asked_for_each_of_them_once() -> None:
    mapping = ReservedMapping(256 << 20)
    mapping._map = Mock(madvise=Mock(side_effect=OSError(errno.EINVAL, "Invalid argument")))
    for used in (64 << 20, 65 << 20, 128 << 20):
        mapping.advise_huge_pages(used)
    assert [call.args[1:] for call in mapping._map.madvise.call_args_list] == [(0, 64 << 20), (64 << 20, 96 << 20)]


def test_a_piece_of_evicted_rows_takes_no_more_than_the_values_there_are(pools) -> None:
    shape = layout("b", "w")
    table = RmwTable(
        shape.schema, fresh(shape), RunSet(shape), TableResources(MemoryBudget(256 << 20), *pools), HashRange()
    )
    long = [Entry(number << 58, (bytes([number]) * (1 << 20),), (0,)) for number in range(8)]
    rows = encode(long, shape)
    table.begin(0)
    table.upsert(Rows(rows.words[:, : shape.key_stop].copy(), rows.heap), 0)
    table._hot.words[:8, 1] |= np.uint64(DIRTY)
    pieces = list(table._hot.evict(1.0, 64))
    assert sum(piece.count for piece in pieces) == 8
    assert max(piece.heap.base.nbytes for piece in pieces) < 9 << 20
    table.close()


def test_many_runs_do_not_make_pieces_large(pools) -> None:
    shape = layout("w", "w" * 70)
    runs = []
    for number in range(20):
        rows = random_rows(100, shape, number)
        rows.words[:, 0] = rows.words[:, 0] >> np.uint64(5) | np.uint64(number << 59)  # the runs' ranges are disjoint
        runs.append(memory_run(sort_rows(rows, shape), shape))
    table = RmwTable(
        shape.schema, fresh(shape), RunSet(shape, runs), TableResources(MemoryBudget(64 << 20), *pools), HashRange()
    )
    table.begin(0)
    pieces = [rows.count for rows in table.scan(100)]
    assert sum(pieces) == 2000
    assert max(pieces) < 400, pieces
    table.close()


def test_pieces_are_judged_by_the_rows_in_runs(pools, tmp_path: Path) -> None:
    shape = layout("w", "b")
    store = RunStore(open_filesystem(f"file://{tmp_path}/state"), f"{tmp_path}/local", disk=0, memory=1 << 20)
    budget = MemoryBudget(16 << 20)
    for length in (20, 2000):
        entries = (Entry(number << 51, (number,), (b"v" * length,)) for number in range(6000))
        run = store.write(encode(entries, shape), shape)
        # As after a restart: no row is in memory.
        table = RmwTable(
            shape.schema, fresh(shape), RunSet(shape, [run]), TableResources(budget, *pools), store=store, keys=6000
        )
        table.begin(0)
        pieces = [rows.count for rows in table.scan()]
        assert sum(pieces) == 6000
        assert budget.piece // 4 < max(pieces) * (length + 50) < 3 * budget.piece
        table.seal()
        table.close()
    store.close()


def test_values_that_were_evicted_do_not_make_pieces_small(pools, tmp_path: Path) -> None:
    shape = layout("w", "b")
    budget = MemoryBudget(64 << 20)
    table = RmwTable(shape.schema, fresh(shape), RunSet(shape), TableResources(budget, *pools), store=Shelf(tmp_path))
    table.load(encode((Entry(number << 51, (number,), (b"v" * 200,)) for number in range(6000)), shape))
    table.begin(0)
    assert table._eviction_buffer is not None
    table._memory.evict(table._eviction_buffer, 0.999)
    assert 0 < table.stats()["hot_rows"] < 60
    assert table.heap.used > 6000 * 200
    assert max(rows.count for rows in table.scan()) > 1000
    table.seal()
    table.close()
