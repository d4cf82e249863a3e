import errno
import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millpond.errors import UsageError
from millpond.layout import RowLayout, Rows
from millpond.operators.kinds.registry import read_rows
from millpond.operators.processors.calls import Changes, FetchState, Phase
from millpond.operators.protocol import Times
from millpond.spec.kinds.processor import TIMERS, InitialState, ProcessorSpec, Variable
from millpond.spec.operators import EventTime
from millpond.stores.aligned import hash_intervals
from millpond.stores.memory.spool import Spool
from tests.operators.rig import Rig, Row, as_rows, fields, hash_of, record_batch
from tests.stores.shelf import Shelf

COUNT = Variable("count", "value", "struct<n:int>")
SEEN = Variable("seen", "list", "struct<s:string>", ttl_ms=1000)
OUT = fields("k string; n int")


def shape(*variables: Variable, time_mode: Any = "none", **more: Any) -> ProcessorSpec:
    return ProcessorSpec(fields("v int; k string; t timestamp"), (1,), OUT, variables, time_mode, "update", **more)


def rows_of(*pairs: tuple[str | None, int]) -> list[Row]:
    return [{"k": k, "v": v, "t": v * 1_000_000} for k, v in pairs]


class Fake:
    """A caller in the test's own process; `handle(phase, key, things, state)` changes the state, and gives rows."""

    def __init__(
        self, handle: Callable[..., list[tuple[Any, ...]]], expiry: Mapping[str, Callable[[Any], int]]
    ) -> None:
        self.handle = handle
        self.expiry = expiry
        self.phases: list[str] = []
        self.times: tuple[int, int] = (0, 0)

    def __call__(
        self,
        phase: Phase,
        times: tuple[int, int],
        tables: Mapping[str, pa.RecordBatch],
        take: Callable[[pa.RecordBatch], None],
        answer: FetchState,
    ) -> Changes:
        self.phases.append(phase)
        self.times = times
        if phase == "end":
            return []
        keys, counts = tables["keys"].column(0).to_pylist(), tables["keys"].column(1).to_pylist()
        things = tables["due" if phase == "timers" else "rows"].to_pylist()
        names = [name for name in tables if name not in ("keys", "rows", "due")]
        held = {name: tables[name].column(0).to_pylist() for name in names}
        out, changed, at = [], {name: [] for name in names}, 0
        for number, (key, count) in enumerate(zip(keys, counts, strict=True)):
            state = {name: held[name][number] for name in names}
            out += self.handle(phase, key, things[at : at + count], state)
            at += count
            for name in names:
                if state[name] != held[name][number]:
                    value = state[name]
                    due = self.expiry[name](value) if value and name in self.expiry else None
                    changed[name].append((number, value, due))
        assert at == len(things)
        assert len(set(keys)) == len(keys)
        take(pa.RecordBatch.from_pylist([dict(zip(("k", "n"), row, strict=True)) for row in out], SCHEMA))
        return [
            (name, self.table(piece, tables[name].schema.field(0).type))
            for name, some in changed.items()
            for piece in (some[: len(some) // 2], some[len(some) // 2 :])
            if piece
        ]

    @staticmethod
    def table(some: list[Any], kind: pa.DataType) -> pa.RecordBatch:
        """Changes of some keys."""
        at, values, due = zip(*some, strict=True)
        columns = [pa.array(at, pa.int32()), pa.array(values, kind), pa.array(due, pa.int64())]
        return pa.RecordBatch.from_arrays(columns, names=["at", "value", "expiry"])


SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int32())])


def call(rig: Rig, fake: Fake, rows: list[Row], times: Times = Times(), bits: int = 64) -> list[tuple[Any, ...]]:  # noqa: B008
    rig.operator.caller = fake  # type: ignore[attr-defined]
    return as_rows(rig.batch(record_batch(rig.spec, rows, ["k"], bits), times=times))


def state(rig: Rig, table: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for rows in rig.operator.tables[table].scan():  # type: ignore[attr-defined]
        for batch in read_rows(rig.spec, table, rows):
            found |= dict(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))
    return found


