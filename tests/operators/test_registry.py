import pytest

from millpond.operators.functions.registry import ACCUMULATORS
from millpond.operators.kinds.registry import state_tables
from millpond.plan.reading.functions import READERS
from millpond.spec.functions import (
    BY_CATALYST,
    FUNCTION,
    FUNCTIONS,
    INPUT_TYPE,
    KEY_COLUMNS,
    KEY_TYPE,
    ROWS,
    is_distinct,
    sketch_precision,
    unsupported_call,
    unsupported_key,
)
from millpond.spec.kinds.deduplicate import DeduplicateSpec
from millpond.spec.operators import AggregateCall
from tests.operators.rig import fields, spec


def call(function: str, inputs: int = 1, **more: object) -> AggregateCall:
    return AggregateCall(function, tuple(range(inputs)), "bigint", **more)  # type: ignore[arg-type]


def test_every_function_is_folded_as_its_record_says() -> None:
    assert FUNCTIONS.keys() == ACCUMULATORS.keys()
    assert READERS.keys() < FUNCTIONS.keys()
    for name, function in FUNCTIONS.items():
        folded = ACCUMULATORS[name]
        assert (folded.by_row is None) == function.whole, name
        assert folded.by_row or folded.of_group, name
        assert (folded.retracting is not None) == function.retractable, name


def test_a_class_of_catalyst_means_one_function() -> None:
    assert len(BY_CATALYST) == sum(len(function.catalyst_classes) for function in FUNCTIONS.values())
    assert {name for name, function in FUNCTIONS.items() if not function.catalyst_classes} == {ROWS}


@pytest.mark.parametrize(
    ("made", "types", "reason"),
    [
        (call("sum"), ["bigint"], None),
        (call("sum"), ["string"], INPUT_TYPE),
        (call("histogram_numeric"), ["double"], FUNCTION),
        (call("percentile"), ["double"], None),
        (call("percentile", 2), ["double", "int"], None),
        (call("percentile", 3), ["double", "int", "int"], FUNCTION),
        (call("percentile"), ["date"], INPUT_TYPE),
        (call("mode"), ["struct<a:array<int>>"], None),
        (call("mode"), ["map<int,int>"], INPUT_TYPE),
        (call("sum", 2), ["int", "int"], FUNCTION),
        (call("min"), ["string collate UNICODE"], INPUT_TYPE),
        (call("min"), ["struct<a:int,b:array<struct<c:string>>>"], None),
        (call("min"), ["struct<a:map<int,int>>"], INPUT_TYPE),
        (call("max"), ["array<string collate UNICODE>"], INPUT_TYPE),
        (call("first"), ["map<string,array<struct<a:string collate UNICODE>>>"], None),
        (call("first"), ["struct<a:int,a:int>"], INPUT_TYPE),
        (call("first"), ["array<interval day to second>"], INPUT_TYPE),
        (call("last"), ["variant"], INPUT_TYPE),
        (call("min_by", 2), ["map<int,int>", "array<date>"], None),
        (call("min_by", 2), ["int", "map<int,int>"], INPUT_TYPE),
        (call("count", 2, distinct=True), ["struct<a:int>", "date"], None),
        (call("count", distinct=True), ["array<int>"], None),
        (call("count", distinct=True), ["map<int,int>"], KEY_TYPE),
        (call("collect_list"), ["map<int,int>"], None),
        (call("collect_list", distinct=True), ["map<int,int>"], KEY_TYPE),
        (call("collect_set"), ["array<double>"], None),
        (call("sum"), ["array<int>"], INPUT_TYPE),
        (call("sum", options={"eval_mode": "try"}), ["int"], None),
        (call("sum", options={"eval_mode": "try"}), ["double"], None),
        (call("collect_list", options={"ignore_nulls": False}), ["int"], FUNCTION),
        (call("listagg"), ["struct<value:string,c1:int>"], INPUT_TYPE),
        (call("listagg", options={"order": [[False, False]]}), ["struct<value:string,c1:int>"], None),
        (call("listagg", options={"order": [[False, False]]}), ["struct<value:string,c1:array<int>>"], INPUT_TYPE),
        (call("count", 0), [], None),
        (call("rows", 3), ["int", "struct<a:int>", "date"], None),
        (call("rows", 2), ["int", "map<int,array<int>>"], None),
        (call("rows", 2), ["int", "interval day"], INPUT_TYPE),
    ],
)
def test_supported(made: AggregateCall, types: list[str], reason: str | None) -> None:
    assert unsupported_call(made, types) == reason


def test_keys() -> None:
    assert unsupported_key("struct<a:int,b:struct<c:decimal(38,2)>>") is None
    assert unsupported_key("struct<a:array<struct<b:int>>>") is None
    assert unsupported_key("struct<a:map<int,int>>") == KEY_TYPE
    assert unsupported_key("string collate UTF8_LCASE") == KEY_TYPE


def test_at_most_64_key_columns() -> None:
    many = "; ".join(f"k{i} int" for i in range(64))
    assert spec(many, "v int", [call("sum")]).unsupported is None
    assert spec(many, "v int", [call("sum", distinct=True)]).unsupported == KEY_COLUMNS
    assert DeduplicateSpec(fields(many + "; s struct<a:int>"), tuple(range(65))).unsupported == KEY_COLUMNS


def test_distinct_matters_only_where_it_changes_results() -> None:
    assert is_distinct(call("sum", distinct=True))
    assert is_distinct(call("collect_set"))
    assert not is_distinct(call("max", distinct=True))


def test_calls_with_the_same_distinct_inputs_share_a_side_table() -> None:
    shared = spec("k int", "v int; b boolean", [call(f, distinct=True) for f in ("count", "sum", "avg")])
    assert state_tables(shared).keys() == {"main", "distinct0"}
    apart = spec("k int", "v int; b boolean", [call("count", distinct=True), call("sum", distinct=True, filter=1)])
    assert state_tables(apart).keys() == {"main", "distinct0"}
    apart = spec("k int", "v int; w int", [call("count", distinct=True), call("count", 2, distinct=True)])
    assert state_tables(apart).keys() == {"main", "distinct0", "distinct1"}


def test_sketch_precision() -> None:
    assert [sketch_precision({"relative_sd": sd}) for sd in (0.39, 0.05, 0.01)] == [4, 9, 14]
    assert sketch_precision({}) == 9
