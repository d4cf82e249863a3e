"""Aggregates over the last rows of each key against plain Python."""

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.errors import UsageError
from millpond.operators.ranking import over_rows
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.over import OverSpec
from millpond.spec.operators import AggregateCall, Order
from millpond.spec.types import parse_type
from tests.operators.model import aggregate
from tests.operators.rig import Rig, Row, as_rows, fields, hash_of, normal
from tests.operators.test_top_n import Key, ascending
from tests.operators.values import values

TYPES = ["int", "bigint", "double", "decimal(5,2)", "decimal(20,3)", "date", "timestamp"]


def record_batch(shape: OverSpec, rows: list[Row]) -> pa.RecordBatch:
    hashes = [hash_of(tuple(row[shape.columns[p].name] for p in shape.keys), 4) for row in rows]
    arrays = [pa.array(hashes, pa.int64())]
    arrays += [pa.array([row[c.name] for row in rows], arrow_type(c.type)) for c in shape.columns]
    return pa.RecordBatch.from_arrays(arrays, names=["__hash", *(c.name for c in shape.columns)])


def arrow_type(name: str) -> pa.DataType:
    """As Spark sends a column: times have the session's time zone."""
    return pa.timestamp("us", "Europe/Berlin") if name == "timestamp" else parse_type(name).arrow


def same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right)) or math.isclose(left, right, rel_tol=1e-9)
    return bool(left == right)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_results_over_the_last_rows(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(TYPES))
    columns = fields(f"k string; n struct<x:int>; t int; v {dtype}; f boolean; s string")
    calls = [AggregateCall("count", (), "bigint"), AggregateCall("count", (3,), "bigint", 4)]
    calls += [AggregateCall("min", (3,), dtype), AggregateCall("max", (3,), dtype, 4)]
    if dtype in ("int", "double"):
        calls.append(AggregateCall("sum", (3,), "bigint" if dtype == "int" else "double"))
        calls.append(AggregateCall("avg", (3,), "double"))
    if dtype == "decimal(5,2)":
        calls.append(AggregateCall("sum", (3,), "decimal(15,2)"))
        calls.append(AggregateCall("avg", (3,), "decimal(9,6)"))
    chosen = data.draw(st.lists(st.sampled_from(calls), min_size=1, max_size=4))
    shape = OverSpec(
        columns,
        (0, 1),
        (Order(2, data.draw(st.booleans()), data.draw(st.booleans())),),
        tuple(chosen),
        tuple(data.draw(st.sampled_from([0, 1, 2, 9])) for _ in chosen),
    )
    model = AggregateSpec((), columns, shape.calls, "update")
    rows = st.fixed_dictionaries(
        {
            "k": st.sampled_from([None, "a", "b" * 20]),
            "n": st.sampled_from([None, 1]).map(lambda x: None if x is None else {"x": x}),
            "t": st.integers(0, 3) | st.none(),
            "v": values(dtype),
            "f": st.sampled_from([None, True, False]),
            "s": st.sampled_from([None, "x", "y" * 30]),
        }
    )
    rig = Rig(shape)
    seen: dict[Any, list[Row]] = defaultdict(list)
    for batch, restart in data.draw(st.lists(st.tuples(st.lists(rows, max_size=15), st.booleans()), max_size=4)):
        if restart:
            rig.restart()
        whole = record_batch(shape, batch)
        middle = len(batch) // 2
        out = as_rows(rig.batch(whole.slice(0, middle), whole.slice(middle)))
        groups: dict[Any, list[Row]] = defaultdict(list)
        for row in batch:
            groups[(normal(row["k"]), normal(row["n"]))].append(row)
        wanted = []
        for key, members in groups.items():
            members.sort(key=lambda r: (Key(r["t"], shape.order[0]), [ascending(r[n]) for n in ("v", "f", "s")]))
            for row in members:
                seen[key].append(row)
                results = [
                    aggregate(model, seen[key][-1 - before :])[number] for number, before in enumerate(shape.preceding)
                ]
                wanted.append((*(row[c.name] for c in columns), *results))
        assert len(out) == len(wanted)
        for left, right in zip(sorted(out, key=str), sorted(wanted, key=str), strict=True):
            assert all(same(a, b) for a, b in zip(left, right, strict=True)), (left, right)
    rig.close()


def test_many_rows() -> None:
    shape = OverSpec(
        fields("k bigint; t bigint; v bigint"),
        (0,),
        (Order(1),),
        (AggregateCall("avg", (2,), "double"), AggregateCall("sum", (2,), "bigint")),
        (9, 2),
    )
    rig = Rig(shape)
    rng = np.random.default_rng(1)
    held: dict[int, list[int]] = defaultdict(list)
    for batch in range(3):
        keys = rng.zipf(1.4, 30_000) % 5000
        rows = [
            {"k": int(k), "t": 100_000 * batch + i, "v": int(v)}
            for i, (k, v) in enumerate(zip(keys, rng.integers(0, 99, 30_000), strict=True))
        ]
        wanted = {}
        for row in rows:
            held[row["k"]].append(row["v"])
            last = held[row["k"]][-10:]
            wanted[row["t"]] = (row["k"], row["t"], row["v"], sum(last) / len(last), sum(last[-3:]))
        shuffled = [rows[i] for i in rng.permutation(len(rows))]
        whole = record_batch(shape, shuffled)
        out = as_rows(rig.batch(*(whole.slice(s, 10_000) for s in range(0, 30_000, 10_000))))
        assert {row[1]: row for row in out} == wanted
        rig.restart()
    rig.close()


LONG = OverSpec(
    fields("k bigint; t bigint; v bigint; s string"), (0,), (Order(1),), (AggregateCall("sum", (2,), "bigint"),), (2,)
)


def long_rows(keys: int) -> list[Row]:
    return [{"k": i % keys, "t": i, "v": i, "s": f"{i:4}" * 20} for i in range(2000)]


def test_a_batch_larger_than_a_column_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = record_batch(LONG, long_rows(50))
    outputs = []
    for limit in (1 << 31, 60_000):
        monkeypatch.setattr(over_rows, "LIMIT", limit)
        rig = Rig(LONG)
        outputs.append([sorted(as_rows(rig.batch(whole.slice(0, 700), whole.slice(700)))) for _ in range(2)])
        rig.close()
    assert outputs[0] == outputs[1]


def test_a_key_larger_than_a_column_may_be_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_rows, "LIMIT", 60_000)
    with pytest.raises(UsageError, match=r"2 GiB .* key \(0,\)"):
        Rig(LONG).batch(record_batch(LONG, long_rows(1)))


def test_a_key_larger_than_the_state_holds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_rows, "MAX_BYTES", 40)
    with pytest.raises(UsageError, match=r"key \(\d+,\) take 4 GiB"):
        Rig(LONG).batch(record_batch(LONG, long_rows(3)))
