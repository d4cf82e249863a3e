import msgspec
import pytest

from millpond.checkpoint.state_schema import QUERY_FILE, OperatorSchema, StateSchema, plain, read_schema
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.locations.faults import Faults, FaultyFiles
from millpond.layout import Column, TableSchema
from millpond.query.schema.comparison import compare, with_new_columns, write_or_check_schema
from millpond.query.schema.evolution import EvolvedSchema, evolve_schema, new_operator_schema
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall, Field
from tests.checkpoint.rig import begin, memory

SCHEMA = TableSchema((Column("k", "word"),), (Column("v", "bytes"),))


COUNT = AggregateCall("count", (), "bigint")


def query(type_="int", *more, key="k"):
    spec = AggregateSpec((Field(key, type_),), (), (COUNT, *more), "update")
    operator = OperatorSchema("aggregate by k", plain(spec), {"main": plain(SCHEMA)})
    return StateSchema(1 << 15, (operator,))


def test_same_query_may_come_back():
    files = memory()
    write_or_check_schema(files, query())
    write_or_check_schema(files, query())
    assert read_schema(files, 0) == query()


def test_difference_is_printed():
    files = memory()
    write_or_check_schema(files, query())
    with pytest.raises(StateIncompatibleError) as error:
        write_or_check_schema(files, query("bigint", AggregateCall("sum", (), "bigint")))
    assert "aggregate by k: the query groups by (k bigint); its checkpoint groups by (k int)" in str(error.value)
    assert "aggregate by k: the query computes sum(*); its checkpoint does not" in str(error.value)
    assert error.value.file == files.locate(QUERY_FILE)
    with pytest.raises(StateIncompatibleError, match="the query has no 'aggregate by k'; its checkpoint has one"):
        write_or_check_schema(files, StateSchema(1 << 15, ()))
    with pytest.raises(StateIncompatibleError, match="has 64 key groups; the checkpoint has 32768"):
        write_or_check_schema(files, StateSchema(64, query().operators))


@pytest.mark.parametrize("functions", [(), ("count(1)",)])
def test_the_setting_for_changed_functions_is_told_where_there_are_functions(functions):
    files = memory()
    before, now = (msgspec.structs.replace(query(type_).operators[0], functions=functions) for type_ in ("int", "long"))
    write_or_check_schema(files, StateSchema(1 << 15, (before,)))
    with pytest.raises(StateIncompatibleError, match="Change it back") as error:
        write_or_check_schema(files, StateSchema(1 << 15, (now,)))
    assert ("onChangedState" in str(error.value)) == bool(functions)


def test_another_alias_is_no_difference_and_another_grouping_is():
    before, named = query(), query()
    named = msgspec.structs.replace(
        named, operators=tuple(msgspec.structs.replace(one, columns=("k", "clicks")) for one in named.operators)
    )
    assert compare(before, named) == compare(named, before) == []
    assert with_new_columns(before, named) == named
    difference = "aggregate by k: the query groups by (u); its checkpoint groups by (k)"
    (old,), (new,) = (one.operators for one in (before, query(key="u")))
    old, new = (msgspec.structs.replace(one, aliased=True) for one in (old, new))
    for was, now, lines in (
        (old, new, []),
        (old, msgspec.structs.replace(new, name="aggregate by u"), [difference]),
        (old, msgspec.structs.replace(new, aliased=False), [difference]),
        (msgspec.structs.replace(old, aliased=False), new, [difference]),
    ):
        assert compare(StateSchema(1 << 15, (was,)), StateSchema(1 << 15, (now,))) == lines


@pytest.mark.parametrize(
    ("setting", "functions", "message"),
    [
        ("evolve", ("count(v)", "sum(v)", "max(v)"), "max(v) is new: it counts the rows from now on"),
        ("evolve", ("sum(v)", "count(v)"), "its functions are in another order"),
        ("keep", ("count(w)", "sum(v)"), "count(w) goes on with what was count(v)"),
    ],
)
def test_a_key_may_get_another_alias_while_functions_change(setting, functions, message):
    def with_key(key, functions, title="aggregate by k"):
        calls = tuple(AggregateCall(text.partition("(")[0], (0,), "bigint") for text in functions)
        spec = AggregateSpec((Field(key, "int"),), (Field("input0", "bigint"),), calls, "update")
        operator = OperatorSchema(title, {}, {}, functions, aliased=True)
        return spec, StateSchema(1 << 15, (new_operator_schema(operator, spec, 0),))

    _, before = with_key("k", ("count(v)", "sum(v)"))
    spec, now = with_key("key", functions)
    evolved = evolve_schema(before, 0, now, [spec], setting)
    assert isinstance(evolved, EvolvedSchema), evolved
    assert f"aggregate by k: {message}" in evolved.messages
    (operator,) = evolved.query.operators
    assert [key["name"] for key in operator.spec["keys"]] == ["key"]
    spec, other = with_key("key", functions, title="aggregate by u")
    lines = evolve_schema(before, 0, other, [spec], setting)
    assert "aggregate by k: the query groups by (key); its checkpoint groups by (k)" in lines


@pytest.mark.parametrize("written", [1, 99])
def test_another_format_is_refused(written):
    files = memory()
    write_or_check_schema(files, StateSchema(1, (), format=written))
    with pytest.raises(StateIncompatibleError, match=f"format {written};"):
        write_or_check_schema(files, query())


def test_altered_file_is_refused_once_there_is_state():
    files = memory()
    write_or_check_schema(files, query())
    files.put(QUERY_FILE, [files.get(QUERY_FILE).replace(b"int", b"inx")])
    begin(files)
    with pytest.raises(StateDamagedError, match=QUERY_FILE):
        write_or_check_schema(files, query())
    with pytest.raises(StateDamagedError, match=QUERY_FILE):
        read_schema(files, 0)


def test_torn_first_write_is_repeated():
    files = memory()
    files.put(QUERY_FILE, [b'{"key_gr'])
    write_or_check_schema(files, query())
    assert read_schema(files, 0) == query()


@pytest.mark.parametrize("seed", range(8))
def test_a_first_start_outlives_a_store_that_fails_now_and_then(seed):
    inner = memory()
    write_or_check_schema(FaultyFiles(inner, Faults(fail=0.4, retries=30, seed=seed)), query())
    assert read_schema(inner, 0) == query()
