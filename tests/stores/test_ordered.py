"""The ordered table against a list of rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.errors import StateDamagedError, TransientError
from millpond.files.formats.blocks import rows_per_block, sort_rows
from millpond.files.formats.segment import decode_rows
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import TableManifest, range_of
from millpond.files.tiers.local_copies import CachedSource
from millpond.kernels.ordered.order import MARK, MATCHED
from millpond.layout import HASH, LAST_HASH, META, NEVER, Column, HashRange, RowLayout, Rows
from millpond.stores import delta_backlog
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.ordered import parts as parts_module
from millpond.stores.ordered import table as table_module
from millpond.stores.ordered.expiry_index import ExpiryIndexBuilder
from millpond.stores.ordered.files import PartFiles
from millpond.stores.ordered.layout import OrderedLayout, empty_rows, matched_names, ordered_schema
from millpond.stores.ordered.merge import Input, TimeInterval, merge_parts
from millpond.stores.ordered.parts import BEGINNING, Part, row_addresses
from millpond.stores.ordered.table import OrderedTable
from millpond.stores.ordered.time_buckets import TimeBuckets
from millpond.stores.runs.run import Run
from millpond.stores.runs.run_store import RunStore
from millpond.stores.table_resources import TableResources
from tests.operators.join_rig import Immediate
from tests.support.rows import Entry, Value, decode, encode, random_rows

SECOND = 1_000_000
LATE = 570_000_000_000 * SECOND
"""A time later than the references of files can tell."""


@pytest.fixture(autouse=True)
def _few_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are flushed to files after a few batches."""
    monkeypatch.setattr(delta_backlog, "_MAX_DELTAS", 2)


@dataclass
class Model:
    """One row: hash, key, value, time, and whether it was matched."""

    hash: int
    key: tuple[Value, ...]
    value: tuple[Value, ...]
    time: int
    matched: bool = False


