"""Top-N against sorting all rows so far by plain Python."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from millpond.errors import StateDamagedError, UsageError
from millpond.operators.ranking import top_n
from millpond.spec.kinds.rank import RankSpec
from millpond.spec.operators import OP, Order
from tests.operators.rig import Rig, Row, as_rows, fields, hash_of, normal
from tests.operators.values import values

COLUMNS = "k string; a {a}; b {b}; s string; d double; t struct<x:int,y:string>"
ORDERED = ["int", "bigint", "double", "float", "decimal(5,2)", "decimal(38,10)", "string", "binary", "boolean", "date"]
ORDERED += ["array<bigint>", "array<struct<x:string,y:date>>", "struct<x:int,l:array<string>>"]


def record_batch(shape: RankSpec, rows: list[Row], signs: list[int] | None = None) -> pa.RecordBatch:
    """The pipe's input; keys collide often."""
    hashes = [hash_of(tuple(row[shape.columns[p].name] for p in shape.keys), 4) for row in rows]
    from millpond.spec.types import parse_type

    arrays = [pa.array(hashes, pa.int64())]
    arrays += [pa.array([row[c.name] for row in rows], parse_type(c.type).arrow) for c in shape.columns]
    names = ["__hash", *(c.name for c in shape.columns)]
    if signs is not None:
        arrays.append(pa.array(signs, pa.int8()))
        names.append(OP.name)
    return pa.RecordBatch.from_arrays(arrays, names=names)


def comparable(value: Any) -> Any:
    """A value that Python orders as Spark does."""
    if isinstance(value, float):
        return (value != value, 0.0 if value != value else value)
    if isinstance(value, dict):
        return (1, *(ascending(part) for part in value.values()))
    if isinstance(value, list):
        return [ascending(part) for part in value]
    return value.encode() if isinstance(value, str) else value


def ascending(value: Any) -> Any:
    return (0,) if value is None else (1, comparable(value))


class Key:
    """One value of an ORDER BY."""

    def __init__(self, value: Any, order: Order) -> None:
        self.value, self.order = value, order

    def __lt__(self, other: "Key") -> bool:
        if (self.value is None) != (other.value is None):
            return (self.value is None) != self.order.nulls_last
        if self.value is None:
            return False
        left, right = comparable(self.value), comparable(other.value)
        return bool(left > right if self.order.descending else left < right)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Key)
        return not self < other and not other < self


def ranked(shape: RankSpec, rows: list[tuple[int, Row]]) -> list[tuple[Row, int]]:
    """The first rows of one key, each with its rank; rows stand with the batch in which they came."""
    names = [column.name for column in shape.columns]

    def order(row: Row) -> list[Key]:
        return [Key(row[names[each.column]], each) for each in shape.order]

    def rest(row: Row) -> list[Any]:
        named = {each.column for each in shape.order}
        return [ascending(row[name]) for position, name in enumerate(names) if position not in named]

    def whole(one: tuple[int, Row]) -> Any:
        return order(one[1]), 0 if shape.retracts else one[0], rest(one[1])

    found = []
    rank = dense = 0
    last: list[Key] | None = None
    for position, (_, row) in enumerate(sorted(rows, key=whole), 1):
        if last is None or order(row) != last:
            rank, dense = position, dense + 1
        last = order(row)
        number = {"row_number": position, "rank": rank, "dense_rank": dense}[shape.function]
        if number <= shape.limit:
            found.append((row, number))
    return found


def structure(x: int, y: str | None) -> Row:
    return {"x": x, "y": y}


def shown(row: tuple[Any, ...]) -> str:
    """A row as text; zeros are alike, since rows that differ in nothing else are equal to Spark."""
    return repr(tuple(value + 0.0 if isinstance(value, float) else value for value in row))


def image(shape: RankSpec, row: Row, rank: int) -> str:
    return shown((*(row[column.name] for column in shape.columns), rank))


def key_of(shape: RankSpec, row: Row) -> Any:
    return tuple(normal(row[shape.columns[p].name]) for p in shape.keys)


class Checked:
    """A rig whose output is held against all rows so far after every batch."""

    def __init__(self, shape: RankSpec) -> None:
        self.shape = shape
        self.rig = Rig(shape)
        self.rows: dict[Any, list[tuple[int, Row]]] = {}
        self.relation: Counter[str] = Counter()
        self.images: dict[Any, str] = {}
        self.version = 0

    def batch(self, rows: list[Row], signs: list[int] | None = None) -> list[tuple[Any, ...]]:
        shape = self.shape
        before = self.expected()
        for position, row in enumerate(rows):
            held = self.rows.setdefault(key_of(shape, row), [])
            if signs is None or signs[position] > 0:
                held.append((self.version, row))
        for position, row in enumerate(rows):
            if signs is not None and signs[position] < 0:
                held = self.rows[key_of(shape, row)]
                held.remove(next(one for one in held if repr(one[1]) == repr(row)))
        self.version += 1
        whole = record_batch(shape, rows, signs)
        middle = len(rows) // 2
        out = as_rows(self.rig.batch(whole.slice(0, middle), whole.slice(middle)))
        after = self.expected()
        if shape.retracts:  # keys without rows have left the state
            assert self.rig.operator.tables["main"].stats()["keys"] == sum(map(bool, self.rows.values()))
        width = len(shape.columns) + 1
        texts = [shown(row[:width]) for row in out]
        if shape.changes:
            for text, row in zip(texts, out, strict=True):
                self.relation[text] += 1 if row[-1] > 0 else -1
            assert +self.relation == after
            assert Counter(texts) == (after - before) + (before - after)
        else:  # that an image is as it was before is not noticed if the row that gave it before is gone
            assert after - before <= Counter(texts) <= after
        return out

    def expected(self) -> Counter[str]:
        return Counter(
            image(self.shape, row, rank) for held in self.rows.values() for row, rank in ranked(self.shape, held)
        )


