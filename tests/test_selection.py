"""The selection of the quick suite, and the recording of Spark's answers."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StructType

from tests import selection
from tests.differential import recorded
from tests.differential.recorded import Answer, Oracle, Question, Use

ROOT = Path(__file__).parents[1]


class Item:
    """A test as pytest collects it, as far as the selection looks."""

    def __init__(self, nodeid: str, *fixtures: str, marks: tuple[pytest.Mark, ...] = ()) -> None:
        self.nodeid = nodeid
        self.fixturenames = fixtures
        self.marks = {mark.name: mark for mark in marks}
        self.config = SimpleNamespace(getini=lambda name: "300")

    def add_marker(self, name: str) -> None:
        self.marks[name] = getattr(pytest.mark, name).mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def iter_markers(self) -> list[pytest.Mark]:
        return list(self.marks.values())


def cases(test: str, count: int, *fixtures: str, **marks: pytest.Mark) -> list[Item]:
    return [Item(f"tests/{test}[{n}]", *fixtures, marks=tuple(marks.values())) for n in range(count)]


def quick(items: list[Item]) -> int:
    selection.mark(items)  # type: ignore[arg-type]
    return sum("slow" not in item.marks for item in items)


def test_a_part_of_what_is_costly_is_quick() -> None:
    every, costly = pytest.mark.every.mark, pytest.mark.costly.mark
    assert [quick(cases("a.py::test_a", count)) for count in (1, 100)] == [1, 100]
    for fixture in ("spark", "hdfs", "owned"):
        assert [quick(cases("a.py::test_a", count, fixture)) for count in (1, 10, 11, 21)] == [1, 1, 2, 3]
    tests = [cases(f"{module}.py::test_{n}", 8, "spark") for module in "ab" for n in range(3)]
    assert quick([item for test in tests for item in test]) == 4
    large, small = cases("a.py::test_large", 5, "spark"), cases("a.py::test_small", 1, "spark")
    assert (quick([*small, *large]), "slow" in small[0].marks) == (1, True)
    assert quick(cases("a.py::test_a", 16, marks=costly)) == 2
    assert quick(cases("a.py::test_a", 16, "spark", marks=every)) == 16
    assert quick(cases("a.py::test_a", 16, "spark", marks=pytest.mark.slow.mark)) == 0
    assert quick(cases("a.py::test_a", 2, marks=pytest.mark.timeout(600).mark)) == 0
    assert quick(cases("a.py::test_a", 2, marks=pytest.mark.timeout(60).mark)) == 2


def test_one_in_four_slow_cases_is_rare_if_there_are_some() -> None:
    for count, rare in ((16, 4), (4, 1), (2, 0)):
        items = cases("a.py::test_a", count, "spark")
        quick([*items, *cases("a.py::test_large", 100, "spark")])
        assert sum("rare" in item.marks for item in items) == rare
        assert all("slow" in item.marks for item in items if "rare" in item.marks)


def test_the_same_cases_are_quick_under_xdist() -> None:
    found = []
    for group in ("", "@group"):
        items = [Item(f"tests/a.py::test_a[{n}]{group}", "spark") for n in range(20)]
        quick(items)
        found.append([n for n, item in enumerate(items) if "slow" not in item.marks])
    assert found[0] == found[1]


def test_what_takes_long_comes_first() -> None:
    items = [Item("tests/a.py::test_a"), Item("tests/a.py::test_b", "spark"), Item("tests/chaos/c.py::test_c")]
    selection.mark(items)  # type: ignore[arg-type]
    selection.longest_first(items)  # type: ignore[arg-type]
    assert [item.nodeid[-1] for item in items] == ["c", "b", "a"]


def test_files_are_drawn_and_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"tests/{file}.py::test_{n}" for file in "abcdefgh" for n in range(3)]

    def ordered(order: str) -> list[str]:
        monkeypatch.setattr(selection, "ORDER", order)
        items = [Item(name) for name in names]
        selection.drawn(items)  # type: ignore[arg-type]
        return [item.nodeid for item in items]

    assert ordered("") == names
    assert len({tuple(ordered(str(order))) for order in range(10)}) == 10
    files = [name.partition("::")[0] for name in ordered("1")]
    assert [file for n, file in enumerate(files) if n % 3 == 0] == list(dict.fromkeys(files))


def test_what_has_not_begun_in_time_is_skipped() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-rs",
            f"{__file__}::test_the_same_cases_are_quick_under_xdist",
        ],
        cwd=ROOT,
        env={**os.environ, "MILLPOND_SECONDS": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "1 skipped" in run.stdout
    assert "not begun: 0 seconds are over" in run.stdout


@given(st.integers())
@settings(max_examples=40)
def drawn(value: int) -> None:
    pass


def test_examples_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "EXAMPLES", 0.25)
    for _ in range(2):  # the cases of a test share its function
        selection._scale(SimpleNamespace(function=drawn))  # type: ignore[arg-type]
    assert drawn._hypothesis_internal_use_settings.max_examples == 10  # type: ignore[attr-defined]
    assert [selection.scaled(count) for count in (400, 5, 1)] == [100, 1, 1]
    assert selection.scaled(3, 5) == 3


VALUES = (None, True, 7, -0.0, float("inf"), "x'", b"\0\xff", Decimal("1.50"), (1, (None, [2.5, ()])), [])
TIMES = (dt.datetime(2024, 3, 1, 12, 0, 0, 5), dt.date(2024, 3, 1), dt.timedelta(1, 2, 3))
SCHEMA = StructType().add("a", LongType(), True, {"spark.watermarkDelayMs": 5})


def answer(*rows: tuple[object, ...]) -> Answer:
    return Answer({0: list(rows), 2: []}, [SCHEMA], "")


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of records, for a test of the name `tests/a/test_b.py::test_c`."""
    monkeypatch.setattr(recorded, "GOLDEN", tmp_path)
    monkeypatch.setattr(recorded, "_PENDING", tmp_path / ".pending")
    (tmp_path / "4.3").mkdir()
    again(monkeypatch, Use.RECORDED)
    return tmp_path


