"""One run: a NEXMark query on Millpond over events that arrive by the clock; in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec
import psutil

from benchmarks.measuring.timing import Arrivals, batch_end, local_log, source_files
from benchmarks.nexmark.generator import NexmarkConfig
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.spark import EVENT_DDL, Streams
from benchmarks.prefetch.arrivals import ARRIVING, Events
from benchmarks.prefetch.latency import Latency
from millpond.demo.engine import PEER_SETTINGS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

VARIANTS: Mapping[str, Mapping[str, str]] = {
    "memory": {"slot.memory": "2g"},
    "prefetching": {"prefetch": "on"},
    "auto": {"prefetch": "auto"},
    "timestamp": {"prefetch": "off"},
    "lru": {"prefetch": "off", "cache.policy": "lru"},
    "clock": {"prefetch": "off", "cache.policy": "clock"},
}
"""Variant → Millpond's settings: all state in memory; with hints; hints by the default setting; without hints, by the
policy that evicts rows."""


_SIZES = ("state_rows", "state_bytes", "memory_bytes")
_MOST = 33
"""Files in a batch, where as many are taken as can be."""
_ONE = 98
"""Per cent of the bids that are for one auction, before the workload changes."""
_MOST_EARLIER = 1.05
"""Events taken for each that came, at most, in a run that keeps up: a batch has those of up to a second before."""
_BID = 180
"""Bytes of a bid in an Arrow batch."""
KEYS = {"q18": ("auction", "bidder"), "q19": ("auction",), "q20": ("auction",)}
"""A bid's columns with the key of a query's state."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a run.

    Attributes:
        query: of NEXMark. variant: one of `VARIANTS`. work: a folder of its own. events: where events are kept.
        stream: which. loaded: events that bring state about.
        rate: events a second; 0 for as many as it takes, 99,000 at most in a batch.
        interval: seconds between two batches, unless one takes longer.
        warmup, seconds: of events that arrive by the clock, left out and measured.
        latency_ms: of a request to the store. slot_memory: of each of two slots, but for all in memory.
        hot: from how many times on that a key came lately it is not announced.
        stage_ms: of work that each Arrow batch of bids waits for on its way, once its keys are known; 0 for none.
        changed: until the middle, nearly all bids are for the hot auction.
        settings: more of Millpond's.
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
        events_per_second: that were taken.
        kept_up: whether that is as fast as they came; not faster, either, which makes up for what came before.
        cpu: cores in use, on the whole machine.
        figures: sums over the measured batches of Millpond's own metrics; the largest of sizes and of `*_ms`.
        hint_share: bytes of hints for each of the bids that went to slots.
        trace: of each measured batch its end, duration in ms, and events.
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
    """A local session."""
    from pyspark.sql import SparkSession

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
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "3g",
        "spark.local.dir": str(work / "local"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.files.openCostInBytes": "262144",
        "spark.sql.streaming.numRecentProgressUpdates": "100000",
        **{f"spark.millpond.{name}": value for name, value in own.items()},
    }
    builder = SparkSession.builder.master("local[2,4]").appName("benchmark-prefetch")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def query(spark: SparkSession, config: Config, source: Path) -> DataFrame:
    """The query over the events in a folder."""
    reader = spark.readStream.schema(EVENT_DDL)
    if not config.rate:
        reader = reader.option("maxFilesPerTrigger", _MOST)
    events = reader.parquet(str(source))
    kinds = [
        events.where(f"event_type = {at}").select(f"{name}.*") for at, name in enumerate(("person", "auction", "bid"))
    ]
    persons, auctions, bids = kinds
    if config.stage_ms:
        bids = slow(bids, KEYS[config.query], config.stage_ms / 1000)
    return QUERIES[config.query](Streams(bids, auctions, persons))


