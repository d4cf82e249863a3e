import datetime
import decimal
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.slot.partition.checksum import InputChecksum, rows_checksum

VALUES = {
    "bool": (pa.bool_(), [True, False, True, None]),
    "byte": (pa.int8(), [1, -1, 0, None]),
    "short": (pa.int16(), [1, -300, 0, None]),
    "int": (pa.int32(), [1, -70_000, 0, None]),
    "long": (pa.int64(), [1, -(2**40), 0, None]),
    "double": (pa.float64(), [1.5, float("inf"), 0.0, None]),
    "float": (pa.float32(), [1.5, -2.0, 0.0, None]),
    "date": (pa.date32(), [datetime.date(2020, 1, 1), datetime.date(1969, 1, 1), datetime.date(1970, 1, 1), None]),
    "decimal": (pa.decimal128(38, 2), [decimal.Decimal("1.25"), decimal.Decimal("-9e30"), decimal.Decimal(0), None]),
    "string": (pa.string(), ["", "abcdefg", "a string of some length", None]),
    "long string": (pa.large_string(), ["", "abcdefgh", "a string of some length", None]),
    "view": (pa.string_view(), ["", "abcdefgh", "a string of some length", None]),
    "binary": (pa.binary(), [b"", b"\x00", b"\x00\x00", None]),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "", None]),
    "struct": (
        pa.struct([("a", pa.int32()), ("b", pa.string())]),
        [{"a": 1, "b": "x"}, {"a": None, "b": "y"}, {}, None],
    ),
    "list": (pa.list_(pa.string()), [["a", "b"], [], ["", None], None]),
    "nested": (pa.list_(pa.list_(pa.int32())), [[[1], [2, 3]], [[]], [], None]),
    "map": (pa.map_(pa.string(), pa.int32()), [[("a", 1)], [("a", 2)], [], None]),
}


def _batch(kind: pa.DataType, values: list[object]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(range(len(values)), pa.int64()), pa.array(values, kind)], ["__hash", "v"]
    )


@pytest.mark.parametrize("name", VALUES)
def test_each_type_is_compared_by_value_whatever_the_order_and_the_slicing(name):
    kind, values = VALUES[name]
    batch = _batch(kind, values)
    whole = rows_checksum(batch)
    assert whole == sum(rows_checksum(batch.slice(i, 1)) for i in range(4)) % 2**64
    assert whole == (rows_checksum(batch.slice(1)) + rows_checksum(batch.slice(0, 1))) % 2**64
    pieces = [_batch(kind, values[:2]), batch.slice(2)]
    assert whole == sum(map(rows_checksum, pieces)) % 2**64
    assert whole == rows_checksum(pa.concat_batches([batch.slice(i, 1) for i in (3, 1, 0, 2)]))
    for i in range(4):
        for j in range(4):
            if values[i] != values[j]:
                changed = [*values]
                changed[i] = values[j]
                assert rows_checksum(_batch(kind, changed)) != whole, (i, j)


def test_what_lies_under_a_null_does_not_count():
    mask = pa.py_buffer(b"\x01")
    one, two = (
        pa.Array.from_buffers(pa.int64(), 2, [mask, pa.py_buffer(np.array([7, under], np.int64))]) for under in (1, 2)
    )
    assert rows_checksum(pa.RecordBatch.from_arrays([one], ["v"])) == rows_checksum(
        pa.RecordBatch.from_arrays([two], ["v"])
    )


def test_values_that_move_between_rows_or_columns_are_seen():
    one = pa.RecordBatch.from_pydict({"k": [1, 2], "v": [5, 6]})
    two = pa.RecordBatch.from_pydict({"k": [1, 2], "v": [6, 5]})
    three = pa.RecordBatch.from_pydict({"k": [5, 6], "v": [1, 2]})
    assert len({rows_checksum(b) for b in (one, two, three)}) == 3


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.text(max_size=30)), min_size=1), st.randoms())
def test_any_change_of_any_value_is_seen(rows, source):
    def checksum(rows):
        seen = InputChecksum()
        seen.add(
            pa.RecordBatch.from_pydict({"k": pa.array([k for k, _ in rows], pa.int64()), "v": [v for _, v in rows]})
        )
        return seen

    before = checksum(rows)
    shuffled = [*rows]
    source.shuffle(shuffled)
    assert checksum(shuffled) == before
    changed = [*rows]
    at = source.randrange(len(rows))
    key, text = rows[at]
    changed[at] = (key ^ 1, text) if source.random() < 0.5 else (key, text + "x")
    assert checksum(changed) != before


def test_it_is_cheap():
    count = 200_000
    words = np.random.default_rng(1).integers(0, 1 << 60, count)
    batch = pa.RecordBatch.from_pydict({"h": words, "k": words, "v": words})
    rows_checksum(batch)
    best = min(_timed(batch) for _ in range(5))
    assert best / count < 50e-9


def _timed(batch):
    started = time.perf_counter()
    rows_checksum(batch)
    return time.perf_counter() - started
