"""The demo: its parts, all of it with fake engines, and once with the real engines."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.nexmark import jobs as nexmark
from rich.console import Console

from millpond.demo import engine, figures, machine, page, view
from millpond.demo import jobs as job
from millpond.demo import run as demo
from millpond.demo.side import Side
from millpond.errors import UsageError

SIZE = job.Size(rows_per_batch=1_000, before_kill=6, after_kill=2, seconds_before_kill=60.0)
ENGINE = (sys.executable, str(Path(__file__).parent / "demo_engine.py"))
ROWS = [{"auction": a, "day": "2015-07-15", "total_bids": a * 2} for a in (3, 1, 2)]


def write_batch(folder: Path, rows: list[dict[str, object]]) -> Path:
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "part-0.parquet")
    return folder


def test_equal_rows_in_any_order(tmp_path: Path) -> None:
    pair = write_batch(tmp_path / "a", ROWS), write_batch(tmp_path / "b", ROWS[::-1])
    assert figures.compare([pair]).line() == "rows equal: 3 = 3"


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ([{**ROWS[0], "total_bids": 0}, *ROWS[1:]], "'total_bids': 0"),
        (ROWS[:2], "'auction': 2"),
        ([*ROWS, ROWS[0]], "3 and 4 rows"),
        ([{**row, "total_bids": float(row["total_bids"])} for row in ROWS], "double"),
        (None, "3 and 0 rows"),
    ],
)
def test_a_difference_is_reported(tmp_path: Path, other: list[dict[str, object]] | None, named: str) -> None:
    second = tmp_path / "b" if other is None else write_batch(tmp_path / "b", other)
    compared = figures.compare([(write_batch(tmp_path / "a", ROWS), second)])
    assert named in compared.line()
    assert not compared.equal


def test_two_empty_outputs_are_not_equal(tmp_path: Path) -> None:
    compared = figures.compare([(tmp_path / "a", tmp_path / "b")])
    assert (compared.line(), compared.equal) == ("no rows to compare", False)


def test_missing_java_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert demo.run_demo(folder=tmp_path) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == "Millpond needs Java 17 or newer on the PATH (or JAVA_HOME), as PySpark does."


def test_an_old_java_is_reported(tmp_path: Path) -> None:
    assert "this is Java 11.0.2" in machine.problem_of("11.0.2", tmp_path)
    assert machine.problem_of("17.0.2", tmp_path) == ""


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("q99", "no such query"),
        ("q4", "Spark's own state store does not run it"),
        ("q12", "not the same each time"),
    ],
)
def test_queries_that_cannot_be_compared_are_refused(query: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){why}.*clicks, .*q17"):
        demo.run_demo(query)


def test_jobs_have_the_configured_sizes() -> None:
    assert "1,000,000 users" in job.find("clicks").about
    assert "1,000 users" in job.find("clicks", 250).about
    assert job.find("q17").size == nexmark.SIZE
    assert job.CLICKS_SIZE.before_kill >= job.LEAST_BATCHES >= job.LEFT_OUT + 5


def run_with_batches(name: str, ms: float) -> figures.Measurement:
    run = figures.Measurement(name, starts=[90.0, 106.5], kills=[106.0], counted=6)
    run.batches = [figures.Figures(i, 100.0 + i, ms + i, 1_000, 2.0) for i in range(6)]
    run.batches += [figures.Figures(i, 102.0 + i, ms + i, 1_000, 2.0) for i in (6, 7)]
    return run


def test_the_figures_of_a_run() -> None:
    run = run_with_batches("spark", 500.0)
    assert [b.batch for b in run.steady()] == [3, 4, 5]
    of = run.figures()
    assert of["rows_per_second"] == pytest.approx(3_000 / 1.512)
    assert (of["batch_ms"], of["longest_ms"], of["commit_wait_ms"], of["first_ms"]) == (504.0, 505.0, 2.0, 506.0)
    assert of["restart_seconds"] == pytest.approx(108.0 + 0.506 - 106.5)
    assert of["seconds"] == pytest.approx(109.0 + 0.507 - 90.0)
    ours, compared = run_with_batches("millpond", 50.0), figures.Comparison()
    report = figures.Report(job.find("clicks"), 1_000, run, ours, compared, compared, "", "", "")
    assert report.ratio() == pytest.approx(1.512 / 0.162)
    times, rows = zip(*run.timeline(), strict=True)
    assert list(times) == sorted(times)
    # From the kill to the first batch after it, nothing is done.
    assert (rows[-1], rows.count(6_000.0), max(b for a, b in run.timeline() if a < 18.0)) == (8_000.0, 2, 6_000.0)


def test_figures_from_either_engine() -> None:
    progress = {
        "batchId": 3,
        "timestamp": "2026-01-01T00:00:01.500Z",
        "numInputRows": 2_000,
        "durationMs": {"triggerExecution": 250},
        "stateOperators": [{"commitTimeMs": 60}],
        "observedMetrics": {},
    }
    native = engine.figures(progress, 2, 1_000)
    assert (native.batch, native.ms, native.rows, native.commit_wait_ms) == (3, 250.0, 1_000, 30.0)
    observed = {"millpond": {"commit_wait_ms": 4}}
    assert engine.figures({**progress, "observedMetrics": observed}, 2, 1_000).commit_wait_ms == 4.0


def test_columns_of_blocks() -> None:
    assert view.columns([1.0, None, 4.0], 4.0, 2, 1) == ["  █", "▄ █"]
    assert view.columns([4.0, 0.001], 4.0, 1, 2) == ["█ ▁ "]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_live_view_fits_the_width(tmp_path: Path, width: int) -> None:
    sides = [
        Side(engine.Plan(name, str(tmp_path / name), "clicks", 1_000, 0, 2, str(tmp_path / f"tmp-{name}")))
        for name in ("spark", "millpond")
    ]
    for side, ms in zip(sides, (500.0, 50.0), strict=True):
        side.run, side.behind, side.state_bytes, side.status = (
            run_with_batches(side.plan.engine, ms),
            1,
            5_000_000,
            "done",
        )
    console = Console(width=width, record=True, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    with view.View(console, sides, job.find("clicks"), 8) as shown:
        text = "\n".join(segment for segment in _lines(console, shown))
    assert all(len(line) <= width for line in text.splitlines())
    for piece in ("Millpond", "batch 8 of 8", "✓ done", "╎", "✕", "5 MB", "commits behind", "1.6 s", "rows/s"):
        assert piece in text
    assert ("Spark (RocksDB)" in text) == (width >= 80)


def _lines(console: Console, shown: view.View) -> list[str]:
    with console.capture() as captured:
        console.print(shown.picture())
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", captured.get()).splitlines()


def run_fake(folder: Path, *wrong: str) -> int:
    return demo.run_demo(
        folder=folder, picture_path=folder / "pictures" / "demo.svg", size=SIZE, command=(*ENGINE, *wrong)
    )


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder for temporary files; its name is short."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def left_behind(temporary: Path) -> list[str]:
    """Return files in the folder for temporary files, and processes that were started below it."""
    left = [str(path) for path in temporary.iterdir()]
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = [*(process.info["cmdline"] or ()), process.info["cwd"] or ""]
        if any(str(temporary) in word for word in words) and process.status() != psutil.STATUS_ZOMBIE:
            left.append(" ".join(words))
    return left


def test_the_report_has_the_measured_figures(
    tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_fake(out) == 0
    assert left_behind(temporary) == []
    printed = capsys.readouterr().out
    (path,) = out.glob("*.html")
    assert f"report: {path}" in printed
    assert "Millpond did 12.5 times the rows per second of Spark's RocksDB" in printed
    assert "Spark (RocksDB): 6 batches, then SIGKILL for all of its 2 processes" in printed
    text = path.read_text()
    for piece in (
        *('<div class="ratio">12.5×', "2,500", "31,200", "31,250", "400 ms", "32 ms"),
        *("✓ all 40 result rows equal (30 before the kill, 10 after)", "batches 4 to 6"),
        *("[millpond 0] &lt;aggregate&gt;", "Spark 4.3 · Java 17", "def busy(", "changelogCheckpointing.enabled=true"),
    ):
        assert piece in text
    assert not re.search(r"""(src|href)=(?!"#)|url\((?!#)|@import|https?:(?!//www\.w3\.org)""", text)
    data = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])
    assert data["computed"]["ratio"] == pytest.approx(12.5)
    runs = [data["report"][name] for name in ("spark", "millpond")]
    assert [[b["batch"] for b in run["batches"]] for run in runs] == [list(range(8))] * 2
    assert [(len(run["kills"]), len(run["starts"])) for run in runs] == [(1, 2)] * 2
    # The charts and the picture are well-formed.
    drawn = [*re.findall(r"<svg.*?</svg>", text, re.DOTALL), (out / "pictures" / "demo.svg").read_text()]
    assert len(drawn) == 4
    assert all(len(list(ElementTree.fromstring(picture).iter())) > 20 for picture in drawn)
    assert "12.5×" in drawn[-1]
    assert "40 result rows equal" in drawn[-1]