def slow(bids: DataFrame, keys: Sequence[str], seconds: float) -> DataFrame:
    """Let each Arrow batch of bids wait as for a call of a service; their keys are announced before."""
    import millpond

    def call(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(seconds)
            yield batch

    return millpond.lookahead(bids, *keys).mapInArrow(call, bids.schema)


def progresses(running: StreamingQuery) -> list[dict[str, Any]]:
    """Progress of every batch that had rows."""
    if (failure := running.exception()) is not None:
        raise failure
    return [one for one in (json.loads(each.json) for each in running.recentProgress) if one["numInputRows"]]


def cpu_seconds() -> float:
    """CPU time of the whole machine, which has nothing else to do."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def run(config: Config) -> Measured:
    """Run it."""
    import millpond

    work = Path(config.work)
    source, checkpoint = work / "source", work / "checkpoint"
    source.mkdir(parents=True)
    events = Events(Path(config.events), config.stream, config.loaded)
    warm = round(config.warmup * (config.rate or 100_000) / ARRIVING)
    count = warm + round(config.seconds * (config.rate or 400_000) / ARRIVING)
    before = events
    if config.changed:
        before = Events(Path(config.events), msgspec.structs.replace(config.stream, hot_bids=_ONE), config.loaded)
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
    done = 0
    for number, file in enumerate(first):
        if number:
            arrivals.put(file)
        while len(found := progresses(running)) <= done:
            time.sleep(0.05)
        done = len(found)
        arrivals.remove([file.name])
    seen = done
    if not config.rate:
        for file in files:
            arrivals.put(file)
    log = local_log(checkpoint)
    started = time.time()
    print("arriving", flush=True)
    begin, used = 0.0, 0.0
    with arrivals.clocked(files if config.rate else [], ARRIVING / (config.rate or 1)):
        while (now := time.time()) < started + config.warmup + config.seconds:
            time.sleep(0.2)
            if not begin and now >= started + config.warmup:
                begin, used = now, cpu_seconds()
            found = progresses(running)
            for one in found[seen:-3]:
                arrivals.remove(source_files(log, one["batchId"]))
            seen = max(seen, len(found) - 3)
            if not config.rate and len(found) - done >= len(files) // _MOST:
                break
        end = time.time()
        cores = (cpu_seconds() - used) / (end - begin)
    if config.rate:
        time.sleep(5.0)  # for what came last
    found = progresses(running)
    print("measured", flush=True)
    running.stop()
    spark.stop()
    return summary(config, arrivals, checkpoint, found, (begin, end), cores)


def summary(
    config: Config,
    arrivals: Arrivals,
    checkpoint: Path,
    found: list[dict[str, Any]],
    window: tuple[float, float],
    cores: float,
) -> Measured:
    """Summarize the results between two points in time."""
    begin, end = window
    log = local_log(checkpoint)
    measured = [one for one in found if begin <= batch_end(one) <= end]
    ends = {name: batch_end(one) for one in found for name in source_files(log, one["batchId"])}
    latencies = [
        ends.get(name, end + 5.0) - at for name, at in arrivals.times.items() if not config.rate or begin <= at <= end
    ]
    files = {one["batchId"]: len(source_files(log, one["batchId"])) for one in measured}
    if not measured:
        raise SystemExit("no batch ended while it was measured: give it more --seconds, or fewer events a second")
    speed = ARRIVING * sum(files.values()) / (end - begin)
    figures: dict[str, float] = {}
    for one in measured:
        for name, value in one.get("observedMetrics", {}).get("millpond", {}).items():
            if isinstance(value, int | float):
                if name in _SIZES or name.endswith("_ms"):
                    figures[name] = max(figures.get(name, 0.0), value)
                else:
                    figures[name] = figures.get(name, 0.0) + value
    return Measured(
        config=config,
        rows=Latency.of(latencies),
        batches=Latency.of([one["durationMs"]["triggerExecution"] / 1000 for one in measured]),
        events_per_second=round(speed),
        kept_up=0.97 * config.rate <= speed <= _MOST_EARLIER * config.rate if config.rate else True,
        cpu=round(cores, 2),
        figures=figures,
        hint_share=round(figures.get("hint_bytes", 0.0) / max(1.0, figures.get("input_rows", 0.0) * _BID), 4),
        trace=[
            (batch_end(one), one["durationMs"]["triggerExecution"], files[one["batchId"]] * ARRIVING)
            for one in measured
        ],
    )


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    asked = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(run(asked)))
