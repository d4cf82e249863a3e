"""`millpond top`: what it shows of a query that runs, and of one that does not."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rich.console import Console

import millpond
from millpond.checkpoint.generation import Restart
from millpond.query.progress.reader import BatchProgress, OperatorProgress, Progress, ProgressReader
from millpond.slot.process.messages import QueryStatus
from millpond.slot.process.queries import find_running_query
from millpond.top import frame
from tests.servers.s3 import s3
from tests.slot.test_damage import Counts, rows_of

TOP = "import sys; from millpond.cli import main; sys.argv = ['millpond', 'top', *sys.argv[1:]]; {}main()"
HEAVY = ("pyspark", "py4j", "numba", "pandas")
LIGHT = f"sys.modules.update(dict.fromkeys({HEAVY})); "  # an import of these fails


def top(*arguments: str) -> str:
    command = [sys.executable, "-c", TOP.format(LIGHT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    return done.stdout


def _environment() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def wait_for_commits(checkpoint: Path) -> Progress:
    deadline, reader = time.monotonic() + 60, ProgressReader(str(checkpoint))
    while (progress := reader.read()).commit_lag or progress.planned > progress.committed:
        assert time.monotonic() < deadline, progress
        time.sleep(0.1)
    return progress


@pytest.mark.parametrize("apart", [False, True])
def test_a_running_query_and_when_it_has_stopped(spark: SparkSession, tmp_path: Path, apart: bool) -> None:
    session, source, checkpoint = spark.newSession(), tmp_path / "in", tmp_path / "checkpoint"
    if apart:
        session.conf.set("spark.millpond.state.location", str(tmp_path / "state"))
    source.mkdir()
    (source / "0.json").write_text('{"k": 1, "t": "2024-01-01 00:10:00"}\n{"k": 2, "t": "2024-01-01 00:10:00"}\n')
    rows = session.readStream.schema("k int, t timestamp").json(str(source)).withWatermark("t", "1 minute")
    counts = rows.groupBy("k", F.window("t", "1 minute")).count()
    writer = millpond.writeStream(counts).outputMode("update").format("noop")
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        query.processAllAvailable()
        (source / "1.json").write_text('{"k": 3, "t": "2024-01-01 00:10:30"}\n{"k": 4, "t": "2024-01-01 00:01:00"}\n')
        query.processAllAvailable()
        progress = wait_for_commits(checkpoint)
        said = top(str(checkpoint), "--once")
        found = find_running_query(progress.state)
        assert found is not None
        assert f"running (process {found[1].process.pid})" in said
        assert "0 versions, 0 failed tries" in said
    finally:
        query.stop()
    first = progress.batches[0]
    assert first.batch == 0
    assert first.seconds is not None
    assert 0.0 < first.seconds < 300.0
    figures = [batch.operators[0] for batch in progress.batches]
    assert (figures[0].rows, figures[0].late_rows, figures[0].state_rows) == (2, 0, 2)
    assert 0.0 < figures[0].seconds < first.seconds
    assert figures[0].file_bytes > 0
    assert figures[0].memory_bytes > 0
    assert sum(one.rows for one in figures) == 4
    assert sum(one.late_rows for one in figures) == 1
    assert progress.durable == progress.committed + 1
    deadline = time.monotonic() + 60
    while find_running_query(progress.state) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    said = top(str(checkpoint))  # without a terminal it shows one frame
    assert "not running on this host" in said
    assert f"{progress.committed} committed" in said
    assert "0: aggregate by k" in said
    # An entry that a start after a crash has restored in the logs does not show when its batch was done.
    os.utime(checkpoint / "offsets" / "0", (1, 1))
    assert ProgressReader(str(checkpoint)).read().batches[0].seconds is None


@pytest.mark.parametrize(
    ("batches", "folder", "said"),
    [(0, "", "no Millpond state"), (1, "millpond", "no Millpond state"), (1, "", "no offset log")],
)
def test_what_is_no_checkpoint_with_state_is_refused(tmp_path: Path, batches: int, folder: str, said: str) -> None:
    if batches:
        Counts(tmp_path).through(batches)  # as the folder of state that lies elsewhere: there are no logs of Spark
    command = [sys.executable, "-c", TOP.format(""), str(tmp_path / folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), timeout=120, check=False)
    assert done.returncode == 1
    assert said in done.stdout
    assert done.stdout.endswith("Give the query's checkpointLocation, also if its state lies elsewhere.\n")


def test_a_query_on_an_object_store(tmp_path: Path) -> None:
    with s3() as bucket:
        Counts(tmp_path, bucket).through(2)
        reader = ProgressReader(f"{bucket}{tmp_path}", batches=1)
        before = reader.read()
        Counts(tmp_path, bucket).through(3)
        progress = reader.read()
    assert (before.durable, progress.durable) == (2, 3)
    assert progress.generation > before.generation
    (last,) = progress.batches
    assert last.batch == 2
    assert last.operators[0].rows == len(rows_of(2))
    assert last.operators[0].state_rows == len({*rows_of(0), *rows_of(1), *rows_of(2)})
    assert last.operators[0].file_bytes > 0


def shown(progress: Progress, status: QueryStatus | None = None) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(frame(progress, 7, status))
    return console.export_text()


def batch(number: int, seconds: float | None, rows: int) -> BatchProgress:
    operators = (
        OperatorProgress("dedup", rows=rows, cache_hits=3, cache_misses=1, file_bytes=2_500_000, memory_bytes=999),
        OperatorProgress("count", rows=rows // 2, late_rows=1, state_rows=12_345, seconds=90.0),
    )
    return BatchProgress(number, seconds, operators)


def progress_of(*batches: BatchProgress, committed: int = 8) -> Progress:
    durable = batches[-1].batch + 1 if batches else 0
    return Progress("s3://b/c", 3, 2, 9, committed, durable, time.time() - 7200, batches)


def test_a_frame() -> None:
    said = shown(progress_of(batch(5, 2.0, 1000), batch(6, 1.0, 2000), batch(7, None, 50), committed=8))
    assert "8 committed, batch 9 planned, last seen 2.0 h ago" in said
    assert "2,000, 1,000 over 2 batches" in said
    assert "1 version" in said
    assert "▃█" in said
    lines = [line for line in said.splitlines() if ": dedup" in line or ": count" in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert cells == [
        ["0: dedup", "2,000", "50", "0", "0", "999 B", "2.5 MB", "75.0%", "0 ms"],
        ["1: count", "1,000", "25", "1", "12,345", "0 B", "0 B", "–", "1.5 min"],
    ]


def test_batches_that_took_less_than_the_whole_seconds_of_a_store() -> None:
    """They count: their rows in rates over several batches, and their other figures as those of any batch."""
    idle, slow, fast = batch(5, 0.0, 0), batch(6, 2.0, 1000), batch(7, 0.0, 3000)
    said = shown(progress_of(idle, fast, slow, fast))
    assert "rows/s      2,000, 3,500 over 4 batches" in said
    lines = [line for line in said.splitlines() if ": dedup" in line]
    assert [line.strip("│").split("│")[1].strip() for line in lines] == ["–"]  # of the last batch alone
    moved = BatchProgress(8, 0.0, (OperatorProgress("count", rows=9, moved_partitions=3),))
    said = shown(progress_of(moved))
    assert "rows/s      –, – over 1 batch" in said
    assert "3 partitions in 1 batch" in said


def test_hosts_moves_and_restarts() -> None:
    def ran(number: int, moved: int, **hosts: int) -> BatchProgress:
        return BatchProgress(
            number, 1.0, (OperatorProgress("count", moved_partitions=moved, open_seconds=moved * 0.65, hosts=hosts),)
        )

    restart = Restart(2, "state_lost", ("b", "c"))
    restarted = dataclasses.replace(
        progress_of(ran(5, 0, a=2, b=2), ran(6, 2, a=4)), started=time.time() - 120, restart=restart
    )
    said = shown(restarted)
    assert "a: 4 partitions" in said
    assert "2 partitions in 2 batches" in said
    assert "1.3 s at most in 2 batches" in said
    assert "2, the last 2.0 min ago: hosts were lost (b, c) with state that was not durable" in said
    assert str(Restart(1, "run_failed", ("b",))) == "the run failed after hosts were lost (b)"
    said = shown(progress_of(batch(5, 2.0, 1000)))
    assert "hosts" not in said
    assert "restarts" not in said


def test_requests_and_what_they_cost() -> None:
    def asked(number: int, **requests: int) -> BatchProgress:
        counts = OperatorProgress("count", requests=requests)
        return BatchProgress(number, 1.0, (counts, OperatorProgress("dedup")), planned=1000.0 + 10 * number)

    first = asked(5, puts=4, gets=100, lists=6, heads=2)
    assert "4 puts, 100 gets, 6 lists, 2 heads a batch" in shown(progress_of(first))
    assert "dollars" not in shown(progress_of(first))
    said = shown(progress_of(first, asked(6, puts=2, gets=0, lists=0, heads=5), asked(7, puts=2, gets=0, lists=0)))
    assert "2.67 puts, 33.3 gets, 2 lists, 2.33 heads a batch" in said
    # 4 puts and 5 heads are 22 micro-dollars; in 20 seconds.
    assert "0.10 dollars a day" in said
    assert "requests" not in shown(progress_of(batch(5, 2.0, 1000)))


def test_where_blocks_were_read() -> None:
    def read(number: int, memory: int, disk: int, remote: int, copied: int) -> BatchProgress:
        tiers = {"memory_blocks": memory, "disk_blocks": disk, "remote_blocks": remote, "copied_bytes": copied}
        operators = (OperatorProgress("count", tiers=tiers), OperatorProgress("dedup", tiers=dict.fromkeys(tiers, 0)))
        return BatchProgress(number, 1.0, operators)

    said = shown(progress_of(read(5, 10, 100, 0, 0), read(6, 20, 40, 30, 2_500_000)))
    assert "100 a batch: 15.0% from memory, 70.0% from local copies, 15.0% from the object store; 2.5 MB copied" in said
    assert "blocks" not in shown(progress_of(read(5, 0, 0, 0, 0)))
    assert "blocks" not in shown(progress_of(batch(5, 2.0, 1000)))


def test_who_compacts() -> None:
    def told(number: int, waiting: int, compactors: int, slots: int) -> BatchProgress:
        figures = {
            "waiting_compactions": waiting,
            "remote_compactions": compactors,
            "local_compactions": slots,
            "remote_compacted_bytes": compactors * 1_000_000,
            "compaction_ms": slots * 250,
        }
        return BatchProgress(number, 1.0, (OperatorProgress("count", compactions=figures), OperatorProgress("dedup")))

    said = shown(progress_of(told(5, 4, 2, 0), told(6, 1, 1, 2)))
    assert "1 waiting, 3 by compactors (3.0 MB), 2 by slots (500 ms) in 2 batches" in said
    local = BatchProgress(5, 1.0, (OperatorProgress("count", compactions={"compaction_ms": 3}),))
    assert "compactions" not in shown(progress_of(local))


def test_what_came_of_hints() -> None:
    def told(number: int, lookahead: int, read: int, used: int, dropped: int, ms: int, **slack: int) -> BatchProgress:
        figures = {
            "lookahead": lookahead,
            "prefetched_keys": read,
            "prefetched_used": used,
            "dropped_hints": dropped,
            "prefetch_ms": ms,
        } | slack
        return BatchProgress(number, 1.0, (OperatorProgress("dedup"), OperatorProgress("count", prefetched=figures)))

    def cells(*batches: BatchProgress) -> list[str]:
        (line,) = [line for line in shown(progress_of(*batches)).splitlines() if "1: count" in line][1:]
        return [cell.strip() for cell in line.strip("│").split("│")]

    off, exchange = told(5, 0, 0, 0, 0, 0), told(6, 1, 1000, 900, 50, 30, slack_ms=200)
    assert cells(off) == ["1: count", "off", "0", "–", "0", "–", "–"]
    both = told(7, 2, 3000, 3000, 0, 20, slack_ms=1500)
    assert cells(off, exchange, both) == ["1: count", "source, exchange", "4,000", "97.5%", "50", "30 ms", "200 ms"]
    assert "prefetching in 3 batches" in shown(progress_of(off, exchange, both))
    assert "prefetching" not in shown(progress_of(batch(5, 2.0, 1000)))


def test_what_lookup_joins_asked_of_their_tables() -> None:
    def told(number: int, requests: int, keys: int, announced: int, failed: int, ms: int) -> BatchProgress:
        figures = {
            "fetches": requests,
            "fetched_keys": keys,
            "fetch_ms": ms,
            "announced_keys": announced,
            "failed_keys": failed,
        }
        return BatchProgress(number, 1.0, (OperatorProgress("enrich", looked_up=figures), OperatorProgress("count")))

    def cells(*batches: BatchProgress) -> list[str]:
        (line,) = [line for line in shown(progress_of(*batches)).splitlines() if "0: enrich" in line][1:]
        return [cell.strip() for cell in line.strip("│").split("│")]

    idle, busy = told(5, 0, 0, 0, 0, 0), told(6, 12, 5000, 4000, 3, 25)
    assert cells(idle) == ["0: enrich", "0", "0", "0", "0", "–"]
    assert cells(idle, busy, busy) == ["0: enrich", "24", "10,000", "8,000", "6", "25 ms"]
    assert "lookups in 2 batches" in shown(progress_of(idle, busy))
    assert "lookups" not in shown(progress_of(batch(5, 2.0, 1000)))


def test_a_frame_of_a_query_in_trouble_and_of_one_that_has_just_begun() -> None:
    assert "no durable version yet" in shown(progress_of(committed=-1))
    said = shown(progress_of(batch(5, None, 10)), QueryStatus([], ["the store is full"], 4))
    assert "the store is full" in said
    assert "3 versions, 4 failed tries" in said
