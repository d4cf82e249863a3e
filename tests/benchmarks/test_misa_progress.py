"""A query of MiSA's as its progress shows it: batches, their files and figures."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from benchmarks.measuring.timing import local_log, source_files
from benchmarks.misa import run as running
from benchmarks.misa.run import Observer, await_batch, batch_of, names_of
from benchmarks.misa.settings import Settings
from benchmarks.workloads.arrivals import Arrivals

SETTINGS = Settings(query="LR2", engine="spark-best", batches=3, warmup=1, rate=100, trigger=1.0)


def progress(**more: Any) -> dict[str, Any]:
    took = {"triggerExecution": 500, "walCommit": 20, "commitOffsets": 30}
    return {"batchId": 4, "timestamp": "2026-01-01T00:00:10.000Z", "durationMs": took, **more}


def test_figures_of_a_batch() -> None:
    operator = {"commitTimeMs": 40, "customMetrics": {"rocksdbGetLatency": 6}}
    end = 1767225610.5
    names, times = ["1-30.parquet", "2-10.parquet"], {"1-30.parquet": end - 1.0, "2-10.parquet": end - 0.6}
    batch = batch_of(progress(stateOperators=[operator, operator]), names, times, SETTINGS)
    assert (batch.number, batch.ms, batch.rows, batch.end) == (4, 500, 40, end)
    assert batch.row_mean_ms == pytest.approx((30 * 1000 + 10 * 600) / 40)
    assert batch.row_max_ms == pytest.approx(1000)
    assert (batch.log_ms, batch.commit_ms, batch.read_ms, batch.durable_ms) == (50, 40, 6, None)
    ours = progress(stateOperators=[], observedMetrics={"millpond": {"commit_ms": 70.0, "commit_wait_ms": 2.0}})
    batch = batch_of(ours, names, times, msgspec.structs.replace(SETTINGS, engine="millpond", rate=0))
    assert (batch.commit_ms, batch.durable_ms, batch.read_ms, batch.row_mean_ms) == (2.0, 70.0, None, None)


def test_files_of_a_batch_after_one_without_rows(tmp_path: Path) -> None:
    log = tmp_path / "sources" / "0"
    log.mkdir(parents=True)
    for entry, name in enumerate(["0-9.parquet", "1-9.parquet"]):
        path = json.dumps({"path": f"file:///in/{name}", "timestamp": 0, "batchId": entry})
        (log / str(entry)).write_text(f"v1\n{path}")
    first = {"startOffset": None, "endOffset": {"logOffset": 0}}
    second = {"startOffset": {"logOffset": 0}, "endOffset": {"logOffset": 1}}
    read = partial(source_files, local_log(tmp_path))
    assert names_of({"batchId": 0, "sources": [first]}, read) == ["0-9.parquet"]
    assert names_of({"batchId": 2, "sources": [second]}, read) == ["1-9.parquet"]
    without = {"startOffset": {"logOffset": 1}, "endOffset": {"logOffset": 1}}
    idle = {"startOffset": None, "endOffset": None}
    assert names_of({"batchId": 3, "sources": [without]}, read) == []
    assert names_of({"batchId": 0, "sources": [idle]}, read) == []


class Query:
    """A query with batches whose rows a filter skips; `report` adds to its progress."""

    def __init__(self) -> None:
        self.reported: list[Any] = []
        self.fetched = 0

    @property
    def lastProgress(self) -> Any:
        return self.reported[-1] if self.reported else None

    @property
    def recentProgress(self) -> list[Any]:
        self.fetched += 1
        return self.reported

    def exception(self) -> None:
        return None

    def report(self, batch: int, second: int, start: int | None, end: int | None, *, ran: bool = True) -> None:
        offsets = {"startOffset": start, "endOffset": end}
        source = {name: None if entry is None else {"logOffset": entry} for name, entry in offsets.items()}
        shown = progress(batchId=batch, numInputRows=0, stateOperators=[], sources=[source])
        if ran:
            shown["durationMs"]["addBatch"] = 400
        shown["timestamp"] = f"2026-01-01T00:00:{second:02}.000Z"
        self.reported.append(SimpleNamespace(timestamp=shown["timestamp"], json=json.dumps(shown)))


def observed(tmp_path: Path, entries: int) -> tuple[Query, Observer]:
    """Return an observer of a query that reads these entries of the source's log, a file each."""
    log = tmp_path / "sources" / "0"
    log.mkdir(parents=True)
    source, query = Arrivals(tmp_path), Query()
    for entry in range(entries):
        name = f"{entry}-9.parquet"
        path = json.dumps({"path": f"file:///in/{name}", "timestamp": 0, "batchId": entry})
        (log / str(entry)).write_text(f"v1\n{path}")
        (tmp_path / name).touch()
        source.times[name] = 0.0
    return query, Observer(query, partial(source_files, local_log(tmp_path)), source, SETTINGS)


def test_only_batches_with_files_count(tmp_path: Path) -> None:
    """Idle progress has the number of the batch that comes next."""
    query, observer = observed(tmp_path, 5)
    assert observer.new_batches() == []
    query.report(0, 1, None, None, ran=False)
    assert observer.new_batches() == []
    query.report(0, 2, None, 0)
    query.report(1, 3, 0, 0)
    assert [batch.number for batch in observer.new_batches()] == [0]
    assert observer.new_batches() == []
    for entry in range(1, 5):
        query.report(entry + 1, 3 + entry, entry - 1, entry)
    assert [batch.number for batch in observer.new_batches()] == [2, 3, 4, 5]
    assert observer.files == 5
    assert [(tmp_path / f"{entry}-9.parquet").exists() for entry in range(5)] == [False, False, True, True, True]


def test_all_progress_is_fetched_only_where_more_than_one_batch_has_ended(tmp_path: Path) -> None:
    query, observer = observed(tmp_path, 4)
    query.report(0, 1, None, 0)
    assert [batch.number for batch in observer.new_batches()] == [0]
    query.report(1, 2, 0, 0, ran=False)
    assert observer.new_batches() == []
    query.report(1, 3, 0, 0)  # closes windows, without files
    assert observer.new_batches() == []
    query.report(2, 4, 0, 1)
    assert [batch.number for batch in observer.new_batches()] == [2]
    assert query.fetched == 0
    query.report(3, 5, 1, 2)
    query.report(4, 6, 2, 3)
    query.report(5, 7, 3, 3, ran=False)
    assert [batch.number for batch in observer.new_batches()] == [3, 4]
    assert query.fetched == 1


def test_a_hanging_first_batch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False, False, True])
    await_batch(lambda: next(looks), SETTINGS)
    assert next(looks, None) is None
    monkeypatch.setattr(running, "HUNG_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match="spark-best has ended no batch of LR2 within 0 seconds"):
        await_batch(lambda: False, SETTINGS)
