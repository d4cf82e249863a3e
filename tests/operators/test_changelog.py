"""Operators above operators whose rows change: what is accumulated equals the same query over all rows so far."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from millpond.errors import StateDamagedError
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.rank import RankSpec
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import OP, AggregateCall, Order
from millpond.spec.types import parse_type
from tests.operators.model import aggregate
from tests.operators.rig import Rig, Row, fields, hash_of, normal
from tests.operators.test_over_changelog import Evicting

NUMBERS = ["int", "bigint", "double", "decimal(5,2)", "decimal(38,10)"]


def call(function: str, inputs: tuple[int, ...], type_: str, **more: Any) -> AggregateCall:
    return AggregateCall(function, inputs, type_, **more)


def inner(dtype: str, *, changes: bool = True, keys: str = "k int; g string") -> AggregateSpec:
    calls = (
        call("max", (0,), dtype),
        call("count", (), "bigint"),
        call("min", (1,), "string"),
        call("collect_list", (1,), "array<string>"),
    )
    return AggregateSpec(fields(keys), fields(f"v {dtype}; s string"), calls, "update", changes=changes)


def outer(dtype: str, *, keys: str = "g string", changes: bool = False) -> AggregateSpec:
    wide = parse_type(dtype)
    summed, mean = "bigint", "double"
    if wide.name == "decimal":
        summed = f"decimal({min(38, wide.precision + 10)},{wide.scale})"
        mean = f"decimal({min(38, wide.precision + 4)},{min(wide.scale + 4, 38)})"
    elif wide.machine == "float":
        summed = "double"
    calls = (
        call("count", (0,), "bigint"),
        call("sum", (0,), summed),
        call("avg", (0,), mean),
        call("sum", (1,), "bigint"),
        call("sum", (1,), "bigint", options={"eval_mode": "try"}),
        call("bit_xor", (1,), "bigint"),
        call("count", (), "bigint", filter=2),
        call("count_if", (2,), "bigint"),
    )
    inputs = fields(f"m {dtype}; n bigint; f boolean")
    return AggregateSpec(fields(keys), inputs, calls, "update", retracts=True, changes=changes)


class Chain:
    """One operator's changes into another."""

    def __init__(self, lower: OperatorSpec, upper: OperatorSpec, between: Callable[[Row], Row]) -> None:
        self.lower, self.upper, self.between = lower, upper, between
        self.rigs = Rig(lower), Rig(upper)

    def batch(self, rows: list[Row], reverse: bool) -> list[Row]:
        """Rows in, the upper operator's output out."""
        changes = self.rigs[0].batch(arrow(self.lower, rows)).to_pylist()
        passed = [self.between(row) | {OP.name: row[OP.name]} for row in changes]
        return self.rigs[1].batch(arrow(self.upper, passed[::-1] if reverse else passed)).to_pylist()

    def restart(self) -> None:
        for rig in self.rigs:
            rig.restart()

    def close(self) -> None:
        for rig in self.rigs:
            rig.close()


def arrow(shape: OperatorSpec, rows: list[Row]) -> pa.RecordBatch:
    keys = (
        [f.name for f in shape.keys]
        if isinstance(shape, AggregateSpec)
        else [shape.columns[k].name for k in shape.keys]
    )
    hashes = [hash_of(tuple(row[k] for k in keys), 4) if keys else 0 for row in rows]
    columns = shape.input_fields
    arrays = [pa.array(hashes, pa.int64())]
    arrays += [pa.array([row[c.name] for row in rows], parse_type(c.type).arrow) for c in columns]
    return pa.RecordBatch.from_arrays(arrays, names=["__hash", *(c.name for c in columns)])


def text(row: Row, names: list[str]) -> str:
    return repr([rounded(row[name]) for name in names])


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return value if not math.isfinite(value) else float(f"{value + 0.0:.9g}")
    return value


def grouped(rows: list[Row], keys: list[str]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(normal(row[key]) for key in keys)].append(row)
    return groups


VALUES: dict[str, list[Any]] = {
    "int": [None, 0, 1, -5, 2**31 - 1],
    "bigint": [None, 1, -1, 7, 2**53 + 1, -(2**62)],
    "double": [None, 0.1, 0.2, 1e18, -3.5, math.inf, -math.inf, math.nan],
    "decimal(5,2)": [None, Decimal("0.01"), Decimal("999.99"), Decimal("-5.00")],
    "decimal(38,10)": [None, Decimal("0.0000000001"), Decimal("9" * 20), Decimal("-7.5")],
}