def test_different_rows_are_reported(tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_fake(tmp_path / "out", "7") == 1
    (path,) = (tmp_path / "out").glob("*.html")
    reported = "rows differ: batch=000007: {'clicks': 3, 'user': 3} and {'clicks': 4, 'user': 3}"
    assert reported in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
    assert "✗ rows differ: batch=000007" in path.read_text()
    assert left_behind(temporary) == []


def test_an_engine_that_fails_ends_the_demo(
    tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_fake(tmp_path / "out", "fail") == 1
    assert "the engine failed on purpose" in capsys.readouterr().out
    assert left_behind(temporary) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, temporary: Path, sent: signal.Signals) -> None:
    size = "Size(1000, 100000, 1, 1000.0)"
    code = f"""import sys
from pathlib import Path
from millpond.demo.run import run_demo
from millpond.demo.jobs import Size
sys.exit(run_demo(folder=Path({str(tmp_path / "out")!r}), size={size}, command={ENGINE!r}))"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        deadline = time.monotonic() + 60
        while not list(temporary.glob("*/spark/figures.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left_behind(temporary)
        process.send_signal(sent)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == demo.INTERRUPTED
    assert "interrupted" in printed
    assert left_behind(temporary) == []
    assert not (tmp_path / "out").exists()


def test_an_engine_ends_with_its_demo(tmp_path: Path) -> None:
    child = "import os, time; from millpond.demo.processes import die_with_parent; die_with_parent(os.getppid());"
    child += "print('ready', flush=True); time.sleep(600)"
    code = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}]);"
    code += "print(p.pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_engine_ends_if_its_demo_died_before() -> None:
    code = "from millpond.demo.processes import die_with_parent; die_with_parent(1 << 22); print('lives on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "has ended" in done.stderr


def test_reports_of_the_same_second_stand_side_by_side(tmp_path: Path) -> None:
    written = [page.write(tmp_path, "text") for _ in range(3)]
    assert len(set(written)) == 3


@pytest.mark.timeout(900)  # four starts of Spark; a minute on a quiet machine
def test_the_real_engines_on_a_small_job(tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = job.Size(rows_per_batch=2_000, before_kill=5, after_kill=2, seconds_before_kill=600.0)
    assert demo.run_demo(folder=tmp_path / "out", size=size) == 0
    (path,) = (tmp_path / "out").glob("*.html")
    text = path.read_text()
    assert "Busy users among 8,000" in text
    assert "[millpond 0] aggregate by window, user" in text
    assert re.search(r"✓ all [\d,]{3,} result rows equal", text)
    assert left_behind(temporary) == []
