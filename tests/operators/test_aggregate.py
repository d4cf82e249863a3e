"""Every function over every type against the slow model, batch by batch, with restarts and colliding hashes."""

import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.errors import ArithmeticOverflowError
from millpond.spec.functions import FUNCTIONS
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall
from millpond.spec.types import parse_type
from tests.operators import model
from tests.operators.rig import Rig, Row, as_rows, normal, record_batch, spec
from tests.operators.values import TYPES, values

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
DISTINCT = ("count", "count_if", "sum", "avg", "collect_list", "listagg", "stddev_pop", "kurtosis", "corr", "bit_xor")
OPTIONS: dict[str, dict[str, Any]] = {
    "percentile_approx": {"percentages": [0.9, 0.0, 0.3, 1.0], "accuracy": 1000, "array": True},
    "count_min_sketch": {"multipliers": [1_569_741_360, 2_045_557_449], "width": 7},
}
"""Of functions that cannot do without."""


def calls_over(ddl: str) -> list[AggregateCall]:
    """Every function that takes column 0, of this type (1 is a number, 2 a condition), in its variants."""
    dtype = parse_type(ddl)
    made = [AggregateCall("count", (), "bigint"), AggregateCall("count", (), "bigint", filter=2)]
    made.append(AggregateCall("count", (0, 1), "bigint", distinct=True))
    for name, function in FUNCTIONS.items():
        if name == "approx_count_distinct" or function.whole or dtype.name not in function.arguments[0]:
            continue
        inputs = (0, 1) if len(function.arguments) == 2 else (0,)
        type_ = result_type(name, ddl)
        if name in OPTIONS:
            made += [AggregateCall(name, (0,), type_, filter=b, options=OPTIONS[name]) for b in (None, 2)]
            made.append(AggregateCall(name, (0,), type_, distinct=True, options=OPTIONS[name]))
            continue
        made.append(AggregateCall(name, inputs, type_))
        made.append(AggregateCall(name, inputs, type_, filter=2))
        if name in ("first", "last"):
            made.append(AggregateCall(name, inputs, type_, options={"ignore_nulls": True}))
        if name == "listagg":
            made.append(AggregateCall(name, inputs, type_, options={"delimiter": "2c20", "order": [[True, False]]}))
        if name == "sum":
            made.append(AggregateCall(name, inputs, type_, options={"eval_mode": "try"}))
        if name in ("min_by", "max_by"):
            made.append(AggregateCall(name, (1, 0), "bigint"))
        if name in DISTINCT:
            made.append(AggregateCall(name, inputs, type_, distinct=True))
            made.append(AggregateCall(name, inputs, type_, distinct=True, filter=2))
    return made


def result_type(function: str, ddl: str) -> str:
    """The type that Spark gives a function's result."""
    dtype = parse_type(ddl)
    if function in ("count", "count_if"):
        return "bigint"
    if function == "sum" and dtype.name == "decimal":
        return f"decimal({min(38, dtype.precision + 10)},{dtype.scale})"
    if function == "avg" and dtype.name == "decimal":
        return f"decimal({min(38, dtype.precision + 4)},{min(38, dtype.scale + 4)})"
    if function == "sum":
        return "double" if dtype.machine == "float" else "bigint"
    if function in ("avg", "product", "skewness", "kurtosis", "corr") or function.startswith(
        ("stddev", "var_", "covar", "regr_")
    ):
        return "double"
    if function == "count_min_sketch":
        return "binary"
    return f"array<{ddl}>" if function.startswith(("collect_", "percentile_")) else ddl


def same(got: Any, wanted: Any) -> bool:
    """Equal; doubles to rounding; NaN equals itself, −0.0 is not 0.0."""
    if isinstance(got, list):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    if isinstance(got, float) and isinstance(wanted, float):
        if got != got or wanted != wanted:
            return got != got and wanted != wanted
        if got == wanted == 0:
            return math.copysign(1, got) == math.copysign(1, wanted)
        return math.isclose(got, wanted, rel_tol=1e-9, abs_tol=1e-6)
    return bool(got == wanted) and type(got) is type(wanted)


