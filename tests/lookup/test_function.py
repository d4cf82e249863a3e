"""The lookup join as Spark alone runs it: a function over record batches, with a few keys that a worker keeps."""

import datetime as dt
import pickle
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.errors import TransientError
from millpond.lookup import function
from millpond.lookup import rows as rows_module
from millpond.lookup.fetch import Fetcher
from millpond.lookup.function import Lookup
from millpond.lookup.rows import distinct_keys
from millpond.spec.kinds.enrich import EnrichSpec
from tests.lookup.tables import Memory, MemoryTable
from tests.operators.rig import fields


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Memory:
    return Memory(request.node.name)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    while function._workers:
        function._workers.popitem()[1].fetcher.close()


def lookup(test: Any, /, **more: Any) -> Lookup:
    name = test.node.name
    given: dict[str, Any] = {
        "columns": fields("k bigint; s string; n int"),
        "keys": (0, 1),
        "named": ("id", "kind"),
        "most": 1 << 20,
        "found": fields("name string"),
        "ttl_ms": -1,
        "timeout_ms": 1000,
        "concurrency": 2,
        "request": 50,
        "table": pickle.dumps(MemoryTable(name)),
        "name": name,
    }
    return pickle.loads(pickle.dumps(Lookup(EnrichSpec(**(given | more)))))


def batch(rng: np.random.Generator, count: int, keys: int) -> pa.RecordBatch:
    numbers = rng.integers(0, keys, count)
    kinds = [None if at % 13 == 0 else "ab"[number % 2] for at, number in enumerate(numbers.tolist())]
    return pa.record_batch(
        [pa.array(numbers, mask=numbers % 31 == 30), pa.array(kinds, pa.string()), pa.array(range(count), pa.int32())],
        names=["k", "s", "n"],
    )