def count(phase: str, key: Any, rows: list[Row], held: dict[str, Any]) -> list[tuple[Any, ...]]:
    had = held[COUNT.table]
    total = (had["n"] if had else 0) + len(rows)
    held[COUNT.table] = None if any(row["v"] < 0 for row in rows) else {"n": total}
    return [(key, total)]


@pytest.mark.parametrize("bits", [64, 2, 0])
def test_each_key_comes_once_with_its_rows_and_its_state(bits: int) -> None:
    rig = Rig(shape(COUNT))
    fake = Fake(count, {})
    chosen = random.Random(bits)
    wanted: dict[Any, int] = {}
    for batch in range(5):
        pairs = [(chosen.choice([None, "", "a", "b" * 13, *map(str, range(30))]), 1) for _ in range(200)]
        counts: dict[Any, int] = {}
        for key, _ in pairs:
            counts[key] = counts.get(key, 0) + 1
        gone = chosen.choice(pairs)[0]
        pairs.append((gone, -1))
        counts[gone] += 1
        out = call(rig, fake, rows_of(*pairs), bits=bits)
        assert dict(out) == {key: wanted.get(key, 0) + n for key, n in counts.items()}
        assert len(out) == len(counts)
        wanted |= dict(out)
        del wanted[gone]
        assert {key: value["n"] for key, value in state(rig, COUNT.table).items()} == wanted
        if batch % 2:
            rig.restart()
    assert fake.phases == ["rows", "end"] * 5
    rig.close()


def test_rows_of_a_key_keep_their_order_and_large_ones_come_in_pieces() -> None:
    rig = Rig(shape(COUNT), budget=8 << 20)
    seen: dict[Any, list[int]] = {}

    def note(phase: str, key: Any, rows: list[Row], held: dict[str, Any]) -> list[tuple[Any, ...]]:
        seen[key] = [row["v"] for row in rows]
        return []

    fake = Fake(note, {})
    rig.operator.caller = fake  # type: ignore[attr-defined]
    rows = rows_of(*((str(v % 7) if v % 3 else f"{v}" * 20, v) for v in range(60_000)))
    pieces = [record_batch(rig.spec, rows[at : at + 7000], ["k"]) for at in range(0, len(rows), 7000)]
    rig.batch(*pieces)
    wanted: dict[Any, list[int]] = {}
    for row in rows:
        wanted.setdefault(row["k"], []).append(row["v"])
    assert seen == wanted
    assert len(fake.phases) > 2
    rig.close()


@pytest.mark.parametrize("bits", [64, 0])
def test_an_initial_state_comes_before_rows(bits: int) -> None:
    """Its columns are others; keys come once, also those without rows of the batch, and timers may be due at once."""
    columns = fields("f double; key string; n int")
    rig = Rig(shape(COUNT, time_mode="processing", initial=InitialState(columns, (1,))), budget=8 << 20)
    seen: list[Any] = []

    def handle(phase: str, key: Any, things: list[Row], held: dict[str, Any]) -> list[tuple[Any, ...]]:
        seen.append((phase, key))
        if phase != "initial":
            return count(phase, key, things, held) if phase == "rows" else [(key, -1)]
        assert held[COUNT.table] is None
        assert [thing["f"] for thing in things] == [thing["n"] / 2 for thing in things]
        held[COUNT.table], held[TIMERS] = {"n": sum(thing["n"] for thing in things)}, [5]
        return []

    fake = Fake(handle, {TIMERS: min})
    keys = [None, *map(str, range(3000))]
    rows = [{"f": n / 2, "key": keys[n % len(keys)], "n": n} for n in range(10_000)]
    hashes = pa.array([hash_of((row["key"],), bits) for row in rows], pa.int64())
    batch = pa.RecordBatch.from_pylist(rows, pa.schema([("f", pa.float64()), ("key", pa.string()), ("n", pa.int32())]))
    first = pa.RecordBatch.from_arrays([hashes, *batch.columns], names=["__hash", *batch.schema.names])
    rig.operator.initial_rows = iter([first.slice(0, 4000), first.slice(4000)])  # type: ignore[attr-defined]
    out = call(rig, fake, rows_of(("1", 1), ("1", 1), ("x", 1)), Times(processing=5), bits)
    sums = {key: sum(range(at, 10_000, len(keys))) for at, key in enumerate(keys)}
    assert dict(out[:2]) == {"1": sums["1"] + 2, "x": 1}
    assert sorted(map(str, out[2:])) == sorted(str((key, -1)) for key in keys)
    assert [phase for phase, _ in seen] == ["initial"] * len(keys) + ["rows"] * 2 + ["timers"] * len(keys)
    wanted = sums | {"1": sums["1"] + 2, "x": 1}
    assert {key: value["n"] for key, value in state(rig, COUNT.table).items()} == wanted
    rig.close()


