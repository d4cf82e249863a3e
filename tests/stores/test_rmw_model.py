"""The read-modify-write table against a dictionary."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.files.formats.segment import decode_rows
from millpond.kernels.hot_table.upsert import TOUCH_NONE
from millpond.layout import NULLS, HashRange, RowLayout, Rows
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.policy import Policy
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from tests.stores.shelf import Shelf
from tests.support.rows import Entry, Value, decode, encode, layout, values

WORDS = layout("w", "www")
BYTES = layout("wb", "bwb")
WIDE = layout("db", "w" * 70 + "bd")


class Immediate(Executor):
    """Does what is submitted at once, in the same thread."""

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Later(Immediate):
    """Does what is submitted in a thread of its own, some time; or all of it now."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def submit(self, fn, /, *args, **kwargs):
        self.waiting.append(lambda: fn(*args, **kwargs))
        return Future()

    def work(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


@dataclass
class Upsert:
    keys: list[tuple[Value, ...]]
    values: list[tuple[Value, ...]]
    touch: str
    stamp: int
    ahead: bool


@dataclass
class Passes:
    """Keys that come range by range of the hash, as those of a batch larger than memory."""

    whole: Upsert
    cuts: set[int]


@dataclass
class Remove:
    keys: list[tuple[Value, ...]]


@dataclass
class Evict:
    share: float


@dataclass
class Flush:
    pass


@dataclass
class Announce:
    """Hints: of keys that come, or do not, in this batch, the next one, or one that is over."""

    keys: list[tuple[Value, ...]]
    stamp: int
    later: int


@dataclass
class Read:
    """Step: the reads of prefetch hints are done."""


@dataclass
class Recover:
    pass


@dataclass
class Rig:
    """A table beside the dictionary that it should equal."""

    layout: RowLayout
    hashes: str
    folder: Path
    policy: Policy = "timestamp"
    state: dict[tuple[int, tuple[Value, ...]], tuple[Value, ...]] = field(default_factory=dict)
    log: list[tuple[int, bytes]] = field(default_factory=list)
    version: int = 0

    def __post_init__(self) -> None:
        self.shelf = Shelf(self.folder)
        self.readers = Later()
        self.table = self._open(RunSet(self.layout), 0)

    def _open(self, runs: RunSet, flushed: int, keys: int = 0) -> RmwTable:
        return RmwTable(
            self.layout.schema,
            np.zeros(self.layout.width, np.uint64),
            runs,
            TableResources(MemoryBudget(4 << 20), Immediate(), readers=self.readers),
            HashRange(),
            store=self.shelf,
            policy=self.policy,
            flushed=flushed,
            keys=keys,
        )

    def prefetch(self, step: Announce) -> None:
        hashes = np.array([self.hash(key) for key in step.keys], np.uint64)
        self.table.prefetch(hashes, step.stamp, self.version + step.later)

    def hash(self, key: tuple[Value, ...]) -> int:
        number = int.from_bytes(repr(key).encode()[-16:], "big") * 0x9E3779B97F4A7C15 % 2**64
        ends = (number & 1) * (2**64 - 1)
        return {"top": number >> 56 << 56, "low": number >> 56, "one": 7, "full": number, "ends": ends}[self.hashes]

    def upsert(self, step: Upsert) -> set[tuple[int, tuple[Value, ...]]]:
        table, names = self.table, [(self.hash(key), key) for key in step.keys]
        blank = (None,) * len(self.layout.schema.values)
        keys = encode((Entry(h, key, blank) for h, key in names), self.layout)
        if step.ahead and not table._memory.complete:
            table._lookup.upsert(keys, step.stamp, TOUCH_NONE)
            table._memory.expect_present(len(names))
        located = table.upsert(keys, step.stamp, step.touch)
        fresh = []
        seen = set(self.state)
        for name in names:
            fresh.append(name not in seen)
            seen.add(name)
        assert located.created.tolist() == fresh
        chosen = [i for i in range(len(names)) if step.touch == "all" or fresh[i]]
        self._write(located.rows[chosen], [step.values[i] for i in chosen])
        self.state |= {names[i]: step.values[i] for i in chosen}
        return {names[i] for i in chosen}

    def passes(self, step: Passes) -> set[tuple[int, tuple[Value, ...]]]:
        whole, changed = step.whole, set()
        bounds = sorted({0, 2**64, *step.cuts})
        for range_ in map(HashRange, bounds, bounds[1:]):
            inside = [i for i, key in enumerate(whole.keys) if range_.lo <= self.hash(key) < range_.hi]
            self.table.restrict(range_)
            keys, lines = [whole.keys[i] for i in inside], [whole.values[i] for i in inside]
            if keys:
                changed |= self.upsert(Upsert(keys, lines, whole.touch, whole.stamp, whole.ahead))
        self.table.restrict(HashRange())
        return changed

    def remove(self, step: Remove) -> set[tuple[int, tuple[Value, ...]]]:
        names = [(self.hash(key), key) for key in step.keys]
        blank = (None,) * len(self.layout.schema.values)
        keys = encode((Entry(h, key, blank) for h, key in names), self.layout)
        located = self.table.upsert(keys, 0, "created")
        assert located.created.tolist() == [
            name not in self.state and name not in names[:i] for i, name in enumerate(names)
        ]
        self.table.remove(located.rows)
        for name in names:
            self.state.pop(name, None)
        return set(names)

    def _write(self, rows: np.ndarray, entries: list[tuple[Value, ...]]) -> None:
        table, cut = self.table, len(self.layout.schema.keys)
        source = encode((Entry(0, (None,) * cut, value) for value in entries), self.layout)
        for i, column in enumerate(self.layout.schema.values, cut):
            at, word, bit = self.layout.offsets[i], NULLS + i // 64, np.uint64(1 << i % 64)
            for row, line in zip(rows.tolist(), source.words, strict=True):
                table.words[row, word] = table.words[row, word] & ~bit | line[word] & bit
                if column.kind != "bytes":
                    size = 1 if column.kind == "word" else 2
                    table.words[row, at : at + size] = line[at : at + size]
            if column.kind == "bytes":
                table.put_bytes(rows, at, source.words[:, at : at + 2], source.heap)

    def batch(self, steps: list[Upsert | Remove | Passes | Evict | Flush | Announce | Read]) -> None:
        table = self.table
        table.begin(self.version)
        changed, gone = set(), set()
        for step in steps:
            if isinstance(step, Upsert | Passes):
                now = self.upsert(step) if isinstance(step, Upsert) else self.passes(step)
                changed, gone = changed | now, gone - now
            elif isinstance(step, Remove):
                now = self.remove(step)
                changed, gone = changed - now, gone | now
            elif isinstance(step, Evict):
                table._memory.evict(table._eviction_buffer, step.share)
            elif isinstance(step, Flush):
                table._flusher.backlog._flush_bytes = 0
            elif isinstance(step, Announce):
                self.prefetch(step)
            elif isinstance(step, Read):
                self.readers.work()
        want = {name: self.state[name] for name in changed}
        before = list(table.touched(7))
        assert entries_of(before, self.layout) == want
        delta = table.seal()
        data = b"".join(bytes(piece) for piece in delta.pieces)
        sealed = [entry for rows in decode_rows(data, self.layout, "delta") for entry in decode(rows, self.layout)]
        assert delta.rows == len(sealed) == len(want) + len(gone)
        assert {(entry.hash, entry.key): entry.value for entry in sealed if not entry.dead} == want
        assert {(entry.hash, entry.key) for entry in sealed if entry.dead} == gone
        assert entries_of(list(table.touched(5)), self.layout) == want
        self.version += 1
        self.log.append((self.version, data))

    def recover(self) -> None:
        """Open the table again from the state that would be durable."""
        manifest = self.table.manifest()
        self.table.close()
        runs = [self.shelf.written[ref.name] for ref in manifest.runs]
        self.table = self._open(RunSet(self.layout, runs), manifest.flushed, manifest.keys)
        for version, data in self.log:
            if version > manifest.flushed:
                for rows in decode_rows(data, self.layout, "delta"):
                    self.table.load(rows)

    def check(self) -> None:
        pieces = list(self.table.scan(6))
        hashes = np.concatenate([piece.words[:, 0] for piece in pieces]) if pieces else np.empty(0, np.uint64)
        assert (hashes[1:] >= hashes[:-1]).all()
        assert entries_of(pieces, self.layout) == self.state
        assert self.table.manifest().keys == self.table.stats()["keys"] == len(self.state)


def entries_of(pieces: list[Rows], shape: RowLayout) -> dict[tuple[int, tuple[Value, ...]], tuple[Value, ...]]:
    entries = [entry for rows in pieces for entry in decode(rows, shape)]
    assert not any(entry.dead for entry in entries)
    found = {(entry.hash, entry.key): entry.value for entry in entries}
    assert len(found) == len(entries)
    return found


@st.composite
def scripts(draw: st.DrawFn) -> tuple[RowLayout, str, list[list[object]]]:
    shape = draw(st.sampled_from([WORDS, BYTES, WIDE]))
    columns = shape.schema
    pairs = st.lists(
        st.tuples(
            values(columns.keys, small=True) | values(columns.keys, small=False), values(columns.values, small=False)
        ),
        min_size=1,
        max_size=12,
    )
    upserts = st.builds(
        lambda chosen, *rest: Upsert([k for k, _ in chosen], [v for _, v in chosen], *rest),
        pairs,
        st.sampled_from(["all", "all", "created"]),
        st.integers(0, 1000),
        st.booleans(),
    )
    cuts = st.sets(st.integers(1, 2**64 - 1) | st.integers(1, 255).map(lambda top: top << 56), max_size=4)
    steps = (
        upserts
        | upserts
        | upserts
        | st.builds(Remove, st.lists(values(columns.keys, small=True), min_size=1, max_size=12))
        | st.builds(Passes, upserts, cuts)
        | st.builds(Evict, st.sampled_from([0.3, 0.7, 1.0]))
        | st.builds(Flush)
        | st.builds(
            Announce,
            st.lists(values(columns.keys, small=True), min_size=1, max_size=12),
            st.integers(0, 1000),
            st.integers(-1, 1),
        )
        | st.builds(Read)
    )
    batches = st.lists(st.lists(steps, max_size=6), min_size=1, max_size=6)
    return shape, draw(st.sampled_from(["top", "low", "one", "full", "ends"])), draw(batches)


@settings(max_examples=150, deadline=None)
@given(scripts(), st.sets(st.integers(0, 5)), st.sampled_from(get_args(Policy)))
def test_a_table_equals_a_dictionary(
    script: tuple[RowLayout, str, list[list[object]]], recoveries: set[int], policy: Policy
) -> None:
    shape, hashes, batches = script
    with TemporaryDirectory() as folder:
        rig = Rig(shape, hashes, Path(folder), policy)
        for number, steps in enumerate(batches):
            rig.batch(steps)
            rig.check()
            if number in recoveries:
                rig.recover()
                rig.check()
        rig.table.close()