def test_distinct_values_of_any_size(memory: Memory, request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a batch, and those of the cache, are not put into one Arrow column beyond its limit."""
    concat = rows_module.concat_values

    def bounded_concat(parts: Any, count: int) -> Any:
        assert rows_module.bytes_of(parts) <= 20_000
        return concat(parts, count)

    for module in (rows_module, function):
        monkeypatch.setattr(module, "MAX_BATCH_BYTES", 20_000)
        monkeypatch.setattr(module, "concat_values", bounded_concat)
    memory.rows = {(number, "ab"[number % 2]): {"name": f"{number} " * 200} for number in range(400)}
    run = lookup(request)
    for keys in (10, 10, 100, 10):
        given = batch(np.random.default_rng(keys), 200, keys)
        out = pa.Table.from_batches(run(iter([given])))
        wanted = [(memory.rows.get((row["k"], row["s"])) or {"name": None})["name"] for row in given.to_pylist()]
        assert out.column("name").to_pylist() == wanted


def test_values_stay_cached_until_their_size_exceeds_the_limit(
    memory: Memory, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, "MAX_BATCH_BYTES", 200_000)
    memory.rows = {(number, "a"): {"name": "x" * 1000} for number in range(250)}
    run = lookup(request, request=250)
    asked = []
    for first, last in [(0, 110)] * 4 + [(100, 150), (0, 150), (0, 250), (0, 110)]:
        numbers = list(range(first, last))
        rows = pa.record_batch({"k": numbers, "s": ["a"] * len(numbers), "n": pa.array(numbers, pa.int32())})
        before = memory.asked.total()
        list(run(iter([rows])))
        asked.append(memory.asked.total() - before)
    assert asked == [110, 0, 0, 0, 40, 0, 100, 110]


@pytest.mark.parametrize("how", ["left", "inner"])
@pytest.mark.parametrize("most", [0, 100, 1 << 20])
def test_rows_are_joined(memory: Memory, request: Any, how: str, most: int) -> None:
    memory.rows = {(number, "ab"[number % 2]): {"name": f"name {number}"} for number in range(0, 300, 3)}
    run = lookup(request, how=how, most=most)
    rng = np.random.default_rng(5)
    batches = [batch(rng, 200, 400) for _ in range(10)] + [batch(rng, 0, 1)]
    out = list(run(iter(batches)))
    for given, found in zip(batches, out, strict=True):
        wanted = [
            {**row, "name": memory.rows.get((row["k"], row["s"]), {}).get("name")}
            for row in given.to_pylist()
            if how == "left" or (row["k"], row["s"]) in memory.rows
        ]
        assert found.to_pylist() == wanted
    assert memory.most <= 50
    if most > 1000:
        assert set(memory.asked.values()) == {1}
    elif most:
        assert 1 < max(memory.asked.values()) <= 10


def test_large_values_of_frequent_keys_come_in_several_batches(
    memory: Memory, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.rows = {(number, "a"): {"name": str(number) * (1000 if number == 1 else 5)} for number in range(4)}
    run = lookup(request)
    numbers = [[1, 0, 2, None][at % 4] for at in range(200)]
    rows = pa.record_batch({"k": numbers, "s": ["a"] * 200, "n": pa.array(range(200), pa.int32())})
    (whole,) = run(iter([rows]))
    monkeypatch.setattr(rows_module, "MAX_BATCH_BYTES", 20_000)
    parts = list(run(iter([rows])))
    assert [part.num_rows for part in parts] == [50] * 4
    assert pa.Table.from_batches(parts).to_pylist() == whole.to_pylist()
    assert whole.column("name").null_count == 50
    monkeypatch.setattr(rows_module, "MAX_BATCH_BYTES", 1)  # smaller than a row
    assert [part.num_rows for part in run(iter([rows.slice(0, 3)]))] == [1, 1, 1]


def test_what_was_found_expires(memory: Memory, request: Any) -> None:
    run = lookup(request, ttl_ms=200)
    rows = pa.record_batch({"k": [1], "s": ["a"], "n": pa.array([0], pa.int32())})
    assert next(run(iter([rows]))).column("name").to_pylist() == [None]
    memory.rows = {(1, "a"): {"name": "one"}}
    assert next(run(iter([rows]))).column("name").to_pylist() == [None]
    time.sleep(0.25)
    assert next(run(iter([rows]))).column("name").to_pylist() == ["one"]


def test_errors(memory: Memory, request: Any) -> None:
    rows = pa.record_batch({"k": [1, 2], "s": ["a", "a"], "n": pa.array([0, 1], pa.int32())})
    memory.failing = 1
    with pytest.raises(TransientError, match=r"id = 1, kind = .a. and 1 other \("):
        next(lookup(request)(iter([rows])))
    memory.failing = 1
    side = lookup(request, on_error="side", request=1, concurrency=1)
    (out,) = side(iter([rows]))
    assert [one is None for one in out.column("_error").to_pylist()] == [False, True]
    (out,) = side(iter([rows]))
    assert out.column("_error").null_count == 2


def test_few_tables_are_kept(memory: Memory, request: Any) -> None:
    rows = pa.record_batch({"k": [1], "s": ["a"], "n": pa.array([0], pa.int32())})
    for retries in range(20):
        next(lookup(request, retries=retries)(iter([rows])))
    assert len(function._workers) == 8
    assert memory.open == 8


@pytest.mark.parametrize("zone", ["UTC", "Etc/UTC", "Europe/Berlin"])
def test_a_table_gets_times_in_utc_in_each_session(memory: Memory, request: Any, zone: str) -> None:
    """As text, a time depends on the zone of its column's type."""
    times = pa.array([1_750_000_000_000_000], pa.timestamp("us", tz=zone))
    one_key = lookup(request, columns=fields("at timestamp"), keys=(0,), named=("at",))
    fetcher = Fetcher(one_key.spec)
    seen: list[pa.RecordBatch] = []
    fetcher._fetch = lambda keys: seen.append(keys)  # type: ignore[assignment, method-assign, func-returns-value]
    fetcher.fetch(pa.record_batch({"at": times})).result(60)
    fetcher.close()
    assert seen[0].column("at").cast(pa.string()).to_pylist() == ["2025-06-15 15:06:40.000000Z"]


def test_a_time_is_kept_whatever_the_zone_of_the_next_session(memory: Memory, request: Any) -> None:
    one_key = lookup(request, columns=fields("at timestamp"), keys=(0,), named=("at",))
    time_ = dt.datetime(2026, 5, 4, 12, tzinfo=dt.UTC)
    memory.rows = {(time_,): {"name": "noon"}}
    batches = [
        pa.record_batch({"at": pa.array([time_], pa.timestamp("us", tz=zone))}) for zone in ("UTC", "Europe/Berlin")
    ]
    out = list(one_key(iter(batches)))
    assert [rows.column("name").to_pylist() for rows in out] == [["noon"], ["noon"]]
    assert memory.asked == {(time_,): 1}


def test_keys_are_told_apart() -> None:
    rng = np.random.default_rng(7)
    for columns in (1, 2, 4):
        keys = [pa.array([str(n) if n else None for n in rng.integers(0, 6, 500).tolist()]) for _ in range(columns)]
        firsts, numbers = distinct_keys(keys)
        rows = list(zip(*(one.to_pylist() for one in keys), strict=True))
        whole = [row for row in rows if None not in row]
        assert len(firsts) == len(set(whole))
        for row, number in zip(rows, numbers.tolist(), strict=True):
            assert (number < 0) == (None in row)
            assert number < 0 or rows[firsts[number]] == row
    firsts, numbers = distinct_keys([pa.array([], pa.int64())])
    assert not len(firsts)
    assert not len(numbers)
