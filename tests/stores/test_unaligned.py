"""The unaligned append store against lists, over segments, compactions and restarts at every version."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.errors import SettingError, StateDamagedError, TransientError, UsageError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.formats.segment import decode_rows
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import TableManifest
from millpond.layout import HashRange, RowLayout, Rows
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.table_resources import TableResources
from millpond.stores.unaligned import batch_read, compaction
from millpond.stores.unaligned import log as window_log
from millpond.stores.unaligned import segment as log_segment
from millpond.stores.unaligned import table as unaligned
from millpond.stores.unaligned.table import UnalignedTable
from tests.stores.test_rmw_model import Immediate, Later
from tests.support.rows import Entry, decode, encode, layout

WORDS = layout("ww", "ww")
BYTES = layout("wbw", "bw")
Name = tuple[int, int]  # hash and initial window


@dataclass
class Append:
    rows: list[tuple[Entry, int]]


@dataclass
class Take:
    """Some of the windows that are open, by their place in order, and one that is not."""

    picks: list[int]
    again: bool


@dataclass
class Freeze:
    pass


@dataclass
class Evict:
    pass


@dataclass
class Rig:
    """A table beside a dictionary of lists."""

    layout: RowLayout
    files: FileSystem
    local: str
    ratio: float
    model: dict[Name, list[Entry]] = field(default_factory=dict)
    version: int = 0
    log: list[tuple[int, bytes]] = field(default_factory=list)
    history: list[tuple[TableManifest, dict[Name, list[Entry]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.append_files = AppendFiles(self.files, self.local)
        self.table = self._open(TableManifest())
        self.history.append((self.table.manifest(), {}))

    def _open(self, manifest: TableManifest) -> UnalignedTable:
        return UnalignedTable(
            self.layout.schema,
            self.append_files,
            TableResources(MemoryBudget(8 << 20), Immediate()),
            manifest,
            directory=self.local,
            read_batch_ratio=self.ratio,
        )

    def name(self, entry: Entry) -> Name:
        window = entry.key[-1]
        assert isinstance(window, int)
        return entry.hash, window

    def append(self, rows: list[tuple[Entry, int]]) -> None:
        times = np.array([time for _, time in rows], np.int64)
        self.table.append(encode([entry for entry, _ in rows], self.layout), times)
        for entry, _ in rows:
            self.model.setdefault(self.name(entry), []).append(plain(entry))

    def take(self, names: list[Name]) -> list[Entry]:
        hashes = np.array([h for h, _ in names], np.uint64)
        pieces = list(self.table.take(hashes, np.array([w for _, w in names], np.uint64).view(np.int64)))
        found = [plain(entry) for piece in pieces for entry in decode(piece, self.layout)]
        want = [entry for name in names for entry in self.model.pop(name, [])]
        assert found == want
        return found

    def batch(self, steps: list[Append | Take | Freeze | Evict]) -> None:
        table = self.table
        table.begin(self.version)
        for step in steps:
            if isinstance(step, Append) and step.rows:
                self.append(step.rows)
            elif isinstance(step, Take):
                open_ = sorted(self.model)
                names = list(dict.fromkeys(open_[pick % len(open_)] for pick in step.picks)) if open_ else []
                taken = self.take([*names, (77, 77)])
                if step.again and taken:
                    self.append([(entry, 3) for entry in taken[: len(taken) // 2 + 1]])
            elif isinstance(step, Freeze):
                table._freeze()
            elif isinstance(step, Evict):
                table._evict()
        delta = table.seal()
        data = b"".join(bytes(piece) for piece in delta.pieces)
        assert sum(rows.count for rows in decode_rows(data, self.layout, "delta")) == delta.rows
        self.version += 1
        self.log.append((self.version, data))
        self.history.append((table.manifest(), copy.deepcopy(self.model)))
        assert table.stats()["keys"] == len(self.model)
        assert table._segments.live_rows <= sum(map(len, self.model.values()))

    def restart(self, version: int) -> None:
        manifest, model = self.history[version]
        self.table.close()
        self.table = self._open(manifest)
        self.model, self.version = copy.deepcopy(model), version
        del self.history[version + 1 :]
        self.log = [(number, data) for number, data in self.log if number <= version]
        for number, data in self.log:
            if number > manifest.flushed:
                for rows in decode_rows(data, self.layout, "delta"):
                    self.table.load(rows)
        assert self.table.stats()["keys"] == len(self.model)


def plain(entry: Entry) -> Entry:
    return Entry(entry.hash, entry.key, entry.value)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[RowLayout, list[list[object]]]:
    shape = draw(st.sampled_from([WORDS, BYTES]))
    words = st.integers(0, 2**64 - 1)
    blobs = st.none() | st.binary(max_size=30)
    if shape is WORDS:
        entry = st.builds(
            lambda h, k, w, v: Entry(h, (k, w), v),
            *(st.integers(0, 3), st.integers(0, 1), st.integers(0, 3), st.tuples(words, words)),
        )
    else:
        keys = st.sampled_from([b"", b"k" * 12, b"k" * 13])
        entry = st.builds(
            lambda h, b, w, v: Entry(h << 60, (5, b, w), v),
            *(st.integers(0, 3), keys, st.integers(0, 3), st.tuples(blobs, words)),
        )
    rows = st.lists(st.tuples(entry, st.integers(-5, 100)), max_size=20)
    step = (
        st.builds(Append, rows)
        | st.builds(Append, rows)
        | st.builds(Take, st.lists(st.integers(0, 30), max_size=6), st.booleans())
        | st.builds(Freeze)
        | st.builds(Evict)
    )
    return shape, draw(st.lists(st.lists(step, max_size=6), min_size=1, max_size=8))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything small, so that a few rows make many blocks, segments and compactions."""
    shrink(monkeypatch)


