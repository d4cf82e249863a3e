"""Rows that expire, against a dictionary: in memory, in runs, after flushes, evictions, merges and restarts."""

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.files.formats.segment import decode_rows
from millpond.kernels.hot_table.upsert import TOUCH_NONE
from millpond.layout import NEVER, HashRange, Rows
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.expiry import Expiry
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from tests.stores.shelf import Shelf
from tests.stores.test_rmw_model import Immediate
from tests.support.rows import Entry, decode, encode, layout

SHAPE = layout("b", "wb")
TIME = SHAPE.offsets[1]
LAST_STAMP = 211_106_232_532_991
"""From this time on, in milliseconds, all times have the same stamp."""
YEAR_9999 = 253_402_214_400_000


@dataclass
class Put:
    """Keys and the times at which they expire from now on; perhaps looked for ahead, or only that."""

    times: dict[int, int]
    ahead: str = ""


@dataclass
class Due:
    limit: int


@dataclass
class Evict:
    share: float


@dataclass
class Flush:
    pass


@dataclass
class Rig:
    """A table whose rows expire beside the dictionary that it should equal."""

    folder: Path
    state: dict[bytes, int] = field(default_factory=dict)
    log: list[tuple[int, bytes]] = field(default_factory=list)
    version: int = 0
    budget: int = 4 << 20

    def __post_init__(self) -> None:
        self.shelf = Shelf(self.folder)
        self._open(RunSet(SHAPE), 0, 0)

    def _open(self, runs: RunSet, flushed: int, keys: int) -> None:
        store, budget = self.shelf, MemoryBudget(self.budget)
        initial = np.zeros(SHAPE.width, np.uint64)
        self.table = RmwTable(
            SHAPE.schema,
            initial,
            runs,
            TableResources(budget, Immediate()),
            HashRange(),
            store=store,
            flushed=flushed,
            keys=keys,
        )
        self.expiry: Expiry = self.table.expire_by(TIME)

    def keys(self, numbers: list[int]) -> tuple[list[bytes], Rows]:
        names = [b"the key of number %d" % n if n % 2 else b"%d" % n for n in numbers]
        hashes = [n * 0x9E3779B97F4A7C15 % 2**64 >> 56 << 56 for n in numbers]
        return names, encode((Entry(h, (k,), (None, None)) for h, k in zip(hashes, names, strict=True)), SHAPE)

    def put(self, step: Put) -> None:
        chosen = step.times
        if step.ahead == "only":
            chosen = {n: time for n, time in chosen.items() if self.keys([n])[0][0] in self.state}
        names, keys = self.keys(list(chosen))
        times = np.array(list(chosen.values()), np.int64)
        if step.ahead and not self.table._memory.complete:
            self.table._lookup.upsert(keys, Expiry.stamps(times), TOUCH_NONE)
        if step.ahead == "only":
            return
        rows = self.table.upsert(keys, Expiry.stamps(times)).rows
        later = [max(time, self.state.get(name, -NEVER)) for name, time in zip(names, times.tolist(), strict=True)]
        self.table.words[rows, TIME] = np.array(later, np.int64).view(np.uint64)
        self.table.words[rows, 2] &= ~np.uint64(2)
        text = encode([Entry(0, (None,), (0, b"a value of more than twelve bytes"))] * len(names), SHAPE)
        self.table.put_bytes(rows, SHAPE.offsets[2], text.words[:, SHAPE.offsets[2] :], text.heap)
        self.expiry.file(rows)
        self.state |= dict(zip(names, later, strict=True))

    def due(self, limit: int) -> None:
        found = []
        for ids in self.expiry.due(limit):
            entries = decode(self.table._hot.copy(ids.astype(np.uint32)), SHAPE)
            assert all(entry.value[1] == b"a value of more than twelve bytes" for entry in entries)
            found += [(entry.key[0], int(np.uint64(entry.value[0]).astype(np.int64))) for entry in entries]
            self.table.remove(ids)
        want = {name: time for name, time in self.state.items() if time <= limit}
        assert len(found) == len(want)
        assert dict(found) == want
        for name in want:
            del self.state[name]

    def batch(self, steps: list[Put | Due | Evict | Flush]) -> None:
        self.table.begin(self.version)
        for step in steps:
            if isinstance(step, Put):
                self.put(step)
            elif isinstance(step, Due):
                self.due(step.limit)
            elif isinstance(step, Evict):
                self.table._memory.evict(self.table._eviction_buffer, step.share)
            else:
                self.table._flusher.backlog._flush_bytes = 0
        self.version += 1
        self.log.append((self.version, b"".join(bytes(piece) for piece in self.table.seal().pieces)))

    def recover(self) -> None:
        manifest = self.table.manifest()
        self.table.close()
        runs = [self.shelf.written[ref.name] for ref in manifest.runs]
        for run in runs:
            run._due_stamp = None
        self._open(RunSet(SHAPE, runs), manifest.flushed, manifest.keys)
        for version, data in self.log:
            if version > manifest.flushed:
                for rows in decode_rows(data, SHAPE, "delta"):
                    self.table.load(rows)

    def check(self) -> None:
        found = {
            e.key[0]: int(np.uint64(e.value[0]).astype(np.int64)) for p in self.table.scan() for e in decode(p, SHAPE)
        }
        assert found == self.state
        assert self.table.stats()["keys"] == len(self.state)


LATE = st.integers(LAST_STAMP - 2, LAST_STAMP + 2) | st.sampled_from([1 << 60, 1 << 47, YEAR_9999])
TIMES = st.integers(-50, 150) | LATE | st.sampled_from([-(1 << 60), NEVER])
PUTS = st.builds(
    Put, st.dictionaries(st.integers(0, 30), TIMES, min_size=1, max_size=12), st.sampled_from(["", "", "ahead", "only"])
)
STEPS = (
    PUTS
    | PUTS
    | st.builds(Due, st.integers(-100, 300) | LATE)
    | st.builds(Evict, st.sampled_from([0.3, 0.7, 1.0]))
    | st.builds(Flush)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(STEPS, max_size=6), min_size=1, max_size=7), st.sets(st.integers(0, 6)))
def test_what_expires_equals_a_dictionary(batches: list[list], recoveries: set[int]) -> None:
    with TemporaryDirectory() as folder:
        rig = Rig(Path(folder))
        for number, steps in enumerate(batches):
            rig.batch(steps)
            rig.check()
            if number in recoveries:
                rig.recover()
                rig.check()
        rig.table.close()


@pytest.mark.parametrize("first", [1_700_000_000_000, LAST_STAMP - 2, YEAR_9999, 1_700_000_000_000_000])
def test_rows_in_runs_expire_whatever_their_time(first: int, tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.batch([Put({number: first + number for number in range(6)} | {6: NEVER}), Evict(1.0)])
    rig.batch([Due(first - 1), Due(first + 2)])
    rig.recover()
    rig.batch([Due(first + 3), Evict(1.0), Due(first + 100)])
    assert list(rig.state.values()) == [NEVER]
    rig.check()
    rig.table.close()
