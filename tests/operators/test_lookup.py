"""Lookup joins on one partition: compared with a join in Python, whatever the cache, the table and the hints do."""

import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow as pa
import pytest

from millpond.errors import TransientError, UsageError
from millpond.lookup import fetch
from millpond.lookup import rows as rows_module
from millpond.operators.columns import decode
from millpond.operators.lookups import fetchers, operator
from millpond.operators.lookups.operator import LookupOperator
from millpond.spec.kinds.enrich import EnrichSpec
from tests.lookup.tables import Memory, MemoryTable
from tests.operators.rig import Rig, as_rows, fields, record_batch
from tests.support.waiting import wait_until

COLUMNS = fields("k bigint; s string; n int")
FOUND = fields("name string; price decimal(10,2); parts array<int>")


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Memory:
    return Memory(request.node.name)


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.operator.close()
        rig.close()
    assert not fetchers._shared


class Clock:
    """The time as lookups see it; it stands still but for what is added."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(operator, "time", clock)
    monkeypatch.setattr(fetch, "time", clock)
    return clock


def wait_for_answers(rig: Rig) -> None:
    """To what was asked for ahead."""
    operator: Any = rig.operator
    wait_until(lambda: all(request.answer.done() for request in operator._requests._open))


@contextmanager
def held_until(memory: Memory, requests: int) -> Iterator[None]:
    """No request is answered before `requests` of them are there."""
    memory.gate.clear()

    def release() -> None:
        wait_until(lambda: memory.at_once >= requests)
        memory.gate.set()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def shape(memory: Memory, test: Any, /, **more: Any) -> EnrichSpec:
    given: dict[str, Any] = {
        "columns": COLUMNS,
        "keys": (0, 1),
        "named": ("id", "kind"),
        "found": FOUND,
        "most": 1 << 20,
        "ttl_ms": -1,
        "timeout_ms": 1000,
        "retries": 0,
        "concurrency": 3,
        "request": 100,
    }
    name = test.node.name
    return EnrichSpec(**(given | {"table": pickle.dumps(MemoryTable(name)), "name": name} | more))


def row(key: tuple[Any, ...], version: int = 0) -> dict[str, Any]:
    from decimal import Decimal

    number = key[0]
    return {
        "name": None if number % 7 == 0 else f"{'long ' * (number % 5)}name {number} {key[1]} {version}",
        "price": Decimal(number) / 100,
        "parts": list(range(number % 4)),
    }


def some_rows(rng: np.random.Generator, count: int, keys: int) -> list[dict[str, Any]]:
    numbers = rng.integers(0, keys, count).tolist()
    return [
        {"k": None if number % 31 == 30 else number, "s": None if at % 53 == 52 else "ab"[number % 2], "n": at}
        for at, number in enumerate(numbers)
    ]


def batch(spec: EnrichSpec, rows: Sequence[dict[str, Any]], bits: int = 64) -> pa.RecordBatch:
    return record_batch(spec, rows, [spec.columns[at].name for at in spec.keys], bits)


def joined(spec: EnrichSpec, rows: Sequence[dict[str, Any]], table: dict[Any, dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The model: the rows in their order."""
    out = []
    for one in rows:
        found = table.get(tuple(one[spec.columns[at].name] for at in spec.keys))
        if found is not None or spec.how == "left":
            out.append((*one.values(), *((found or {}).get(field.name) for field in spec.found)))
    return out


def plain(value: Any) -> Any:
    return [tuple(tuple(part) if isinstance(part, list) else part for part in one) for one in value]


@pytest.mark.parametrize("how", ["left", "inner"])
@pytest.mark.parametrize("bits", [64, 6])
def test_rows_are_joined(memory: Memory, rigs: list[Rig], request: Any, how: str, bits: int) -> None:
    spec = shape(memory, request, how=how)
    rng = np.random.default_rng(1)
    memory.rows = {(number, "ab"[number % 2]): row((number, "ab"[number % 2])) for number in range(0, 900, 3)}
    rigs.append(rig := Rig(spec))
    for _ in range(4):
        pieces = [some_rows(rng, 700, 1000) for _ in range(3)]
        out = rig.batch(*(batch(spec, rows, bits) for rows in pieces))
        assert out.schema.names == [field.name for field in spec.output_fields]
        assert plain(as_rows(out)) == plain(joined(spec, list(chain(*pieces)), memory.rows))
    if bits == 64:
        assert set(memory.asked.values()) == {1}
    assert memory.most <= 100
    assert 1 <= memory.open <= 3


