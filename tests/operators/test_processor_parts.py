"""Parts of variables beside the rows of their keys: written, asked for, and gone when no head speaks of them."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from millpond.operators.processors.calls import Changes, FetchState, Phase
from millpond.operators.protocol import Times
from millpond.spec.kinds.processor import HEAD, ProcessorSpec, Variable
from millpond.spec.types import parse_type
from millpond.tasks.user_processor import UserProcessor
from tests.operators.called import Called
from tests.operators.rig import Rig, fields, record_batch
from tests.stores.shelf import Shelf
from tests.worker.processors.mini_slot import Scripted, user_processor

PLAIN = Variable("seen", "list", "struct<s:string>")
DYING = Variable("seen", "list", "struct<s:string>", ttl_ms=1000)


def spec(variable: Variable) -> ProcessorSpec:
    mode = "processing" if variable.ttl_ms else "none"
    return ProcessorSpec(fields("k string"), (0,), fields("k string"), (variable,), mode, "update")  # type: ignore[arg-type]


class Parted:
    """A caller that keeps a model beside: for each key the texts in its row, and in its parts by number."""

    def __init__(self, variable: Variable, seed: int) -> None:
        self.variable = variable
        self.chosen = random.Random(seed)
        self.rows: dict[str, list[tuple[str, int]]] = {}
        self.parts: dict[str, dict[int, list[tuple[str, int]]]] = {}
        self.now = 0

    def value(self, texts: list[tuple[str, int]]) -> list[Any]:
        if self.variable.ttl_ms:
            return [{"value": {"s": text}, "expiry": expiry} for text, expiry in texts]
        return [{"s": text} for text, _ in texts]

    def head(self, key: str) -> dict[str, int] | None:
        parts = self.parts.get(key)
        if not parts:
            return None
        latest = max(expiry for texts in parts.values() for _, expiry in texts)
        return {"first": min(parts), "stop": max(parts) + 1, "entries": 0, "bytes": 0, "expiry": latest}

    def texts(self) -> list[tuple[str, int]]:
        return [
            (f"{self.chosen.random()}" * self.chosen.choice([0, 1, 40]), self.now + self.chosen.randrange(1, 3000))
            for _ in range(self.chosen.choice([1, 2, 5]))
        ]

    def __call__(
        self,
        phase: Phase,
        times: tuple[int, int],
        tables: Mapping[str, pa.RecordBatch],
        take: Callable[[pa.RecordBatch], None],
        answer: FetchState,
    ) -> Changes:
        if phase == "end":
            return []
        variable = self.variable
        keys = tables["keys"].column(0).to_pylist()
        sent = tables[variable.table]
        heads = sent.column("head").to_pylist() if "head" in sent.schema.names else [None] * len(keys)
        asked = []
        for at, (key, value, head) in enumerate(zip(keys, sent.column("value").to_pylist(), heads, strict=True)):
            assert self.alive(value) == self.alive(self.value(self.rows.get(key, [])))
            if head is None or (variable.ttl_ms and head["expiry"] <= self.now):
                assert not any(self.alive(self.value(texts)) for texts in self.parts.get(key, {}).values())
            asked += [(at, part) for part in self.parts.get(key, {})] + [(at, 1000)]
        self.chosen.shuffle(asked)
        answers = answer(variable.parts, pairs(asked)).to_pylist()
        for (at, part), value in zip(asked, answers, strict=True):
            wanted = self.parts.get(keys[at], {}).get(part, [])
            assert self.alive(value) == self.alive(self.value(wanted))
        changed, written = [], []
        for at, key in enumerate(keys):
            if self.chosen.random() < 0.2:
                continue
            before = self.parts.get(key, {})
            if self.chosen.random() < 0.2:
                self.rows.pop(key, None)
                self.parts.pop(key, None)
            else:
                first = self.chosen.randrange(4)
                stop = first + self.chosen.randrange(6)
                new = {part: self.texts() for part in range(first, stop) if part not in before or part % 2}
                written += [(at, part, texts) for part, texts in new.items()]
                self.parts[key] = {part: texts for part, texts in before.items() if first <= part < stop} | new
                self.rows[key] = self.texts() if not self.parts[key] or self.chosen.random() < 0.5 else []
            changed.append(at)
        if not changed:
            return []
        kind = parse_type(variable.stored).arrow
        here = [keys[at] for at in changed]
        values = [self.value(self.rows[key]) if key in self.rows else None for key in here]
        heads = pa.array([self.head(key) for key in here], parse_type(HEAD).arrow)
        dues = [
            min([e for _, e in self.rows.get(key, [])] + [(self.head(key) or {}).get("expiry", 9999)]) for key in here
        ]
        made = [pa.array(changed), pa.array(values, kind), pa.array(dues, pa.int64())]
        names = ["at", "value", "expiry"]
        if heads.null_count < len(heads):
            made, names = [*made, heads], [*names, "head"]
        found = {variable.table: pa.record_batch(made, names)}
        if written:
            arrays = [
                *pairs([(at, part) for at, part, _ in written]).columns,
                pa.array([self.value(texts) for _, _, texts in written], kind),
                pa.array([min(expiry for _, expiry in texts) for _, _, texts in written], pa.int64()),
            ]
            found[variable.parts] = pa.record_batch(arrays, ["at", "part", "value", "expiry"])
        return list(found.items())

    def alive(self, value: list[Any] | None) -> list[Any]:
        return [one for one in value or () if not self.variable.ttl_ms or one["expiry"] > self.now]

    def keys_alive(self) -> set[str]:
        if not self.variable.ttl_ms:
            return set(self.rows)
        late = {key: max([e for _, e in self.rows[key]], default=0) for key in self.rows}
        late = {key: max(e, (self.head(key) or {"expiry": 0})["expiry"]) for key, e in late.items()}
        return {key for key, expiry in late.items() if expiry > self.now}


def pairs(asked: list[tuple[int, int]]) -> pa.RecordBatch:
    numbers = np.array(asked, np.int64).reshape(-1, 2)
    return pa.record_batch([pa.array(numbers[:, 0].copy()), pa.array(numbers[:, 1].copy())], ["at", "part"])


def run(rig: Rig, parted: Parted, keys: list[str], bits: int) -> None:
    rig.operator.caller = parted  # type: ignore[attr-defined]
    rows = [{"k": key} for key in keys]
    rig.batch(record_batch(rig.spec, rows, ["k"], bits), times=Times(0, 0, parted.now))


@pytest.mark.parametrize("variable", [PLAIN, DYING], ids=["for ever", "with a time to live"])
@pytest.mark.parametrize("bits", [64, 2, 0])
def test_parts(variable: Variable, bits: int, tmp_path: Path) -> None:
    store = Shelf(tmp_path) if bits == 64 else None
    rig = Rig(spec(variable), budget=(1 << 20) if bits == 64 else 64 << 20, store=store)
    parted = Parted(variable, bits)
    for batch in range(30):
        parted.now += 200
        number = 400 if bits == 64 else 30
        run(rig, parted, [str(parted.chosen.randrange(number)) for _ in range(100)], bits)
        if batch % 7 == 6 and store is None:
            rig.restart()
    tables = rig.operator.tables
    live = {
        (key, part): len(left)
        for key, parts in parted.parts.items()
        for part, texts in parts.items()
        if (left := parted.alive(parted.value(texts)))
    }
    assert sum(rows.count for rows in tables[variable.parts].scan()) == len(live)  # type: ignore[attr-defined]
    assert sum(rows.count for rows in tables[variable.table].scan()) == len(parted.keys_alive())  # type: ignore[attr-defined]
    rig.close()


def test_a_variable_without_parts_has_no_table_for_them() -> None:
    rig = Rig(spec(PLAIN))
    parted = Parted(PLAIN, 1)
    parted.chosen.random = lambda: 0.0  # type: ignore[method-assign]
    run(rig, parted, ["a", "b"], 64)
    assert list(rig.operator.tables) == [PLAIN.table]
    rig.close()


class Lists:
    """A processor with a list of texts, called as beside a pipe: `step(list, key)` is done for each key.

    A timer reports the list.

    Args:
        timed: whether each key that has rows has a timer that is due at once.
    """

    def __init__(self, *, timed: bool = False) -> None:
        def init(processor: Any, handle: Any) -> None:
            processor.texts = handle.getListState("seen", "s string")

        def rows(processor: Any, key: Any, rows: Any, times: Any) -> Iterator[Any]:
            self.told.append(self.step(processor.texts, key[0]))
            if timed:
                processor.handle.registerTimer(0)
            yield from ()

        def timer(processor: Any, key: Any, times: Any, due: Any) -> Iterator[Any]:
            self.told.append(list(processor.texts.get()))
            yield from ()

        mode: Any = "processing" if timed else "none"
        self.user = user_processor(Scripted(init=init, rows=rows, timer=timer), mode=mode)
        self.rig = Rig(self.user.spec)
        self.calls: list[tuple[Phase, int]] = []

    def run(self, step: Callable[[Any, str], Any], *keys: str) -> list[Any]:
        """Run a batch with these keys and return its reports; `calls` then has the calls with their numbers of keys."""
        self.step, self.told, called = step, list[Any](), Called(self.user)

        def counted(phase: Phase, times: Any, tables: Any, take: Any, answer: FetchState) -> Any:
            self.calls += [(phase, tables["keys"].num_rows)] if tables else []
            return called(phase, times, tables, take, answer)

        self.calls.clear()
        self.rig.operator.caller = counted  # type: ignore[attr-defined]
        self.rig.batch(record_batch(self.rig.spec, [{"k": key, "v": 0} for key in keys], ["k"]))
        return self.told


def test_parts_that_are_much_larger_than_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.operators.processors.stored_variable._MAX_BYTES", 64 << 10)
    monkeypatch.setattr("millpond.worker.processors.state.lists._MAX_SENT_ELEMENTS", 1)
    lists = Lists()
    wanted = [(str(n),) for n in range(100)] + [("x" * 40_000,), ("y" * 40_000,)]
    for start in range(0, len(wanted), 2):
        lists.run(lambda texts, key: texts.appendList(wanted[start : start + 2]), "a")  # noqa: B023
    assert lists.run(lambda texts, key: list(texts.get()), "a") == [wanted]
    lists.rig.close()


def test_calls_are_cut_by_the_bytes_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that a call asks for stay in the worker's memory until its end: calls have few keys if parts are large.

    Calls for rows, which ask for nothing, are no measure of those for timers, which do.
    """
    monkeypatch.setattr("millpond.operators.processors.operator._STATE_BYTES_PER_CALL", 1 << 20)
    lists = Lists(timed=True)
    keys = [str(n) for n in range(900)]
    long = [(f"{n}" * 30,) for n in range(300)]
    lists.run(lambda texts, key: texts.put(long), *keys)
    for _ in range(2):
        told = lists.run(lambda texts, key: texts.exists(), *keys)
    assert told == [True] * 900 + [long] * 900
    assert max(count for phase, count in lists.calls if phase == "rows") == 900
    assert max(count for phase, count in lists.calls if phase == "timers") < 50
    lists.rig.close()