def test_calls_are_cut_by_bytes_of_state() -> None:
    text = Variable("text", "value", "struct<s:string>")
    rig = Rig(shape(text), budget=256 << 20)
    fake = Fake(lambda phase, key, rows, held: held.update({text.table: {"s": "x" * (rows[0]["v"] << 10)}}) or [], {})
    sent: list[int] = []

    def measured(phase: Phase, times: Any, tables: Any, take: Any, answer: Any) -> Any:
        sent.append(sum(table.nbytes for table in tables.values()))
        return fake(phase, times, tables, take, answer)

    rig.operator.caller = measured  # type: ignore[attr-defined]
    sizes = {str(n): 1 + 400 * (n < 300) + (40 << 10) * (n > 3597) for n in range(3600)}
    for _ in range(3):
        sent.clear()
        rig.batch(record_batch(rig.spec, rows_of(*sizes.items()), ["k"]))
        assert max(sent) <= 64 << 20
    assert sum(sent) > 200 << 20
    assert 5 < len(sent) < 60
    assert state(rig, text.table) == {key: {"s": "x" * (size << 10)} for key, size in sizes.items()}
    rig.close()


def test_a_state_of_one_key_that_is_too_large_for_a_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Variable("text", "value", "struct<s:string>")
    rig = Rig(shape(text))
    fake = Fake(lambda phase, key, rows, held: held.update({text.table: {"s": "x" * rows[0]["v"]}}) or [], {})
    call(rig, fake, rows_of(("a", 10), ("b", 5000)))

    def called(phase: Phase, times: Any, tables: Any, take: Any, answer: Any) -> Any:
        assert phase == "end" or tables["keys"].num_rows
        return fake(phase, times, tables, take, answer)

    monkeypatch.setattr("millpond.operators.columns.decode.LIMIT", 1000)
    rig.operator.caller = called  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"rows of \('b',\).* more than 2 GiB"):
        rig.batch(record_batch(rig.spec, rows_of(("a", 1), ("b", 1)), ["k"]))
    rig.close()


def test_timers_fire_in_order_and_those_set_meanwhile_wait() -> None:
    rig = Rig(shape(COUNT, time_mode="event", time=EventTime(2), marked=True))
    fired: list[tuple[Any, int]] = []

    def handle(phase: str, key: Any, things: list[Row], held: dict[str, Any]) -> list[tuple[Any, ...]]:
        timers = held[TIMERS] or []
        if phase == "rows":
            timers = sorted({*timers, *(row["v"] * 1000 for row in things)})
        for due in things if phase == "timers" else ():
            fired.append((key, due["time"]))
            timers = sorted({*timers, due["time"] - 1, 90_000} - {due["time"]})
        held[TIMERS] = timers or None
        return []

    fake = Fake(handle, {TIMERS: lambda timers: timers[0]})
    call(rig, fake, rows_of(("a", 5), ("a", 3), ("a", 50), ("b", 4), ("c", 60)), Times(0, 4000))
    assert sorted(fired) == [("a", 3000), ("b", 4000)]
    assert fake.times == (0, 4000)
    assert state(rig, TIMERS)["a"] == [2999, 5000, 50_000, 90_000]
    rig.restart()
    fired.clear()
    call(rig, fake, rows_of(("a", 2), ("b", 70)), Times(2000, 4500))  # the first is late
    assert rig.operator.late_rows == 1
    assert sorted(fired) == [("a", 2999), ("b", 3999)]
    fired.clear()
    call(rig, fake, rows_of(("c", 45)), Times(4500, 50_000))
    assert sorted(fired) == [("a", 2998), ("a", 5000), ("a", 50_000), ("b", 3998), ("c", 45_000)]
    assert rig.operator.extra_metrics["due_timers"] == 5
    rig.close()


