import pytest

from millpond.checkpoint.pinned import NAME, PinnedOperator, PinnedQuery, pin, plain, read_pinned
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.layout import Column, TableSchema
from tests.checkpoint.rig import begin, memory

SCHEMA = TableSchema((Column("k", "word"),), (Column("v", "bytes"),))


def query(type_="int", **changes):
    spec = {"keys": [{"name": "k", "type": type_}], "calls": ["count"]}
    operator = PinnedOperator("Aggregate", {**spec, **changes}, {"main": plain(SCHEMA)})
    return PinnedQuery(1 << 15, (operator,))


def test_same_query_may_come_back():
    files = memory()
    assert read_pinned(files) is None
    pin(files, query())
    pin(files, query())
    assert read_pinned(files) == query()


def test_difference_is_printed():
    files = memory()
    pin(files, query())
    with pytest.raises(StateIncompatibleError) as error:
        pin(files, query("bigint", calls=["count", "sum"]))
    assert "operators[0].spec.keys[0].type: was 'int', is 'bigint'" in str(error.value)
    assert "operators[0].spec.calls[1]: is new: 'sum'" in str(error.value)
    assert error.value.file == files.locate(NAME)
    with pytest.raises(StateIncompatibleError, match=r"operators\[0\]: was .* is gone"):
        pin(files, PinnedQuery(1 << 15, ()))
    with pytest.raises(StateIncompatibleError, match="key_groups: was 32768, is 64"):
        pin(files, PinnedQuery(64, query().operators))


def test_newer_format_is_refused():
    files = memory()
    pin(files, PinnedQuery(1, (), format=99))
    with pytest.raises(StateIncompatibleError, match="format 99"):
        pin(files, query())


def test_altered_file_is_refused_once_there_is_state():
    files = memory()
    pin(files, query())
    files.put(NAME, [files.get(NAME).replace(b"int", b"inx")])
    begin(files)
    with pytest.raises(StateDamagedError, match=NAME):
        pin(files, query())
    with pytest.raises(StateDamagedError, match=NAME):
        read_pinned(files)


def test_torn_first_write_is_repeated():
    files = memory()
    files.put(NAME, [b'{"key_gr'])
    pin(files, query())
    assert read_pinned(files) == query()