def rows_of(dtype: str) -> st.SearchStrategy[Row]:
    return st.fixed_dictionaries(
        {
            "k": st.integers(0, 3),
            "g": st.sampled_from([None, "a", "b" * 20]),
            "v": st.sampled_from(VALUES[dtype]),
            "s": st.sampled_from([None, "x", "y" * 30]),
        }
    )


SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SETTINGS
@given(st.data())
def test_aggregate_over_aggregate(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(NUMBERS))
    keys = data.draw(st.sampled_from(["g string", ""]))
    lower, upper = inner(dtype), outer(dtype, keys=keys, changes=data.draw(st.booleans()))
    least = data.draw(st.integers(0, 2))

    def between(row: Row) -> Row:
        return {"g": row["g"], "m": row["max_0"], "n": row["count_1"], "f": row["count_1"] > 1}

    chain = Chain(lower, upper, between)
    # A filter in between lets groups of the upper aggregate go: rows count only up to a size that they outgrow.
    chain.between = between
    seen: list[Row] = []
    relation: Counter[str] = Counter()
    held: dict[str, str] = {}
    names = [field.name for field in upper.output_fields if field != OP]
    key_names = [field.name for field in upper.keys]
    for batch, restart in data.draw(
        st.lists(st.tuples(st.lists(rows_of(dtype), max_size=12), st.booleans()), max_size=4)
    ):
        if restart:
            chain.restart()
        seen += batch
        changes = chain.rigs[0].batch(arrow(lower, batch)).to_pylist()
        passed = [between(row) | {OP.name: row[OP.name]} for row in changes if row["count_1"] <= 2 + least]
        out = chain.rigs[1].batch(arrow(upper, passed[::-1])).to_pylist()
        first = []
        for members in grouped(seen, ["k", "g"]).values():
            top, count, _, _ = aggregate(lower, members)
            if count <= 2 + least:
                first.append({"g": members[0]["g"], "m": top, "n": count, "f": count > 1})
        groups = grouped(first, ["g"]) if keys else {(): first}
        wanted = {}
        for members in groups.values():
            results = aggregate(upper, members)
            row = {field.name: members[0][field.name] for field in upper.keys} | dict(
                zip(names[len(upper.keys) :], results, strict=True)
            )
            wanted[text(row, key_names)] = text(row, names)
        for row in out:
            shown = text(row, names)
            if upper.changes:
                relation[shown] += 1 if row[OP.name] > 0 else -1
            else:
                assert wanted[text(row, key_names)] == shown
                held[text(row, key_names)] = shown
        if upper.changes:
            assert sorted((+relation).elements()) == sorted(wanted.values())
            assert not -relation
        else:  # without deletions asked for, groups that are gone stay as they were last seen
            assert {key: held[key] for key in wanted} == wanted
    chain.close()


@SETTINGS
@given(st.data())
def test_aggregate_over_the_first_rows_and_first_rows_over_an_aggregate(data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, 3))
    columns = fields("k int; g string; v int; s string")
    rank = RankSpec(columns, (1,), (Order(2, True),), "row_number", limit, changes=True)
    calls = (call("count", (), "bigint"), call("sum", (0,), "bigint"))
    total = AggregateSpec(fields("k int"), fields("v int"), calls, "update", retracts=True, changes=True)
    columns = fields("k int; count_0 bigint; sum_1 bigint")
    order = (Order(2, True, True), Order(0))
    best = RankSpec(columns, (), order, "row_number", 2, retracts=True, changes=True)
    first, second, third = Rig(rank), Rig(total), Rig(best)
    seen: list[tuple[int, Row]] = []
    relation: Counter[str] = Counter()
    batches = st.lists(st.tuples(st.lists(rows_of("int"), max_size=12), st.booleans()), max_size=4)
    for version, (batch, restart) in enumerate(data.draw(batches)):
        if restart:
            for rig in (first, second, third):
                rig.restart()
        seen += [(version, row) for row in batch]
        ranked = first.batch(arrow(rank, batch)).to_pylist()
        summed = second.batch(arrow(total, ranked[::-1])).to_pylist()
        for row in third.batch(arrow(best, summed[::-1])).to_pylist():
            relation[repr((row["k"], row["count_0"], row["sum_1"], row["__rank"]))] += 1 if row[OP.name] > 0 else -1
        kept: list[Row] = []
        for members in grouped([row | {"version": version} for version, row in seen], ["g"]).values():
            members.sort(
                key=lambda r: (r["v"] is not None, -(r["v"] or 0), r["version"], r["k"], r["s"] is not None, r["s"])
            )
            kept += members[:limit]
        sums = []
        for (k,), members in grouped(kept, ["k"]).items():
            values = [row["v"] for row in members if row["v"] is not None]
            sums.append((k, len(members), sum(values) if values else None))
        sums.sort(key=lambda r: (r[2] is None, -(r[2] or 0), r[0]))
        wanted = [repr((*row, number)) for number, row in enumerate(sums[:2], 1)]
        assert sorted((+relation).elements()) == sorted(wanted)
        assert not -relation
    for rig in (first, second, third):
        rig.close()


