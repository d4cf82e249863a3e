"""Figures for Prometheus: what a scrape says, that nothing listens unasked, and who says what is wrong."""

from __future__ import annotations

import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import Row, SparkSession

import millpond
from millpond.conf import Settings, read_settings
from millpond.errors import SettingError, TransientError
from millpond.metrics import COMPACTION_METRICS, REQUEST_METRICS, TIER_METRICS, request_cost
from millpond.query.progress import endpoint as endpoints
from millpond.query.progress.counts import Counts
from millpond.query.progress.families import ScrapedQuery, families
from millpond.query.progress.reader import BatchProgress, OperatorProgress, Progress, ProgressReader

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


@pytest.fixture
def session(spark: SparkSession) -> Iterator[SparkSession]:
    yield spark.newSession()
    assert not endpoints._endpoints, "an endpoint was left behind"


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def wait_for_silence(port: int) -> None:
    deadline = time.monotonic() + 60
    while listening(port):
        assert time.monotonic() < deadline, "it listens though no query runs"
        time.sleep(0.1)


def scrape(port: int) -> dict[tuple[str, str, str], float]:
    """All samples by name, query, and operator or kind of request."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels["query_name"], _which(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _which(labels: dict[str, str]) -> str:
    return labels.get("operator", labels.get("kind", labels.get("tier", "")))


def settled(port: int, batches: int, names: int) -> dict[tuple[str, str, str], float]:
    """A scrape once all queries have counted their batches, and nothing is on its way."""
    deadline = time.monotonic() + 60
    while True:
        said = scrape(port)
        counted = [value for (name, _, _), value in said.items() if name == "millpond_batch_seconds_count"]
        lags = [value for (name, _, _), value in said.items() if name == "millpond_commit_lag_versions"]
        if counted == [batches] * names and lags == [0.0] * names:
            return said
        assert time.monotonic() < deadline, said
        time.sleep(0.2)


def counts(session: SparkSession, source: Path) -> Any:
    rows = session.readStream.schema("k int, t timestamp").json(str(source))
    return rows.withWatermark("t", "1 minute").dropDuplicates(["k", "t"]).groupBy("k").count()


def start(session: SparkSession, folder: Path, name: str) -> Any:
    writer = millpond.writeStream(counts(session, folder / "in")).outputMode("update").format("noop").queryName(name)
    return writer.option("checkpointLocation", str(folder / name)).start()


def write_rows(folder: Path, number: int) -> None:
    rows = [(1, "00:10:00"), (1, "00:10:00"), (2, "00:10:00")], [(3, "00:01:00"), (2, "00:10:30")]
    lines = [f'{{"k": {k}, "t": "2024-01-01 {t}"}}\n' for k, t in rows[number]]
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / f"{number}.json").write_text("".join(lines))


def test_a_scrape_of_two_queries(session: SparkSession, tmp_path: Path, port: int) -> None:
    write_rows(tmp_path, 0)
    assert not listening(port)
    session.conf.set("spark.millpond.metrics.port", str(port))
    first = start(session, tmp_path, "first")
    second = start(session, tmp_path, "second")
    try:
        for query in (first, second):
            query.processAllAvailable()
        write_rows(tmp_path, 1)
        for query in (first, second):
            query.processAllAvailable()
        ran = len([p for p in second.recentProgress if "millpond" in p.observedMetrics])
        assert ran >= 2
        said = settled(port, ran, 2)
        first.stop()
        deadline = time.monotonic() + 60
        while ("millpond_state_rows", "first", "0") in (left := scrape(port)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert ("millpond_state_rows", "second", "0") in left
    finally:
        first.stop()
        second.stop()
    for name in ("first", "second"):
        assert said["millpond_input_rows_total", name, "0"] == 5
        assert said["millpond_output_rows_total", name, "0"] == 3
        assert said["millpond_late_rows_total", name, "0"] == 1
        assert said["millpond_input_rows_total", name, "1"] == 3
        assert said["millpond_state_rows", name, "1"] == 2
        assert said["millpond_cache_hits_total", name, "1"] >= 1
        assert said["millpond_cache_misses_total", name, "1"] == 0
        assert said["millpond_state_memory_bytes", name, "1"] > 0
        assert said["millpond_state_file_bytes", name, "1"] > 0
        assert said["millpond_commit_wait_seconds", name, "1"] >= 0
        assert said["millpond_failed_commits_total", name, ""] == 0
        assert said["millpond_batch_seconds_sum", name, ""] >= said["millpond_last_batch_seconds", name, ""] > 0
        assert said["millpond_operator_info", name, "1"] == 1
    assert not any("request" in metric for metric, _, _ in said)
    wait_for_silence(port)


def test_requests_to_a_store(session: SparkSession, tmp_path: Path, port: int) -> None:
    write_rows(tmp_path, 0)
    session.conf.set("spark.millpond.metrics.port", str(port))
    session.conf.set("spark.millpond.state.location", f"faults+file:{tmp_path}/store")
    query = start(session, tmp_path, "query")
    try:
        query.processAllAvailable()
        write_rows(tmp_path, 1)
        query.processAllAvailable()
        told = [p.observedMetrics for p in query.recentProgress if "millpond" in p.observedMetrics]
        said = settled(port, len(told), 1)
    finally:
        query.stop()
    wait_for_silence(port)
    rows = [figures[name].asDict() for figures in told for name in ("millpond", "millpond-1")]
    total = {name: sum(row[name] for row in rows) for name in REQUEST_METRICS + TIER_METRICS}
    assert total["puts"] >= 1
    assert total["put_bytes"] > 100
    assert total["gets"] >= 2  # each slot reads its generation
    assert total["lists"] >= 1
    assert total["request_cost"] == pytest.approx(request_cost(total))
    for kind in ("put", "get", "list", "head"):
        assert said["millpond_requests_total", "query", kind] == total[f"{kind}s"]
    for kind in ("put", "get"):
        assert said["millpond_request_bytes_total", "query", kind] == total[f"{kind}_bytes"]
    assert said["millpond_hedged_requests_total", "query", ""] == total["hedges"]
    for tier in ("memory", "disk", "remote"):
        assert said["millpond_blocks_total", "query", tier] == total[f"{tier}_blocks"]
    assert said["millpond_copied_bytes_total", "query", ""] == total["copied_bytes"]


def test_a_store_that_fails_at_the_start_of_a_query_fails_a_scrape_at_most(
    session: SparkSession, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, 0)
    session.conf.set("spark.millpond.metrics.port", str(port))

    def failing(checkpoint: str) -> ProgressReader:
        raise TransientError("The store is down.")

    with monkeypatch.context() as down:
        down.setattr(endpoints, "ProgressReader", failing)
        query = start(session, tmp_path, "query")
        try:
            query.processAllAvailable()
            assert ("millpond_batch_seconds_count", "query", "") in scrape(port)
        except BaseException:
            query.stop()
            raise
    try:
        assert settled(port, 1, 1)["millpond_commit_lag_versions", "query", ""] == 0
    finally:
        query.stop()
    wait_for_silence(port)


def test_a_port_that_is_taken_is_said_before_anything_starts(session: SparkSession, tmp_path: Path, port: int) -> None:
    write_rows(tmp_path, 0)
    session.conf.set("spark.millpond.metrics.port", str(port))
    with socket.socket() as other:
        other.bind((HOST, port))
        other.listen()
        with pytest.raises(SettingError, match=rf"shown on {HOST}:{port}.*spark\.millpond\.metrics\.port"):
            start(session, tmp_path, "query")
    assert not (tmp_path / "query").exists()


def test_without_the_package(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    wanting = endpoints.endpoint_of(Settings(metrics_port=port))
    with pytest.raises(SettingError, match="pip install prometheus-client"), wanting:
        pass
    with endpoints.endpoint_of(Settings()) as nothing:
        assert nothing is None


def test_a_start_that_fails_leaves_nothing_listening(port: int) -> None:
    def fail() -> None:
        assert listening(port)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), endpoints.endpoint_of(Settings(metrics_port=port)):
        fail()
    assert not listening(port)


def test_nothing_is_counted_twice_or_missed() -> None:
    def progress(batch: int, rows: int | None) -> SimpleNamespace:
        figures = {} if rows is None else {"millpond": Row(input_rows=rows, output_rows=None, state_rows=7)}
        return SimpleNamespace(batchId=batch, observedMetrics=figures, durationMs={"triggerExecution": 500})

    counted = Counts(1)
    for one in (progress(3, 10), progress(3, 10), progress(3, None), progress(4, 5), progress(4, None)):
        counted.add(one)
    assert (counted.batches, counted.seconds, counted.totals[0]["input_rows"]) == (2, 1.0, 15)
    assert counted.last[0]["state_rows"] == 7


def test_who_compacts() -> None:
    counts = Counts(2)
    for batch in range(2):
        first = Row(
            waiting_compactions=3 - batch,
            remote_compactions=2,
            local_compactions=1,
            remote_compacted_bytes=1000,
            compaction_ms=500,
            state_rows=7,
            commit_wait_ms=0,
        )
        others = Row(**dict.fromkeys(COMPACTION_METRICS, 0), state_rows=7, commit_wait_ms=0)
        figures = {"millpond": first, "millpond-1": others}
        counts.add(SimpleNamespace(batchId=batch, observedMetrics=figures, durationMs={"triggerExecution": 500}))
    shown = ScrapedQuery(("id", "name"), ["a", "b"], counts, None, None)
    said = {
        (sample.name, _which(sample.labels) or sample.labels.get("by")): sample.value
        for family in families([shown])
        for sample in family.samples
        if "compact" in sample.name
    }
    assert said == {
        ("millpond_waiting_compactions", None): 2,
        ("millpond_compactions_total", "compactor"): 4,
        ("millpond_compactions_total", "slot"): 2,
        ("millpond_remote_compacted_bytes_total", None): 2000,
        ("millpond_compaction_seconds_total", None): 1,
    }


def test_hosts_moves_and_restarts() -> None:
    counts = Counts(2, {"run_failed": 1})
    for batch in range(2):
        row = Row(moved_partitions=batch + 1, state_rows=7, commit_wait_ms=0)
        figures = {"millpond": row, "millpond-1": row}
        counts.add(SimpleNamespace(batchId=batch, observedMetrics=figures, durationMs={"triggerExecution": 500}))
    operators = tuple(OperatorProgress(title, hosts={"a": 3, "b": 1}) for title in "xy")
    progress = Progress("s3://b/c", 3, 4, 1, 1, 2, None, (BatchProgress(1, None, operators),))
    said = {
        (sample.name, sample.labels.get("host") or sample.labels.get("reason")): sample.value
        for family in families([ScrapedQuery(("id", "name"), ["x", "y"], counts, progress, None)])
        for sample in family.samples
    }
    assert said["millpond_moved_partitions_total", None] == 6
    assert (said["millpond_host_partitions", "a"], said["millpond_host_partitions", "b"]) == (3, 1)
    assert said["millpond_restarts_total", "run_failed"] == 1
    assert said["millpond_restarts_total", "state_lost"] == 0


@pytest.mark.parametrize("wrong", ["0", "65536", "http", ""])
def test_ports(wrong: str) -> None:
    assert read_settings({"spark.millpond.metrics.port": "9102"}).metrics_port == 9102
    with pytest.raises(SettingError, match="a whole number from 1 to 65535"):
        read_settings({"spark.millpond.metrics.port": wrong})