def test_large_values_of_a_frequent_key(
    memory: Memory, rigs: list[Rig], request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "MAX_BATCH_BYTES", 20_000)
    spec = shape(memory, request, found=fields("name string"))
    memory.rows = {(1, "a"): {"name": "x" * 1000}}
    rigs.append(rig := Rig(spec))
    rows = [{"k": 1, "s": "a", "n": number} for number in range(100)]
    out = rig.batch(batch(spec, rows))
    assert as_rows(out) == joined(spec, rows, memory.rows)
    assert out.column("name").num_chunks == 8


def test_distinct_values_of_any_size(
    memory: Memory, rigs: list[Rig], request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow's 32-bit offsets hold neither the values of all keys of a piece, nor those that the cache has of them."""
    limit = 20_000
    monkeypatch.setattr(rows_module, "MAX_BATCH_BYTES", limit)
    monkeypatch.setattr(decode, "LIMIT", limit)
    concat = rows_module.concat_values

    def bounded_concat(parts: Any, count: int) -> Any:
        assert rows_module.bytes_of(parts) <= limit
        return concat(parts, count)

    monkeypatch.setattr(rows_module, "concat_values", bounded_concat)
    spec = shape(memory, request, found=fields("name string"), request=10, on_error="side", concurrency=1)
    memory.rows = {(number, "a"): {"name": f"{number} " * 400} for number in range(0, 100, 3)}
    memory.broken = {(50, "a")}
    rigs.append(rig := Rig(spec))
    rows = [{"k": None if number % 7 == 0 else number % 100, "s": "a", "n": number} for number in range(150)]
    for hits in (0, 92):
        out = rig.batch(batch(spec, rows))
        assert as_rows(out.select(["k", "s", "n", "name"])) == joined(spec, rows, memory.rows)
        failed = [one["n"] for one in out.to_pylist() if one["_error"] is not None]
        assert failed == [50]
        assert rig.operator.extra_metrics["cache_hits"] == hits


def test_a_key_on_its_way_is_not_asked_for_again(memory: Memory, rigs: list[Rig], request: Any) -> None:
    spec = shape(memory, request, concurrency=2, request=40)
    memory.rows = {(number, "a"): row((number, "a")) for number in range(100)}
    memory.delay = 0.02
    rigs.append(rig := Rig(spec))
    rows = [{"k": number, "s": "a", "n": number} for number in range(100)]
    with held_until(memory, 2):
        out = rig.batch(*(batch(spec, rows[start : start + 60]) for start in (0, 20, 40, 0, 10)))
    assert out.num_rows == 300
    assert set(memory.asked.values()) == {1}
    assert memory.at_once == 2
    figures = rig.operator.extra_metrics
    assert figures["fetched_keys"] == 100
    assert figures["fetches"] == memory.requests
    assert figures["cache_misses"] + figures["cache_hits"] == 300
    assert figures["fetch_ms"] >= 20


def test_pieces_are_looked_at_while_others_wait(memory: Memory, rigs: list[Rig], request: Any) -> None:
    spec = shape(memory, request, concurrency=4)
    rigs.append(rig := Rig(spec))
    memory.gate.clear()
    rig.operator.begin(0, None)  # type: ignore[arg-type]
    for number in range(4):
        rig.operator.process(batch(spec, [{"k": number, "s": "a", "n": 0}]))
    wait_until(lambda: memory.at_once == 4)
    memory.gate.set()
    rig.operator.finish()
    assert sum(piece.num_rows for piece in rig.operator.output()) == 4


def test_what_was_found_expires(memory: Memory, rigs: list[Rig], request: Any, clock: Clock) -> None:
    spec = shape(memory, request, ttl_ms=300)
    rows = [{"k": 1, "s": "a", "n": 0}, {"k": 2, "s": "a", "n": 0}]
    memory.rows = {(1, "a"): row((1, "a"))}
    rigs.append(rig := Rig(spec))
    before = plain(as_rows(rig.batch(batch(spec, rows))))
    first = dict(memory.rows)
    memory.rows = {(1, "a"): row((1, "a"), 2), (2, "a"): row((2, "a"), 2)}
    assert plain(as_rows(rig.batch(batch(spec, rows)))) == before == plain(joined(spec, rows, first))
    clock.now += 0.35
    assert plain(as_rows(rig.batch(batch(spec, rows)))) == plain(joined(spec, rows, memory.rows))
    assert memory.asked == {(1, "a"): 2, (2, "a"): 2}


def test_what_was_found_is_as_old_as_its_request(memory: Memory, rigs: list[Rig], request: Any, clock: Clock) -> None:
    """An answer may lie about until the next batch asks for it."""
    spec = shape(memory, request, ttl_ms=300)
    rows = [{"k": 1, "s": "a", "n": 0}]
    memory.rows = {(1, "a"): row((1, "a"))}
    rigs.append(rig := Rig(spec))
    operator: Any = rig.operator
    operator.prefetch_keys(batch(spec, rows).select([0, 1, 2]), 0)
    wait_for_answers(rig)
    clock.now += 0.35
    memory.rows = {(1, "a"): row((1, "a"), 2)}
    assert plain(as_rows(rig.batch(batch(spec, rows)))) == plain(joined(spec, rows, memory.rows))
    assert memory.asked == {(1, "a"): 2}


def test_a_cache_smaller_than_a_request(memory: Memory, rigs: list[Rig], request: Any) -> None:
    spec = shape(memory, request, most=20, request=100)
    rows = [{"k": number, "s": "a", "n": 0} for number in range(100)]
    rigs.append(rig := Rig(spec))
    for _ in range(2):
        rig.batch(batch(spec, rows))
        operator: Any = rig.operator
        assert operator._cache._table.rows == 20
    assert rig.operator.extra_metrics["cache_hits"] == 20


def test_without_a_life_nothing_is_kept(memory: Memory, rigs: list[Rig], request: Any) -> None:
    spec = shape(memory, request, ttl_ms=0)
    rigs.append(rig := Rig(spec))
    for _ in range(3):
        rig.batch(batch(spec, [{"k": 1, "s": "a", "n": 0}] * 5))
    assert memory.asked == {(1, "a"): 3}


@pytest.mark.parametrize("limit", ["keys", "memory", "nothing"])
def test_memory_is_bounded(memory: Memory, rigs: list[Rig], request: Any, limit: str) -> None:
    budget = (16 << 20) if limit == "memory" else (64 << 20)
    most = {"keys": 1000, "memory": 1 << 30, "nothing": 0}[limit]
    spec = shape(memory, request, found=fields("name string"), keys=(0,), named=("id",), most=most, request=5000)
    memory.rows = {(number,): {"name": f"{number} " * 20} for number in range(0, 60_000, 2)}
    rigs.append(rig := Rig(spec, budget=budget))
    rng = np.random.default_rng(3)
    for _ in range(3):
        rows = [{"k": number, "s": "x", "n": 0} for number in rng.permutation(60_000).tolist()]
        out = rig.batch(*(batch(spec, rows[start : start + 10_000]) for start in range(0, 60_000, 10_000)))
        assert as_rows(out) == joined(spec, rows, memory.rows)
        operator: Any = rig.operator
        assert operator._cache.memory < budget
        assert operator._cache._table.rows <= most
        if limit == "memory":
            assert 1000 < operator._cache._table.rows < 60_000


def test_keys_of_late_use_stay(memory: Memory, rigs: list[Rig], request: Any) -> None:
    spec = shape(memory, request, keys=(0,), named=("id",), most=200)
    rigs.append(rig := Rig(spec))
    hot = [{"k": number, "s": "x", "n": 0} for number in range(50)]
    for start in range(1000, 2000, 100):
        cold = [{"k": number, "s": "x", "n": 0} for number in range(start, start + 100)]
        rig.batch(batch(spec, hot + cold))
    assert sum(memory.asked[(number,)] for number in range(50)) < 100


class TestHints:
    ROWS: ClassVar = [{"k": number, "s": "a", "n": 0} for number in range(200)]

    def prefetch(self, rig: Rig, spec: EnrichSpec, rows: list[dict[str, Any]], needed: int) -> None:
        operator = rig.operator
        assert isinstance(operator, LookupOperator)
        keys = batch(spec, rows).select([0, *(1 + at for at in spec.hint_columns)])
        operator.prefetch_keys(keys, needed)

    def test_keys_are_there_when_their_rows_come(self, memory: Memory, rigs: list[Rig], request: Any) -> None:
        spec = shape(memory, request)
        memory.rows = {(number, "a"): row((number, "a")) for number in range(100)}
        rigs.append(rig := Rig(spec))
        self.prefetch(rig, spec, self.ROWS, 0)
        wait_for_answers(rig)
        assert sum(memory.asked.values()) == 200
        out = rig.batch(batch(spec, self.ROWS))
        assert plain(as_rows(out)) == plain(joined(spec, self.ROWS, memory.rows))
        assert set(memory.asked.values()) == {1}
        assert rig.operator.extra_metrics["cache_misses"] == 0
        assert rig.operator.extra_metrics["announced_keys"] == 200

    @pytest.mark.parametrize("kind", ["others", "null", "twice", "many", "late"])
    def test_wrong_ones_change_nothing(self, memory: Memory, rigs: list[Rig], request: Any, kind: str) -> None:
        spec = shape(memory, request)
        memory.rows = {(number, "a"): row((number, "a")) for number in range(100)}
        rigs.append(rig := Rig(spec))
        for version in range(3):
            if kind == "others":
                self.prefetch(rig, spec, [{"k": number, "s": "b", "n": 0} for number in range(200)], version)
            elif kind == "null":
                self.prefetch(rig, spec, [{"k": None, "s": "a", "n": 0}, {"k": 1, "s": None, "n": 0}], version)
            elif kind == "twice":
                for _ in range(3):
                    self.prefetch(rig, spec, self.ROWS + self.ROWS, version)
            elif kind == "many":
                memory.delay = 0.005
                self.prefetch(rig, spec, [{"k": number, "s": "c", "n": 0} for number in range(50_000)], version)
            out = rig.batch(batch(spec, self.ROWS))
            if kind == "late":
                self.prefetch(rig, spec, self.ROWS, version)
            assert plain(as_rows(out)) == plain(joined(spec, self.ROWS, memory.rows))
        assert sum(memory.asked.values()) <= 200 + (12 * 100 * 3 if kind == "many" else 200)


class TestErrors:
    ROWS: ClassVar = [{"k": number, "s": "a", "n": 0} for number in range(5)]

    def test_a_request_is_tried_again(self, memory: Memory, rigs: list[Rig], request: Any) -> None:
        spec = shape(memory, request, retries=2)
        memory.rows = {(1, "a"): row((1, "a"))}
        memory.failing = 2
        rigs.append(rig := Rig(spec))
        out = rig.batch(batch(spec, self.ROWS))
        assert plain(as_rows(out)) == plain(joined(spec, self.ROWS, memory.rows))
        assert memory.requests == 3

    def test_a_server_that_was_started_anew(self, memory: Memory, rigs: list[Rig], request: Any) -> None:
        """All connections that lie idle are broken then, more than there are tries."""
        spec = shape(memory, request, retries=1, request=1, concurrency=4, ttl_ms=0)
        rigs.append(rig := Rig(spec))
        with held_until(memory, 4):
            rig.batch(batch(spec, self.ROWS))
        assert memory.open == 4
        memory.starts += 1
        assert rig.batch(batch(spec, self.ROWS[:1])).num_rows == 1
        assert memory.open == 1

    def test_the_batch_fails(self, memory: Memory, rigs: list[Rig], request: Any) -> None:
        spec = shape(memory, request, retries=1)
        memory.failing = 2
        rigs.append(rig := Rig(spec))
        with pytest.raises(TransientError) as caught:
            rig.batch(batch(spec, self.ROWS))
        said = str(caught.value)
        for part in (spec.name, "id = 0", "kind = 'a'", "and 4 others", "2 tries", "gone", "on_error"):
            assert part in said
        rig.operator.close()
        rig.restart()
        assert rig.batch(batch(spec, self.ROWS)).num_rows == 5

    @pytest.mark.parametrize("on_error", ["null", "side"])
    @pytest.mark.parametrize("how", ["left", "inner"])
    def test_rows_come_out_without(
        self, memory: Memory, rigs: list[Rig], request: Any, on_error: str, how: str
    ) -> None:
        spec = shape(memory, request, on_error=on_error, how=how, request=2, concurrency=1)
        memory.rows = {(number, "a"): row((number, "a")) for number in (0, 1, 2)}
        memory.failing = 1
        memory.broken = {(2, "a")}
        rigs.append(rig := Rig(spec))
        out = rig.batch(batch(spec, self.ROWS))
        found = {one["k"]: one for one in out.to_pylist()}
        lost = [key for key, count in memory.asked.items()][:2]
        failed = {key[0] for key in lost} | {2}
        assert rig.operator.extra_metrics["failed_keys"] == len(failed)
        for number in range(5):
            if number in failed:
                assert found[number]["price"] is None
            elif number in (0, 1):
                assert found[number]["price"] is not None
            elif how == "inner":
                assert number not in found
            if on_error == "side" and number in found:
                error = found[number]["_error"]
                assert (error is not None) == (number in failed)
                if number in failed:
                    assert error["kind"] == ("unreachable" if (number, "a") in lost else "unreadable")
        memory.broken.clear()
        again = rig.batch(batch(spec, self.ROWS))  # what failed is not kept
        assert {one["k"] for one in again.to_pylist() if one["price"] is not None} == {0, 1, 2}

    def test_what_cannot_be_read_is_named(self, memory: Memory, rigs: list[Rig], request: Any) -> None:
        spec = shape(memory, request)
        memory.broken = {(3, "a")}
        rigs.append(rig := Rig(spec))
        with pytest.raises(UsageError, match=r"id = 3, kind = 'a' what cannot be read: it is broken"):
            rig.batch(batch(spec, self.ROWS))
        rig.operator.close()
        rig.restart()

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ("usage", "no table"),
            ("twice", "several rows of one key"),
            ("columns", "other columns"),
            ("collisions", "not asked for"),
            ("unreadable collisions", "not asked for"),
        ],
    )
    def test_a_bad_table_is_told(self, memory: Memory, rigs: list[Rig], request: Any, wrong: str, said: str) -> None:
        spec = shape(memory, request, retries=3, on_error="null")
        memory.rows = {(1, "a"): row((1, "a")), (2, "a"): row((2, "a"))}
        memory.wrong = wrong
        rigs.append(rig := Rig(spec))
        with pytest.raises(UsageError, match=said):
            rig.batch(batch(spec, self.ROWS))
        assert memory.requests == 1
        rig.operator.close()
        rig.restart()

    def test_one_that_hangs(
        self, memory: Memory, rigs: list[Rig], request: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whose `fetch` does not obey its time-out: the batch fails, and the next one asks by other threads."""
        spec = shape(memory, request, timeout_ms=20, on_error="null")
        memory.rows = {(1, "a"): row((1, "a"))}
        memory.gate.clear()
        rigs.append(rig := Rig(spec))
        with monkeypatch.context() as hasty:
            hasty.setattr(fetch, "_GRACE_SECONDS", 0.1)
            hasty.setattr(fetch, "_CHECK_SECONDS", 0.05)
            with pytest.raises(TransientError, match=r"hangs: it was given 0.02 s to answer, and has not for 0.14 s"):
                rig.batch(batch(spec, self.ROWS))
        rig.operator.close()
        rig.restart()
        memory.gate.set()
        assert rig.batch(batch(spec, self.ROWS)).num_rows == len(self.ROWS)

    def test_one_request_that_hangs_for_ever(
        self, memory: Memory, rigs: list[Rig], request: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It fails one batch of each partition at most: a partition that starts again gets other connections."""
        spec = shape(memory, request, timeout_ms=20)
        rigs += [Rig(spec), Rig(spec)]
        first, second = rigs
        hanging = memory.gate
        hanging.clear()
        with monkeypatch.context() as hasty:
            hasty.setattr(fetch, "_GRACE_SECONDS", 0.1)
            hasty.setattr(fetch, "_CHECK_SECONDS", 0.05)
            with pytest.raises(TransientError, match="hangs"):
                first.batch(batch(spec, self.ROWS))
            memory.gate = threading.Event()
            memory.gate.set()
            first.operator.close()
            first.restart()
            used = [cast("LookupOperator", rig.operator)._fetcher for rig in rigs]
            assert [fetcher.hangs for fetcher in used] == [False, True]
        assert first.batch(batch(spec, self.ROWS)).num_rows == len(self.ROWS)
        second.operator.close()
        second.restart()
        assert list(fetchers._users.items()) == [(used[0], 2)]
        hanging.set()

    def test_a_class_that_is_not_here(self, memory: Memory, request: Any) -> None:
        spec = shape(memory, request, table=b"cnowhere\nTable\n.")
        with pytest.raises(UsageError, match="cannot be loaded"):
            Rig(spec)
        assert not fetchers._shared


def test_nothing_goes_into_checkpoints(memory: Memory, rigs: list[Rig], request: Any) -> None:
    spec = shape(memory, request)
    rigs.append(rig := Rig(spec))
    rig.batch(batch(spec, [{"k": 1, "s": "a", "n": 0}]))
    assert not rig.operator.tables
    assert not any(rig._deltas)
    assert spec.compatibility_spec.table == b""
    assert spec.compatibility_spec.name == ""
    assert repr(spec.table) not in repr(spec)


def test_threads_end(memory: Memory, rigs: list[Rig], request: Any) -> None:
    spec = shape(memory, request)
    before = threading.active_count()
    rig = Rig(spec)
    rig.batch(batch(spec, [{"k": number, "s": "a", "n": 0} for number in range(1000)]))
    rig.operator.close()
    rig.close()
    wait_until(lambda: threading.active_count() <= before + 1)  # the rig's own
    assert memory.open == 0