@pytest.mark.parametrize("ttl", [0, 1000])
def test_parts_of_an_earlier_type(ttl: int) -> None:
    """They are read as of the type that is now, as they were written or among others that were added."""
    told: list[Any] = []

    def user(value: str, step: Callable[[Any, Any], Any], before: ProcessorSpec | None) -> UserProcessor:
        def init(processor: Any, handle: Any) -> None:
            processor.list, processor.map = (
                handle.getListState("l", value, ttl),
                handle.getMapState("m", "n int", value, ttl),
            )

        def rows(processor: Any, key: Any, rows: Any, times: Any) -> Iterator[Any]:
            told.append(step(processor.list, processor.map))
            yield from ()

        mode: Any = "processing" if ttl else "none"
        made = user_processor(Scripted(init=init, rows=rows), mode=mode)
        variables = tuple(msgspec.structs.replace(one, evolves=True) for one in made.spec.variables)
        shape = msgspec.structs.replace(made.spec, variables=variables)
        return dataclasses.replace(made, spec=shape if before is None else shape.with_idle_state(before))

    def write(start: int, stop: int, *beside: Any) -> Callable[[Any, Any], Any]:
        return lambda list_, map_: (
            list_.appendList([(n, *beside) for n in range(start, stop)]),
            [map_.updateValue((n,), (n, *beside)) for n in range(start, stop)],
        )

    def read(list_: Any, map_: Any) -> Any:
        return list(list_.get()), sorted(map_.iterator()), map_.getValue((5,)), map_.getValue((1205,))

    first = user("a int", write(0, 1000), None)
    rig = Rig(first.spec)
    for one in (
        first,
        user("a bigint, b string", read, first.spec),
        user("a bigint, b string", write(1000, 1300, "x"), first.spec),
        user("a bigint, b string", read, first.spec),
    ):
        rig.spec = one.spec
        rig.restart()
        rig.operator.caller = Called(one)  # type: ignore[attr-defined]
        rig.batch(record_batch(rig.spec, [{"k": "a", "v": 0}], ["k"]))
    old = [(n, None) for n in range(1000)]
    new = [(n, "x") for n in range(1000, 1300)]
    assert told[1] == (old, [((n,), one) for n, one in enumerate(old)], (5, None), None)
    assert told[3] == (old + new, [((n,), one) for n, one in enumerate(old + new)], (5, None), (1205, "x"))
    rig.close()
