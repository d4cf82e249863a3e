"""The aligned append store against lists, over spills, merges and restarts at every version."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.errors import StateDamagedError, StateIncompatibleError, TransientError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.formats.append_file import ByteRange
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import TableManifest
from millpond.files.tiers.local_copies import LocalCache
from millpond.layout import HashRange, RowLayout, Rows
from millpond.stores.aligned import hash_intervals
from millpond.stores.aligned import table as aligned
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from tests.stores.test_rmw_model import Immediate
from tests.stores.windows import WindowTables
from tests.support.rows import Entry, decode, encode, entries, layout, random_rows

WORDS = layout("w", "ww")
BYTES = layout("wb", "bw")


@dataclass
class Rig:
    """A store beside lists of what its windows hold; deltas lie in objects as commits hold them."""

    layout: RowLayout
    files: FileSystem
    local: str
    placed: bool = True
    model: dict[int, list[Entry]] = field(default_factory=dict)
    version: int = 0
    deltas: dict[int, list[tuple[int, ByteRange]]] = field(default_factory=dict)
    history: list[tuple[dict[int, TableManifest], dict[int, list[tuple[int, ByteRange]]], dict[int, list[Entry]]]] = (
        field(default_factory=list)
    )

    def __post_init__(self) -> None:
        self.append_files = AppendFiles(self.files, self.local)
        self._open({}, {})
        self._remember()

    def _open(self, manifests: dict[int, TableManifest], deltas: dict[int, list[tuple[int, ByteRange]]]) -> None:
        self.store = WindowTables(self.layout.schema, self.append_files, MemoryBudget(8 << 20), Immediate())
        for window, manifest in manifests.items():
            behind = [at for version, at in deltas.get(window, []) if version > manifest.flushed]
            self.store.open(window, manifest, behind)

    def _remember(self) -> None:
        manifests = {window: table.manifest() for window, table in self.store.tables.items()}
        self.history.append((manifests, copy.deepcopy(self.deltas), copy.deepcopy(self.model)))

    def batch(self, steps: list[tuple[str, object]]) -> None:
        self.store.begin(self.version)
        for kind, value in steps:
            if kind == "append":
                rows: list[tuple[int, Entry]] = value  # type: ignore[assignment]
                self.store.append(encode([e for _, e in rows], self.layout), np.array([w for w, _ in rows], np.int64))
                for window, entry in rows:
                    self.model.setdefault(window, []).append(entry)
            elif kind == "spill":
                for table in self.store.tables.values():
                    table.freeze(spool=True)
            else:
                self.store.drop(value)  # type: ignore[arg-type]
                self.model.pop(value, None)  # type: ignore[call-overload]
                self.deltas.pop(value, None)  # type: ignore[call-overload]
        self.check()
        readers = {window: self.store.read(window, size=100) for window in self.store.tables}
        sealed = self.store.seal()
        self.version += 1
        for window, delta in sealed.items():
            data = b"".join(bytes(piece) for piece in delta.pieces)
            commit = f"commits/{self.version}-{window}"
            self.files.put(commit, [b"header--!", data, b"tail"])
            self.deltas.setdefault(window, []).append((self.version, ByteRange(commit, 9, len(data))))
            if self.placed:
                self.store.tables[window].adopt_sealed(data)
        self.check()
        for window, reader in readers.items():
            assert [e for p in reader for e in decode(p, self.layout)] == by_hash(self.model[window])
        self._remember()

    def restart(self, version: int) -> None:
        manifests, deltas, model = copy.deepcopy(self.history[version])
        self.store.close()
        self.model, self.deltas, self.version = model, deltas, version
        del self.history[version + 1 :]
        self._open(manifests, deltas)
        self.check()

    def check(self) -> None:
        assert self.store.tables.keys() == self.model.keys()
        for window, want in self.model.items():
            assert self.read(window) == by_hash(want)
        every = [e for window in sorted(self.model) for e in self.model[window]]
        assert self.read(*sorted(self.model)) == by_hash(every)
        range_ = HashRange(1 << 62, 3 << 62)
        got = [e for piece in self.store.read(*self.model, range_=range_) for e in decode(piece, self.layout)]
        assert sorted(map(repr, got)) == sorted(repr(e) for e in every if range_.lo <= e.hash < range_.hi)
        assert self.store.stats()["keys"] == len(every)

    def read(self, *windows: int) -> list[Entry]:
        pieces = list(self.store.read(*windows, size=1))
        ends = [(int(p.words[0, 0]), int(p.words[-1, 0])) for p in pieces]
        assert all(before[1] < after[0] for before, after in pairwise(ends))
        return [e for piece in pieces for e in decode(piece, self.layout)]


def by_hash(rows: list[Entry]) -> list[Entry]:
    return sorted(rows, key=lambda entry: entry.hash)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[RowLayout, list[list[tuple[str, object]]]]:
    shape = draw(st.sampled_from([WORDS, BYTES]))
    hashes = st.integers(0, 3).map(lambda h: h << 62) | st.integers(0, 2**64 - 1)
    rows = st.lists(st.tuples(st.integers(-2, 3), entries(shape, hashes)), max_size=12)
    step = st.one_of(
        st.tuples(st.just("append"), rows),
        st.tuples(st.just("append"), rows),
        st.tuples(st.just("spill"), st.none()),
        st.tuples(st.just("drop"), st.integers(-2, 3)),
    )
    return shape, draw(st.lists(st.lists(step, max_size=5), min_size=1, max_size=7))


@settings(max_examples=60, deadline=None)
@given(scripts(), st.booleans(), st.sampled_from(["file", "memory"]), st.lists(st.integers(0, 7), max_size=3))
def test_windows_equal_lists(
    script: tuple[RowLayout, list[list[tuple[str, object]]]], placed: bool, where: str, restarts: list[int]
) -> None:
    shape, batches = script
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(aligned, "_MAX_SMALL_SEGMENTS", 3)
        patch.setattr(hash_intervals, "_MIN_INTERVAL_BYTES", 1)
        patch.setattr("millpond.files.formats.blocks.BLOCK_BYTES", 100)
        files = open_filesystem(f"{folder}/store" if where == "file" else f"memory:{folder}")
        rig = Rig(shape, files, folder, placed)
        for steps in batches:
            rig.batch(steps)
        for version in [*restarts, len(batches)]:
            if version <= rig.version:
                rig.restart(version)
                rig.batch(batches[-1])
        rig.store.close()
        rig.append_files.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as background:
        yield background


def test_a_row_is_written_once_unless_segments_are_many(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    files = open_filesystem(str(tmp_path / "store"))
    store = WindowTables(WORDS.schema, AppendFiles(files, str(tmp_path)), MemoryBudget(64 << 20), pool)
    for version in range(aligned._MAX_SMALL_SEGMENTS + 2):
        store.begin(version)
        assert bool(files.list("files/")) == (version > aligned._MAX_SMALL_SEGMENTS)
        store.append(random_rows(100, WORDS, version), np.zeros(100, np.int64))
        for window, delta in store.seal().items():
            store.tables[window].adopt_sealed(b"".join(bytes(piece) for piece in delta.pieces))
        assert store.stats()["hot_bytes"] < 200 * (version + 2)
        pool.submit(int).result()  # what was begun is done
    assert len(store.tables[0].manifest().runs) == 1
    assert store.tables[0].manifest().flushed == aligned._MAX_SMALL_SEGMENTS
    assert sum(piece.count for piece in store.read(0)) == 100 * len(store.tables[0].files) + 6300
    store.close()


def test_opening_reads_directories_only(tmp_path: Path) -> None:
    class Counting:
        def __init__(self, files: FileSystem) -> None:
            self.files, self.read = files, 0

        def __getattr__(self, name: str) -> object:
            return getattr(self.files, name)

        def get_ranges(self, name: str, ranges: list[tuple[int, int]]) -> list[object]:
            self.read += sum(length for _, length in ranges)
            return self.files.get_ranges(name, ranges)

    files = Counting(open_filesystem(f"memory:{tmp_path}"))
    append_files = AppendFiles(files, str(tmp_path))  # type: ignore[arg-type]
    store = WindowTables(WORDS.schema, append_files, MemoryBudget(256 << 20), Immediate())
    store.begin(0)
    store.append(random_rows(200_000, WORDS, 1), np.zeros(200_000, np.int64))
    (delta,) = store.seal().values()
    data = b"".join(bytes(piece) for piece in delta.pieces)
    files.files.put("commit", [data])
    store.close()
    again = WindowTables(WORDS.schema, append_files, MemoryBudget(256 << 20), Immediate())
    files.read = 0
    again.open(0, TableManifest(), [ByteRange("commit", 0, len(data))])
    assert files.read <= 65536 < len(data) // 20
    assert sum(p.count for p in again.read(0)) == 200_000
    again.close()


def test_a_shared_delta_counts_by_parts(tmp_path: Path) -> None:
    """After a rescale, each of several partitions has a part of a delta, which may be of several segments."""
    append_files = AppendFiles(open_filesystem(str(tmp_path / "store")), str(tmp_path))
    store = WindowTables(WORDS.schema, append_files, MemoryBudget(64 << 20), Immediate())
    store.begin(0)
    for seed in range(2):
        store.append(random_rows(50_000, WORDS, seed), np.zeros(50_000, np.int64))
        store.tables[0].freeze(spool=True)
    (delta,) = store.seal().values()
    size = store.stats()["bytes"]
    data = b"".join(bytes(piece) for piece in delta.pieces)
    append_files._files.put("commit", [data])
    store.close()
    halves = ((0, (1 << 63) - 1), (1 << 63, (1 << 64) - 1))
    for parts in ((None,), halves):
        total = 0
        for visible in parts:
            again = WindowTables(WORDS.schema, append_files, MemoryBudget(64 << 20), Immediate())
            again.open(0, TableManifest(), [ByteRange("commit", 0, len(data), visible)])
            total += again.stats()["bytes"]
            again.close()
        assert size <= total < 1.05 * size
    append_files.close()


@pytest.mark.parametrize("where", ["file", "memory"])
def test_damage_is_found(tmp_path: Path, where: str) -> None:
    files = open_filesystem(str(tmp_path / "store") if where == "file" else f"memory:{tmp_path}")
    append_files = AppendFiles(files, str(tmp_path))
    store = WindowTables(BYTES.schema, append_files, MemoryBudget(8 << 20), Immediate())
    store.begin(0)
    store.append(random_rows(3000, BYTES, 1), np.zeros(3000, np.int64))
    (delta,) = store.seal().values()
    data = b"".join(bytes(piece) for piece in delta.pieces)
    want = [e for p in store.read(0) for e in decode(p, BYTES)]

    def read(content: bytes) -> list[Entry]:
        files.put("commit", [content])
        again = WindowTables(BYTES.schema, append_files, MemoryBudget(8 << 20), Immediate())
        again.open(0, TableManifest(), [ByteRange("commit", 0, len(data))])
        return [e for p in again.read(0) for e in decode(p, BYTES)]

    assert read(data) == want
    for at in [*range(8, len(data), 997), len(data) - 1, len(data) - 30, len(data) - 200]:
        with pytest.raises(StateDamagedError, match="commit"):
            read(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    for size in (0, 10, len(data) // 2, len(data) - 1):
        with pytest.raises(StateDamagedError):
            read(data[:size])
    files.delete("commit")
    again = WindowTables(BYTES.schema, append_files, MemoryBudget(8 << 20), Immediate())
    with pytest.raises(StateDamagedError):
        again.open(0, TableManifest(), [ByteRange("commit", 0, len(data))])
    files.put("commit", [data])
    other = WindowTables(WORDS.schema, append_files, MemoryBudget(8 << 20), Immediate())
    with pytest.raises(StateIncompatibleError):
        other.open(0, TableManifest(), [ByteRange("commit", 0, len(data))])
    store.close()
    append_files.close()


_GRADUAL = """
import sys, tempfile
import numpy as np
from millpond.files.formats.append_file import ByteRange
from millpond.files.locations.opening import open_filesystem
from millpond.layout import Rows
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.memory.process_memory import anonymous_bytes, set_trim_threshold
from tests.stores.test_rmw_model import Immediate
from tests.stores.windows import WindowTables
from tests.support.rows import layout