def test_what_has_expired_is_evicted_part_by_part() -> None:
    value = Variable("last", "value", "struct<n:int>", ttl_ms=500)
    rig = Rig(shape(SEEN, value, time_mode="processing"))

    def handle(phase: str, key: Any, rows: list[Row], held: dict[str, Any]) -> list[tuple[Any, ...]]:
        parts = [{"value": {"s": str(row["v"])}, "expiry": row["v"]} for row in rows]
        held[SEEN.table] = (held[SEEN.table] or []) + parts
        held[value.table] = {"value": {"n": 1}, "expiry": rows[-1]["v"]}
        return []

    fake = Fake(
        handle,
        {SEEN.table: lambda parts: min(part["expiry"] for part in parts), value.table: lambda one: one["expiry"]},
    )
    call(rig, fake, rows_of(("a", 30), ("a", 10), ("a", 20), ("b", 10)), Times(0, 0, 5))
    assert len(state(rig, SEEN.table)["a"]) == 3
    call(rig, fake, [], Times(0, 0, 10))
    assert {key: [part["expiry"] for part in parts] for key, parts in state(rig, SEEN.table).items()} == {"a": [30, 20]}
    assert list(state(rig, value.table)) == ["a"]
    rig.restart()
    call(rig, fake, [], Times(0, 0, 29))
    assert [part["expiry"] for part in state(rig, SEEN.table)["a"]] == [30]
    assert state(rig, value.table) == {}
    call(rig, fake, [], Times(0, 0, 30))
    assert state(rig, SEEN.table) == {}
    assert fake.phases[-1] == "end"
    rig.close()


def test_what_is_due_at_once_may_be_more_than_a_column_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.operators.columns.decode.LIMIT", 50_000)
    monkeypatch.setattr("millpond.operators.processors.stored_variable._MAX_BYTES", 10_000)
    rig = Rig(shape(SEEN, time_mode="processing"))

    def handle(phase: str, key: Any, things: list[Row], held: dict[str, Any]) -> list[tuple[Any, ...]]:
        if phase == "timers":
            held[TIMERS] = None
            return [(key, len(things))]
        held[SEEN.table] = [{"value": {"s": key * 2000}, "expiry": expiry} for expiry in (10, 20)]
        held[TIMERS] = [*range(10, 10 + things[0]["v"])]
        return []

    fake = Fake(handle, {TIMERS: min, SEEN.table: lambda parts: min(part["expiry"] for part in parts)})
    rows = rows_of(*((chr(65 + n), 100 + n) for n in range(100)))
    call(rig, fake, rows, Times(0, 0, 5))
    assert sorted(call(rig, fake, [], Times(0, 0, 500))) == [(row["k"], row["v"]) for row in rows]
    assert state(rig, SEEN.table) == {}
    call(rig, fake, rows, Times(0, 0, 5))
    call(rig, fake, [], Times(0, 0, 15))
    assert {key: [one["expiry"] for one in parts] for key, parts in state(rig, SEEN.table).items()} == {
        row["k"]: [20] for row in rows
    }
    rig.close()


def test_only_a_caller_that_is_gone_loses_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk of the slot, on which output is kept, is no crash of the user's code."""

    def full(spool: Spool, batch: pa.RecordBatch) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def dies(*_: Any) -> Changes:
        raise ConnectionError("the connection was closed")

    rig = Rig(shape(COUNT))
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "add", full)
        with pytest.raises(OSError, match="No space"):
            call(rig, Fake(count, {}), rows_of(("a", 1)))
    assert rig.operator.lost == ""  # type: ignore[attr-defined]
    rig.restart()
    rig.operator.caller = dies  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="closed"):
        rig.batch(record_batch(rig.spec, rows_of(("a", 1)), ["k"]))
    assert rig.operator.lost == "rows of ('a',)"  # type: ignore[attr-defined]
    rig.close()


