"""MiSA's workloads without an engine: records, files, deadlines, figures and the command line."""

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from benchmarks.measuring.process import Sample
from benchmarks.measuring.result import Machine
from benchmarks.misa import stream_files
from benchmarks.misa.__main__ import line, main
from benchmarks.misa.deadline import Deadline, Gate
from benchmarks.misa.engines import STORES
from benchmarks.misa.measure import fill
from benchmarks.misa.queries import QUERIES
from benchmarks.misa.result import Batch, Observed, Result
from benchmarks.misa.settings import ENGINES, Settings
from benchmarks.misa.stream_files import FILES, files, rows_of
from benchmarks.misa.streams import cluster, road
from benchmarks.misa.streams.records import RECORD_BYTES, counts

SECONDS = 100


def stream(query: str, seed: int = 1, rate: int = 200) -> pa.Table:
    made = QUERIES[query].stream(rate, seed)
    tables = [made.second(second, count) for second, count in enumerate(counts(rate, SECONDS, seed).tolist())]
    return pa.concat_tables(tables)


def test_records_a_second_are_normal_around_the_rate() -> None:
    drawn = counts(1500, 2000, 7)
    assert drawn.mean() == pytest.approx(1500, rel=0.02)
    assert drawn.std() == pytest.approx(150, rel=0.1)
    within = np.abs(drawn - 1500) < 150  # one standard deviation
    assert within.mean() == pytest.approx(0.68, abs=0.04)
    assert np.array_equal(drawn, counts(1500, 2000, 7))
    assert not np.array_equal(drawn, counts(1500, 2000, 8))


@pytest.mark.parametrize("query", ["LR2", "CM1"])
def test_records_come_from_the_seed(query: str) -> None:
    records = stream(query)
    assert records.equals(stream(query))
    assert not records.equals(stream(query, seed=2))
    assert records.schema.equals(QUERIES[query].schema)
    assert len(records) == counts(200, SECONDS, 1).sum()
    assert records.nbytes / len(records) == pytest.approx(RECORD_BYTES, rel=0.15)
    assert pc.all(pc.less_equal(records["timestamp"][:-1], records["timestamp"][1:])).as_py()
    assert pc.count_distinct(records["timestamp"]).as_py() == SECONDS


