"""Lists of structs: what comes out is what went in, bit by bit."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.operators.columns.structs import element, unpacked
from millpond.spec.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall
from millpond.spec.types import parse_type
from tests.operators.rig import Rig, as_rows, fields, record_batch

DDL = "struct<a:bigint,s:string,d:double,t:timestamp,n:struct<x:decimal(38,2),y:binary>,b:boolean>"
TYPE = parse_type(DDL)

texts = st.one_of(st.none(), st.text(max_size=30))
values = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "a": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
            "s": texts,
            "d": st.sampled_from([None, -0.0, 0.0, 1.5, math.inf, math.nan]),
            "t": st.sampled_from([None, dt.datetime(2024, 1, 1, tzinfo=dt.UTC)]),
            "n": st.one_of(
                st.none(),
                st.fixed_dictionaries(
                    {
                        "x": st.sampled_from([None, Decimal("1.25"), Decimal(-(10**30))]),
                        "y": st.one_of(st.none(), st.binary(max_size=40)),
                    }
                ),
            ),
            "b": st.sampled_from([None, True, False]),
        }
    ),
)


@settings(deadline=None)
@given(rows=st.lists(values, max_size=30), start=st.integers(0, 5))
def test_structs_come_back_as_they_were(rows: list[Any], start: int) -> None:
    array = pa.array([*([None] * start), *rows], TYPE.arrow).slice(start)
    operand = element(array, TYPE)
    lengths = (operand.values[:, 0] & np.uint64(0xFFFFFFFF)).astype(np.int64)
    assert len(lengths) == len(rows)
    if None not in rows:
        ends = np.concatenate([[0], np.cumsum(lengths)])
        assert str(unpacked(operand.heap, ends, TYPE).to_pylist()) == str(array.to_pylist())


@settings(deadline=None, max_examples=40)
@given(batches=st.lists(st.lists(st.tuples(st.integers(0, 2), values), max_size=15), min_size=1, max_size=4))
def test_lists_of_structs_grow_over_batches_and_restarts(batches: list[list[tuple[int, Any]]]) -> None:
    shape = AggregateSpec(
        fields("k int"), fields(f"v {DDL}"), (AggregateCall("collect_list", (0,), f"array<{DDL}>"),), "update"
    )
    rig = Rig(shape)
    lists: dict[int, list[Any]] = {}
    try:
        for batch in batches:
            for key, value in batch:
                lists.setdefault(key, []).extend([] if value is None else [value])
            out = rig.batch(record_batch(shape, [{"k": key, "v": value} for key, value in batch], ["k"]))
            assert out.num_rows == len({key for key, _ in batch})
            for key, found in as_rows(out):
                assert str(found) == str(pa.array(lists[key], TYPE.arrow).to_pylist())
            rig.restart()
    finally:
        rig.close()