def check(shape: AggregateSpec, batches: list[tuple[list[Row], bool]], keys: list[str], bits: int = 8) -> None:
    """Run batches (rows, and whether to restart before) and compare each one's output."""
    rig = Rig(shape)
    groups: dict[Any, list[Row]] = {}
    if not keys:
        groups[()] = []
    try:
        for number, (rows, restart) in enumerate(batches):
            if restart:
                rig.restart()
            changed = {(): None} if not keys else {}
            for row in rows:
                key = tuple(normal(row[name]) for name in keys)
                groups.setdefault(key, []).append(row | {model.BATCH: number})
                changed[key] = None
            out = as_rows(rig.batch(record_batch(shape, rows, keys, bits)))
            assert len(out) == len(changed if shape.output_mode == "update" else groups)
            for row in out:
                key = tuple(normal(value) for value in row[: len(keys)])
                wanted = model.aggregate(shape, groups[key])
                for call, got, value in zip(shape.calls, row[len(keys) :], wanted, strict=True):
                    assert same(got, value), (call, got, value, groups[key])
    finally:
        rig.close()


@pytest.mark.parametrize("ddl", TYPES)
def test_functions_over_type(ddl: str) -> None:
    shape = spec("k int", f"v {ddl}; w bigint; b boolean", calls_over(ddl))
    assert shape.unsupported is None
    rows = st.fixed_dictionaries(
        {
            "k": st.integers(0, 2) | st.none(),
            "v": values(ddl),
            "w": st.none() | st.integers(0, 3),
            "b": values("boolean"),
        }
    )

    @FEW
    @given(st.lists(st.tuples(st.lists(rows, max_size=12), st.booleans()), max_size=4))
    def run(batches: list[tuple[list[Row], bool]]) -> None:
        check(shape, batches, ["k"])

    run()


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_without_keys(mode: str) -> None:
    calls = [AggregateCall("count", (), "bigint"), AggregateCall("sum", (0,), "bigint")]
    shape = spec("", "v int", [*calls, AggregateCall("count", (0,), "bigint", distinct=True)], mode)
    batches: list[list[Any]] = [[], [None], [1, 1, 2], [], [3]]
    check(shape, [([{"v": v} for v in batch], True) for batch in batches], [])


def test_global_group_lives_in_one_partition() -> None:
    from millpond.operators.kinds.registry import open_operator
    from millpond.operators.protocol import Times

    shape = spec("", "v int", [AggregateCall("count", (), "bigint")])
    rig = Rig(shape)
    made = rig.operator.tables["main"]
    operator = open_operator(shape, lambda *_: made, owns_global=False)
    operator.begin(0, Times())
    operator.finish()
    assert list(operator.output()) == []


@FEW
@given(st.data())
def test_keys_of_every_type(data: st.DataObject) -> None:
    types = data.draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=5))
    keys = [f"k{i}" for i in range(len(types))]
    shape = spec("; ".join(map(" ".join, zip(keys, types, strict=True))), "", [AggregateCall("count", (), "bigint")])
    pool = data.draw(st.lists(st.tuples(*(values(t) for t in types)), min_size=1, max_size=8))
    row = st.sampled_from(pool).map(lambda key: dict(zip(keys, key, strict=True)))
    check(shape, data.draw(st.lists(st.tuples(st.lists(row, max_size=20), st.booleans()), max_size=3)), keys)


def test_struct_keys() -> None:
    struct = "struct<a:int,b:struct<c:string,d:double>>"
    shape = spec(f"s {struct}; t string", "", [AggregateCall("count", (), "bigint")], "complete")
    inner: list[Any] = [None, {"c": None, "d": None}, {"c": "x" * 20, "d": -0.0}, {"c": "x" * 20, "d": 0.0}]
    structs = [None, *({"a": a, "b": b} for a in (None, 1) for b in inner)]
    rows = [{"s": s, "t": t} for s in structs for t in (None, "y" * 15)]
    check(shape, [(rows, False), (rows[3:], True)], ["s", "t"])
    rig = Rig(shape)
    out = rig.batch(record_batch(shape, rows, ["s", "t"]))
    assert out.schema.field("s").type == parse_type(struct).arrow
    assert len(out) == 2 * (len(structs) - 2)
    assert all(math.copysign(1, s["b"]["d"]) == 1 for s in out["s"].to_pylist() if s and s["b"] and s["b"]["d"] == 0)