def test_vehicles_enter_drive_and_leave() -> None:
    reports = stream("LR4").to_pandas()
    assert reports["segment"].between(0, road.SEGMENTS - 1).all()
    assert (reports["segment"] == reports["position"] // road.MILE).all()
    for _, trip in list(reports.groupby("vehicle"))[:200]:
        lanes = trip["lane"].tolist()
        assert lanes[0] == road.ENTRY
        assert all(1 <= lane <= 3 for lane in lanes[1:-1])
        between = trip["timestamp"].diff().dt.total_seconds()[1:]
        assert between.between(road.REPORT_SECONDS, road.REPORT_SECONDS + 1).all()
        assert trip["direction"].nunique() == trip["highway"].nunique() == 1
        moved = trip["position"].diff()[1:] * (1 if trip["direction"].iloc[0] == 0 else -1)
        assert (moved >= 0).all()
    left = reports.loc[reports["lane"] == road.EXIT, "vehicle"]
    last = reports.groupby("vehicle").tail(1)
    assert len(left)
    assert set(left) <= set(last.loc[last["lane"] == road.EXIT, "vehicle"])


def test_reports_beyond_the_count_are_deferred() -> None:
    made = road.SegSpeedStr(10, 1)
    sizes = [len(made.second(second, count)) for second, count in enumerate([50] + [10] * 60)]
    assert sizes == [50] + [10] * 60


def test_tasks_are_submitted_scheduled_and_end() -> None:
    events = stream("CM2").to_pandas()
    assert set(events["eventType"]) == set(range(6))
    following = {
        cluster.SUBMIT: [cluster.SCHEDULE],
        cluster.SCHEDULE: [cluster.EVICT, cluster.FAIL, cluster.FINISH, cluster.KILL],
        cluster.EVICT: [cluster.SUBMIT],
        **{ended: [] for ended in (cluster.FAIL, cluster.FINISH, cluster.KILL)},
    }
    for _, task in list(events.groupby("taskId"))[:200]:
        types = task["eventType"].tolist()
        assert types[0] == cluster.SUBMIT
        assert all(after in following[before] for before, after in pairwise(types))
        assert task["jobId"].nunique() == task["cpu"].nunique() == 1
    assert (events.loc[events["eventType"] == cluster.SCHEDULE, "machineId"] >= 0).all()
    jobs = events.groupby("jobId")["taskId"].nunique()
    assert jobs.mean() == pytest.approx(cluster.JOB_TASKS, rel=0.2)
    assert events["category"].nunique() == cluster.CATEGORIES
    assert (events.groupby("jobId")["category"].nunique() == 1).all()


def test_files_have_the_streams_records_in_order(tmp_path: Path) -> None:
    made = files(tmp_path, "LR2", 200, 3, 1)
    assert len(made) == 3 * FILES
    assert [rows_of(file.name) for file in made] == [pq.read_metadata(file).num_rows for file in made]
    expected = stream("LR2").slice(0, sum(rows_of(file.name) for file in made))
    assert pa.concat_tables(pq.read_table(file) for file in made).equals(expected)
    written = made[0].stat().st_mtime_ns
    assert files(tmp_path, "LR4", 200, 3, 1) == made
    assert files(tmp_path, "LR4", 200, 2, 1) == made[: 2 * FILES]
    longer = files(tmp_path, "LR4", 200, 4, 1)
    assert [file.read_bytes() for file in longer[: len(made)]] == [file.read_bytes() for file in made]
    assert made[0].stat().st_mtime_ns == written
    assert files(tmp_path, "LR2", 200, 3, 2) != made


def test_streams_of_other_code_are_made_again_and_removed_when_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    made = files(tmp_path, "LR2", 200, 3, 1)[0].parent
    monkeypatch.setattr(stream_files, "code_digest", lambda: "0123456789ab")
    again = files(tmp_path, "LR2", 200, 3, 1)[0].parent
    assert again != made
    assert made.exists()
    undigested = tmp_path / "TaskEvents-200-1-3"
    undigested.mkdir()
    for folder in (made, undigested, other, again):
        os.utime(folder, (0, 0))
    files(tmp_path, "LR2", 200, 3, 2)
    assert not made.exists()
    assert not undigested.exists()
    assert again.exists()
    assert other.exists()


class TestDeadline:
    """A query that takes 0.5 s for a batch and 1 ms for each row, and files of 100 rows."""

    def learned(self, seconds: float = 3.0) -> Deadline:
        deadline = Deadline(seconds, 1000)
        for rows in (400, 800, 1200):
            deadline.learn(rows, 0.5 + 0.001 * rows)
        return deadline

    def test_a_batch_waits_for_as_many_rows_as_end_in_time(self) -> None:
        deadline = self.learned()
        assert deadline.most_rows() == pytest.approx(2500)
        assert deadline.due([], 0.0) == 0
        assert deadline.due([100] * 5, 1.9) == 0  # 1.9 + 0.5 + 0.5 s
        assert deadline.due([100] * 5, 2.1) == 5

    def test_a_batch_is_cut(self) -> None:
        assert self.learned().due([100] * 40, 0.1) == 25
        assert self.learned().due([100] * 40, 60.0) == 25
        assert self.learned().due([9000], 60.0) == 1

    def test_before_a_batch_has_ended(self) -> None:
        deadline = Deadline(3.0, 1000)
        assert deadline.due([100] * 4, 1.0) == 0
        assert deadline.due([100] * 4, 3.0) == 4
        assert deadline.due([100] * 40, 3.0) == 10

    def test_batches_of_one_size_grow_while_they_end_early(self) -> None:
        deadline, rows = Deadline(3.0, 1000), 100
        sizes = []
        for _ in range(6):
            deadline.learn(rows, 0.5 + 0.001 * rows)
            sizes.append(rows := int(deadline.most_rows()))
        assert sizes[0] == pytest.approx(900)  # of 0.6 s half is taken for fixed
        assert sizes[-1] == pytest.approx(2500, rel=0.01)
        for _ in range(20):  # sizes differ no longer
            deadline.learn(2500, 3.0)
        assert deadline.most_rows() == pytest.approx(2500, rel=0.01)

    def test_faster_batches_grow(self) -> None:
        deadline = self.learned()
        for _ in range(8):
            deadline.learn(2500, 0.4)
        assert deadline.most_rows() > 2500

    def test_a_deadline_that_no_batch_meets(self) -> None:
        assert self.learned(seconds=0.4).due([100] * 40, 1.0) == 40

    def test_only_the_last_batches_count(self) -> None:
        deadline = Deadline(3.0, 1000)
        deadline.learn(10, 60.0)  # a cold JVM
        for rows in range(400, 2000, 200):
            deadline.learn(rows, 0.5 + 0.001 * rows)
        assert deadline.most_rows() == pytest.approx(2500)


def test_a_gate_releases_a_batch_at_once(tmp_path: Path) -> None:
    waiting, source = tmp_path / "waiting", tmp_path / "source"
    waiting.mkdir()
    source.mkdir()
    for name in "abc":
        (waiting / name).write_text(name)
    gate = Gate(waiting, source)
    gate.release(["a", "b"])
    gate.release(["c"])
    assert gate.released == 2
    assert [sorted(file.name for file in folder.iterdir()) for folder in sorted(source.iterdir())] == [
        ["a", "b"],
        ["c"],
    ]
    assert not list(waiting.iterdir())


SETTINGS = Settings(query="LR2", engine="spark-best", batches=3, warmup=1, rate=100, trigger=1.0)


class Tree:
    samples = (Sample(0.0, 0.0, 100), Sample(102.0, 4.0, 300), Sample(103.5, 5.0, 0), Sample(200.0, 5.0, 900))

    def cpu_between(self, start: float, end: float) -> float:
        return (end - start) / 2


def result(**changes: Any) -> Result:
    return Result(settings=msgspec.structs.replace(SETTINGS, **changes), machine=Machine.here())


def batches(*ms: float) -> list[Batch]:
    return [Batch(number=n, start=100.0 + n, ms=took, rows=100, row_max_ms=took + 9) for n, took in enumerate(ms)]


def test_figures_of_a_run() -> None:
    measured = result()
    fill(measured, Observed(version="4", batches=batches(9000, 200, 300, 400)), Tree())
    assert [batch.ms for batch in measured.batches] == [200, 300, 400]
    assert measured.batch_ms.p50 == 300
    assert measured.row_max_ms.max == 409
    assert measured.slope_ms == pytest.approx(100)
    assert measured.rows_per_second == pytest.approx(300 / 2.4)
    assert measured.batch_rows_per_second == pytest.approx((500 + 1000 / 3 + 250) / 3, abs=0.1)
    assert measured.kilobytes_per_second == pytest.approx(measured.batch_rows_per_second * 0.065)
    assert measured.kept_up
    assert measured.cores == 0.5
    assert measured.memory_peak_bytes == 300
    assert [batch.memory_bytes for batch in measured.batches] == [100, 300, 300]
    assert measured.batches[0].cpu_seconds == pytest.approx(0.1)
    behind = result()
    fill(behind, Observed(batches=batches(1, 2000, 3000, 4000)), Tree())
    assert behind.kept_up is False
    assert "behind" in line(behind)["rows/s"]


def test_runs_without_figures() -> None:
    refused, short = result(engine="spark-async"), result()
    fill(refused, Observed(refused=f"not with state in {Path.home() / 'state'}"), Tree())
    fill(short, Observed(batches=batches(100)), Tree())
    assert line(refused)["batches"] == "refused: not with state in …/state"
    assert "only 1 batches ended" in line(short)["batches"]
    for ended in ([], batches(4000)):
        slow = result()
        fill(slow, Observed(batches=ended), Tree())
        assert (slow.error, slow.kept_up) == (None, False)
        assert line(slow)["batches"] == "behind: no batch ended after those that are left out"


def test_the_command_line_runs_each_engine_at_each_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Settings] = []

    def run(settings: Settings) -> Result:
        asked.append(settings)
        measured = result(**msgspec.structs.asdict(settings))
        fill(measured, Observed(batches=batches(*[100] * (1 + settings.warmup))), Tree())
        return measured

    path = tmp_path / "results.json"
    handler = signal.getsignal(signal.SIGTERM)
    arguments = ["--query", "LR2,CM2", "--engines", "millpond,spark-shipped", "--rates", "0,15000", "--trigger", "3,4"]
    assert main([*arguments, "--json", str(path)], run) == 0
    assert signal.getsignal(signal.SIGTERM) == handler
    assert len(asked) == len({msgspec.json.encode(settings) for settings in asked}) == 2 * 2 * 2 * 2
    saved = msgspec.json.decode(path.read_bytes(), type=list[Result])
    assert [measured.settings for measured in saved] == asked
    assert "15,000" in capsys.readouterr().out

    def failing(settings: Settings) -> Result:
        return msgspec.structs.replace(result(), error="it ended")

    assert main(["--query", "LR2"], failing) == 1
    for wrong in (["--query", "LR3"], ["--engines", "flink"], ["--trigger", "0"], ["--rates", "-1"]):
        with pytest.raises(SystemExit):
            main(wrong, run)


def test_engines_differ_in_their_stores() -> None:
    assert set(STORES) == set(ENGINES)
    assert STORES["spark-shipped"] != STORES["spark-best"]
    assert STORES["spark-deadline"] == STORES["spark-shipped"]
    assert STORES["millpond"]["spark.millpond.commit.mode"] == "async"
