"""One run: a NEXMark query on Millpond over events that arrive by the clock; in a process of its own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec
import psutil

from benchmarks.engines.session import progress_reports, start_session
from benchmarks.measuring.timing import batch_end, local_log, source_files
from benchmarks.nexmark.generator import NexmarkConfig
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.spark import EVENT_DDL, Streams
from benchmarks.prefetch.event_files import ARRIVING, Events
from benchmarks.prefetch.latency import Latency
from benchmarks.workloads.arrivals import Arrivals
from millpond.demo.engine import PEER_SETTINGS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

VARIANTS: Mapping[str, Mapping[str, str]] = {
    "memory": {"slot.memory": "2g"},
    "prefetching": {"prefetch": "on"},
    "auto": {"prefetch": "auto"},
    "timestamp": {"prefetch": "off"},
    "lru": {"prefetch": "off", "cache.policy": "lru"},
    "clock": {"prefetch": "off", "cache.policy": "clock"},
}
"""Millpond's settings by variant: all state in memory; with hints; hints by the default setting; without hints under
each eviction policy."""


_SIZES = ("state_rows", "state_bytes", "memory_bytes")
_FILES_PER_BATCH = 33
"""Files in a batch of a run without a rate."""
_CHANGED_HOT_BIDS = 98
"""Percentage of the bids that are for the hot auction before the workload changes."""
_MOST_TAKEN = 1.05
"""In a run that keeps up, at most this number of events is taken for each that arrives. It is above 1, because the
first measured batch has events of up to a second before."""
_BID_BYTES = 180
"""Size of a bid in an Arrow batch."""
KEYS = {"q18": ("auction", "bidder"), "q19": ("auction",), "q20": ("auction",)}
"""A bid's columns with the key of a query's state."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a run.

    Attributes:
        query: a key of `KEYS`. variant: a key of `VARIANTS`. work: the run's own folder.
        events: folder in which files of events are kept. stream: parameters of the events.
        loaded: events that build up the state before events arrive by the clock.
        rate: events a second; 0 = as many as Millpond takes, at most 99,000 in a batch.
        interval: seconds between two batches, unless a batch takes longer.
        warmup, seconds: how long events arrive by the clock before measuring starts, and during it.
        latency_ms: of each request to the store.
        slot_memory: memory of each of the two slots; the variant `memory` has more.
        hot: a key that came at least this number of times lately gets no hint.
        stage_ms: time that each Arrow batch of bids waits once its keys are known; 0 = none.
        changed: whether nearly all bids are for the hot auction until the middle of the run.
        settings: further settings of Millpond.
    """

    query: str
    variant: str
    work: str
    events: str
    stream: NexmarkConfig
    loaded: int
    rate: int
    interval: float
    warmup: float
    seconds: float
    latency_ms: float
    slot_memory: str
    hot: int = 8
    stage_ms: float = 0.0
    changed: bool = False
    settings: dict[str, str] = {}


class Measured(msgspec.Struct, kw_only=True):
    """Result of a run.

    Attributes:
        rows: latencies of rows. batches: durations of batches.
        events_per_second: rate at which events were taken.
        kept_up: whether events were taken as fast as they came. A faster run does not count: it made up for a queue.
        cpu: cores in use on the whole machine.
        figures: Millpond's metrics over the measured batches: sums, but the largest of sizes and of `*_ms`.
        hint_share: bytes of hints ÷ bytes of the bids that went to slots.
        trace: end, duration in ms, and events of each measured batch.
    """

    config: Config
    rows: Latency
    batches: Latency
    events_per_second: float
    kept_up: bool
    cpu: float
    figures: dict[str, float]
    hint_share: float
    trace: list[tuple[float, float, int]]


def session(config: Config) -> SparkSession:
    """Start a local session with the settings of the run's variant."""
    work = Path(config.work)
    store = f"faults+file:{work / 'store'}?{urlencode({'latency_ms': f'{config.latency_ms:g}'})}"
    own = {
        "slot.memory": config.slot_memory,
        "slots": "2",
        "onUnsupported": "error",
        "state.location": store,
        "cache.disk": "0",
        "prefetch.hot": str(config.hot),
        **VARIANTS[config.variant],
        **config.settings,
    }
    settings = {
        **PEER_SETTINGS,
        "spark.driver.memory": "3g",
        "spark.local.dir": str(work / "local"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.files.openCostInBytes": "262144",
        **{f"spark.millpond.{name}": value for name, value in own.items()},
    }
    return start_session("local[2,4]", "benchmark-prefetch", settings)


def query(spark: SparkSession, config: Config, source: Path) -> DataFrame:
    """Return the query over the events in a folder."""
    reader = spark.readStream.schema(EVENT_DDL)
    if not config.rate:
        reader = reader.option("maxFilesPerTrigger", _FILES_PER_BATCH)
    events = reader.parquet(str(source))
    persons, auctions, bids = (
        events.where(f"event_type = {code}").select(f"{kind}.*")
        for code, kind in enumerate(("person", "auction", "bid"))
    )
    if config.stage_ms:
        bids = slow(bids, KEYS[config.query], config.stage_ms / 1000)
    return QUERIES[config.query](Streams(bids, auctions, persons))


def slow(bids: DataFrame, keys: Sequence[str], seconds: float) -> DataFrame:
    """Delay each Arrow batch of bids, as a call of a service would; the hints of its keys are sent before."""
    import millpond

    def call(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(seconds)
            yield batch

    return millpond.lookahead(bids, *keys).mapInArrow(call, bids.schema)


def cpu_seconds() -> float:
    """Return the CPU time of the whole machine, which has nothing else to do."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def run(config: Config) -> Measured:
    """Load the state, let events arrive, and measure."""
    import millpond

    work = Path(config.work)
    source, checkpoint = work / "source", work / "checkpoint"
    source.mkdir(parents=True)
    events = Events(Path(config.events), config.stream, config.loaded)
    warm = round(config.warmup * (config.rate or 100_000) / ARRIVING)
    count = warm + round(config.seconds * (config.rate or 400_000) / ARRIVING)
    before = events
    if config.changed:
        stream = msgspec.structs.replace(config.stream, hot_bids=_CHANGED_HOT_BIDS)
        before = Events(Path(config.events), stream, config.loaded)
    files = [(before if number < (warm + count) // 2 else events).arriving(number) for number in range(count)]
    first = [before.load(number) for number in range(events.first)]
    spark = session(config)
    arrivals = Arrivals(source)
    arrivals.put(first[0])
    writer = millpond.writeStream(query(spark, config, source)).format("noop")
    running = (
        writer.outputMode(QUERIES[config.query].mode)
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime=f"{config.interval if config.rate else 0:g} seconds")
        .start()
    )
    loaded = 0
    for number, file in enumerate(first):
        if number:
            arrivals.put(file)
        while len(reports := progress_reports(running)) <= loaded:
            time.sleep(0.05)
        loaded = len(reports)
        arrivals.remove([file.name])
    cleared = loaded
    if not config.rate:
        for file in files:
            arrivals.put(file)
    log = local_log(checkpoint)
    started = time.time()
    print("arriving", flush=True)
    begin, cpu_before = 0.0, 0.0
    with arrivals.clocked(files if config.rate else [], ARRIVING / (config.rate or 1)):
        while (now := time.time()) < started + config.warmup + config.seconds:
            time.sleep(0.2)
            if not begin and now >= started + config.warmup:
                begin, cpu_before = now, cpu_seconds()
            reports = progress_reports(running)
            for report in reports[cleared:-3]:
                arrivals.remove(source_files(log, report["batchId"]))
            cleared = max(cleared, len(reports) - 3)
            if not config.rate and len(reports) - loaded >= len(files) // _FILES_PER_BATCH:
                break
        end = time.time()
        cores = (cpu_seconds() - cpu_before) / (end - begin)
    if config.rate:
        time.sleep(5.0)  # so that the batches of the last files end
    reports = progress_reports(running)
    print("measured", flush=True)
    running.stop()
    spark.stop()
    return summary(config, arrivals, checkpoint, reports, (begin, end), cores)


def summary(
    config: Config,
    arrivals: Arrivals,
    checkpoint: Path,
    reports: list[dict[str, Any]],
    window: tuple[float, float],
    cores: float,
) -> Measured:
    """Compute the result of a run from the batches and files between two points in time.

    Args:
        reports: Spark's progress reports of all batches. window: both points in time, in seconds since the epoch.
        cores: cores in use between them.
    """
    begin, end = window
    log = local_log(checkpoint)
    measured = [report for report in reports if begin <= batch_end(report) <= end]
    ends = {name: batch_end(report) for report in reports for name in source_files(log, report["batchId"])}
    latencies = [
        ends.get(name, end + 5.0) - arrival
        for name, arrival in arrivals.times.items()
        if not config.rate or begin <= arrival <= end
    ]
    files = {report["batchId"]: len(source_files(log, report["batchId"])) for report in measured}
    if not measured:
        raise SystemExit("no batch ended while it was measured: give it more --seconds, or a lower --rate")
    speed = ARRIVING * sum(files.values()) / (end - begin)
    figures: dict[str, float] = {}
    for report in measured:
        for name, value in report.get("observedMetrics", {}).get("millpond", {}).items():
            if isinstance(value, int | float):
                if name in _SIZES or name.endswith("_ms"):
                    figures[name] = max(figures.get(name, 0.0), value)
                else:
                    figures[name] = figures.get(name, 0.0) + value
    return Measured(
        config=config,
        rows=Latency.of(latencies),
        batches=Latency.of([report["durationMs"]["triggerExecution"] / 1000 for report in measured]),
        events_per_second=round(speed),
        kept_up=0.97 * config.rate <= speed <= _MOST_TAKEN * config.rate if config.rate else True,
        cpu=round(cores, 2),
        figures=figures,
        hint_share=round(figures.get("hint_bytes", 0.0) / max(1.0, figures.get("input_rows", 0.0) * _BID_BYTES), 4),
        trace=[
            (batch_end(report), report["durationMs"]["triggerExecution"], files[report["batchId"]] * ARRIVING)
            for report in measured
        ],
    )


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    run_config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(run(run_config)))
