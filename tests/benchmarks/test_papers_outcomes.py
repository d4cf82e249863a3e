"""Headlines of the papers as they are read from figures: ratios, bounds, and why there is no figure."""

from typing import Any

import msgspec
import pytest
from benchmarks.misa.result import Result as MisaResult
from benchmarks.misa.settings import Settings as MisaSettings
from benchmarks.nexmark.generator import NexmarkConfig
from benchmarks.papers.figures import Figures, of_latencies, of_misa
from benchmarks.papers.outcome import Outcome, outcome
from benchmarks.papers.page import page
from benchmarks.papers.row import Headline
from benchmarks.papers.rows import ROWS
from benchmarks.prefetch.latency import Latency
from benchmarks.prefetch.run import Config, Measured

from tests.benchmarks.test_papers import MACHINE, fake_misa, rates, saved_of, two_rows


def headline(**changes: Any) -> Headline:
    return msgspec.structs.replace(two_rows()[0].headlines[0], **changes)


@pytest.mark.parametrize(
    ("figures", "changes", "cells"),
    [
        (rates(millpond=250.0, spark=100.0), {}, ("Spark 100 rows/s", "2.50", "pass: 2.50 ≥ 2")),
        (rates(millpond=150.0, spark=100.0), {}, ("Spark 100 rows/s", "1.50", "miss: 1.50 < 2. It is slow.")),
        (rates(millpond=150.0), {}, ("Spark no figure", "–", "no figure: no peer has one")),
        (rates(spark=150.0), {}, ("Spark 150 rows/s", "–", "no figure")),
        (rates(millpond=7.0), {"ratio": None, "peers": (), "most": 8.0}, ("–", "–", "pass: 7 ≤ 8 rows/s")),
        (
            rates(millpond=7.0),
            {"ratio": None, "peers": (), "least": 8.0},
            ("–", "–", "miss: 7 < 8 rows/s. It is slow."),
        ),
    ],
)
def test_cells_of_a_headline(figures: list[Figures], changes: dict[str, Any], cells: tuple[str, str, str]) -> None:
    row = two_rows()[0]
    read = outcome(headline(**{"peers": ("spark",), **changes}), saved_of(row, figures))
    assert (read.peers, read.ratio, read.verdict) == cells


def test_ratios_are_over_the_best_peer_and_a_mean_over_places() -> None:
    figures = [
        Figures(engine=engine, place=place, values={"row_p99_ms": value})
        for place, ours, lru, clock in (("q18", 10.0, 40.0, 50.0), ("q19", 10.0, 20.0, 10.0))
        for engine, value in (("prefetching", ours), ("lru", lru), ("clock", clock))
    ]
    asked = headline(metric="row_p99_ms", ours="prefetching", peers=("lru", "clock"))
    read = outcome(asked, saved_of(two_rows()[0], figures))
    assert (read.ratio, read.passed) == ("2.00", True)
    assert read.peers == "LRU 40 ms (q18), 20 ms (q19); Clock 50 ms (q18), 10 ms (q19)"
    elsewhere = outcome(msgspec.structs.replace(asked, place="q19", peer_place="q18"), saved_of(two_rows()[0], figures))
    assert elsewhere.ratio == "4.00"


def at_rate(variant: str, query: str, *, kept_up: bool) -> Measured:
    """Return a run of `benchmarks.prefetch highest`."""
    latency = Latency(1.0, 2.0, 3.0, 4.0)
    config = Config(
        query=query,
        variant=variant,
        work="",
        events="",
        stream=NexmarkConfig(),
        loaded=1,
        rate=2_000,
        interval=1.0,
        warmup=1.0,
        seconds=1.0,
        latency_ms=1.5,
        slot_memory="32m",
    )
    return Measured(
        config=config,
        rows=latency,
        batches=latency,
        events_per_second=2_000.0 if kept_up else 500.0,
        kept_up=kept_up,
        cpu=1.0,
        figures={},
        hint_share=0.0,
        trace=[],
    )


def highest(*runs: Measured) -> Outcome:
    row = ROWS["prefetch-highest"]
    return outcome(row.headlines[0], saved_of(row, list(of_latencies(row.commands[0], msgspec.json.encode(runs)))))


def test_a_variant_that_kept_up_with_no_rate_has_no_figure() -> None:
    peers = [at_rate("lru", query, kept_up=True) for query in ("q18", "q19")]
    ours = [at_rate("prefetching", "q18", kept_up=True), at_rate("prefetching", "q19", kept_up=False)]
    read = highest(*peers, *ours)
    assert (read.passed, read.verdict) == (None, "no figure: it kept up with no rate down to 2,000 rows/s")
    assert read.ours == "2,000 rows/s (q18), no figure (q19)"
    read = highest(*peers, *ours, at_rate("prefetching", "q19", kept_up=True))
    assert (read.passed, read.ours) == (True, "2,000 rows/s (q18), 2,000 rows/s (q19)")
    read = highest(at_rate("lru", "q18", kept_up=False), ours[0])
    assert read.peers.startswith("LRU no figure; ")
    assert (read.passed, read.verdict) == (None, "no figure: it kept up with no rate down to 2,000 rows/s")


def test_a_spark_that_kept_up_with_no_rate_is_reported() -> None:
    row = ROWS["misa-lr2"]
    runs = [
        fake_misa(MisaSettings(query="LR2", engine=engine, rate=rate))
        for engine in ("spark-shipped", "millpond")
        for rate in (25_000, 150_000)
    ]
    read = outcome(row.headlines[0], saved_of(row, list(of_misa(row.commands[0], msgspec.json.encode(runs)))))
    reason = "no figure: Spark as shipped kept up with no rate: 25,000; 150,000 rows/s"
    assert (read.ours, read.passed, read.verdict) == ("no figure", None, reason)
    runs.append(fake_misa(MisaSettings(query="LR2", engine="spark-shipped", rate=2_500)))
    runs.append(fake_misa(MisaSettings(query="LR2", engine="millpond", rate=2_500)))
    read = outcome(row.headlines[0], saved_of(row, list(of_misa(row.commands[0], msgspec.json.encode(runs)))))
    assert read.passed
    slow = MisaSettings(query="LR2", engine="spark-shipped", rate=15_000)
    runs.append(MisaResult(settings=slow, machine=MACHINE, kept_up=False))
    figures = list(of_misa(row.commands[0], msgspec.json.encode(runs)))
    assert outcome(row.headlines[0], saved_of(row, figures)) == read
    assert [(run.values, run.missing is None) for run in figures if run.place == "15,000/s"] == [({}, False)]


def test_a_row_without_time_left_is_not_measured() -> None:
    read = outcome(headline(), saved_of(two_rows()[0], rates(millpond=150.0), unfinished=True))
    assert read.peers == "Spark not measured; Flink, RocksDB not measured"
    assert read.verdict == "not measured: no time left"


def test_a_verdict_on_a_part_of_the_runs_is_marked() -> None:
    row = two_rows()[0]
    both = rates(millpond=300.0, spark=100.0)
    for changes, cell in (
        ({}, "| pass: 3.00 ≥ 2 |"),
        ({"quick": True}, "| not judged: a quick run |"),
        ({"unfinished": True}, "| pass: 3.00 ≥ 2 (not all runs ended) |"),
        ({"error": "spark: it broke"}, "| pass: 3.00 ≥ 2 (not all runs ended) |"),
    ):
        assert cell in page([row], {row.name: saved_of(row, both, **changes)})
