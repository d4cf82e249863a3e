"""Figures from outside: process trees, limits, results, and one small run of each kind."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from benchmarks.measuring.compactors import Compactors
from benchmarks.measuring.harness import EngineFailed, local_folder, to_batch
from benchmarks.measuring.limits import MemoryGroup, drop_page_cache
from benchmarks.measuring.process import ProcessTree, Sample
from benchmarks.measuring.report import plot, suite, table
from benchmarks.measuring.result import Batch, Machine, Restart, Result, Spread, read, write
from benchmarks.workloads.config import RunConfig
from rich.console import Console

from benchmarks import cli
from millpond.demo.processes import tree_bytes

DETACHES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        while True: time.sleep(1)
    os._exit(0)
os.wait()
while True: time.sleep(1)
"""


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


def test_killing_a_tree_kills_detached_processes(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    tree = ProcessTree([sys.executable, "-c", DETACHES, str(pid_file)], log=tmp_path / "log")
    detached = int(wait_for(pid_file))
    try:
        assert detached in {p.pid for p in tree.members()}
        assert tree.running()
    finally:
        tree.kill()
    assert not psutil.pid_exists(detached) or psutil.Process(detached).status() == psutil.STATUS_ZOMBIE
    assert not tree.members()


def test_ended_processes_are_not_members(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    tree = ProcessTree([sys.executable, "-c", DETACHES, str(pid_file)], log=tmp_path / "log")
    detached = int(wait_for(pid_file))
    try:
        os.kill(detached, signal.SIGKILL)
        tree.process.kill()
        deadline = time.monotonic() + 60
        while tree.members():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        tree.kill()


def test_cpu_and_memory_are_sampled(tmp_path: Path) -> None:
    code = "import sys\nb = bytearray(50_000_000)\nopen(sys.argv[1], 'w').write('x')\nwhile True: pass"
    ready = tmp_path / "ready"
    tree = ProcessTree([sys.executable, "-c", code, str(ready)], log=tmp_path / "log", interval=0.05)
    try:
        wait_for(ready)
        sample = tree.sample(memory=True)
        assert sample.anonymous > 40_000_000
        start = tree.sample(memory=False)
        while tree.sample(memory=False).cpu < start.cpu + 0.2:
            time.sleep(0.05)
    finally:
        tree.kill()
    assert tree.samples[-1].cpu > 0


def test_cpu_is_interpolated_between_samples(tmp_path: Path) -> None:
    tree = ProcessTree(["/bin/true"], log=tmp_path / "log")
    tree.close()
    tree.samples = [Sample(10.0, 1.0), Sample(20.0, 3.0), Sample(30.0, 9.0)]
    assert tree.cpu_between(15.0, 25.0) == pytest.approx(4.0)
    assert tree.cpu_between(0.0, 99.0) == pytest.approx(8.0)


def test_hard_links_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 8_192)
    os.link(tmp_path / "a", tmp_path / "b")
    assert tree_bytes(tmp_path) == (tmp_path / "a").stat().st_blocks * 512
    assert tree_bytes(tmp_path / "nothing") == 0


def test_dropping_the_page_cache_leaves_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    assert drop_page_cache(tmp_path) == 1
    assert (tmp_path / "a").read_bytes() == b"x" * 100_000


def test_a_memory_group_limits_its_processes() -> None:
    try:
        group = MemoryGroup(64 << 20)
    except OSError as error:
        pytest.skip(f"no control groups here: {error}")
    try:
        code = "b = bytearray(40_000_000); print(len(b))"
        command = ["/bin/sh", "-c", f"echo $$ > {group.entrance} && exec {sys.executable} -c '{code}'"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "40000000"
        assert group.peak() > 30 << 20
        hungry = ["/bin/sh", "-c", f"echo $$ > {group.entrance} && exec {sys.executable} -c 'bytearray(200_000_000)'"]
        assert subprocess.run(hungry, capture_output=True, check=False).returncode != 0
    finally:
        group.close()
    assert not group.path.exists()


def test_local_folders_have_short_names(tmp_path: Path) -> None:
    config = RunConfig(engine="millpond", workload="rmw", work=str(tmp_path / ("x" * 100)))
    assert len(str(local_folder(config))) < 60


def test_compactors_start_once_the_query_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    start = subprocess.Popen

    def sleeping(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        commands.append(command)
        return start(["sleep", "600"], **options)

    monkeypatch.setattr(subprocess, "Popen", sleeping)
    config = RunConfig(engine="millpond", workload="rmw", work=str(tmp_path), compactors=2)
    compactors = Compactors(config, os.environ)
    try:
        compactors.step()
        assert commands == []
        (tmp_path / "checkpoint" / "offsets").mkdir(parents=True)
        compactors.step()
        compactors.step()
        assert [command[-2:] for command in commands] == [["compactor", str(tmp_path / "checkpoint")]] * 2
        assert len(compactors.cpu) == 1
    finally:
        compactors.close()


def progress(**changes: object) -> dict[str, object]:
    return {
        "timestamp": "2026-01-01T00:00:01.500Z",
        "numInputRows": 1_000,
        "durationMs": {"triggerExecution": 250},
        "stateOperators": [{"commitTimeMs": 60}, {"commitTimeMs": 20}],
        "observedMetrics": {},
        **changes,
    }


def test_commit_times_are_per_partition() -> None:
    config = RunConfig(engine="spark", workload="rmw", work="/tmp/x")
    assert to_batch(progress(), config) == Batch(1767225601.5, 250.0, 1_000, 40.0, 40.0)
    ours = msgspec.structs.replace(config, engine="millpond")
    observed = {"millpond": {"commit_wait_ms": 3, "commit_ms": 30}}
    batch = to_batch(progress(observedMetrics=observed), ours)
    assert (batch.commit_ms, batch.checkpoint_ms) == (3, 30)
    assert to_batch(progress(), ours).commit_ms is None


def some_results() -> list[Result]:
    batches = [Batch(10.0 + i, 900.0 + i, 1_000, 1.0) for i in range(5)]
    good = Result(
        engine="millpond",
        workload="rmw",
        rows_per_batch=1_000,
        keys=10,
        rows_per_second=1_111.0,
        batch_ms=Spread.of([b.ms for b in batches]),
        commit_ms=Spread.of([1.0]),
        batches=batches,
        restart=Restart(1_500.0, 900.0, 598.0, 9.5, 8.0),
        machine=Machine.here(),
    )
    return [good, Result(engine="spark", workload="rmw", error="it broke")]


def test_results_survive_json(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "r.json", some_results())
    assert read(tmp_path / "deep" / "r.json") == some_results()
    first = json.loads((tmp_path / "deep" / "r.json").read_text())[0]
    assert {
        *("engine", "workload", "rows_per_second", "batch_ms", "commit_ms", "cpu_seconds_per_million_rows"),
        *("memory_peak_bytes", "state_disk_bytes", "state_store_bytes", "new_objects", "machine"),
    } <= first.keys()
    assert first["batch_ms"].keys() == {"p50", "p95", "p99", "max"}


def test_rows_of_repeated_scans_count_once() -> None:
    config = RunConfig(engine="spark", workload="nexmark", query="q8", work="/tmp/x", rows_per_batch=500)
    assert to_batch(progress(), config).rows == 500


def test_rows_at_a_rate_are_counted_by_seconds() -> None:
    config = RunConfig(engine="spark", workload="nexmark", query="q8", work="/tmp/x", rate=700)
    between = [{"startOffset": "3", "endOffset": "5"}]
    assert to_batch(progress(sources=between), config).rows == 1_400
    assert to_batch(progress(sources=[{"startOffset": None, "endOffset": 2}]), config).rows == 1_400


def test_the_table_compares_queries_that_both_engines_ran() -> None:
    def result(query: str, engine: str, rate: float, **changes: str) -> Result:
        batch_ms = Spread.of([10.0]) if rate else None
        return Result(
            engine=engine, workload="nexmark", query=query, rows_per_second=rate, batch_ms=batch_ms, **changes
        )

    results = [
        *(result("q0", "millpond", 100.0), result("q0", "spark", 50.0)),
        *(result("q5", "millpond", 80.0), result("q5", "spark", 10.0)),
        *(result("q15", "millpond", 70.0), result("q15", "spark", 0.0, refused="no DISTINCT")),
        *(result("q9", "millpond", 0.0, error="it broke"), result("q9", "spark", 0.0, refused="no ROW_NUMBER")),
    ]
    printed = io.StringIO()
    console = Console(width=120, file=printed)
    console.print(suite(results))
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.getvalue().splitlines()]
    cells = {line[0]: line[1:] for line in lines}
    assert cells["q0"] == ["100", "10", "50", "10", "2.00"]
    assert cells["q15"] == ["70", "10", "refused", "–", "–"]
    assert cells["q9"] == ["failed", "–", "refused", "–", "–"]
    assert cells["geometric mean"][-1] == "4.00"
    assert table(results[4:6]).row_count == 2


def test_spread() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 2.9, 2.98, 3.0)


@pytest.mark.parametrize("name", ["p.png", "p.html"])
def test_reports_are_drawn(tmp_path: Path, name: str) -> None:
    plot(some_results(), tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1_000
    assert table(some_results()).row_count == 2


@pytest.mark.slow
def test_a_small_run_at_a_rate(tmp_path: Path) -> None:
    json_file = tmp_path / "r.json"
    arguments = ["rmw", "--engines", "events", "--rate", "2k", "--warmup-batches", "2", "--max-batches", "3"]
    arguments += ["--driver-memory", "1g", "--warmup-seconds", "4", "--json", str(json_file)]
    assert cli.main([*arguments, "--work", str(tmp_path / "w")]) == 0
    result = read(json_file)[0]
    assert (result.error, result.rate) == (None, 2_000)
    assert len(result.batches) >= 3
    assert all(batch.rows and batch.rows % 2_000 == 0 for batch in result.batches), "whole seconds of the clock"


@pytest.mark.process
@pytest.mark.parametrize("engine", ["spark", "millpond"])
def test_a_small_run(tmp_path: Path, engine: str) -> None:
    json_file = tmp_path / "r.json"
    arguments = ["rmw", "--engines", engine, "--rows-per-batch", "2k", "--keys", "1k", "--warmup-batches", "2"]
    arguments += ["--max-batches", "3", "--driver-memory", "1g", "--slot-memory", "64m", "--warmup-seconds", "2"]
    assert cli.main([*arguments, "--json", str(json_file), "--work", str(tmp_path / "w")]) == 0
    result = read(json_file)[0]
    assert result.error is None
    assert {b.rows for b in result.batches} == {2_000}
    assert len(result.batches) >= 3
    assert result.left_out >= 2
    assert result.rows_per_second > 0
    assert result.state_store_bytes > 0
    assert not (tmp_path / "w" / engine).exists()


@pytest.mark.process
def test_a_refusal_is_a_result(tmp_path: Path) -> None:
    json_file = tmp_path / "r.json"
    arguments = ["nexmark", "--query", "q19", "--engines", "spark", "--driver-memory", "1g", "--json", str(json_file)]
    assert cli.main([*arguments, "--work", str(tmp_path / "w")]) == 0
    result = read(json_file)[0]
    assert result.error is None
    assert "ROW_NUMBER" in str(result.refused)
    assert "\n" not in str(result.refused)


@pytest.mark.process
def test_a_failing_engine_is_an_error_in_the_result(tmp_path: Path) -> None:
    json_file = tmp_path / "r.json"
    arguments = ["rmw", "--engines", "millpond", "--set", "spark.millpond.nonsense=1", "--driver-memory", "1g"]
    assert cli.main([*arguments, "--json", str(json_file), "--work", str(tmp_path / "w")]) == 1
    assert "nonsense" in str(read(json_file)[0].error)
    assert issubclass(EngineFailed, Exception)