def test_a_processor_needs_somebody_to_call_it() -> None:
    rig = Rig(shape(COUNT))
    with pytest.raises(UsageError, match="No caller of the processor"):
        rig.batch(record_batch(rig.spec, rows_of(("a", 1)), ["k"]))
    rig.close()


def test_a_state_that_is_larger_than_memory(tmp_path: Path) -> None:
    """Values, lists that expire and timers that move forth and back are found in files, and nothing else is."""
    text = Variable("text", "value", "struct<s:string>")
    rig = Rig(shape(text, SEEN, time_mode="processing"), budget=2 << 20, store=Shelf(tmp_path))
    chosen = random.Random(5)
    texts: dict[str, str] = {}
    seen: dict[str, list[int]] = {}
    timers: dict[str, set[int]] = {}
    now = 0
    fired: list[tuple[str, int]] = []

    def handle(phase: str, key: Any, things: list[Row], held: dict[str, Any]) -> list[tuple[Any, ...]]:
        assert held[TIMERS] == (sorted(timers[key]) if timers.get(key) else None)
        assert (held[text.table] or {"s": None})["s"] == texts.get(key)
        alive = [part["expiry"] for part in held[SEEN.table] or () if part["expiry"] > now]
        assert alive == [expiry for expiry in seen.get(key, ()) if expiry > now]
        mine = timers.setdefault(key, set())
        for due in things if phase == "timers" else ():
            fired.append((key, due["time"]))
            mine.discard(due["time"])
        for row in things if phase == "rows" else ():
            if row["v"] % 5 == 0:
                texts.pop(key, None)
            else:
                texts[key] = f"{key} {row['v']} " * 4
            seen[key] = [*alive, now + row["v"] % 7000 + 1]
            mine.add(now + row["v"] % 9000)
            if row["v"] % 3 == 0:
                mine.discard(max(mine))
        held[TIMERS] = sorted(mine) or None
        held[text.table] = {"s": texts[key]} if key in texts else None
        if phase == "rows":
            held[SEEN.table] = [{"value": {"s": key}, "expiry": expiry} for expiry in seen[key]]
        return []

    expiry = {TIMERS: lambda times: times[0], SEEN.table: lambda parts: min(part["expiry"] for part in parts)}
    fake = Fake(handle, expiry)
    for batch in range(30):
        now = 1000 * batch
        numbers = chosen.sample(range(30_000), 2500)
        coming = {str(number): chosen.randrange(1 << 20) for number in numbers}
        before = {key: set(times) for key, times in timers.items()}
        fired.clear()
        call(rig, fake, rows_of(*coming.items()), Times(0, 0, now))
        due = {(key, time) for key, times in before.items() if key not in coming for time in times if time <= now}
        assert {one for one in fired if one[0] not in coming} == due
        assert len(fired) == len(set(fired))
        assert not any(time <= now for times in timers.values() for time in times)
        seen = {key: left for key, parts in seen.items() if (left := [one for one in parts if one > now])}
    figures = rig.operator.tables[text.table].stats()
    assert figures["run_rows"] > figures["hot_rows"] > 0
    assert {key: one["s"] for key, one in state(rig, text.table).items()} == texts
    assert {key: [part["expiry"] for part in parts] for key, parts in state(rig, SEEN.table).items()} == seen
    assert {key: set(times) for key, times in state(rig, TIMERS).items()} == {k: t for k, t in timers.items() if t}
    rig.close()


def test_rows_of_a_key_are_in_memory_once_while_they_are_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    merge, chunks = hash_intervals.in_hash_order, []

    def merged(parts: Sequence[Rows], layout: RowLayout) -> Rows:
        chunks[:] = [weakref.ref(part.words) for part in parts]
        return merge(parts, layout)

    monkeypatch.setattr(hash_intervals, "in_hash_order", merged)
    rig = Rig(shape(COUNT))
    alive: list[bool] = []
    fake = Fake(lambda phase, key, rows, held: alive.extend(chunk() is not None for chunk in chunks) or [], {})
    call(rig, fake, rows_of(*(("a", v) for v in range(3000))))
    assert alive
    assert not any(alive)
    rig.close()