shape = layout("w", "wb")
set_trim_threshold(1 << 17)
folder, budget, total = sys.argv[1], 8 << 20, 1_400_000

def rows(count, seed):
    rng = np.random.default_rng(seed)
    words = np.zeros((count, shape.width), np.uint64)
    words[:, 3] = rng.integers(0, 1 << 18, count)
    words[:, 0] = words[:, 3] * np.uint64(0x9E3779B97F4A7C15)
    words[:, 4] = np.arange(count)
    words[:, 5] = 20
    words[:, 6] = np.arange(count, dtype=np.uint64) * np.uint64(20)
    return Rows(words, rng.integers(97, 123, 20 * count, np.uint8))

def batch(store, version, count):
    store.begin(version)
    for at in range(0, count, 2000):
        store.append(rows(2000, version * 1000 + at), np.zeros(2000, np.int64))
    for window, delta in store.seal().items():
        with tempfile.TemporaryFile(dir=folder) as file:
            file.writelines(delta.pieces)
            file.flush()
            import mmap
            store.tables[window].adopt_sealed(memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)))

files = AppendFiles(open_filesystem(folder + "/store"), folder)
warm = WindowTables(shape.schema, files, MemoryBudget(budget), Immediate())
batch(warm, 0, 20_000)
list(warm.read(0))
warm.close()
store = WindowTables(shape.schema, files, MemoryBudget(budget), Immediate())
before, most = anonymous_bytes(), 0
for version in range(10):
    batch(store, version, total // 10)
    most = max(most, anonymous_bytes() - before)
seen, last, size = 0, -1, 0
for piece in store.read(0):
    assert int(piece.words[0, 0]) > last
    last = int(piece.words[-1, 0])
    seen += piece.count
    size += piece.words.nbytes + piece.heap.nbytes
    most = max(most, anonymous_bytes() - before)
assert seen == total and size > 10 * budget, (seen, size)
print(most, size)
"""


def test_a_window_of_ten_times_the_budget_is_read_within_it(tmp_path: Path) -> None:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", _GRADUAL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    most, size = map(int, done.stdout.split())
    assert size > 10 * (8 << 20)
    assert most < 12 << 20  # of which the window would be 92


def test_pieces_stay_small_but_for_a_hash_that_is_not(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    store = WindowTables(
        WORDS.schema, AppendFiles(open_filesystem(str(tmp_path)), str(tmp_path)), MemoryBudget(64 << 20), pool
    )
    store.begin(0)
    rows = random_rows(100_000, WORDS, 3)
    rows.words[:40_000, 0] = 1 << 63
    store.append(Rows(rows.words, rows.heap), np.zeros(100_000, np.int64))
    store.seal()
    sizes = sorted(piece.words.nbytes for piece in store.read(0, size=1 << 18))
    assert sizes[-1] >= 40_000 * 48
    assert sizes[-2] <= 2 << 18
    store.close()


def test_memory_that_a_window_releases_is_for_others(tmp_path: Path) -> None:
    """Without further rows, too: the account follows what was sealed, adopted and closed."""
    budget = MemoryBudget(64 << 20)
    append_files = AppendFiles(open_filesystem(str(tmp_path / "store")), str(tmp_path))
    store = WindowTables(WORDS.schema, append_files, budget, Immediate())
    (account,) = budget._accounts
    store.begin(0)
    store.append(random_rows(100_000, WORDS, 1), np.zeros(100_000, np.int64))
    appended = account.reserved
    (delta,) = store.seal().values()
    assert 0 < account.reserved < appended  # encoded
    store.tables[0].adopt_sealed(b"".join(bytes(piece) for piece in delta.pieces))
    assert 0 < account.reserved < appended // 10
    store.drop(0)
    assert account.reserved == 0
    store.close()
    append_files.close()


def test_copies_stay_until_the_window_has_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned, "_MAX_SMALL_SEGMENTS", 1)
    copies = LocalCache(str(tmp_path / "copies"), 1 << 30)
    append_files = AppendFiles(open_filesystem(f"memory:{tmp_path}"), str(tmp_path), copies=copies)

    def open_store() -> WindowTables:
        return WindowTables(WORDS.schema, append_files, MemoryBudget(8 << 20), Immediate())

    store = open_store()
    store.begin(0)
    store.append(random_rows(100, WORDS, 1), np.zeros(100, np.int64))
    store.seal()
    store.begin(1)  # begins the merge
    store.begin(2)
    manifest = store.tables[0].manifest()
    (ref,) = manifest.runs
    store.close()
    assert copies.has(ref.name)
    again = open_store()
    again.open(0, manifest)
    again.drop(0)
    assert not copies.has(ref.name)
    again.close()
    append_files.close()


def test_a_merge_that_keeps_failing_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned, "_MAX_SMALL_SEGMENTS", 1)
    append_files = AppendFiles(open_filesystem(str(tmp_path / "store")), str(tmp_path))
    store = WindowTables(WORDS.schema, append_files, MemoryBudget(8 << 20), Immediate())
    fail = Mock(side_effect=TransientError("the store is away"))
    monkeypatch.setattr(append_files, "write", fail)
    store.begin(0)
    store.append(random_rows(10, WORDS, 1), np.zeros(10, np.int64))
    store.seal()
    for version in range(1, 6):  # a try each, the first of which is taken over by the second batch
        store.begin(version)
        store.seal()
    with pytest.raises(TransientError, match="away"):
        store.begin(6)
    assert fail.call_count == 5
    store.close()
    append_files.close()
