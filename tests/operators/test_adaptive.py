"""Aggregates whose store is chosen while they run, against plain Python, over streams whose pattern changes."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.files.formats import blocks
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import TableManifest
from millpond.layout import RowLayout, TableSchema, Words
from millpond.operators.aggregate import cardinality_observer
from millpond.operators.aggregate.adaptive import AdaptiveAggregate
from millpond.operators.aggregate.adaptive_slice import AdaptiveSlice
from millpond.operators.aggregate.cardinality_observer import Observation, Observer
from millpond.operators.aggregate.groups import Groups
from millpond.operators.aggregate.tables import BACKFILLED, SAMPLE
from millpond.operators.kinds.registry import open_operator
from millpond.operators.protocol import MAIN, ROWS, TableKind, Times
from millpond.spec.operators import AggregateCall, Windows
from millpond.stores.aligned import hash_intervals
from millpond.stores.aligned.table import AlignedStore, AlignedTable
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from millpond.time_slices import base_name
from tests.operators.rig import Rig, Row, as_rows, normal, record_batch
from tests.operators.test_buffered import SECOND, Truth, shape
from tests.stores.shelf import Shelf

CALLS = (
    AggregateCall("count", (0,), "bigint", distinct=True),
    AggregateCall("sum", (0,), "bigint", distinct=True),
    AggregateCall("count", (0,), "bigint", distinct=True, filter=2),
    AggregateCall("collect_set", (1,), "array<string>"),
    AggregateCall("count", (1, 0), "bigint", distinct=True, filter=2),
    AggregateCall("count", (), "bigint"),
    AggregateCall("max", (1,), "string"),
    AggregateCall("avg", (0,), "double"),
)
INPUTS = "n bigint; s string; ok boolean"
TUMBLING = Windows(8 * SECOND, 8 * SECOND, SECOND)
MEMORY = 1_000_000


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every input is looked at, a few say something, and little is read at once."""
    monkeypatch.setattr(cardinality_observer, "SAMPLING_BITS", 0)
    monkeypatch.setattr(cardinality_observer, "_MIN_ACCESSES", 16)
    monkeypatch.setattr(blocks, "RUN_BLOCK", 1024)
    monkeypatch.setattr(hash_intervals, "_MIN_INTERVAL_BYTES", 1024)


def row(rng: random.Random, time: int, values: int) -> Row:
    n = rng.randrange(values)
    return {
        "time": time,
        "window": time - (time - TUMBLING.offset) % TUMBLING.slide,
        "at": time // SECOND * SECOND,
        "k": rng.choice([None, "a", "a key of more than twelve bytes", *"bcdefghijklmnopqrst"]),
        "n": rng.choice([None, n, n, n]),
        "s": rng.choice([None, f"text {n}", f"a text of more than twelve bytes {n}"]),
        "ok": rng.choice([None, True, False]),
    }


def stream(rng: random.Random, batches: int, values: Callable[[int], int]) -> Iterator[tuple[list[Row], Times]]:
    """Batches of a stream: rows and times; some rows are late, and the watermark moves by fits and starts."""
    late = closed = 0
    for number in range(batches):
        late, closed = closed, max(closed, (number - 3) * 1000 + rng.choice([-1000, 0, 1000]))
        times = [max(0, number * SECOND + rng.randrange(-6 * SECOND, SECOND)) for _ in range(250)]
        rows = [row(rng, time, values(number)) for time in times]
        yield rows[: rng.choice([0, 250, 250, 250, 250])], Times(late, closed, number)


def found(table: pa.Table) -> list[str]:
    shown = []
    for key, name, *results in as_rows(table):
        begin = key["start"] if isinstance(key, dict) else key
        shown.append((round(begin.timestamp() * SECOND), (normal(name),), *results))
    return sorted(map(comparable, shown))


def comparable(one: tuple[Any, ...]) -> str:
    return repr([sorted(v) if isinstance(v, list) else f"{v:.12g}" if isinstance(v, float) else v for v in one])


def figures(rig: Rig) -> dict[str, float]:
    assert isinstance(rig.operator, AdaptiveAggregate)
    return rig.operator.extra_metrics


