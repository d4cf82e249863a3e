"""Lists of all rows of a group, in whatever pieces they come and are asked for."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from millpond.errors import UsageError
from millpond.layout import RowLayout, TableSchema, Words
from millpond.operators.aggregate.groups import Groups
from millpond.operators.functions import whole_groups
from millpond.operators.tables.keyed import decode_rows
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall
from millpond.spec.types import parse_type
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from tests.operators.rig import fields, hash_of
from tests.stores.test_rmw_model import Immediate

POINT = "struct<a:bigint,b:string>"
SPEC = AggregateSpec(
    fields("k bigint"),
    fields(f"p {POINT}; t string; chosen boolean"),
    (
        AggregateCall("collect_list", (0,), f"array<{POINT}>"),
        AggregateCall("collect_list", (1,), "array<string>", filter=2),
        AggregateCall("collect_list", (1,), "array<string>", distinct=True),
        AggregateCall("rows", (1, 2), "array<struct<a:string,b:boolean>>"),
        AggregateCall("count", (), "bigint"),
    ),
    "update",
)
Row = tuple[int, dict[str, Any] | None, str | None, bool | None]


def random_row(rng: random.Random, keys: int) -> Row:
    text = rng.choice([None, "", f"{rng.randrange(20)} " * rng.randrange(12)])
    point = rng.choice([None, {"a": rng.choice([None, rng.randrange(-9, 9)]), "b": text}])
    return rng.randrange(keys), point, text, rng.choice([None, True, False])


@contextmanager
def groups_of(batches: list[list[Row]]) -> Iterator[Groups]:
    budget = MemoryBudget(64 << 20)

    def make(name: str, schema: TableSchema, initial: Words) -> RmwTable:
        return RmwTable(schema, initial, RunSet(RowLayout(schema)), TableResources(budget, Immediate()))

    groups = Groups(SPEC, make, whole=True)
    groups.begin(0)
    types = [parse_type(field.type).arrow for field in SPEC.input_fields]
    for rows in batches:
        arrays = [pa.array([hash_of((row[0],), 64) for row in rows], pa.int64())]
        arrays += [pa.array(column, dtype) for column, dtype in zip(zip(*rows, strict=True), types, strict=True)]
        names = ["__hash", *(field.name for field in SPEC.input_fields)]
        groups.fold(pa.RecordBatch.from_arrays(arrays, names=names))
    yield groups
    groups.close()


def results(groups: Groups, size: int | None = None) -> dict[int, list[Any]]:
    found = {}
    for rows in groups.scan(size):
        for batch in decode_rows(groups.main, groups.calls, SPEC.output_fields, rows):
            batch.validate(full=True)
            for key, *row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                assert key not in found
                found[key] = row
    return found


def expected(rows: list[Row]) -> dict[int, list[Any]]:
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[0], []).append(row)
    return {
        key: [
            [point for _, point, _, _ in some if point is not None],
            [text for _, _, text, chosen in some if text is not None and chosen],
            list(dict.fromkeys(text for _, _, text, _ in some if text is not None)),
            [{"a": text, "b": chosen} for _, _, text, chosen in some],
            len(some),
        ]
        for key, some in groups.items()
    }


@pytest.mark.parametrize("limit", [1 << 31, 4000])
@pytest.mark.parametrize("keys", [1, 40])
def test_lists_hold_every_row_in_order(keys: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_groups, "LIMIT", limit)
    rng = random.Random(keys)
    batches = [[random_row(rng, keys) for _ in range(count)] for count in ((9, 1, 8) if keys == 1 else (150, 1, 90))]
    with groups_of(batches) as groups:
        assert results(groups) == expected([row for batch in batches for row in batch])
        assert results(groups, 7) == results(groups)


def test_a_list_that_arrow_cannot_hold_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_groups, "LIMIT", 400)
    row: Row = (1, None, "x" * 100, True)
    with groups_of([[row] * 3, [row] * 3]) as groups, pytest.raises(UsageError, match="2 GiB"):
        results(groups)
