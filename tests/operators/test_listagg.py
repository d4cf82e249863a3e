"""`listagg` in an order that is asked for: stable, by several ranks, whether rows are kept or not."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import UsageError
from millpond.operators.functions import listagg
from millpond.operators.functions.registry import accumulator
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall
from millpond.spec.types import parse_type
from tests.operators import test_whole_groups as whole
from tests.operators.rig import Rig, record_batch, spec
from tests.operators.test_aggregate import FEW, check
from tests.operators.test_combine import check as check_combined
from tests.operators.values import values

BESIDE = "struct<value:string,c1:double,c2:decimal(20,3),c3:string>"
ORDERS = [
    [[False, False], [True, False], [False, True]],
    [[True, True], [False, True], [True, False]],
    [[False, True], [True, True], [False, False]],
]


def shape(distinct: bool = False) -> AggregateSpec:
    options = [{"delimiter": "7c", "order": order} for order in ORDERS]
    calls = [AggregateCall("listagg", (0,), "string", distinct=distinct, options=one) for one in options]
    return spec("k int", f"t {BESIDE}", calls)


TEXTS = st.tuples(
    st.sampled_from(["", "a", "bb", "x" * 15]),
    st.sampled_from([None, 0.0, -0.0, float("nan"), -1.5, 2.0]),
    st.none() | values("decimal(20,3)"),
    st.sampled_from([None, "", "é", "b"]),
).map(lambda one: dict(zip(("value", "c1", "c2", "c3"), one, strict=True)))
ROWS = st.lists(st.fixed_dictionaries({"k": st.integers(0, 2), "t": st.none() | TEXTS}), max_size=14)


@FEW
@given(st.lists(st.tuples(ROWS, st.booleans()), max_size=3))
def test_order(batches: list[Any]) -> None:
    assert shape().unsupported is None
    check(shape(), batches, ["k"])
    check(shape(distinct=True), batches, ["k"])


@FEW
@given(st.lists(ROWS, min_size=2, max_size=3))
def test_partial_texts(parts: list[Any]) -> None:
    check_combined(shape(), parts)


def test_a_text_that_arrow_cannot_hold_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listagg, "LIMIT", 400)
    rig = Rig(spec("k int", "t string", [AggregateCall("listagg", (0,), "string", options={"delimiter": "2c" * 100})]))
    row = {"k": 1, "t": "x"}
    with pytest.raises(UsageError, match="2 GiB"):
        rig.batch(record_batch(rig.spec, [row] * 5, ["k"]))
    rig.close()


def test_rows_that_are_all_there_are_joined_in_order() -> None:
    call = AggregateCall("listagg", (1,), "string", filter=2, options={"delimiter": "2c", "order": [[True, False]]})
    assert isinstance(accumulator(call, [parse_type("string")], whole=True), listagg.GatheredListAgg)
    rows: list[whole.Row] = [(n % 3, None, f"{n * 7 % 10}" if n % 4 else None, n % 5 != 0) for n in range(40)]
    whole_spec = whole.SPEC
    try:
        whole.SPEC = AggregateSpec(whole_spec.keys, whole_spec.inputs, (call,), "update")
        with whole.groups_of([rows[:17], rows[17:]]) as groups:
            found = whole.results(groups)
    finally:
        whole.SPEC = whole_spec
    for key in range(3):
        texts = [text for k, _, text, chosen in rows if k == key and text is not None and chosen]
        assert found[key] == [",".join(sorted(texts, reverse=True))]


def test_bytes_that_are_no_text_are_concatenated_all_the_same() -> None:
    """As in Spark, where `cast(value as string)` checks nothing."""
    offsets, texts = np.array([0, 2]), pa.array([b"a\xff", b"b"]).view(pa.string())
    call = AggregateCall("listagg", (0,), "string", options={"delimiter": "2c"})
    found = listagg.join_texts(offsets, texts, call, parse_type("string"))
    assert found.view(pa.binary()).to_pylist() == [b"a\xff,b"]