@dataclass
class Rig:
    """A table on a run store beside the rows that it should have."""

    folder: Path
    marked: bool
    remote: bool
    drop_matched: bool = False
    rows: list[Model] = field(default_factory=list)
    version: int = 0
    log: list[bytes] = field(default_factory=list)
    manifests: list[TableManifest] = field(default_factory=list)
    expired: int = BEGINNING

    def __post_init__(self) -> None:
        self.schema = ordered_schema(
            [Column("a", "word"), Column("b", "bytes")], [Column("v", "bytes"), Column("w", "word")], marked=self.marked
        )
        self.layout = OrderedLayout.of(self.schema)
        self.files = open_filesystem("memory:" if self.remote else f"file://{self.folder}/state")
        self.stores: list[RunStore] = []
        self.table = self._open(TableManifest())

    def _open(self, manifest: TableManifest) -> OrderedTable:
        store = RunStore(self.files, str(self.folder / f"local{len(self.stores)}"), disk=0, memory=1 << 20)
        self.stores.append(store)
        return OrderedTable.open(
            self.schema,
            manifest,
            store,
            TableResources(MemoryBudget(4 << 20), Immediate(), readers=Immediate()),
            drop_matched=self.drop_matched,
        )

    def reopen(self, version: int | None = None) -> None:
        """Open the newest version, as after a restart."""
        self.table.close()
        manifest = self.manifests[-1] if self.manifests else TableManifest()
        self.table = self._open(manifest)
        for data in self.log[manifest.flushed :]:
            for rows in decode_rows(data, self.layout.rows, "delta"):
                self.table.load(rows)

    def batch(self, fresh: list[Model], marks: list[int], until: int, spill: bool) -> None:
        table = self.table
        table.begin(self.version)
        table.prefetch(np.array([row.hash for row in (*fresh, *self.rows[:3])], np.uint64))
        if fresh:
            entries = [Entry(row.hash, row.key, (0, *([0] if self.marked else []), *row.value)) for row in fresh]
            rows = encode(entries, self.layout.rows)
            table.append(rows, np.array([row.time for row in fresh], np.int64))
        table.build_parts()
        if spill and table._files is not None:
            table._files.spill((*table.parts, *table.fresh), lambda: False)
        self.rows += fresh
        self._mark(marks)
        if self.version % 2:
            table.expire(until)
            self.expired = max(self.expired, until)
        delta = table.seal()
        self.log.append(b"".join(bytes(piece) for piece in delta.pieces))
        self.manifests.append(table.manifest())
        self.version += 1
        self.rows = [row for row in self.rows if row.time > self.expired]
        if self.drop_matched:
            self.rows = [row for row in self.rows if not row.matched]

    def _mark(self, marks: list[int]) -> None:
        """Mark the rows of some keys through the interval read of their whole key."""
        if not self.marked or not self.rows:
            return
        chosen = [self.rows[mark % len(self.rows)] for mark in marks]
        for row in chosen:
            probe = encode([Entry(row.hash, row.key, (0,))], RowLayout(ordered_schema(self._keys, [], marked=False)))
            for part in (*self.table.parts, *self.table.fresh):
                lo, hi = np.array([max(row.time, self.table.floor(part) + 1)]), np.array([row.time])
                for pairs in part.match(probe, self._probe.shape, lo, hi, 3):
                    keep = np.ones(len(pairs.probes), np.uint8)
                    self.table.mark(part, pairs.rows_at, pairs.positions, keep, once=False)
            for other in self.rows:
                if (other.hash, other.key, other.time) == (row.hash, row.key, row.time):
                    other.matched = True

    @property
    def _keys(self) -> list[Column]:
        return list(self.schema.keys)

    @property
    def _probe(self) -> OrderedLayout:
        return OrderedLayout.of(ordered_schema(self._keys, [], marked=False))

    def check(self) -> None:
        """The whole state, and interval reads of every key."""
        for part in (*self.table.parts, *self.table.fresh):
            assert part.marked == (0 if part.marks is None else np.bitwise_count(part.marks).sum())
        seen = [entry for rows in self.table.scan() for entry in self.entries(rows)]
        assert sorted(map(repr, seen)) == sorted(repr(self.entry(row)) for row in self.rows)

    def entries(self, rows: Rows) -> list[tuple[Any, ...]]:
        times = self.layout.times(rows).tolist()
        matched = (rows.words[:, META] & np.uint64(MATCHED) != 0).tolist()
        skip = 2 if self.marked else 1
        return [
            (e.hash, e.key, e.value[skip:], at, self.marked and flag)
            for e, at, flag in zip(decode(rows, self.layout.rows), times, matched, strict=True)
        ]

    def entry(self, row: Model) -> tuple[Any, ...]:
        return (row.hash, row.key, row.value, row.time, self.marked and row.matched)

    def check_reads(self, probes: list[tuple[Model, int, int]]) -> None:
        """Interval reads, before a batch changes anything."""
        probes = sorted(probes, key=lambda probe: probe[0].hash)
        if not probes:
            return
        rows = encode([Entry(p.hash, p.key, (0,)) for p, _, _ in probes], self._probe.rows)
        lo = np.array([low for _, low, _ in probes])
        hi = np.array([high for _, _, high in probes])
        got = []
        self.table._build_parts(self.version)
        for part in (*self.table.parts, *self.table.fresh):
            floor = np.maximum(lo, self.table.until + 1)
            for pairs in part.match(rows, self._probe.shape, floor, hi, 3):
                for probe, position in zip(pairs.probes.tolist(), pairs.positions.tolist(), strict=True):
                    (one,) = [self.entries(r) for r in part.rows_at_positions(np.array([position]))]
                    got.append((probe, one[0][:4]))
        want = [
            (number, self.entry(row)[:4])
            for number, (probe, low, high) in enumerate(probes)
            for row in self.rows
            if (row.hash, row.key) == (probe.hash, probe.key) and low <= row.time <= high
        ]
        assert sorted(map(repr, got)) == sorted(map(repr, want))

    def close(self) -> None:
        self.table.close()
        for store in self.stores:
            store.close()


HASHES = st.sampled_from([0, 7, 1 << 63, 2**64 - 1]) | st.integers(0, 255).map(lambda h: h << 56)
KEYS = st.tuples(st.none() | st.integers(0, 2), st.sampled_from([None, b"", b"k" * 12, b"k" * 13, b"l" * 13]))
VALUES = st.tuples(st.sampled_from([None, b"", b"short", b"long" * 9]), st.none() | st.integers(0, 9))


def models(front: int) -> st.SearchStrategy[Model]:
    far = [NEVER, LATE, NEVER - 1]
    times = st.integers(front - 20 * SECOND, front + 20 * SECOND) | st.just(front) | st.sampled_from(far)
    return st.builds(Model, HASHES, KEYS, VALUES, times)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