def test_what_is_taken_back_leaves_nothing() -> None:
    upper = outer("double")
    rig = Rig(upper)
    rows = [{"g": "a", "m": m, "n": 1, "f": False} for m in (1e16, 0.1, math.inf, math.nan, 3.0)]
    rig.batch(arrow(upper, [row | {OP.name: 1} for row in rows]))
    (out,) = rig.batch(arrow(upper, [row | {OP.name: -1} for row in rows[:1] + rows[2:]])).to_pylist()
    assert out["sum_1"] == pytest.approx(0.1, rel=1e-15)
    assert out["count_0"] == 1
    assert rig.batch(arrow(upper, [rows[1] | {OP.name: -1}])).num_rows == 0
    rig.close()


@pytest.mark.parametrize("rows", [[("a", 5, -1)], [("a", None, -1)], [("a", 5, -1), ("a", 6, -1), ("a", None, 1)]])
def test_what_was_never_there_cannot_be_taken_back(rows: list[tuple[str, int | None, int]]) -> None:
    """More rows than a group had, or more that count: the batch fails, and its state is not sealed."""
    calls = (call("count", (), "bigint"), call("count", (0,), "bigint"))
    shape = AggregateSpec(fields("g string"), fields("v int"), calls, "update", retracts=True)
    rig = Rig(shape)
    rig.batch(arrow(shape, [{"g": "b", "v": 1, OP.name: 1}, {"g": "a", "v": None, OP.name: 1}][: 1 + (len(rows) > 1)]))
    with pytest.raises(StateDamagedError, match="does not have"):
        rig.batch(arrow(shape, [{"g": g, "v": v, OP.name: kind} for g, v, kind in rows]))
    rig.close()


@pytest.mark.parametrize("changes", [False, True])
def test_groups_without_rows_leave_the_state(changes: bool) -> None:
    shape = outer("bigint", changes=changes)
    rig = Rig(shape)
    last: list[Row] = []
    for number in range(6):
        rows = [{"g": f"group {number} of a long name {n}", "m": n, "n": 1, "f": False} for n in range(100)]
        kinds = [row | {OP.name: 1} for row in rows] + [row | {OP.name: -1} for row in last]
        out = rig.batch(arrow(shape, kinds)).to_pylist()
        deleted = [(row["g"], row["sum_1"], row["count_0"]) for row in out if changes and row[OP.name] < 0]
        assert sorted(deleted) == sorted((row["g"], row["m"], 1) for row in last if changes)
        assert len(out) == 100 + len(deleted)
        assert rig.operator.tables["main"].stats()["keys"] == 100
        last = rows
        if number % 2:
            rig.restart()
    rig.batch(arrow(shape, [row | {OP.name: -1} for row in last]))
    assert rig.operator.tables["main"].stats()["keys"] == 0
    rig.close()


