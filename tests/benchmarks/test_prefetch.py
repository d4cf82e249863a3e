"""Latencies of rows that arrive in files by the clock: times of files, their batches, and the figures."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from benchmarks.measuring.timing import batch_end, local_log, source_files
from benchmarks.nexmark.generator import NexmarkConfig
from benchmarks.prefetch.__main__ import main, parser
from benchmarks.prefetch.event_files import ARRIVING, LOADED, Events
from benchmarks.prefetch.figures import FIGURES, draw, line
from benchmarks.prefetch.latency import Latency
from benchmarks.prefetch.run import VARIANTS, Config, Measured, summary
from benchmarks.workloads.arrivals import Arrivals

STREAM = NexmarkConfig(in_flight_auctions=1000)


def config(**changes: Any) -> Config:
    base = Config(
        query="q18",
        variant="prefetching",
        work="",
        events="",
        stream=STREAM,
        loaded=LOADED,
        rate=10 * ARRIVING,
        interval=1.0,
        warmup=1,
        seconds=1,
        latency_ms=1.5,
        slot_memory="32m",
    )
    return msgspec.structs.replace(base, **changes)


def progress(batch: int, second: float, ms: int, **figures: float) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)) + f".{round(second % 1 * 1000):03}Z"
    observed = {"millpond": figures}
    return {"batchId": batch, "timestamp": stamp, "durationMs": {"triggerExecution": ms}, "observedMetrics": observed}


def test_only_one_variant_forces_hints() -> None:
    assert [name for name, settings in VARIANTS.items() if settings.get("prefetch") == "on"] == ["prefetching"]


def test_files_are_made_once_and_come_in_order(tmp_path: Path) -> None:
    events = Events(tmp_path / "events", STREAM, LOADED)
    files = [events.arriving(number) for number in range(3)]
    assert files == [events.arriving(number) for number in range(3)]
    assert [pq.read_metadata(file).num_rows for file in files] == [ARRIVING] * 3
    source = tmp_path / "source"
    source.mkdir()
    arrivals = Arrivals(source)
    started = time.time()
    with arrivals.clocked(files, 0.1) as over:
        assert over.wait(60)
    assert sorted(file.name for file in source.iterdir()) == [file.name for file in files]
    for number, file in enumerate(files, 1):
        assert arrivals.times[file.name] > started + 0.1 * number - 0.01
    arrivals.remove([files[0].name])
    assert not (source / files[0].name).exists()


def test_row_latency_is_from_file_arrival_to_batch_end(tmp_path: Path) -> None:
    log = tmp_path / "sources" / "0"
    log.mkdir(parents=True)

    def note(batch: int, *names: str, compact: str = "") -> None:
        entries = [json.dumps({"path": f"file:///in/{name}", "timestamp": 0, "batchId": batch}) for name in names]
        (log / f"{batch}{compact}").write_text("\n".join(["v1", *entries]))

    note(0, "a")
    note(1, "b", "c")
    note(2, "d", compact=".compact")
    assert [source_files(local_log(tmp_path), entry) for entry in range(4)] == [["a"], ["b", "c"], ["d"], []]
    arrivals = Arrivals(tmp_path)
    arrivals.times = {"a": 1000.0, "b": 1000.5, "c": 1001.0, "d": 1001.5}
    reports = [
        progress(0, 1000.2, 300, state_rows=5.0, hint_bytes=8.0, input_rows=9.0),
        progress(1, 1001.1, 400, state_rows=7.0, hint_bytes=8.0),
        progress(2, 1001.6, 100),
    ]
    assert batch_end(reports[0]) == pytest.approx(1000.5)
    measured = summary(config(), arrivals, tmp_path, reports, (1000.0, 1002.0), 1.5)
    assert measured.rows == Latency.of([0.5, 1.0, 0.5, 0.2])
    assert measured.batches.max == 400
    assert measured.events_per_second == 4 * ARRIVING / 2
    assert measured.figures["state_rows"] == 7
    assert measured.hint_share == round(16 / (9 * 180), 4)
    rates = (7_000, 6_000, 5_000)  # 6,000 are taken: fewer than arrive, as many, and more
    kept_up = [summary(config(rate=rate), arrivals, tmp_path, reports, (1000.0, 1002.0), 1.5).kept_up for rate in rates]
    assert kept_up == [False, True, False]
    assert line(measured)["row p50"] == "500"
    with pytest.raises(SystemExit, match="no batch ended"):
        summary(config(), arrivals, tmp_path, reports, (2000.0, 2001.0), 1.5)


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_runs_its_variants_and_is_drawn(name: str, tmp_path: Path) -> None:
    options = parser().parse_args([name, "--query", "q18"])
    options.stream = STREAM
    asked = []

    def measure(variant: str, **changes: Any) -> Measured:
        asked.append(config(variant=variant, **changes))
        latency = Latency(1.0, 2.0, 3.0, 4.0)
        return Measured(
            config=asked[-1],
            rows=latency,
            batches=latency,
            events_per_second=1000.0,
            kept_up=True,
            cpu=1.0,
            figures={},
            hint_share=0.01,
            trace=[(1000.0, 5.0, 10), (1001.0, 6.0, 10)],
        )

    results = list(FIGURES[name](options, measure))
    assert results
    if name == "changes":
        assert all(run.changed for run in asked)
    elif name != "highest":  # it stops at the first rate that is kept up with
        configs = [msgspec.json.encode(run) for run in asked]
        assert len(set(configs)) == (len(configs) if name != "costs" else 2)
    draw(name, results, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    (tmp_path / "figures.json").write_bytes(msgspec.json.encode(results))
    again = ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "again.png")]
    assert main([name, *again]) == 0
    assert (tmp_path / "again.png").exists()


def test_unknown_variants_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["latencies", "--variants", "memory,none"])
    assert "no variant 'none'" in capsys.readouterr().err
    assert isinstance(parser(), argparse.ArgumentParser)
