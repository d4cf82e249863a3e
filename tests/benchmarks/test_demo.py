"""The demo's parts; the whole of it is run by `make demo`."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from millpond import demo
from millpond.demo import comparison, engine, machine, plot, view
from millpond.demo.side import Side


def write_batch(folder: Path, rows: list[dict[str, object]]) -> Path:
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "part-0.parquet")
    return folder


ROWS = [{"auction": a, "day": "2015-07-15", "total_bids": a * 2} for a in (3, 1, 2)]


def test_equal_rows_in_any_order(tmp_path: Path) -> None:
    pair = write_batch(tmp_path / "a", ROWS), write_batch(tmp_path / "b", ROWS[::-1])
    assert comparison.compare([pair]).line() == "rows equal: 3 = 3"


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ([{**ROWS[0], "total_bids": 0}, *ROWS[1:]], "'total_bids': 0"),
        (ROWS[:2], "'auction': 2"),
        ([*ROWS, ROWS[0]], "3 and 4 rows"),
        ([{**row, "total_bids": float(row["total_bids"])} for row in ROWS], "double"),
    ],
)
def test_a_difference_is_named(tmp_path: Path, other: list[dict[str, object]], named: str) -> None:
    pair = write_batch(tmp_path / "a", ROWS), write_batch(tmp_path / "b", other)
    assert named in comparison.compare([pair]).line()


def test_without_java_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert demo.run_demo(tmp_path) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == "Millpond needs Java 17 or newer on the PATH (or JAVA_HOME), as PySpark does."


def test_an_old_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "java_version", lambda: "11.0.2")
    assert "this is Java 11.0.2" in machine.look(tmp_path).problem


def side_with_batches(folder: Path, name: str) -> Side:
    side = Side(name, folder / name, 1_000, 2)
    side.batches = [engine.Figures(i, 100.0 + i, 500.0 + i, 1_000, 2.0, 0.5) for i in range(8)]
    side.kills, side.restarted = [104.5], 104.6
    return side


def test_the_view_and_the_summary(tmp_path: Path) -> None:
    sides = [side_with_batches(tmp_path, name) for name in ("spark", "millpond")]
    console = Console(width=120, record=True)
    console.print(view.live_table(sides, "now"))
    console.print(view.summary(sides))
    text = console.export_text()
    assert "50.0 %" in text
    assert "505 ms" in text  # the first batch after the kill
    assert view.back_after_kill(sides[0]) == pytest.approx(0.905)


def test_the_plot(tmp_path: Path) -> None:
    sides = [side_with_batches(tmp_path, name) for name in ("spark", "millpond")]
    written = plot.draw(sides, tmp_path, ["rows equal: 3 = 3"])
    assert [path.name for path in written] == ["demo.png", "demo.html"]
    assert "rows equal: 3 = 3" in written[1].read_text()


def test_figures_from_either_engine() -> None:
    progress = {
        "batchId": 3,
        "timestamp": "2026-01-01T00:00:01.500Z",
        "numInputRows": 1_000,
        "durationMs": {"triggerExecution": 250},
        "stateOperators": [
            {
                "commitTimeMs": 60,
                "customMetrics": {"rocksdbReadBlockCacheHitCount": 3, "rocksdbReadBlockCacheMissCount": 1},
            }
        ],
        "observedMetrics": {},
    }
    native = engine.figures(progress, 2)
    assert (native.batch, native.ms, native.commit_ms, native.hits) == (3, 250.0, 30.0, 0.75)
    mine = {"millpond": {"commit_lag_ms": 4, "input_rows": 100, "cache_misses": 25}}
    ours = engine.figures({**progress, "observedMetrics": mine}, 2)
    assert (ours.commit_ms, ours.hits) == (4.0, 0.75)