def test_more_groups_without_rows_than_memory_holds(tmp_path: Path) -> None:
    """Their keys alone exceed what is worked on at a time."""
    calls = (call("count", (), "bigint"), call("sum", (0,), "bigint"))
    shape = AggregateSpec(fields("g string"), fields("v bigint"), calls, "update", retracts=True, changes=True)
    rig = Evicting(shape, str(tmp_path), budget=6 << 20)  # type: ignore[arg-type]
    count = 20_000
    last: list[Row] = []
    for number in range(4):
        rows: list[Row] = [{"g": f"{number} {n} " * 8, "v": n} for n in range(count)] if number < 3 else []
        assert len(last) * 60 > rig.table.portion_bytes or not number
        kinds = [row | {OP.name: -1} for row in last] + [row | {OP.name: 1} for row in rows]
        batch = arrow(shape, kinds)
        rig.what = "passes" if number % 2 else ""
        out = rig.batch(*(batch.slice(start, 4000) for start in range(0, len(kinds), 4000)))
        signs = np.asarray(out.column(OP.name))
        assert sorted(out.filter(pa.array(signs < 0)).column("g").to_pylist()) == sorted(row["g"] for row in last)
        assert sorted(out.filter(pa.array(signs > 0)).column("g").to_pylist()) == sorted(row["g"] for row in rows)
        assert rig.table.stats()["keys"] == len(rows)
        assert sum(piece.count for piece in rig.table.scan()) == len(rows)
        last = rows
    assert rig.table.stats()["run_rows"] > 0
    rig.operator.close()


@settings(max_examples=100, phases=[Phase.generate], deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_groups_without_rows_leave_tables_that_evict(data: st.DataObject) -> None:
    """Groups come, go and come back, in batches with passes, over runs, and after restarts."""
    calls = (call("count", (), "bigint"), call("sum", (0,), "bigint"))
    shape = AggregateSpec(fields("g string"), fields("v bigint"), calls, "update", retracts=True, changes=True)
    event = st.fixed_dictionaries({"g": st.integers(0, 9).map(lambda g: f"{g}" * (1 + g % 2 * 20)), "v": st.just(1)})
    whats = st.sampled_from(["", "restart", "evict", "flush", "passes"])
    with TemporaryDirectory() as folder:
        rig = Evicting(shape, folder)  # type: ignore[arg-type]
        seen: list[Row] = []
        relation: Counter[str] = Counter()
        for batch, what in data.draw(st.lists(st.tuples(st.lists(event, max_size=15), whats), max_size=8)):
            if what == "restart":
                rig.restart()
            rig.what = what
            marked = [(row, data.draw(st.booleans())) for row in [*seen, *batch]]
            seen = [row for row, gone in marked if not gone]
            kinds = [row | {OP.name: 1} for row in batch] + [row | {OP.name: -1} for row, gone in marked if gone]
            for row in rig.batch(*(arrow(shape, kinds[at::2]) for at in (0, 1))).to_pylist():
                relation[text(row, ["g", "count_0", "sum_1"])] += 1 if row[OP.name] > 0 else -1
            groups = grouped(seen, ["g"])
            assert sorted((+relation).elements()) == sorted(repr([g, len(r), len(r)]) for (g,), r in groups.items())
            assert not -relation
            assert rig.table.stats()["keys"] == len(groups)
        rig.operator.close()


def test_an_image_may_come_before_what_it_takes_the_place_of() -> None:
    """Within a batch the order does not matter: a count may be below nothing in between."""
    calls = (call("count", (), "bigint"), call("count", (0,), "bigint"))
    shape = AggregateSpec(fields("g string"), fields("v int"), calls, "update", retracts=True)
    rig = Rig(shape)
    out = rig.batch(arrow(shape, [{"g": "a", "v": 1, OP.name: -2}]), arrow(shape, [{"g": "a", "v": 1, OP.name: 2}]))
    assert not out.num_rows
    rig.close()


def test_a_group_that_a_batch_leaves_as_it_was_has_no_images() -> None:
    shape = AggregateSpec(
        fields("g string"), fields("s string"), (call("max", (0,), "string"),), "update", changes=True
    )
    rig = Rig(shape)
    long = "x" * 13
    rig.batch(arrow(shape, [{"g": "short", "s": "b"}, {"g": "long", "s": long}, {"g": "none", "s": None}]))
    again = [{"g": "short", "s": "a"}, {"g": "long", "s": long}, {"g": "none", "s": None}]
    assert set(rig.batch(arrow(shape, again)).column("g").to_pylist()) == {"long"}
    assert set(rig.batch(arrow(shape, [{"g": "short", "s": "c"}])).column("g").to_pylist()) == {"short"}
    rig.close()
