import math
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.operators.kinds.registry import read_rows
from millpond.spec.kinds.deduplicate import DeduplicateSpec
from tests.operators.rig import Rig, Row, as_rows, fields, normal, record_batch
from tests.operators.values import values

SHAPE = DeduplicateSpec(fields("x int; s string; y int; d double; extra array<int>"), (1, 3))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_first_row_of_every_key(data: st.DataObject) -> None:
    rows = st.fixed_dictionaries(
        {
            "x": st.integers(0, 99),
            "s": st.sampled_from([None, "", "a", "b" * 13, "b" * 14]),
            "y": values("int"),
            "d": st.sampled_from([None, 0.0, -0.0, math.nan, 1.0]),
            "extra": st.none() | st.lists(st.integers(0, 3), max_size=2),
        }
    )
    seen: set[Any] = set()
    rig = Rig(SHAPE, memory=data.draw(st.sampled_from([64 << 20, 64])))  # the new rows of a batch are in a file, or not
    for batch, restart in data.draw(st.lists(st.tuples(st.lists(rows, max_size=15), st.booleans()), max_size=4)):
        if restart:
            rig.restart()
        wanted: list[Row] = []
        for row in batch:
            key = (normal(row["s"]), normal(row["d"]))
            if key not in seen:
                seen.add(key)
                wanted.append(row)
        whole = record_batch(SHAPE, batch, ["s", "d"], bits=8)
        middle = len(batch) // 2
        out = as_rows(rig.batch(whole.slice(0, middle), whole.slice(middle)))
        assert str(out) == str(
            [tuple(row[field.name] for field in SHAPE.columns) for row in wanted]
        )  # as they came: −0.0 stays
    rig.close()


def test_output_has_the_columns_of_the_spec() -> None:
    rig = Rig(SHAPE)
    out = rig.batch(record_batch(SHAPE, [{"x": 1, "s": "a", "y": 2, "d": 0.5, "extra": [1]}], ["s", "d"]))
    assert out.schema.names == ["x", "s", "y", "d", "extra"]
    assert out.schema.field("extra").type == pa.list_(pa.field("element", pa.int32()))


def test_state_is_read_as_keys() -> None:
    rig = Rig(SHAPE)
    rig.batch(record_batch(SHAPE, [{"x": 1, "s": "a" * 20, "y": 2, "d": -0.0, "extra": None}], ["s", "d"]))
    table: Any = rig.operator.tables["main"]
    (rows,) = table.scan()
    (batch,) = read_rows(SHAPE, "main", rows)
    assert batch.to_pylist() == [{"s": "a" * 20, "d": 0.0}]