def again(monkeypatch: pytest.MonkeyPatch, use: Use) -> None:
    monkeypatch.setattr(recorded, "USE", use)
    monkeypatch.setattr(recorded, "_current", recorded._Current("tests/a/test_b.py::test_c"))
    recorded._records.cache_clear()


def ask(rows: list[int]) -> Oracle:
    spark = SimpleNamespace(version="4.3.0")
    return Oracle(spark, lambda question: question.add_tables([pa.table({"a": rows})]))  # type: ignore[arg-type]


def equal(left: object, right: object) -> None:
    assert repr(left) == repr(right)


def test_an_answer_is_recorded_and_given_back(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again(monkeypatch, Use.WRITE)
    oracle = ask([1])
    known = oracle.answer(lambda: answer(VALUES, TIMES))
    oracle.close(equal)
    recorded.finish(whole=True)
    path = golden / "4.3" / "a" / "test_b.jsonl.gz"
    written = path.read_bytes()
    again(monkeypatch, Use.HELD)
    oracle = ask([1])
    given = oracle.answer(lambda: pytest.fail("Spark runs"))
    oracle.close(equal)
    assert given.schemas == known.schemas
    equal({number: sorted(rows, key=repr) for number, rows in given.batches.items()}, {0: [VALUES, TIMES], 2: []})
    again(monkeypatch, Use.WRITE)
    oracle = ask([1])
    oracle.answer(lambda: pytest.fail("Spark runs though a record holds"))
    oracle.close(equal)
    recorded.finish(whole=True)
    assert path.read_bytes() == written


def test_a_record_of_another_question_is_not_believed(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again(monkeypatch, Use.WRITE)
    oracle = ask([1])
    oracle.answer(lambda: answer((1,)))
    oracle.close(equal)
    recorded.finish(whole=True)
    again(monkeypatch, Use.RECORDED)
    oracle = ask([2])
    assert oracle.answer(lambda: answer((2,))).batches[0] == [(2,)]
    oracle.close(equal)
    for use in (Use.HELD, Use.LIVE):
        again(monkeypatch, use)
        oracle = ask([2])
        oracle.answer(lambda: answer((2,)))
        with pytest.raises(AssertionError, match="make golden"):
            oracle.close(equal)


def test_a_record_is_held_against_spark(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again(monkeypatch, Use.WRITE)
    oracle = ask([1])
    oracle.answer(lambda: answer((1,)))
    oracle.close(equal)
    recorded.finish(whole=True)
    again(monkeypatch, Use.LIVE)
    oracle = ask([1])
    assert oracle.answer(lambda: answer((2,))).batches[0] == [(2,)]
    with pytest.raises(AssertionError):
        oracle.close(equal)


def test_plans_are_told_without_what_is_new_each_time() -> None:
    uuids = "9fcb5d76-0b58-4cb3-b7f1-2160cd27a2fb", "cdbc02a9-9cd2-4065-97f6-fed9050196a1"
    plans = [
        f"Project [a#{n}, b#{n + 1}L, a#{n} / 2]\n+- Watermark {uuid}\n   +- FileSource[/tmp/x-{n}/in], a.Some@{n}abcd"
        for n, uuid in zip((3, 99), uuids, strict=True)
    ]
    assert len(set(map(recorded._normalized, plans))) == 1
    for one, other in (
        ("[a#1, b#2]", "[a#1, b#1]"),
        ("split(a#1, /x)", "split(a#1, /y)"),
        ("a#1 = x@abcd1", "a#1 = x@abcd2"),
    ):
        assert recorded._normalized(one) != recorded._normalized(other)


def test_the_digest_is_the_same_in_another_process(tmp_path: Path) -> None:
    question = Question()
    question.add_tables([pa.table({"a": [1, None], "b": ["x", "y"]})])
    question.add(recorded._sources("tests.differential.test_joins"))
    code = (
        "import pyarrow as pa; from tests.differential import recorded as r; q = r.Question();"
        "q.add_tables([pa.table({'a': [1, None], 'b': ['x', 'y']})]);"
        "q.add(r._sources('tests.differential.test_joins')); print(q.digest())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == question.digest()


def test_code_that_decides_answers_is_found() -> None:
    imported = set(recorded._imports((ROOT / "tests/differential/processors/test_state.py").read_bytes()))
    assert {"tests.differential.processors.processors", "tests.differential.processors.checks"} <= imported
