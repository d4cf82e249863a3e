"""The unaligned append store against lists, over segments, compactions and restarts at every version."""

import copy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.errors import SettingError, StateDamagedError, TransientError, UsageError
from millpond.files.filesystem import FileSystem, open_filesystem
from millpond.files.refs import TableManifest
from millpond.files.segment import decode_rows
from millpond.layout import RowLayout, Rows
from millpond.stores import fold, log_segment, unaligned
from millpond.stores.append_files import AppendFiles
from millpond.stores.budget import MemoryBudget
from millpond.stores.unaligned import UnalignedTable
from tests.rows import Entry, decode, encode, layout
from tests.stores.test_rmw_model import Immediate

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
            MemoryBudget(8 << 20),
            Immediate(),
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
        stats = table.stats()
        assert stats["keys"] == len(self.model)
        assert stats["live_rows"] <= sum(map(len, self.model.values()))

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
    patch.setattr(unaligned, "_LEAST_OUTDATED", 1)
    patch.setattr(unaligned, "_CHUNK", 5)
    patch.setattr(unaligned, "_BLOCKS", 2)
    patch.setattr(log_segment, "_GROUP", 2)
    patch.setattr("millpond.files.blocks.BLOCK_BYTES", 100)


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
    active: int  # batches that a key is active for
    gap: int = 1000  # ms, and batches are 100 ms
    total: int = 0
    seconds: float = 0.0

    def run(self, batches: int, *, first: int = 0, before_take: object = None) -> None:
        rng = np.random.default_rng(17)
        starts = rng.integers(0, batches, self.keys)  # batch in which each key's one session begins
        length = rng.integers(1, 2 * self.active, self.keys)
        last = starts + length
        expected = np.zeros(self.keys, np.int64)
        for version in range(first, first + batches + 2 * self.active + self.gap // 100 + 2):
            self.table.begin(version)
            running = np.flatnonzero((starts <= version) & (version <= last))
            if version < last.max():
                # The last row of a session comes in its last batch, others in half of them.
                running = running[(rng.random(len(running)) < 0.5) | (last[running] == version)]
            expected[running] += 1
            now = version * 100
            self.table.append(
                rows_of(running, starts[running], np.full(len(running), version)),
                np.full(len(running), now + self.gap),
            )
            closed = np.flatnonzero(last * 100 + self.gap == now)
            if before_take is not None:
                before_take()  # type: ignore[operator]
            started = time.perf_counter()
            hashes = closed.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            got = np.zeros(self.keys, np.int64)
            for piece in self.table.take(hashes, starts[closed]):
                np.add.at(got, piece.words[:, 3].astype(np.int64), 1)
                self.total += piece.count
            self.seconds += time.perf_counter() - started
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
        WIDE.schema,
        append_files,
        MemoryBudget(64 << 20),
        pool,
        directory=str(local),
        **settings_,  # type: ignore[arg-type]
    )


def test_predictions_hit(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    table = session_table(open_filesystem(str(tmp_path / "store")), tmp_path, pool)
    Sessions(table, 60_000, 100).run(600)
    stats = table.stats()
    assert stats["prefetch_hits"] + stats["prefetch_misses"] > 50_000
    assert stats["prefetch_hit_ratio"] >= 0.93
    assert stats["read_amplification"] < 1.3
    assert stats["compactions"] > 0
    table.close()


def test_without_prediction_nothing_hits(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    table = session_table(open_filesystem(str(tmp_path / "store")), tmp_path, pool, read_batch_ratio=0.0)
    Sessions(table, 10_000, 50).run(200)
    stats = table.stats()
    assert stats["prefetch_hits"] == 0 < stats["prefetch_misses"]
    table.close()