@pytest.mark.parametrize(
    ("seed", "bits", "windows", "memory"),
    [(0, 64, TUMBLING, MEMORY), (1, 64, TUMBLING, MEMORY), (2, 2, TUMBLING, MEMORY), (3, 64, None, MEMORY // 8)],
    ids=["tumbling", "other", "colliding", "times"],
)
def test_a_pattern_that_changes(seed: int, bits: int, windows: Windows | None, memory: int) -> None:
    """Values repeat, then are new each time, then repeat: as the model has it, with restarts, chosen as they are."""
    rng = random.Random(seed)
    spec = shape(CALLS, INPUTS, windows)
    assert spec.unsupported is None
    rig, truth = Rig(spec, 1 << 17, memory), Truth(spec)
    appending, moved, both, left = [], 0.0, 0, 0
    for rows, times in stream(rng, 48, lambda number: 10**9 if 8 <= number < 24 else 1):
        given = [one | {"window": one["at"]} for one in rows] if windows is None else rows
        pieces = [record_batch(spec, given[at : at + 70], ["k"], bits) for at in range(0, len(rows), 70)]
        rows = rows if windows else [one | {"time": one["at"]} for one in rows]
        got = found(rig.batch(*pieces, times=times))
        assert got == sorted(map(comparable, truth.batch(rows, times))), times
        done = figures(rig)
        appending.append(done["appending"])
        moved += done["moved_rows"]
        left += done["left_rows"] > 0
        names = rig.operator.tables
        both += any(base_name(name) == ROWS and name.replace(ROWS, MAIN) in names for name in names)
        if rng.random() < 0.5:
            rig.restart()
            assert figures(rig) == done | {"moved_rows": 0.0}
    assert 1.0 in appending
    if windows:  # within a second, little repeats
        assert appending[:8] == appending[-8:] == [0.0] * 8
        assert both > 1
        assert left
        assert moved > 30
    rig.close()


def test_the_first_and_the_last_beside_distinct_inputs() -> None:
    """Rows that were appended would be older than those that a window's groups have received since."""
    rng = random.Random(4)
    ordered = (AggregateCall("first", (3,), "int"), AggregateCall("last", (3,), "int"))
    spec = shape((*CALLS, *ordered), f"{INPUTS}; batch int", TUMBLING)
    rig, truth = Rig(spec, 1 << 17, MEMORY), Truth(spec)
    for rows, times in stream(rng, 48, lambda number: 10**9 if 8 <= number < 24 else 1):
        given = [one | {"batch": times.processing} for one in rows]
        got = found(rig.batch(record_batch(spec, given, ["k"]), times=times))
        assert got == sorted(map(comparable, truth.batch(given, times))), times
    rig.close()


def test_small_state_stays_in_groups() -> None:
    rng = random.Random(5)
    rig = Rig(shape(CALLS, INPUTS, TUMBLING), 1 << 17)
    for rows, times in stream(rng, 6, lambda number: 10**9):
        rig.batch(record_batch(rig.spec, rows, ["k"]), times=times)
        assert figures(rig) == {"appending": 0.0, "moved_rows": 0.0, "left_rows": 0.0}
    assert not any(base_name(name) in (ROWS, SAMPLE, BACKFILLED) for name in rig.operator.tables)
    rig.close()


def test_when_the_observer_changes_its_mind() -> None:
    mind = Observer(1 << 20)
    large, small = 1 << 19, 1 << 14
    assert mind.should_append(Observation(1000, 900, large, 100))
    assert not mind.should_append(Observation(1000, 900, small, 100))  # it fits in memory
    assert not mind.should_append(Observation(1000, 100, large, 100))  # inputs repeat
    assert not mind.should_append(Observation(1000, 900, large, 2))  # all rows of a group will have to be in memory
    assert not mind.should_append(Observation())
    assert mind.should_group(Observation(1000, 10, small, 0), 0)
    assert not mind.should_group(Observation(1000, 900, small, 0), 0)
    assert not mind.should_group(Observation(1000, 10, large, 0), 0)  # it would not fit
    assert not mind.should_group(Observation(10, 0, small, 0), 0)  # too few to say
    assert mind.should_group(Observation(1000, 900, small, 0), 1 << 18)  # a group has got heavy
    for asked, made, size in [(1000, made, size) for made in range(0, 1001, 50) for size in (small, 1 << 17, large)]:
        seen = Observation(asked, made, size, 1000)
        assert not (mind.should_append(seen) and mind.should_group(seen, 0))


def test_what_is_observed() -> None:
    spec = shape(CALLS, INPUTS, TUMBLING)
    assert spec.adaptive
    assert spec.access_pattern.store == "observed"
    for pattern, store in (("rmw", "read-modify-write"), ("append", "aligned append")):
        asked = spec.with_pattern(pattern)
        assert not asked.adaptive
        assert asked.access_pattern.store == store
    assert not shape(CALLS[5:], INPUTS, TUMBLING).adaptive  # partial results are all there is to keep
    assert not shape([*CALLS, AggregateCall("collect_list", (0,), "array<bigint>")], INPUTS, TUMBLING).adaptive
    assert not shape(CALLS, INPUTS, Windows(8 * SECOND, 4 * SECOND, 0)).adaptive


def test_a_window_that_is_read_from_both_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups and rows of one window, several times the memory: they close in pieces, each small."""
    monkeypatch.setattr(cardinality_observer, "SAMPLING_BITS", 6)
    spec = shape(CALLS[:1], "n bigint", TUMBLING, keys="k bigint")
    pieces: list[int] = []
    together = AdaptiveSlice._merge_rows

    def put_together(part: AdaptiveSlice, groups: Groups, held: Any, entries: Any, rows: Any) -> None:
        pieces.append(sum(each.words.nbytes for some in (held, rows, *entries) for each in some))
        together(part, groups, held, entries, rows)

    monkeypatch.setattr(AdaptiveSlice, "_merge_rows", put_together)
    budget, rng, keys = MemoryBudget(2 << 20), np.random.default_rng(1), 5000
    folder = open_filesystem(f"memory:{tmp_path}")
    with ThreadPoolExecutor(1) as background, ThreadPoolExecutor(1) as writers:
        appended = AlignedStore(TableSchema((), ()), AppendFiles(folder, str(tmp_path)), budget, background)

        def make(name: str, schema: TableSchema, initial: Words, *, kind: TableKind = "rmw") -> Any:
            runs = RunSet(RowLayout(schema))
            if kind in ("aligned", "spool"):
                return appended.open(name, TableManifest(), layout=RowLayout(schema))
            if kind == "scratch":
                return RmwTable(schema, initial, runs, TableResources(budget, background))
            (tmp_path / name).mkdir()
            return RmwTable(
                schema, initial, runs, TableResources(budget, background, writers=writers), store=Shelf(tmp_path / name)
            )

        operator = open_operator(spec, make, memory=budget.total)
        assert isinstance(operator, AdaptiveAggregate)
        hashes = rng.integers(-(2**63), 2**63, keys)
        for version in range(10):
            operator.begin(version, Times(0, 9_000 * (version == 9)))
            for number in range(2):
                k = rng.integers(0, keys, 6000)
                columns = [hashes[k], np.full(len(k), SECOND), k, (2 * version + number) * 6000 + np.arange(6000)]
                names = ["__hash", "window", "k", "n"]
                if version < 9:
                    operator.process(pa.RecordBatch.from_arrays([pa.array(one) for one in columns], names))
            for name, delta in operator.finish().items():
                table: Any = operator.tables[name]
                if isinstance(table, AlignedTable):
                    table.adopt_sealed(b"".join(bytes(piece) for piece in delta.pieces))
        assert operator.extra_metrics["appending"] == 0.0  # the one window is closed
        counts = [count for piece in operator.output() for count in piece.column(2).to_pylist()]
        assert (len(counts), sum(counts)) == (keys, 9 * 2 * 6000)
        assert len(pieces) > 8
        assert max(pieces) < budget.total // 4 < sum(pieces)
        operator.close()
        appended.close()
        assert budget.used == 0