@pytest.mark.parametrize("remote", [False, True])
def test_a_table_equals_a_list(remote: bool, data: st.DataObject) -> None:
    marked, drop = data.draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    with TemporaryDirectory() as folder:
        rig = Rig(Path(folder), marked, remote, drop)
        front = 100 * SECOND
        for _ in range(data.draw(st.integers(1, 14))):
            fresh = data.draw(st.lists(models(front), max_size=10))
            marks = data.draw(st.lists(st.integers(0, 99), max_size=4))
            rig.batch(fresh, marks, front - data.draw(st.integers(-5, 40)) * SECOND, data.draw(st.booleans()))
            front += data.draw(st.sampled_from([0, 3, 15])) * SECOND
            if data.draw(st.sampled_from([False, False, True])):
                rig.reopen()
            rig.check()
            if not drop:
                probes = st.tuples(models(front), st.integers(front - 30 * SECOND, front), st.just(NEVER))
                some = [(row, BEGINNING, NEVER) for row in rig.rows[:4]]
                rig.check_reads(data.draw(st.lists(probes, max_size=4)) + some)
        rig.close()


@pytest.mark.parametrize(("remote", "index_divisor"), [(False, 256), (True, 256), (True, 1 << 30)])
def test_many_rows_through_files(
    remote: bool, index_divisor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state several times larger than its memory, with expiry, marks, merges of files, restarts."""
    monkeypatch.setattr(table_module, "_INDEX_DIVISOR", index_divisor)
    monkeypatch.setattr(parts_module, "_BLOCKS_PER_STEP", 3)
    rig = Rig(tmp_path, True, remote)
    rng = np.random.default_rng(5)
    live: dict[int, tuple[int, bool]] = {}  # number → time, matched
    merges = 0
    for version in range(24):
        table = rig.table
        assert table._files is not None
        table.begin(version)
        count, base = 6000, version * SECOND
        keys = rng.integers(0, 500, count)
        words = np.zeros((count, rig.layout.rows.width), np.uint64)
        words[:, 0] = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        words[:, rig.layout.rows.offsets[0]] = keys.astype(np.uint64)
        words[:, rig.layout.rows.offsets[-1]] = np.arange(version * count, (version + 1) * count, dtype=np.uint64)
        times = rng.integers(base, base + 2 * SECOND, count)
        numbers = range(version * count, (version + 1) * count)
        for begin in range(0, count, 1000):
            piece = words[begin : begin + 1000].copy()
            table.append(Rows(piece, np.empty(0, np.uint8)), times[begin : begin + 1000])
        live |= {number: (int(at), False) for number, at in zip(numbers, times, strict=True)}
        table.build_parts()
        probe = np.unique(words[keys < 20][:, : rig._probe.rows.width].copy(), axis=0)
        probes = Rows(probe, np.empty(0, np.uint8))
        low = base - SECOND
        matched = 0
        for part in (*table.parts, *table.fresh):
            lo, hi = np.full(len(probe), max(low, table.floor(part) + 1)), np.full(len(probe), base)
            for pairs in part.match(probes, rig._probe.shape, lo, hi, 1000):
                new = table.mark(part, pairs.rows_at, pairs.positions, np.ones(len(pairs.probes), np.uint8), once=False)
                for rows in part.rows_at_positions(np.sort(new)):
                    for number in rows.words[:, rig.layout.rows.offsets[-1]].tolist():
                        at, before = live[number]
                        assert not before
                        assert low <= at <= base
                        live[number] = (at, True)
                        matched += 1
        assert version < 2 or matched > 100
        until = base - 4 * SECOND
        table.expire(until)
        gone = [
            n for rows in table.expired_unmatched_rows() for n in rows.words[:, rig.layout.rows.offsets[-1]].tolist()
        ]
        assert sorted(gone) == sorted(n for n, (at, flag) in live.items() if at <= until and not flag)
        live = {n: state for n, state in live.items() if state[0] > until}
        delta = table.seal()
        rig.log.append(b"".join(bytes(piece) for piece in delta.pieces))
        rig.manifests.append(table.manifest())
        merges += table._files._merge.running
        if version % 3 == 2:
            rig.reopen()
        seen = {}
        for rows in rig.table.scan():
            flags = (rows.words[:, META] & np.uint64(MATCHED) != 0).tolist()
            numbers_ = rows.words[:, rig.layout.rows.offsets[-1]].tolist()
            seen |= dict(zip(numbers_, zip(rig.layout.times(rows).tolist(), flags, strict=True), strict=True))
        assert seen == live
        assert len(rig.table.parts) < 40
    assert merges
    assert rig.manifests[-1].flushed > 15

    rig.close()


@pytest.mark.parametrize("timeless", [False, True])
def test_a_file_is_scanned_once_for_its_unmatched_rows(
    timeless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, True, True)
    table = rig.table
    assert table._files is not None
    count = 4000
    table.begin(0)
    words = np.zeros((count, rig.layout.rows.width), np.uint64)
    words[:, 0] = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words[:, rig.layout.rows.offsets[0]] = np.arange(count)
    words[:, rig.layout.rows.offsets[-1]] = np.arange(count)
    times = np.arange(count) * SECOND
    if timeless:
        times[-1] = NEVER
    table.append(Rows(words.copy(), np.empty(0, np.uint8)), times)
    table.build_parts()
    table._files.spill(table.fresh, lambda: False)
    table.seal()
    (part,) = table.fresh
    assert part.run is not None
    table.fresh = [Part.of_run(rig.layout, part.run, part.upto)]  # as after a restart
    scans: list[Part] = []
    chunks = Part.chunks

    def counted(part: Part) -> Iterator[tuple[Rows, int]]:
        scans.append(part)
        return chunks(part)

    monkeypatch.setattr(Part, "chunks", counted)

    def expire(version: int, until: int) -> list[int]:
        """Expire rows, after the batch has matched the last row that expires."""
        table.begin(version)
        key = int(np.flatnonzero(times <= until)[-1])
        probe = Rows(words[key : key + 1, : rig._probe.rows.width].copy(), np.empty(0, np.uint8))
        for part in table.parts:
            for pairs in part.match(probe, rig._probe.shape, times[key : key + 1], times[key : key + 1], 10):
                table.mark(part, pairs.rows_at, pairs.positions, np.ones(len(pairs.probes), np.uint8), once=False)
        table.expire(until)
        table.seal()
        last = rig.layout.rows.offsets[-1]
        return sorted(n for rows in table.expired_unmatched_rows() for n in rows.words[:, last].tolist())

    first = 0
    for version in range(1, 10):
        assert expire(version, 100 * version * SECOND) == list(range(first, 100 * version))
        first = 100 * version + 1
    assert len(scans) == 1
    assert expire(10, 900 * SECOND) == []  # the watermark stays
    assert len(scans) == 1
    (part,) = table.parts
    assert part._expiry_index is not None
    assert 0 < part._expiry_index.memory < table._account.reserved
    rig.close()


def test_an_expiry_index_has_the_earliest_rows() -> None:
    builder = ExpiryIndexBuilder(10, 4)
    builder.add(np.array([30, 12, 20, 11, 20]), np.arange(5))
    assert builder.until == NEVER - 1
    builder.add(np.array([20, 40, 13, 11]), np.arange(5, 9))
    index = builder.build()
    # The fifth earliest row is of the time 20, so no row of this time is in the index.
    assert (index.times.tolist(), index.until) == ([11, 11, 12, 13], 19)
    assert index.between(11, 15).tolist() == [1, 7]
    assert index.between(10, 11).tolist() == [3, 8]
    assert index.covers(12, 19)
    assert not index.covers(12, 20)
    assert not index.covers(9, 12)


def test_blocks_of_announced_keys_are_there(tmp_path: Path) -> None:
    rig = Rig(tmp_path, False, True)
    table, (store,) = rig.table, rig.stores
    assert table._files is not None
    table.begin(0)
    words = np.zeros((2000, rig.layout.rows.width), np.uint64)
    words[:, 0] = np.arange(2000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words[:, rig.layout.rows.offsets[0]] = np.arange(2000)
    table.append(Rows(words, np.empty(0, np.uint8)), np.arange(2000) * SECOND)
    table.build_parts()
    table._files.spill(table.fresh, lambda: False)
    table.seal()
    table.begin(1)
    assert all(part.rows is None for part in table.parts)
    probe = words[words[:, 0].argsort()][5:400:9, : rig._probe.rows.width].copy()
    for part in table.parts:  # a read that fails costs no later one
        part.preload_blocks = lambda _: [][0]  # type: ignore[method-assign]
    table.prefetch(probe[:, 0].copy())
    assert table.stats()["prefetched_keys"] == 0
    for part in table.parts:
        del part.preload_blocks  # type: ignore[method-assign]
    table.prefetch(probe[:, 0].copy())
    read = store.cache.misses
    found = 0
    for part in table.parts:
        lo, hi = np.full(len(probe), BEGINNING), np.full(len(probe), NEVER)
        for pairs in part.match(Rows(probe, np.empty(0, np.uint8)), rig._probe.shape, lo, hi, 1000):
            found += len(pairs.probes)
    assert found == len(probe)
    assert store.cache.misses == read
    table.seal()
    assert table.stats()["prefetched_keys"] == len(probe)
    table.begin(2)
    # Hints behind one read wait for it in no more than a part of the memory.
    assert table._prefetcher is not None
    table._prefetcher._reading = True
    flood = np.arange(1 << 17, dtype=np.uint64) << np.uint64(46)
    for start in range(0, len(flood), 1 << 12):
        table.prefetch(flood[start : start + (1 << 12)])
    held = [column.nbytes for one in table._prefetcher._waiting for column in one]
    assert sum(held) <= rig.table._budget.total // 16
    table._prefetcher._reading = False
    table.seal()
    assert table.stats()["dropped_hints"] == len(flood) - sum(len(one.hashes) for one in table._prefetcher._waiting)
    rig.close()
    assert table.stats()["cache_misses"] == len(probe) * len(table.parts)
    rig.close()


def test_only_parts_of_the_times_that_are_sought_are_read_ahead(tmp_path: Path) -> None:
    rig = Rig(tmp_path, False, True)
    table, (store,) = rig.table, rig.stores
    assert table._files is not None
    words = np.zeros((2000, rig.layout.rows.width), np.uint64)
    words[:, 0] = np.arange(2000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words[:, rig.layout.rows.offsets[0]] = np.arange(2000)
    times = (np.array([10, 20, 30]) * SECOND, np.array([NEVER]))
    for version, at in enumerate(np.concatenate(times).tolist()):
        table.begin(version)
        table.append(Rows(words.copy(), np.empty(0, np.uint8)), np.full(2000, at))
        table.build_parts()
        table._files.spill(table.fresh, lambda: False)
        table.seal()
    table.begin(4)
    assert len(table.parts) == 4
    hashes = words[7:8, 0].copy()
    keys = np.full(len(hashes), 1)

    def read(lo: int, hi: int) -> list[int]:
        """The times of the parts of which blocks are read for these keys and times."""
        store.cache.limit, limit = 0, store.cache.limit  # nothing is there
        store.cache.limit = limit
        for part in table.parts:
            part.run.source.remote().fetched = 0  # type: ignore[union-attr]
        table.prefetch(hashes, lo * keys, hi * keys)
        return [part.oldest // SECOND for part in table.parts if part.run.source.remote().fetched]  # type: ignore[union-attr]

    assert read(10 * SECOND, 20 * SECOND) == [10, 20]
    assert read(21 * SECOND, 29 * SECOND) == []
    assert read(25 * SECOND, 1 << 62) == [30]
    assert len(read(BEGINNING, NEVER)) == 4  # the rows without a time, too
    assert read(NEVER, BEGINNING) == []
    table.expire(15 * SECOND)
    assert read(10 * SECOND, 20 * SECOND) == [10, 20]  # they are part of what this batch reads
    table.seal()
    assert read(10 * SECOND, 20 * SECOND) == [20]
    rig.close()


def test_a_hot_key_is_merged_in_time(tmp_path: Path) -> None:
    """200 k rows of one key: merging and reading an interval must not look at every pair of rows."""
    rig = Rig(tmp_path, False, False)
    for version in range(4):
        rig.table.begin(version)
        words = np.zeros((50_000, rig.layout.rows.width), np.uint64)
        words[:, 0] = 42
        rig.table.append(Rows(words, np.empty(0, np.uint8)), np.arange(50_000) * 4 + version)
        rig.table.seal()
    rig.table.begin(4)
    probe = Rows(np.array([[42] + [0] * (rig._probe.rows.width - 1)], np.uint64), np.empty(0, np.uint8))
    found = sum(
        len(pairs.probes)
        for part in rig.table.parts
        for pairs in part.match(probe, rig._probe.shape, np.array([99_990]), np.array([100_009]), 7)
    )
    assert found == 20
    rig.close()


def test_a_table_that_cannot_be_opened_takes_no_share_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, marked=True, remote=False)
    store, budget = rig.stores[0], MemoryBudget(4 << 20)
    names = encode([Entry(1, (1, b"k"), (0, 0, b"v", 1))], rig.layout.rows)
    ref = store.write(names, rig.layout.rows).ref
    assert ref is not None
    manifest = TableManifest((msgspec.structs.replace(ref, marks=True),))

    def fail(table: OrderedTable, rows: Rows) -> None:
        raise TransientError("the store is away")

    monkeypatch.setattr(OrderedTable, "_apply_matched_names", fail)
    with pytest.raises(TransientError):
        OrderedTable.open(rig.schema, manifest, store, TableResources(budget, Immediate()))
    assert budget._accounts == []


def test_files_of_a_remote_merge_are_closed_if_one_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, marked=False, remote=True)
    (store,) = rig.stores
    compactor = Mock(**{"submit.return_value": Future()})
    resources = TableResources(MemoryBudget(4 << 20), Immediate(), remote_compactor=compactor)
    rows = encode([Entry(1, (1, b"k"), (0, b"v", 1))], rig.layout.rows)
    parts = [Part.of_run(rig.layout, store.write(rows, rig.layout.rows), 0) for _ in range(5)]
    files = PartFiles(rig.layout, store, resources, HashRange(), flushed=0, drop_matched=False)
    files._begin_merge(parts, TimeBuckets(), BEGINNING)
    open_results = compactor.submit.call_args.args[2]
    runs: list[Run] = []
    open_run = store.open
    monkeypatch.setattr(store, "open", lambda *arguments: runs.append(open_run(*arguments)) or runs[-1])
    ref = parts[0].ref
    assert ref is not None
    with pytest.raises(StateDamagedError):
        open_results([ref, msgspec.structs.replace(ref, name="files/gone.run")])
    (run,) = runs
    assert isinstance(run.source, CachedSource)
    assert run.source.closed
    files.close()
    rig.close()


@pytest.mark.parametrize("fails", [False, True])
def test_inputs_that_expire_during_their_merge_are_dropped_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    rig = Rig(tmp_path, marked=False, remote=True)
    (store,) = rig.stores
    merge: Future[list[Run]] = Future()
    compactor = Mock(**{"submit.return_value": merge})
    resources = TableResources(MemoryBudget(4 << 20), Immediate(), remote_compactor=compactor)
    rows = encode([Entry(1, (1, b"k"), (0, b"v", 1))], rig.layout.rows)
    parts = [Part.of_run(rig.layout, store.write(rows, rig.layout.rows), 0) for _ in range(5)]
    files = PartFiles(rig.layout, store, resources, HashRange(), flushed=0, drop_matched=False)
    drop = Mock(wraps=store.drop)
    monkeypatch.setattr(store, "drop", drop)
    files._begin_merge(parts, TimeBuckets(), BEGINNING)
    files.step(parts[1:], parts[:1], TimeBuckets(), BEGINNING)
    drop.assert_not_called()
    if fails:
        merge.set_exception(TransientError("the store is away"))
    else:
        merge.set_result([])
    files.step(parts[1:], [], TimeBuckets(), BEGINNING)
    assert [call.args[0] for call in drop.call_args_list] == [part.run for part in (parts[:1] if fails else parts)]
    files.close()
    rig.close()


def test_rows_without_time_in_a_file_do_not_lengthen_buckets() -> None:
    timed, mixed = (
        SimpleNamespace(newest=newest, timeless=timeless, rows=None)
        for newest, timeless in ((10_000_000, False), (NEVER - 1, True))
    )
    alone, together = TimeBuckets(), TimeBuckets()
    alone.choose_length([timed], 1_000_000)  # type: ignore[list-item]
    together.choose_length([timed, mixed], 1_000_000)  # type: ignore[list-item]
    assert together.shift == alone.shift < 32


@pytest.mark.parametrize(("far", "shift"), [(1 << 59, 55), (7 << 60, 60), (NEVER - 1, 60)])
def test_time_buckets_have_each_time_once(far: int, shift: int) -> None:
    now = 1_700_000_000 * SECOND
    parts = [
        SimpleNamespace(oldest=now, newest=far, timeless=True),
        # A file: its reference has times up to the year 10889 only.
        SimpleNamespace(oldest=now, newest=1000 * (1 << 48) - 1, timeless=True),
    ]
    for chosen in (parts[:1], parts[1:], parts):
        buckets = TimeBuckets()
        buckets.shift = shift
        intervals = buckets.intervals(chosen, now - 1)  # type: ignore[arg-type]
        for time in (now, now + SECOND, 1000 * (1 << 48), far, NEVER):
            assert sum(interval.after < time <= interval.until for interval in intervals) == 1


def test_rows_of_late_times_stay_when_files_are_merged(tmp_path: Path) -> None:
    rig = Rig(tmp_path, marked=True, remote=False)
    front = 1_700_000_000 * SECOND
    for version in range(14):
        far = Model(9, (1, b"far"), (b"v", version), LATE + version)
        rig.batch([Model(5 << 60, (1, b"k"), (b"v", version), front), far], [], front - 2 * SECOND, spill=True)
        if version == 5:
            rig.reopen()
        rig.check()
        front += SECOND
    rig.close()


def test_many_rows_of_one_key_are_merged_in_pieces(tmp_path: Path) -> None:
    rig = Rig(tmp_path, marked=True, remote=False)
    parts = []
    for number in range(3):
        words = np.zeros((5000, rig.layout.rows.width), np.uint64)
        words[:, 0] = 42
        words[:, rig.layout.time] = np.arange(5000) * 3 + number
        parts.append(Part(rig.layout, Rows(words, np.empty(0, np.uint8)), 0))
        parts[-1].bits()[:] = np.uint64(0x5555555555555555)  # every other row
    inputs = [Input(part) for part in parts]
    pieces = list(merge_parts(inputs, rig.layout, HashRange(), TimeInterval(), size=1000))
    assert max(rows.count for rows in pieces) < 2000
    words = np.concatenate([rows.words for rows in pieces])
    assert words[:, rig.layout.time].tolist() == list(range(15000))
    assert (words[:, META] & np.uint64(MATCHED) != 0).tolist() == [time // 3 % 2 == 0 for time in range(15000)]
    none = [Input(Part(rig.layout, empty_rows(rig.layout), 0))]
    assert not list(merge_parts(none, rig.layout, HashRange(), TimeInterval(), size=1000))
    rig.close()


def test_deltas_with_matches_are_loaded_within_the_budget(tmp_path: Path) -> None:
    """Their rows become parts before they can be marked, and parts in memory have to be reserved, too."""
    rig = Rig(tmp_path, marked=True, remote=False)
    deltas = []
    for version in range(60):
        words = np.zeros((2_000, rig.layout.rows.width), np.uint64)
        words[:, HASH] = np.random.default_rng(version).integers(0, 1 << 63, len(words), np.uint64)
        words[:, rig.layout.time] = version * SECOND
        words[:, rig.layout.number] = np.arange(len(words)) + (version << 32)
        rows = Rows(words, np.empty(0, np.uint8))
        name = matched_names(rows.take(slice(0, 1)), rig.layout)
        deltas.append(Rows(np.concatenate([words, name.words]), rows.heap))
    peak = 0
    for delta in deltas:
        rig.table.load(delta)
        peak = max(peak, rig.table.memory)
    assert sum(delta.words.nbytes for delta in deltas) > 8 << 20
    assert peak < 4 << 20
    matched = [rows.words[:, META] & np.uint64(MATCHED) != 0 for rows in rig.table.scan()]
    assert np.concatenate(matched).sum() == len(deltas)
    rig.close()


def test_names_of_matched_rows_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks of rows in files are as many as the state has rows: their names are not held in memory together."""
    names: list[int] = []
    write = RunStore.write

    def counting(store: RunStore, rows: Any, layout: RowLayout) -> Run:
        pieces = [rows] if isinstance(rows, Rows) else list(rows)
        names.append(sum(int(np.count_nonzero(piece.words[:, META] & np.uint64(MARK))) for piece in pieces))
        return write(store, pieces, layout)

    monkeypatch.setattr(RunStore, "write", counting)
    monkeypatch.setattr(parts_module, "_BLOCKS_PER_STEP", 3)
    rig = Rig(tmp_path, marked=True, remote=False)
    for version in range(9):
        table = rig.table
        table.begin(version)
        if version == 0:
            words = np.zeros((20_000, rig.layout.rows.width), np.uint64)
            words[:, HASH] = np.arange(len(words), dtype=np.uint64) << np.uint64(48)
            table.append(Rows(words, np.empty(0, np.uint8)), np.full(len(words), SECOND))
        if version == 4:
            (part,) = table.parts
            assert part.run is not None
            rows_at, _ = row_addresses(part.blocks(), rig.layout.stride)
            chosen = np.arange(0, part.count, 5)
            table.mark(part, rows_at[chosen], chosen, np.ones(len(chosen), np.uint8), once=False)
        rig.log.append(b"".join(bytes(piece) for piece in table.seal().pieces))
        rig.manifests.append(table.manifest())
        rig.version += 1
    files = sum(ref.marks for ref in rig.manifests[-1].runs)
    assert files > 1
    written = [count for count in names if count][-files:]
    assert sum(written) == 4000
    # Two temporaries, and the rows that are read at a time.
    piece = 2 * MemoryBudget(4 << 20).piece // rig.layout.stride
    assert max(written) < piece + parts_module._BLOCKS_PER_STEP * rows_per_block(rig.layout.rows)
    rig.reopen()
    matched = [rows.words[:, META] & np.uint64(MATCHED) != 0 for rows in rig.table.scan()]
    assert np.concatenate(matched).sum() == 4000
    rig.close()


@pytest.mark.parametrize("end", ["done", "failed", "closed"])
def test_batches_go_on_while_names_of_matched_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A write may hang during an outage of the store; the file that is read stays open until it is done."""
    writing, gate = threading.Event(), threading.Event()
    written: list[Run] = []
    write = RunStore.write

    def hanging(store: RunStore, rows: Any, layout: RowLayout) -> Run:
        if isinstance(rows, Rows) and (rows.words[:, META] & np.uint64(MARK)).all():
            writing.set()
            assert gate.wait(60)
            if end == "failed" and written:
                raise TransientError("The store does not answer.")
            written.append(write(store, rows, layout))
            return written[-1]
        return write(store, rows, layout)

    dropped: list[Run] = []
    closed: list[Run] = []
    close = Run.close

    def record_close(run: Run) -> None:
        closed.extend([run] if run in written else [])
        close(run)

    monkeypatch.setattr(Run, "close", record_close)
    monkeypatch.setattr(RunStore, "write", hanging)
    monkeypatch.setattr(RunStore, "drop", lambda _, run: dropped.append(run))
    monkeypatch.setattr(parts_module, "_BLOCKS_PER_STEP", 3)
    rig = Rig(tmp_path, marked=True, remote=False)

    def run_batch(rows: int = 0, mark: int = 0, until: int = BEGINNING) -> Part | None:
        table = rig.table
        table.begin(rig.version)
        part = table.parts[0] if table.parts else None
        if rows:
            words = np.zeros((rows, rig.layout.rows.width), np.uint64)
            words[:, HASH] = np.arange(rows, dtype=np.uint64) << np.uint64(48)
            table.append(Rows(words, np.empty(0, np.uint8)), np.full(rows, SECOND))
        if mark:
            assert part is not None
            assert part.run is not None
            rows_at, _ = row_addresses(part.blocks(), rig.layout.stride)
            chosen = np.arange(0, part.count, mark)
            table.mark(part, rows_at[chosen], chosen, np.ones(len(chosen), np.uint8), once=False)
        table.expire(until)
        rig.log.append(b"".join(bytes(piece) for piece in table.seal().pieces))
        rig.manifests.append(table.manifest())
        rig.version += 1
        return part

    with ThreadPoolExecutor(1) as background:
        try:
            files = rig.table._files
            assert files is not None
            files._namers = background
            run_batch(rows=20_000)
            for _ in range(3):
                run_batch()
            flushed = rig.manifests[-1].flushed
            part = run_batch(mark=5)
            while not writing.is_set():  # the names of 4,000 rows
                run_batch()
                assert rig.version < 20
                writing.wait(0.1)
            matched_write = files._naming._result
            assert matched_write is not None
            assert not any(ref.marks for ref in rig.manifests[-1].runs)
            assert rig.manifests[-1].flushed < rig.version - 1
            assert flushed <= rig.manifests[-1].flushed
            run_batch(until=2 * SECOND)  # the part expires
            run_batch()
            assert part is not None
            assert part.run is not None
            assert part not in rig.table.parts
            assert part.run not in dropped
            # Named, so that the garbage collection keeps it until it has been read.
            assert part.ref is not None
            assert part.ref.name in {ref.name for ref in rig.manifests[-1].runs if ref.pending}
            if end == "closed":
                rig.table.close()
        finally:
            gate.set()
        if end != "done":
            assert isinstance(matched_write.exception(60), TransientError)
            assert len(written) == 1
            assert closed == written
        if end == "failed":
            before = rig.manifests[-1].flushed
            run_batch()  # which does not fail
            run_batch()
            assert rig.manifests[-1].flushed > before, "it is tried again, and the part with the rows has gone"
        if end != "done":
            return
        assert matched_write.result(60) == written
        assert {run.ref.name for run in written if run.ref} <= {
            ref.name for ref in rig.table.manifest().runs if ref.pending
        }
        run_batch()
        assert part.run in dropped
        assert len(written) > 1
        assert [run.rows for run in written] == [ref.rows for ref in rig.manifests[-1].runs if ref.marks]
        assert sum(run.rows for run in written) == 4000
        assert not closed
    rig.close()


def test_a_shared_file_counts_by_parts(tmp_path: Path) -> None:
    """After a rescale, each of several partitions has a part of one file."""
    rig = Rig(tmp_path, marked=False, remote=False)
    layout = rig.layout.rows
    ref = rig.stores[0].write([sort_rows(random_rows(50_000, layout, 1), layout)], layout).ref
    assert ref is not None
    total = 0
    for visible in ((0, (1 << 62) - 1), (1 << 62, LAST_HASH)):
        resources = TableResources(MemoryBudget(4 << 20), Immediate())
        manifest = TableManifest((msgspec.structs.replace(ref, visible=visible),), 1)
        table = OrderedTable.open(rig.schema, manifest, rig.stores[0], resources, range_of(visible))
        total += table.stats()["bytes"]
        table.close()
    assert ref.bytes * 0.99 < total < ref.bytes * 1.05
    rig.close()