def test_distinct_conditions() -> None:
    calls = [AggregateCall("count_if", (0,), "bigint", distinct=True, filter=b) for b in (None, 1)]
    calls.append(AggregateCall("count", (0,), "bigint", distinct=True))
    shape = spec("k int", "v boolean; b boolean", calls)
    rows = [{"k": 1, "v": v, "b": b} for v, b in ((True, False), (True, True), (False, True), (None, True))]
    check(shape, [(rows, False), (rows, True)], ["k"])


def test_large_blocks_and_growing_lists() -> None:
    calls = [AggregateCall(f, (0,), f"array<{t}>") for f, t in (("collect_list", "string"), ("collect_set", "string"))]
    calls += [AggregateCall(f, (0,), "string") for f in ("min", "max", "first", "last")]
    shape = spec("k int", "v string", calls)
    rows = [{"k": i * i % 7, "v": f"{i % 1000}" * (i % 5 + 1) if i % 11 else None} for i in range(9000)]
    check(shape, [(rows, False), (rows[:5000], True)], ["k"], bits=64)


def test_sliced_and_foreign_arrays() -> None:
    shape = spec("s string; b boolean", "v int", [AggregateCall("sum", (0,), "bigint")])
    rows = [{"s": "ab" * (i % 9), "b": [True, False, None][i % 3], "v": i if i % 4 else None} for i in range(50)]
    whole = record_batch(shape, rows, ["s", "b"])
    wanted = sorted(as_rows(Rig(shape).batch(whole.slice(7, 30))), key=str)
    assert (
        sorted(as_rows(Rig(shape).batch(whole.slice(7, 13), whole.slice(20, 0), whole.slice(20, 17))), key=str)
        == wanted
    )
    for foreign in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        strings = whole.column("s")
        strings = strings.dictionary_encode() if pa.types.is_dictionary(foreign) else strings.cast(foreign)
        batch = pa.RecordBatch.from_arrays([whole.column(0), strings, *whole.columns[2:]], names=whole.schema.names)
        assert sorted(as_rows(Rig(shape).batch(batch.slice(7, 30))), key=str) == wanted


@pytest.mark.parametrize(
    ("ddl", "function", "inputs"),
    [
        ("bigint", "sum", [2**63 - 1, 1]),
        ("decimal(38,0)", "sum", [Decimal(9 * 10**37), Decimal(9 * 10**37)]),
        ("decimal(38,2)", "avg", [Decimal(9 * 10**34)]),
    ],
)
def test_overflow_is_an_error_in_ansi_mode(ddl: str, function: str, inputs: list[Any]) -> None:
    type_ = result_type(function, ddl)
    shape = spec("", f"v {ddl}", [AggregateCall(function, (0,), type_, options={"eval_mode": "ansi"})])
    with pytest.raises(ArithmeticOverflowError, match=r"ARITHMETIC_OVERFLOW|NUMERIC_VALUE_OUT_OF_RANGE"):
        Rig(shape).batch(record_batch(shape, [{"v": v} for v in inputs], []))


def test_output_comes_in_bounded_pieces() -> None:
    shape = spec("k bigint", "", [AggregateCall("count", (), "bigint")])
    rig = Rig(shape)
    rig.batch(record_batch(shape, [{"k": k} for k in range(70_000)], ["k"]))
    sizes = [(piece.num_rows, piece.nbytes) for piece in rig.operator.output()]
    assert sum(rows for rows, _ in sizes) == 70_000
    assert max(size for _, size in sizes) < 2 << 20
