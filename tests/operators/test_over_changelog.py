"""Aggregates over each key's last rows, of rows that come and go, against plain Python over the rows that there are."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from millpond.errors import StateDamagedError
from millpond.layout import HashRange, RowLayout, TableSchema, Words
from millpond.operators.kinds.registry import open_operator
from millpond.operators.protocol import Times
from millpond.operators.ranking import over_changelog
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.over import OverSpec
from millpond.spec.kinds.rank import RankSpec
from millpond.spec.operators import OP, AggregateCall, Order
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from tests.operators.model import aggregate
from tests.operators.rig import Rig, Row, as_rows, fields, normal
from tests.operators.test_over_rows import TYPES, record_batch
from tests.operators.test_session import Rig as SessionRig
from tests.operators.test_top_n import Key, ascending
from tests.operators.test_top_n import record_batch as ranked_batch
from tests.operators.values import values


def changed_batch(shape: OverSpec, rows: list[Row], signs: list[int]) -> pa.RecordBatch:
    return record_batch(shape, rows).append_column(OP.name, pa.array(signs, pa.int8()))


def text(row: tuple[Any, ...]) -> str:
    """A row as text, numbers rounded, so that sums of floats in other orders are alike."""
    return repr([float(f"{v + 0.0:.9g}") if isinstance(v, float) and math.isfinite(v) else v for v in row])


class Checked:
    """A rig whose output is held against all rows after every batch."""

    def __init__(self, shape: OverSpec, rig: Any = None) -> None:
        self.shape = shape
        self.rig = rig or Rig(shape)
        self.names = [column.name for column in shape.columns]
        self.rows: list[Row] = []
        self.model = AggregateSpec((), shape.columns, shape.calls, "update")
        self.known: Counter[str] = Counter()

    def whole_order(self, row: Row) -> Any:
        first = [Key(row[self.names[each.column]], each) for each in self.shape.order]
        named = {each.column for each in self.shape.order}
        return first, [ascending(row[name]) for position, name in enumerate(self.names) if position not in named]

    def expected(self) -> Counter[str]:
        groups: dict[Any, list[Row]] = defaultdict(list)
        for row in self.rows:
            groups[tuple(normal(row[self.names[p]]) for p in self.shape.keys)].append(row)
        found: Counter[str] = Counter()
        for members in groups.values():
            members.sort(key=self.whole_order)
            for at, row in enumerate(members):
                results = [
                    aggregate(self.model, members[max(0, at - before) : at + 1])[number]
                    for number, before in enumerate(self.shape.preceding)
                ]
                found[text((*(row[name] for name in self.names), *results))] += 1
        return found

    def batch(self, rows: list[Row], signs: list[int], pieces: int = 2) -> list[tuple[Any, ...]]:
        before = self.known
        self.rows += [row for row, sign in zip(rows, signs, strict=True) if sign > 0]
        gone = Counter(repr(row) for row, sign in zip(rows, signs, strict=True) if sign < 0)
        kept = []
        for row in self.rows:
            if gone[repr(row)]:
                gone[repr(row)] -= 1
            else:
                kept.append(row)
        assert not +gone
        self.rows = kept
        whole = changed_batch(self.shape, rows, signs)
        size = max(1, -(-len(rows) // pieces))
        out = as_rows(self.rig.batch(*(whole.slice(start, size) for start in range(0, max(1, len(rows)), size))))
        after = self.known = self.expected()
        keys = {tuple(normal(row[self.names[p]]) for p in self.shape.keys) for row in self.rows}
        assert self.rig.operator.tables["main"].stats()["keys"] == len(keys), "keys without rows stay"
        if self.shape.changes:
            kinds = Counter(row[-1] for row in out)
            assert kinds[2] == kinds[-2]
            assert Counter(text(row[:-1]) for row in out if row[-1] < 0) == before - after
            assert Counter(text(row[:-1]) for row in out if row[-1] > 0) == after - before
        else:
            assert Counter(map(text, out)) == after - before
        return out


def calls_of(dtype: str) -> list[AggregateCall]:
    calls = [AggregateCall("count", (), "bigint"), AggregateCall("count", (3,), "bigint", 4)]
    calls += [AggregateCall("count", (5,), "bigint"), AggregateCall("count_if", (4,), "bigint")]
    calls += [AggregateCall("min", (3,), dtype), AggregateCall("max", (3,), dtype, 4)]
    calls += [AggregateCall("bool_or", (4,), "boolean")]
    if dtype in ("int", "double"):
        calls.append(AggregateCall("sum", (3,), "bigint" if dtype == "int" else "double"))
        calls.append(AggregateCall("avg", (3,), "double"))
    if dtype == "decimal(5,2)":
        calls.append(AggregateCall("sum", (3,), "decimal(15,2)"))
        calls.append(AggregateCall("avg", (3,), "decimal(9,6)"))
    return calls


def structure(x: int | None) -> Row | None:
    return None if x is None else {"x": x}


@settings(max_examples=120, phases=[Phase.generate], deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_results_over_rows_that_come_and_go(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(TYPES))
    chosen = data.draw(st.lists(st.sampled_from(calls_of(dtype)), min_size=1, max_size=4))
    shape = OverSpec(
        fields(f"k string; n struct<x:int>; t int; v {dtype}; f boolean; s string"),
        (0, 1),
        (Order(2, data.draw(st.booleans()), data.draw(st.booleans())),) if data.draw(st.integers(0, 9)) else (),
        tuple(chosen),
        tuple(data.draw(st.sampled_from([0, 1, 2, 9])) for _ in chosen),
        retracts=True,
        changes=data.draw(st.booleans()),
    )
    rows = st.fixed_dictionaries(
        {
            "k": st.sampled_from([None, "a", "b" * 20]),
            "n": st.sampled_from([None, 1]).map(structure),
            "t": st.integers(0, 3) | st.none(),
            "v": values(dtype),
            "f": st.sampled_from([None, True, False]),
            "s": st.sampled_from([None, "x", "y" * 30]),
        }
    )
    few = data.draw(st.lists(rows, min_size=1, max_size=4))  # of which several are alike
    checked = Checked(shape)
    batches = st.tuples(st.lists(rows | st.sampled_from(few), max_size=15), st.booleans())
    for batch, restart in data.draw(st.lists(batches, max_size=5)):
        if restart:
            checked.rig.restart()
        gone = [row for row in [*checked.rows, *batch] if data.draw(st.booleans())]
        shuffled = data.draw(st.permutations([(row, 1) for row in batch] + [(row, -1) for row in gone]))
        # A row goes after it came where both are in one batch, but in whatever block.
        shuffled = [one for one in shuffled if one[1] > 0] + [one for one in shuffled if one[1] < 0]
        checked.batch([row for row, _ in shuffled], [sign for _, sign in shuffled], data.draw(st.integers(1, 3)))
    checked.rig.close()


SUMS = OverSpec(
    fields("k bigint; t bigint; v bigint"),
    (0,),
    (Order(1),),
    (AggregateCall("sum", (2,), "bigint"), AggregateCall("count", (), "bigint")),
    (2, 1),
    retracts=True,
    changes=True,
)


def rows_at(*times: int, v: int = 1) -> list[Row]:
    return [{"k": 1, "t": t, "v": v} for t in times]


def test_what_is_shown_reaches_as_far_as_frames_do() -> None:
    checked = Checked(SUMS)
    checked.batch(rows_at(*range(10, 20)), [1] * 10)
    out = checked.batch([*rows_at(12), *rows_at(12, v=5)], [-1, 1])
    assert sorted(row[1:] for row in out) == [
        (12, 1, 3, 2, -1),
        (12, 5, 7, 2, 1),
        (13, 1, 3, 2, -2),
        (13, 1, 7, 2, 2),
        (14, 1, 3, 2, -2),
        (14, 1, 7, 2, 2),
    ]
    assert checked.batch([*rows_at(12, v=5), *rows_at(12, v=5)], [-1, 1]) == []
    assert [row[1:] for row in checked.batch(rows_at(19), [-1])] == [(19, 1, 3, 2, -1)]
    checked.rig.close()


def test_equal_rows() -> None:
    checked = Checked(SUMS)
    checked.batch(rows_at(1, 1, 1, 1, 1, 1), [1] * 6)
    assert [row[1:] for row in checked.batch(rows_at(1, 1), [-1, -1])] == [(1, 1, 3, 2, -1)] * 2
    assert [row[1:] for row in checked.batch(rows_at(1), [1])] == [(1, 1, 3, 2, 1)]
    out = checked.batch(rows_at(1, 1, 1, 1), [-1] * 4)
    assert sorted(row[3:] for row in out) == [(2, 2, -1), (3, 2, -1), (3, 2, -1), (3, 2, -1)]
    # What stands before equal rows changes their results; one image takes the place of the other.
    checked.batch(rows_at(1), [1])
    out = checked.batch(rows_at(0, v=7), [1])
    assert sorted(row[3:] for row in out if row[1] == 1) == [(1, 1, -2), (2, 2, -2), (8, 2, 2), (9, 2, 2)]
    checked.rig.close()


def test_what_was_never_there_cannot_go() -> None:
    rig = Rig(SUMS)
    with pytest.raises(StateDamagedError, match="does not have"):
        rig.batch(changed_batch(SUMS, rows_at(1), [-1]))
    rig.close()


def test_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large keys and small ones, in several blocks."""
    monkeypatch.setattr(over_changelog, "BLOCK", 500)
    rng = np.random.default_rng(1)
    checked = Checked(SUMS)
    for number in range(3):
        rows = [
            {"k": int(k), "t": int(t), "v": int(v)}
            for k, t, v in zip(
                rng.zipf(1.3, 12_000) % 3000, rng.integers(0, 500, 12_000), rng.integers(0, 9, 12_000), strict=True
            )
        ]
        gone = [checked.rows[i] for i in rng.permutation(len(checked.rows))[: len(checked.rows) // 3]]
        checked.batch(rows + gone, [1] * len(rows) + [-1] * len(gone), pieces=3)
        if number:
            checked.rig.restart()
    checked.rig.close()


class Evicting(SessionRig):
    """An operator whose table evicts and flushes, and is read back from runs and deltas."""

    def _open(self, runs: list[Any], flushed: int, keys: int) -> None:
        def make(name: str, schema: TableSchema, initial: Words) -> RmwTable:
            place = RunSet(RowLayout(schema), runs), TableResources(MemoryBudget(self.budget), self.background)
            return RmwTable(schema, initial, *place, store=self.shelf, flushed=flushed, keys=keys)

        self.operator = open_operator(self.spec, make)  # type: ignore[arg-type, assignment]
        self.table: Any = self.operator.tables["main"]
        self.what = ""

    def batch(self, *pieces: pa.RecordBatch) -> pa.Table:  # type: ignore[override]
        self.operator.begin(self.version, Times())
        if self.what == "flush":
            self.table._flusher.backlog._flush_bytes = 0
        for half in (0, 1) if self.what == "passes" else (None,):
            if half is not None:
                self.operator.restrict(HashRange(half << 63, (half + 1) << 63))
            for piece in pieces:
                if half is not None:
                    piece = piece.filter(pa.array((piece.column(0).to_numpy() < 0) == bool(half)))
                self.operator.process(piece)
                if self.what == "evict":
                    self.table._memory.evict(self.table._eviction_buffer, 0.6)
        (delta,) = self.operator.finish().values()
        self.version += 1
        self.log.append((self.version, b"".join(bytes(piece) for piece in delta.pieces)))
        out = list(self.operator.output())
        assert str(list(self.operator.output())) == str(out)
        return pa.Table.from_batches(out) if out else pa.table({})


EVENTS = st.fixed_dictionaries(
    {"k": st.integers(0, 8), "t": st.integers(0, 3), "v": st.integers(0, 3), "s": st.sampled_from(["x", "y" * 40])}
)
LONG = OverSpec(
    fields("k bigint; t bigint; v bigint; s string"), (0,), (Order(1, True),), SUMS.calls, (2, 1), True, True
)


@settings(max_examples=100, phases=[Phase.generate], deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_tables_that_evict(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        rig = Evicting(LONG, folder)  # type: ignore[arg-type]
        checked = Checked(LONG, rig)
        whats = st.sampled_from(["", "restart", "evict", "flush", "passes"])
        for batch, what in data.draw(st.lists(st.tuples(st.lists(EVENTS, max_size=15), whats), max_size=7)):
            if what == "restart":
                rig.restart()
            rig.what = what
            gone = [row for row in [*checked.rows, *batch] if data.draw(st.booleans())]
            checked.batch([*batch, *gone], [1] * len(batch) + [-1] * len(gone))
        rig.operator.close()


def test_a_state_larger_than_memory(tmp_path: Path) -> None:
    rig = Evicting(LONG, str(tmp_path), budget=6 << 20)  # type: ignore[arg-type]
    checked = Checked(LONG, rig)
    rng = np.random.default_rng(1)
    for _ in range(6):
        rows = [
            {"k": int(k), "t": int(t), "v": int(t) % 7, "s": f"{t}" * 50}
            for k, t in zip(rng.integers(0, 9000, 6000), rng.integers(0, 100_000, 6000), strict=True)
        ]
        gone = [checked.rows[i] for i in rng.permutation(len(checked.rows))[: len(checked.rows) // 8]]
        checked.batch(rows + gone, [1] * len(rows) + [-1] * len(gone))
    assert rig.table.stats()["run_rows"] > 0
    rig.operator.close()


@pytest.mark.parametrize("seed", range(3))
def test_over_the_first_rows_of_a_key(seed: int) -> None:
    """A top-N's changes go in: of each auction its best bid, of each seller the last of these."""
    columns = fields("id bigint; k bigint; t bigint; v bigint")
    best = RankSpec(columns, (0, 1), (Order(3, True, True),), "row_number", 1, changes=True)
    over = OverSpec(
        (*columns, *fields("__rank int")),
        (1,),
        (Order(2),),
        (AggregateCall("avg", (3,), "double"),),
        (3,),
        retracts=True,
    )
    lower, upper = Rig(best), Rig(over)
    rng = np.random.default_rng(seed)
    seen: dict[int, tuple[Any, ...]] = {}
    won: dict[int, Row] = {}
    for batch in range(5):
        ids = rng.integers(0, 60, 80)
        rows = [
            {"id": int(i), "k": int(i) % 7, "t": 100 * batch + n, "v": int(rng.integers(0, 1000))}
            for n, i in enumerate(ids)
        ]
        for row in rows:
            if row["id"] not in won or row["v"] > won[row["id"]]["v"]:
                won[row["id"]] = row
        changes = lower.batch(ranked_batch(best, rows)).to_pylist()
        hashed = changed_batch(over, changes, [row[OP.name] for row in changes])
        seen |= {row[0]: row for row in as_rows(upper.batch(hashed))}
        for k in range(7):
            last = sorted((row for row in won.values() if row["k"] == k), key=lambda row: row["t"])
            for at, row in enumerate(last):
                frame = [one["v"] for one in last[max(0, at - 3) : at + 1]]
                assert seen[row["id"]] == (row["id"], k, row["t"], row["v"], 1, sum(frame) / len(frame))
        if batch == 2:
            upper.restart()
    lower.close()
    upper.close()
