"""Large state of processors in the tables of a slot: against a model, larger than memory, over restarts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import Row

from millpond.operators.kinds.registry import read_rows, read_whole
from millpond.operators.processors import user_rows
from millpond.operators.processors.calls import Changes, Phase
from millpond.worker.processors.state import columns
from tests.stores.shelf import Shelf
from tests.worker.processors.beside import Beside
from tests.worker.processors.mini_slot import Scripted, user_processor

Step = Callable[[Any, Any, list[int]], None]


class Whole(Beside):
    """A processor with a map and a list, of which each key's row is a step."""

    def __init__(self, ttl: int = 0, budget: int = 64 << 20, store: Shelf | None = None) -> None:
        def init(self: Any, handle: Any) -> None:
            self.map = handle.getMapState("m", "k string", "a bigint, b string", ttl)
            self.list = handle.getListState("l", "a string", ttl)

        def rows(processor: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
            self.step(processor, key[0], [row.v for row in rows])
            yield from ()

        mode: Any = "processing" if ttl else "none"
        super().__init__(user_processor(Scripted(init=init, rows=rows), mode=mode), budget, store)
        self.sent = 0
        self.answers: list[int] = []
        """How many tables more than one of each name each call has answered with."""

    def batch(self, step: Step, keys: Mapping[str, int], now: int = 0, bits: int = 64) -> None:
        """A batch in which each key has a row."""
        self.step = step
        self.run([{"k": key, "v": number} for key, number in keys.items()], now, bits)

    def called(
        self, phase: Phase, tables: Mapping[str, pa.RecordBatch], asked: tuple[int, int], changed: Changes
    ) -> None:
        self.sent = max(self.sent, *(table.nbytes for table in tables.values()), 0)
        self.answers.append(len(changed) - len({name for name, _ in changed}))

    def read(self, name: str) -> dict[str, list[Any]]:
        """Values that a user reads of a variable."""
        spec, tables = self.user.spec, self.rig.operator.tables
        table = spec.parts[name]
        beside = f"parts.{name}"
        pieces: Any = tables[table].scan()  # type: ignore[attr-defined]
        if beside in tables:
            shown = read_whole(spec, table, pieces, tables[beside].scan())  # type: ignore[attr-defined]
        else:
            shown = (batch for rows in pieces for batch in read_rows(spec, table, rows))
        found: dict[str, list[Any]] = {}
        for batch in shown:
            assert batch.schema.names == ["k", name]
            batch.validate(full=True)
            keys = batch.column(0).to_pylist()
            assert not found.keys() & {*keys}
            found |= dict(zip(keys, batch.column(1).to_pylist(), strict=True))
        return found


@pytest.mark.parametrize("ttl", [0, 500])
@pytest.mark.parametrize(("bits", "bound"), [(64, None), (2, None), (0, None), (2, 70_000)])
def test_any_program(ttl: int, bits: int, bound: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 bits of hash, in little memory; with fewer, keys have one hash and there are restarts.

    Where a table of what has changed has a bound, some calls answer with several.
    """
    if bound is not None:
        monkeypatch.setattr(columns, "_MAX_COLUMN_BYTES", bound)
    small = bits == 64
    whole = Whole(ttl, 2 << 20 if small else 64 << 20, Shelf(tmp_path) if small else None)
    chosen = random.Random(ttl + bits)
    maps: dict[str, dict[str, tuple[int, str, int]]] = {}
    lists: dict[str, list[tuple[str, int]]] = {}
    now = 0

    def step(self: Any, key: str, numbers: list[int]) -> None:
        due = now + ttl if ttl else 1 << 60
        has = maps[key] = {k: v for k, v in maps.get(key, {}).items() if v[2] > now}
        held = lists[key] = [one for one in lists.get(key, []) if one[1] > now]
        for _ in range(chosen.choice([1, 5, 400 if numbers[0] % 3 == 0 else 5])):
            one = str(chosen.randrange(1500))
            kind = chosen.random()
            if kind < 0.6:
                has[one] = numbers[0], one * chosen.choice([1, 1, 30]), due
                self.map.updateValue((one,), has[one][:2])
            elif kind < 0.7:
                self.map.removeKey((one,))
                has.pop(one, None)
            else:
                got = self.map.getValue((one,))
                assert got == (has[one][:2] if one in has else None)
        more = [(f"{numbers[0]} " * chosen.choice([1, 50]),) for _ in range(chosen.choice([1, 3, 300]))]
        self.list.appendList(more)
        held += [(text, due) for (text,) in more]
        kind = chosen.random()
        if kind < 0.05:
            self.map.clear()
            has.clear()
        elif kind < 0.1:
            self.list.put([("x",)])
            held[:] = [("x", due)]
        elif kind < 0.15:
            self.list.clear()
            held.clear()
        elif kind < 0.5:
            assert [text for (text,) in self.list.get()] == [text for text, _ in held]
            assert {k: v for (k,), v in self.map.iterator()} == {k: v[:2] for k, v in has.items()}

    keys = [f"key {n}" for n in range(12)]
    for batch in range(40):
        now += 50
        some = {key: chosen.randrange(1000) for key in chosen.sample(keys, 4)}
        whole.batch(step, some, now, bits)
        if batch % 8 == 7 and not small:
            whole.rig.restart()
        if batch % 10 == 9:
            shown = {
                key: {one["key"]["k"]: tuple(one["value"].values()) for one in entries}
                for key, entries in whole.read("m").items()
            }
            assert shown == {
                key: live for key, has in maps.items() if (live := {k: v[:2] for k, v in has.items() if v[2] > now})
            }
            texts = {
                key: [(one["value"] if ttl else one)["a"] for one in parts] for key, parts in whole.read("l").items()
            }
            assert texts == {
                key: live for key, held in lists.items() if (live := [text for text, due in held if due > now])
            }
    assert any(whole.answers) == (bound is not None)
    if small:
        assert any(table.stats()["run_rows"] for table in whole.rig.operator.tables.values())
    whole.rig.close()


def test_a_list_and_a_map_of_one_key_that_are_larger_than_memory(tmp_path: Path) -> None:
    whole = Whole(budget=8 << 20, store=Shelf(tmp_path))
    count = 0

    def grow(self: Any, key: str, numbers: list[int]) -> None:
        nonlocal count
        self.list.appendList([(f"{number} " * 200,) for number in range(count, count + 2000)])
        for number in range(count, count + 2000):
            self.map.updateValue((str(number),), (number, f"{number} " * 200))
        count += 2000

    def check(self: Any, key: str, numbers: list[int]) -> None:
        for number, (text,) in enumerate(self.list.get()):
            assert text == f"{number} " * 200
        assert number == count - 1
        for number in range(0, count, 997):
            assert self.map.getValue((str(number),)) == (number, f"{number} " * 200)
        assert {k for (k,) in self.map.keys()} == {str(number) for number in range(count)}  # noqa: SIM118

    for _ in range(10):
        whole.batch(grow, {"k": 1})
    whole.batch(check, {"k": 1})
    tables = whole.rig.operator.tables
    stats = [tables[f"parts.{name}"].stats() for name in "lm"]
    assert all(one["run_rows"] > one["hot_rows"] for one in stats)
    assert whole.sent < 1 << 20

    def clear(self: Any, key: str, numbers: list[int]) -> None:
        self.list.clear()
        self.map.clear()

    whole.batch(clear, {"k": 1})
    assert all(table.stats()["keys"] == 0 for table in tables.values())
    whole.rig.close()


def test_a_key_that_has_too_much_for_a_row_is_shown_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_rows, "_MAX_ROW_BYTES", 10_000)
    whole = Whole()

    def step(self: Any, key: str, numbers: list[int]) -> None:
        for start in range(0, 3000, 300):
            self.list.appendList([(f"{key} {n}",) for n in range(start, start + 300)])

    for _ in range(3):
        whole.batch(step, {"a": 1, "b": 2})
    rows: dict[str, list[list[str]]] = {"a": [], "b": []}
    tables: Any = whole.rig.operator.tables
    pieces = tables["variable.l"].scan(), tables["parts.l"].scan()
    for batch in read_whole(whole.user.spec, "variable.l", *pieces):
        for row in batch.to_pylist():
            rows[row["k"]].append([one["a"] for one in row["l"]])
    for key, found in rows.items():
        assert len(found) >= 3
        assert [text for some in found for text in some] == [f"{key} {n}" for n in range(3000)] * 3
    whole.rig.close()
