"""Lookup joins with Redis behind a slow network: `python -m benchmarks.studies.enrichment`.

The query is that of the Yahoo Streaming Benchmark. Events of 114 bytes as JSON, with ads by Zipf's law, are parsed, and
views are kept. Each ad's campaign is looked up, and views are counted by campaign and window of ten seconds. With
`--query q13` it is NEXMark's thirteenth: bids with a column of the table, without counts. The engines:

- `millpond`: `millpond.enrich`.
- `synchronous`: `foreachBatch` with a client that waits for each different key of a record batch. The counts are in
  Redis, too.
- `pipelines`: the same with a client that asks for 500 keys in a pipeline.
- `source`: the events are only parsed.

With `--rate` a clock starts the batches, and latencies of rows are reported (`benchmarks.measuring.latency`).
`--two-thirds` measures them at two thirds of the rate that Millpond takes with all keys in its cache. The cache then
has a tenth of the keys, and Millpond runs with hints and without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchmarks.engines.session import start_session
from benchmarks.measuring.arguments import names
from benchmarks.measuring.latency import latencies_of, latency_metrics
from benchmarks.measuring.percentiles import percentile
from benchmarks.nexmark.generator import NexmarkConfig
from benchmarks.nexmark.spark import bids, numbers
from benchmarks.workloads.config import RunConfig
from benchmarks.workloads.dataframes import key_sql
from millpond.demo.engine import PEER_SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

ENGINES = ("millpond", "synchronous", "pipelines", "source")
CAMPAIGNS = 100
_BYTES = 114
_PIPELINE = 500
_EVENT = "ad_id string, event_type string, event_time bigint"
_WINDOW_MS = 10_000


def events(spark: SparkSession, options: argparse.Namespace) -> DataFrame:
    """Return events with columns `ad_id`, the key of the lookup, and `at`; bids have more columns."""
    source = numbers(spark, options.rows_per_batch, options.cores)
    if options.query == "q13":
        key = f"lpad(cast(auction % {options.ads} as string), 12, '0') as ad_id"
        config = NexmarkConfig(in_flight_auctions=options.ads // 10)
        return bids(source, config).selectExpr(key, "dateTime as at", "auction", "bidder", "price")
    return views(source, options)


def views(source: DataFrame, options: argparse.Namespace) -> DataFrame:
    """Return the parsed views, with columns `ad_id` and `at`."""
    config = RunConfig(engine="", workload="", work="", keys=options.ads, zipf=options.zipf)
    ad = f"lpad(cast({key_sql(config)} as string), 12, '0')"
    kind = "element_at(array('view', 'click', 'purchase'), cast(n % 3 as int) + 1)"
    text = (
        f"""concat('{{"ad_id":"', {ad}, '","event_type":"', {kind}, '","event_time":', 1700000000000 + n, ',"x":"')"""
    )
    raw = source.selectExpr(f"{text} as text").selectExpr(f"""concat(rpad(text, {_BYTES - 2}, '.'), '"}}') as value""")
    parsed = raw.selectExpr(f"from_json(value, '{_EVENT}') as e").where("e.event_type = 'view'")
    return parsed.selectExpr("e.ad_id", "timestamp_millis(e.event_time) as at")


def with_millpond(spark: SparkSession, url: str, options: argparse.Namespace, work: Path) -> StreamingQuery:
    """Start the query with `millpond.enrich`."""
    from pyspark.sql import functions as F

    import millpond
    from millpond.lookup import RedisTable

    rows = events(spark, options)
    table = RedisTable(url, "ad:{ad_id}")
    cache, ttl = -(-options.cache // options.cores), None if options.ttl < 0 else options.ttl
    joined = millpond.enrich(rows, table, on="ad_id", columns="campaign bigint", how="inner", cache=cache, ttl=ttl)
    if options.query == "ysb":
        joined = joined.groupBy("campaign", F.window("at", f"{_WINDOW_MS // 1000} seconds")).count()
    mode = "update" if options.query == "ysb" else "append"
    return start(millpond.writeStream(joined).outputMode(mode).format("noop"), options, work)


def start(writer: Any, options: argparse.Namespace, work: Path) -> StreamingQuery:
    """Start a query, on a clock if there is one."""
    if options.rate:
        writer = writer.trigger(processingTime=f"{round(1000 * options.interval)} milliseconds")
    query: StreamingQuery = writer.option("checkpointLocation", str(work / "checkpoint")).start()
    return query


def by_hand(
    spark: SparkSession, url: str, options: argparse.Namespace, work: Path, *, pipelines: bool
) -> StreamingQuery:
    """Start the query with a client written by hand."""

    def look_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import redis

        client = redis.Redis.from_url(url)
        for batch in batches:
            encoded = batch.column(0).dictionary_encode()
            ads = encoded.dictionary.to_pylist()
            campaigns: list[int | None] = []
            for first in range(0, len(ads), _PIPELINE if pipelines else 1):
                if pipelines:
                    pipeline = client.pipeline(transaction=False)
                    for ad in ads[first : first + _PIPELINE]:
                        pipeline.hget(f"ad:{ad}", "campaign")
                    answers = pipeline.execute()
                else:
                    answers = [client.hget(f"ad:{ads[first]}", "campaign")]
                campaigns += [None if answer is None else int(answer) for answer in answers]
            column = pa.array(campaigns, pa.int64()).take(encoded.indices)
            yield pa.RecordBatch.from_arrays([column, *batch.columns[1:]], names=["campaign", *batch.schema.names[1:]])
        client.close()

    def count(rows: DataFrame, batch: int) -> None:
        import redis
        from pyspark.sql import functions as F

        columns = ", ".join(f"{name} {kind}" for name, kind in [("campaign", "bigint"), *rows.dtypes[1:]])
        joined = rows.mapInArrow(look_up, columns).where("campaign is not null")
        if options.query == "q13":
            joined.write.format("noop").mode("append").save()
            return
        window = F.unix_millis("at") - F.pmod(F.unix_millis("at"), F.lit(_WINDOW_MS))
        counts = joined.groupBy("campaign", window.alias("window")).count().collect()
        with redis.Redis.from_url(url) as client:
            pipeline = client.pipeline(transaction=False)
            for row in counts:
                pipeline.hincrby(f"count:{row.window}", str(row.campaign), row["count"])
            pipeline.execute()

    return start(events(spark, options).writeStream.foreachBatch(count), options, work)


def parsed_only(spark: SparkSession, url: str, options: argparse.Namespace, work: Path) -> StreamingQuery:
    """Start a query that only parses the events."""
    return start(events(spark, options).writeStream.format("noop"), options, work)


START: dict[str, Callable[..., StreamingQuery]] = {
    "millpond": with_millpond,
    "synchronous": partial(by_hand, pipelines=False),
    "pipelines": partial(by_hand, pipelines=True),
    "source": parsed_only,
}


def session(options: argparse.Namespace) -> SparkSession:
    """Start a local session."""
    settings = {
        **PEER_SETTINGS,
        "spark.driver.memory": "2g",
        "spark.sql.shuffle.partitions": str(options.cores),
        "spark.millpond.onUnsupported": "error",
        "spark.millpond.slots": str(options.cores),
        "spark.millpond.prefetch": options.hints,
    }
    return start_session(f"local[{options.cores},4]", "benchmark-enrichment", settings)


def measure(engine: str, spark: SparkSession, url: str, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run one engine for some seconds, and return its figures without the first batches."""
    query = START[engine](spark, url, options, work)
    until = time.monotonic() + options.seconds
    while time.monotonic() < until and query.isActive:
        time.sleep(0.2)
    query.stop()
    if query.exception() is not None:
        raise SystemExit(f"{engine}: {query.exception()}")
    batches = [progress for progress in query.recentProgress if progress.numInputRows]
    batches = batches[2 * len(batches) // 3 if options.last else options.warmup :]
    if not batches:
        raise SystemExit(f"{engine}: no batch beyond the first {options.warmup}: give it more --seconds")
    durations = np.array([progress.durationMs["triggerExecution"] for progress in batches], float)
    observed = [progress.observedMetrics for progress in batches]
    metrics = [named["millpond"].asDict() for named in observed if "millpond" in named]
    looked_up = {
        name: sum(values[name] for values in metrics)
        for name in ("cache_hits", "cache_misses", "fetches", "fetched_keys", "announced_keys")
        if metrics
    }
    return {
        "engine": engine,
        "batches": len(batches),
        "rows_per_second": round(1000 * sum(progress.numInputRows for progress in batches) / durations.sum()),
        **{f"p{share}_ms": round(percentile(durations, share)) for share in (50, 99)},
        **(latency_metrics(latencies_of(batches, options.interval)) | {"hints": options.hints} if options.rate else {}),
        **looked_up,
    }


def fill(url: str, ads: int) -> None:
    """Fill Redis with the campaign of every ad."""
    import redis

    with redis.Redis.from_url(url) as client:
        for start in range(0, ads, 10_000):
            pipeline = client.pipeline(transaction=False)
            for ad in range(start, min(ads, start + 10_000)):
                pipeline.hset(f"ad:{ad:012}", mapping={"campaign": ad % CAMPAIGNS})
            pipeline.execute()


def two_thirds(arguments: list[str], options: argparse.Namespace) -> int:
    """Find the rate that Millpond takes with all keys in its cache, then measure latencies at two thirds of it."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.studies.enrichment",
        *arguments,
        "--engines",
        "millpond",
        "--ads",
        str(options.ads),
    ]
    full = ["--cache", str(2 * options.ads), "--ttl", "-1", "--seconds", str(2 * options.seconds), "--last", "--alone"]
    sustained = subprocess.run([*command, *full], check=True, stdout=subprocess.PIPE, text=True).stdout
    print(sustained, end="", flush=True)
    rate = json.loads(sustained)["rows_per_second"] * 2 // 3
    tenth = ["--rate", str(rate), "--cache", str(options.ads // 10), "--alone"]
    return max(subprocess.run([*command, *tenth, "--hints", hints], check=False).returncode for hints in ("on", "off"))


def main(argv: list[str] | None = None) -> int:
    """Run the engines one after another, and print a line for each."""
    from tests.servers.redis import running
    from tests.servers.wire import wire

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=names(ENGINES, "engine"), default=list(ENGINES), metavar="A,B")
    parser.add_argument("--query", choices=("ysb", "q13"), default="ysb")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each engine, its first batches included")
    parser.add_argument("--warmup", type=int, default=5, help="batches that are left out")
    parser.add_argument("--rows-per-batch", type=int, default=100_000)
    parser.add_argument("--ads", type=int, default=1_000_000)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the ads' distribution; 0: uniform")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="milliseconds that the network adds to each answer")
    parser.add_argument("--cache", type=int, default=1_000_000, help="keys that Millpond keeps, at most")
    parser.add_argument("--ttl", type=float, default=60.0, help="seconds; below 0: for ever")
    parser.add_argument("--rate", type=int, default=0, help="rows a second, by a clock; 0: batch after batch")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two batches, with --rate")
    parser.add_argument("--hints", choices=("on", "off"), default="on")
    parser.add_argument("--last", action="store_true", help="measure the last third of the batches only")
    parser.add_argument("--two-thirds", action="store_true", help="latencies of rows (see above)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write one engine's figures there")
    options = parser.parse_args(argv)
    arguments = argv if argv is not None else sys.argv[1:]
    if options.two_thirds and not options.alone:
        return two_thirds(arguments, options)
    if options.rate:
        options.rows_per_batch = round(options.rate * options.interval)
    engines = options.engines
    if options.json is not None and len(engines) > 1:
        parser.error("--json is for one of --engines")
    if len(engines) > 1:  # each in a process of its own, so that the JVM is cold for all
        command = [sys.executable, "-m", "benchmarks.studies.enrichment", *arguments, "--engines"]
        return max(subprocess.run([*command, engine], check=False).returncode for engine in engines)
    with tempfile.TemporaryDirectory(prefix="millpond-enrichment-") as folder:
        (Path(folder) / "redis").mkdir()
        with running(Path(folder) / "redis") as server, wire(server.port, options.delay_ms / 1000) as slow:
            fill(server.url, options.ads)
            spark = session(options)
            for engine in engines:
                work = Path(folder) / engine
                work.mkdir()
                figures = measure(engine, spark, f"redis://127.0.0.1:{slow.port}/0", options, work)
                print(json.dumps(figures), flush=True)
                if options.json is not None:
                    options.json.write_text(json.dumps(figures))
            spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