@settings(max_examples=150, phases=[Phase.generate], deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_first_rows_of_every_key(data: st.DataObject) -> None:
    a, b = data.draw(st.sampled_from(ORDERED)), data.draw(st.sampled_from(ORDERED))
    orders = st.builds(Order, st.just(0), st.booleans(), st.booleans())
    first, second = data.draw(orders), data.draw(orders)
    order = [Order(1, first.descending, first.nulls_last), Order(2, second.descending, second.nulls_last)]
    shape = RankSpec(
        fields(COLUMNS.format(a=a, b=b)),
        (0,),
        tuple(order[: data.draw(st.integers(1, 2))]),
        data.draw(st.sampled_from(["row_number", "rank", "dense_rank"])),
        data.draw(st.sampled_from([1, 1, 2, 3, 10])),
        retracts=data.draw(st.booleans()),
        changes=data.draw(st.booleans()),
    )
    rows = st.fixed_dictionaries(
        {
            "k": st.sampled_from([None, "", "a", "b" * 13]),
            "a": values(a),
            "b": values(b),
            "s": st.sampled_from([None, "x", "y" * 20, "y" * 21, "z" * 400]),
            "d": st.sampled_from([None, 0.0, 1.0, math.nan]),
            "t": st.none() | st.builds(structure, st.integers(0, 1), st.sampled_from([None, "q" * 15])),
        }
    )
    checked = Checked(shape)
    for batch, restart in data.draw(st.lists(st.tuples(st.lists(rows, max_size=15), st.booleans()), max_size=5)):
        if restart:
            checked.rig.restart()
        signs = None
        if shape.retracts:
            held = [row for rows_ in checked.rows.values() for _, row in rows_]
            gone = [row for row in held if data.draw(st.booleans())]
            signs = [1] * len(batch) + [-1] * len(gone)
            shuffled = data.draw(st.permutations(list(zip(batch + gone, signs, strict=True))))
            batch, signs = [row for row, _ in shuffled], [sign for _, sign in shuffled]
        checked.batch(batch, signs)
    checked.rig.close()


@pytest.mark.parametrize("signs", [[1, -1], [-1, 1]])
@pytest.mark.parametrize("function", ["row_number", "rank", "dense_rank"])
def test_a_row_that_comes_and_goes_in_a_batch_leaves_its_equal(function: str, signs: list[int]) -> None:
    shape = RankSpec(
        fields(COLUMNS.format(a="double", b="double")), (0,), (Order(1, True, True),), function, 3, True, True
    )
    checked = Checked(shape)
    row: Row = {"k": "", "a": 1.0, "b": None, "s": "y" * 21, "d": None, "t": None}
    checked.batch([row], [1])
    checked.batch([row, row], signs)
    checked.rig.close()


LATEST = RankSpec(fields("k bigint; v bigint; t bigint"), (0,), (Order(2, True, True),), "row_number", 1)
BEST = RankSpec(fields("k bigint; v bigint; s string"), (0,), (Order(1, True, True),), "row_number", 10)


def test_the_earlier_row_wins_a_tie() -> None:
    checked = Checked(LATEST)
    assert checked.batch([{"k": 1, "v": 5, "t": 1}, {"k": 1, "v": 3, "t": 1}]) == [(1, 3, 1, 1)]
    assert checked.batch([{"k": 1, "v": 1, "t": 1}]) == []
    assert checked.batch([{"k": 1, "v": 9, "t": 2}]) == [(1, 9, 2, 1)]
    checked.rig.close()


@pytest.mark.costly
@pytest.mark.parametrize("function", ["row_number", "rank", "dense_rank"])
@pytest.mark.parametrize("limit", [1, 10, 3000])
def test_many_rows_of_few_keys(function: str, limit: int) -> None:
    rng = np.random.default_rng(limit)
    shape = RankSpec(BEST.columns, (0,), BEST.order, function, limit, changes=function != "row_number")
    checked = Checked(shape)
    for _ in range(3):
        count = 20_000
        rows = [
            {"k": int(k), "v": int(v), "s": "s" * int(v % 40)}
            for k, v in zip(rng.zipf(1.3, count) % 50, rng.integers(0, 500, count), strict=True)
        ]
        checked.batch(rows)
        checked.rig.restart()
    checked.rig.close()


def test_a_key_larger_than_the_state_holds_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_n, "MAX_BYTES", 4000)
    shape = RankSpec(BEST.columns, (0,), BEST.order, "row_number", 100, changes=True)
    rig = Rig(shape)
    rows = [{"k": k, "v": v, "s": "a" * 80} for k, count in ((1, 5), (2, 50)) for v in range(count)]
    rig.batch(record_batch(shape, rows[:30]))
    with pytest.raises(UsageError, match=r"key \(2,\) take 4 GiB"):
        rig.batch(record_batch(shape, rows[30:]))
    rig.close()


def test_what_was_never_there_cannot_go() -> None:
    shape = RankSpec(BEST.columns, (0,), BEST.order, "row_number", 2, retracts=True)
    rig = Rig(shape)
    rig.batch(record_batch(shape, [{"k": 1, "v": 1, "s": "a"}], [1]))
    with pytest.raises(StateDamagedError, match="does not have"):
        rig.batch(record_batch(shape, [{"k": 1, "v": 1, "s": "b"}], [-1]))
    rig.close()