def shrink(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(window_log, "_MIN_OUTDATED_BYTES", 1)
    patch.setattr(unaligned, "_CHUNK_ROWS", 5)
    patch.setattr(batch_read, "_BLOCKS_PER_PART", 2)
    patch.setattr(log_segment, "_BLOCKS_PER_READ", 2)
    patch.setattr("millpond.files.formats.blocks.BLOCK_BYTES", 100)


@settings(max_examples=150, deadline=None)
@given(
    scripts(),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from(["file", "memory"]),
    st.lists(st.integers(0, 8), max_size=3),
)
def test_a_table_equals_lists(
    script: tuple[RowLayout, list[list[object]]], ratio: float, where: str, restarts: list[int]
) -> None:
    shape, batches = script
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        files = open_filesystem(f"{folder}/store" if where == "file" else f"memory:{folder}")
        rig = Rig(shape, files, folder, ratio)
        for steps in batches:
            rig.batch(steps)
        for version in [*restarts, *range(len(batches), -1, -1)]:
            if version < len(rig.history):
                rig.restart(version)
                if version in restarts:
                    rig.batch(batches[-1])
        for number in range(len(rig.history) - 1, -1, -1):
            rig.restart(number)
            rig.table.begin(number)
            rig.take(sorted(rig.model))
            rig.table.seal()
        rig.table.close()
        rig.append_files.close()


def test_long_values_are_known_after_a_restart(tmp_path: Path) -> None:
    """How much is read at once goes by the bytes of a row."""
    rng = np.random.default_rng(1)
    rig = Rig(BYTES, open_filesystem(f"memory:{tmp_path}"), str(tmp_path), 0.3)
    rows = [(Entry(h << 60, (5, b"k", h), (rng.bytes(2000), 1)), 50) for h in range(4) for _ in range(5)]
    rig.batch([Append(rows), Freeze()])
    rig.batch([])  # takes over the segment, which is durable
    rig.restart(2)
    assert rig.table._segments.rows == len(rows)
    assert 2000 < rig.table._segments.row_bytes < 10_000
    rig.table.close()
    rig.append_files.close()


# Sessions

WIDE = layout("ww", "wwww")


def rows_of(keys: np.ndarray, windows: np.ndarray, values: np.ndarray) -> Rows:
    words = np.zeros((len(keys), WIDE.width), np.uint64)
    words[:, 3] = keys
    words[:, 0] = words[:, 3] * np.uint64(0x9E3779B97F4A7C15)
    words[:, 4] = windows
    words[:, 5] = values
    words[:, 6:9] = words[:, 5:6] * np.uint64(7)
    return Rows(words, np.empty(0, np.uint8))


@dataclass
class Sessions:
    """Keys that are active for a while and then idle for longer than the gap; each batch is a step of event time."""

    table: UnalignedTable
    keys: int
    active: int = 300  # batches that a key is active for, on average
    often: float = 0.05  # share of them in which it has a row
    gap: int = 30_000  # ms; batches are 100 ms

    def run(self, batches: int) -> None:
        rng = np.random.default_rng(17)
        starts = rng.integers(0, batches, self.keys)  # batch in which each key's one session begins
        length = rng.integers(1, 2 * self.active, self.keys)
        last = starts + length
        expected = np.zeros(self.keys, np.int64)
        for version in range(batches + 2 * self.active + self.gap // 100 + 2):
            self.table.begin(version)
            running = np.flatnonzero((starts <= version) & (version <= last))
            if version < last.max():
                # The last row of a session comes in its last batch, others in some of those before.
                running = running[(rng.random(len(running)) < self.often) | (last[running] == version)]
            expected[running] += 1
            now = version * 100
            self.table.append(
                rows_of(running, starts[running], np.full(len(running), version)),
                np.full(len(running), now + self.gap),
            )
            closed = np.flatnonzero(last * 100 + self.gap == now)
            hashes = closed.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            got = np.zeros(self.keys, np.int64)
            for piece in self.table.take(hashes, starts[closed]):
                np.add.at(got, piece.words[:, 3].astype(np.int64), 1)
            assert (got[closed] == expected[closed]).all()
            assert got.sum() == expected[closed].sum()
            self.table.seal()
        assert self.table.stats()["keys"] == 0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as background:
        yield background


def session_table(files: FileSystem, local: Path, pool: ThreadPoolExecutor, **options: object) -> UnalignedTable:
    settings_: dict[str, object] = {"write_buffer": 1 << 20, **options}
    append_files = AppendFiles(files, str(local))
    return UnalignedTable(
        WIDE.schema, append_files, TableResources(MemoryBudget(64 << 20), pool), directory=str(local), **settings_
    )


def test_predictions_hit(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    table = session_table(open_filesystem(str(tmp_path / "store")), tmp_path, pool)
    Sessions(table, 30_000, 500, often=0.03, gap=50_000).run(1500)
    stats = table.stats()
    assert stats["prefetch_hits"] + stats["prefetch_misses"] > 25_000
    assert stats["prefetch_hit_ratio"] >= 0.93
    assert stats["read_amplification"] < 1.3
    assert stats["compactions"] > 0
    table.close()


def test_without_prediction_nothing_hits(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    table = session_table(open_filesystem(str(tmp_path / "store")), tmp_path, pool, read_batch_ratio=0.0)
    Sessions(table, 5_000, 50, gap=5000).run(200)
    stats = table.stats()
    assert stats["prefetch_hits"] == 0 < stats["prefetch_misses"]
    table.close()


@pytest.mark.parametrize("where", ["disk", "remote"])
def test_prediction_reads_seldom(where: str, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Its gain with cold reads is measured by `benchmarks.studies.append_stores`."""
    reads = {}
    for ratio in (0.0, 0.04):
        folder = tmp_path / str(ratio)
        folder.mkdir()
        url = str(folder / "store") if where == "disk" else f"faults+memory:{folder}"
        table = session_table(open_filesystem(url), folder, pool, read_batch_ratio=ratio, write_buffer=1 << 18)
        Sessions(table, 2000, 120, gap=12_000).run(150)
        reads[ratio] = table.stats()["batch_reads"]
        table.close()
    assert reads[0.0] > 2.5 * reads[0.04], reads


def test_a_state_of_ten_times_the_memory(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    budget = 4 << 20
    files = AppendFiles(open_filesystem(str(tmp_path / "store")), str(tmp_path))
    table = UnalignedTable(WIDE.schema, files, TableResources(MemoryBudget(budget), pool), directory=str(tmp_path))
    keys, seen = np.repeat(np.arange(1000), 8), 0
    for version in range(70):
        table.begin(version)
        table.append(rows_of(keys, keys, np.full(len(keys), version)), 100 + keys)
        assert table.stats()["hot_bytes"] <= budget
        table.seal()
    assert table._segments.rows * 72 > 9 * budget
    table.begin(70)
    for part in np.array_split(np.arange(1000), 50):
        for piece in table.take(part.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), part):
            assert table.stats()["hot_bytes"] <= budget
            values = piece.words[:, 5].reshape(-1, 70, 8)
            assert (values == np.arange(70)[:, None]).all()
            seen += piece.count
    assert seen == 8000 * 70
    table.seal()
    table.close()


def test_windows_that_outgrow_memory_are_an_error(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    files = AppendFiles(open_filesystem(str(tmp_path / "store")), str(tmp_path))
    table = UnalignedTable(WIDE.schema, files, TableResources(MemoryBudget(1 << 20), pool), directory=str(tmp_path))
    table.begin(0)
    keys = np.arange(100_000)
    rows = rows_of(keys, keys, keys)
    with pytest.raises(SettingError, match=r"slot\.memory"):
        table.append(rows, keys)


def test_damage_is_found(tmp_path: Path, tiny: None) -> None:
    files = open_filesystem(str(tmp_path / "store"))
    append_files = AppendFiles(files, str(tmp_path))
    budget = MemoryBudget(8 << 20)

    def open_table(manifest: TableManifest) -> UnalignedTable:
        return UnalignedTable(
            WIDE.schema, append_files, TableResources(budget, Immediate()), manifest, directory=str(tmp_path)
        )

    table = open_table(TableManifest())
    table.begin(0)
    keys = np.arange(100)
    table.append(rows_of(keys, keys, keys), keys)
    table._freeze()
    table.seal()
    table.begin(1)
    table.seal()
    manifest = table.manifest()
    (ref,) = manifest.runs
    assert (manifest.flushed, manifest.skip) == (0, 100)

    def read() -> int:
        again = open_table(manifest)
        try:
            again.begin(1)
            return sum(rows.count for rows in again.take(keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), keys))
        finally:
            again.close()

    assert read() == 100
    path = tmp_path / "store" / ref.name
    data = path.read_bytes()
    for at in [*range(8, len(data), 499), len(data) - 1, len(data) - 30]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(StateDamagedError, match=ref.name.split("/")[1]):
            read()
    for size in (0, 100, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(StateDamagedError):
            read()
    path.unlink()
    with pytest.raises(StateDamagedError):
        read()
    assert budget._accounts == [table._account]  # what was not opened takes no share of the memory


def test_a_failure_to_write_is_raised_between_batches(tmp_path: Path) -> None:
    files = open_filesystem(f"memory:{tmp_path}")

    class Failing:
        def __getattr__(self, name: str) -> object:
            return getattr(files, name)

        def put(self, *args: object, **kwargs: object) -> None:
            raise TransientError("the store is away")

    append_files = AppendFiles(Failing(), str(tmp_path))  # type: ignore[arg-type]
    table = UnalignedTable(
        WIDE.schema, append_files, TableResources(MemoryBudget(8 << 20), Immediate()), directory=str(tmp_path)
    )
    table.begin(0)
    table.append(rows_of(np.arange(10), np.arange(10), np.arange(10)), np.arange(10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millpond.files.backends.retry._FIRST_PAUSE_SECONDS", 0.0)
        table._freeze()
    table.seal()
    assert table.manifest().runs == ()
    with pytest.raises(TransientError, match="away"):
        table.begin(1)


def test_an_unsealed_batch_and_a_window_that_is_no_word_are_refused(tmp_path: Path) -> None:
    files = AppendFiles(open_filesystem(str(tmp_path / "store")), str(tmp_path))
    table = UnalignedTable(
        WIDE.schema, files, TableResources(MemoryBudget(8 << 20), Immediate()), directory=str(tmp_path)
    )
    table.begin(0)
    with pytest.raises(UsageError, match="not sealed"):
        table.begin(1)
    with pytest.raises(UsageError, match="word"):
        UnalignedTable(
            layout("wb", "w").schema, files, TableResources(MemoryBudget(8 << 20), Immediate()), directory=str(tmp_path)
        )


def test_compaction_keeps_what_is_open(tmp_path: Path, tiny: None) -> None:
    rig = Rig(WORDS, open_filesystem(str(tmp_path / "store")), str(tmp_path), 0.1)
    rng = np.random.default_rng(3)
    folds = 0
    for number in range(60):
        rows = [
            (Entry(int(k) << 32, (int(k), int(k)), (number, i)), int(k) * 10 + number)
            for i, k in enumerate(rng.integers(0, 40, 30))
        ]
        picks = rng.integers(0, 40, 6).tolist()
        rig.batch([Append(rows), Freeze(), Take(picks, number % 3 == 0)])
        folds += rig.table.stats()["compactions"]
        if number % 7 == 0:
            rig.restart(rig.version)
    assert folds > 10
    assert rig.table._segments.rows <= 2 * sum(map(len, rig.model.values())) + 60
    rig.table.begin(rig.version)
    rig.take(sorted(rig.model))


def test_a_compaction_that_keeps_failing_is_raised(tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(WORDS, open_filesystem(str(tmp_path / "store")), str(tmp_path), 0.0)
    fail = Mock(side_effect=TransientError("the store is away"))
    monkeypatch.setattr(window_log, "compact", fail)
    rig.batch([Append([(Entry(k << 32, (k, k), (1, 2)), k) for k in range(40)]), Freeze()])
    rig.batch([Take(list(range(30)), False)])
    for _ in range(5):  # a try each, the first of which is taken over by the second batch
        rig.batch([])
    with pytest.raises(TransientError, match="away"):
        rig.batch([])
    assert fail.call_count == 5
    rig.table.close()
    rig.append_files.close()


def test_a_compaction_makes_no_segment_with_more_rows_than_its_index_can_number(
    tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_log, "MAX_SEGMENT_ROWS", 50, raising=False)
    monkeypatch.setattr(compaction, "MAX_SEGMENT_ROWS", 50, raising=False)
    sizes = []
    inner = compaction.compact

    def watched(*arguments: object) -> object:
        made = inner(*arguments)
        sizes.append(made[0].rows)
        return made

    monkeypatch.setattr(window_log, "compact", watched)
    rig = Rig(WORDS, open_filesystem(str(tmp_path / "store")), str(tmp_path), 0.1)
    for number in range(8):
        rows = [(Entry(k << 32, (k, k), (number, k)), k) for k in range(number * 20, number * 20 + 20)]
        rig.batch([Append(rows), Freeze()])
    for _ in range(8):
        rig.batch([Take([0, 19, 38, 57, 76, 95, 114, 120, 122], False)])
    assert sizes
    assert max(sizes) <= 50
    rig.restart(rig.version)
    rig.table.begin(rig.version)
    rig.take(sorted(rig.model))
    rig.table.seal()
    rig.table.close()
    rig.append_files.close()


def test_a_segment_without_outdated_rows_is_not_copied(
    tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_log, "MAX_SEGMENT_ROWS", 30, raising=False)
    rig = Rig(WORDS, open_filesystem(str(tmp_path / "store")), str(tmp_path), 0.0)
    for first in (0, 20):
        rows = [(Entry(k << 32, (k, k), (1, k)), k) for k in range(first, first + 20)]
        rig.batch([Append(rows), Freeze()])
    rig.batch([])
    monkeypatch.setattr(window_log, "_MAX_SEGMENTS", 0)
    log = rig.table._segments
    log.compact({segment.seq: [(np.ones(20, np.uint8), 20)] for segment in log.segments})
    assert not log._compaction.running
    rig.table.close()
    rig.append_files.close()


def test_a_compaction_of_too_many_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = compaction.CompactionInput(Mock(), np.ones(1, np.uint8), 1 << 31)
    with pytest.raises(AssertionError, match="4294967296 rows"):
        compaction.compact(Mock(), [source, source], WORDS, "", 1, Mock())


@pytest.mark.parametrize("kept", [0, 1, 100])
def test_segments_do_not_pile_up(tmp_path: Path, kept: int) -> None:
    """Though each holds next to nothing: `kept` batches after its rows have come, a window is taken."""
    files = AppendFiles(open_filesystem(str(tmp_path / "store")), str(tmp_path))
    table = UnalignedTable(
        WIDE.schema, files, TableResources(MemoryBudget(8 << 20), Immediate()), directory=str(tmp_path)
    )
    seen = 0
    for version in range(64 * 150):
        table.begin(version)
        new, old = np.array([version]), np.array([version - kept])
        table.append(rows_of(new, new, new), new)
        if version >= kept:
            seen += sum(rows.count for rows in table.take(old.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), old))
        table.seal()
    assert seen == 64 * 150 - kept
    assert table.stats()["keys"] == kept
    assert len(table.manifest().runs) <= 66
    table.close()


def test_a_reader_compacts_nothing(
    source: tuple[AppendFiles, UnalignedTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, table = source
    keys = np.arange(10)
    for version in range(4):
        table.begin(version)
        table.append(appended(keys, version, 0), keys)
        table._freeze()
        table.seal()
    table.begin(4)
    table.seal()
    manifest = table.manifest()
    assert len(manifest.runs) == 4
    monkeypatch.setattr(window_log, "_MAX_SEGMENTS", 2)
    background = Later()
    resources = TableResources(MemoryBudget(64 << 20), background)
    reader = UnalignedTable(WIDE.schema, files, resources, manifest, directory=str(tmp_path), writable=False)
    assert sum(rows.count for rows in reader.scan()) == 40
    assert not background.waiting
    reader.close()


def appended(keys: np.ndarray, window: int, first: int) -> Rows:
    """A row for each key, in one window, with values from `first` on."""
    return rows_of(keys, np.full(len(keys), window), first + np.arange(len(keys)))


def reopened(files: AppendFiles, local: Path, deltas: list[tuple[bytes, HashRange]], budget: int) -> tuple[int, int]:
    """Rows that a table with little memory has loaded, and those of one opened on what it left a batch later."""

    def open_on(manifest: TableManifest, budget: int, behind: list[tuple[bytes, HashRange]]) -> UnalignedTable:
        table = UnalignedTable(
            WIDE.schema, files, TableResources(MemoryBudget(budget), Immediate()), manifest, directory=str(local)
        )
        for data, window in behind:
            for rows in decode_rows(data, WIDE, "a delta"):
                table.load(rows, window)
        return table

    table = open_on(TableManifest(), budget, deltas)
    before = sum(rows.count for rows in table.scan())
    table.begin(len(deltas))
    last = b"".join(memoryview(piece).cast("B") for piece in table.seal().pieces)
    manifest = table.manifest()
    assert manifest.runs
    assert manifest.flushed == 0
    table.close()
    again = open_on(manifest, 512 << 20, [*deltas, (last, HashRange())])
    after = sum(rows.count for rows in again.scan())
    again.close()
    return before, after


@pytest.fixture
def source(tmp_path: Path) -> Iterator[tuple[AppendFiles, UnalignedTable]]:
    files = AppendFiles(open_filesystem(f"memory:{tmp_path}"), str(tmp_path))
    table = UnalignedTable(
        WIDE.schema, files, TableResources(MemoryBudget(512 << 20), Immediate()), directory=str(tmp_path)
    )
    yield files, table
    table.close()
    files.close()


def test_rows_of_other_partitions_cover_none_of_its_own(source: tuple, tmp_path: Path) -> None:
    """They lie between its own in the deltas, and are left out where segments are written while deltas are loaded."""
    files, table = source
    rows = appended(np.random.default_rng(1).integers(0, 500, 200_000, np.uint64), 1, 0)
    hashes = rows.words[:, 0].copy()
    table.begin(0)
    table.append(rows, np.full(rows.count, 5))
    delta = b"".join(memoryview(piece).cast("B") for piece in table.seal().pieces)
    for half in (HashRange(0, 1 << 63), HashRange(1 << 63)):
        wanted = int(half.covers(hashes).sum())
        assert reopened(files, tmp_path, [(delta, half)], 8 << 20) == (wanted, wanted)


def test_what_has_come_and_gone_is_covered_once(source: tuple, tmp_path: Path) -> None:
    files, table = source
    numbers = np.random.default_rng(2)
    gone, kept = numbers.integers(0, 1 << 64, 100, np.uint64), numbers.integers(0, 1 << 64, 100, np.uint64)
    deltas = []

    def seal() -> None:
        deltas.append((b"".join(memoryview(piece).cast("B") for piece in table.seal().pieces), HashRange()))

    table.begin(0)
    table.append(appended(np.resize(gone, 8192), 1, 0), np.full(8192, 5))
    seal()
    table.begin(1)
    assert sum(rows.count for rows in table.take(appended(gone, 1, 0).words[:, 0], np.full(len(gone), 1))) == 8192
    seal()
    table.begin(2)
    table.append(appended(np.resize(kept, 200_000), 2, 8192), np.full(200_000, 5))
    seal()
    assert reopened(files, tmp_path, deltas, 8 << 20) == (200_000, 200_000)


def test_a_shared_segment_counts_by_parts(source: tuple[AppendFiles, UnalignedTable], tmp_path: Path) -> None:
    """After a rescale, each of several partitions has a part of one segment."""
    files, table = source
    keys = np.random.default_rng(3).integers(0, 1 << 62, 20_000, np.uint64)
    table.begin(0)
    table.append(appended(keys, 1, 0), np.full(len(keys), 5))
    table._freeze()
    table.seal()
    table.begin(1)
    table.seal()
    (ref,) = table.manifest().runs
    sizes = []
    for visible in ((0, (1 << 62) - 1), (1 << 62, (1 << 64) - 1)):
        shared = TableManifest((msgspec.structs.replace(ref, visible=visible),), 1)
        resources = TableResources(MemoryBudget(64 << 20), Immediate())
        part = UnalignedTable(WIDE.schema, files, resources, shared, directory=str(tmp_path), writable=False)
        stats = part.stats()
        sizes.append(stats["bytes"] - stats["hot_bytes"])
        part.close()
    assert 0 <= sum(sizes) - ref.bytes <= 1
    assert 2 * sizes[0] < sizes[1]
