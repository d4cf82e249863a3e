"""The workloads as Flink SQL, into a sink that keeps nothing."""

from __future__ import annotations

import re

from benchmarks.engines.flink.queries import QUERIES
from benchmarks.nexmark.draws import stream_id
from benchmarks.nexmark.generator import AUCTION, BID, PERSON, NexmarkConfig
from benchmarks.workloads.config import RunConfig
from benchmarks.workloads.dataframes import PADDING, POOL, Stream, event_time

_COLUMNS = {"bid": BID.names, "auction": AUCTION.names, "person": PERSON.names}
_FUNCTIONS = {"bid": "BIDS", "auction": "AUCTIONS", "person": "PERSONS"}
LAST = 720_720 * 10**6
"""End of the sequence; it is divisible by any sensible parallelism."""


def _number(config: RunConfig, place: str) -> str:
    """Return SQL for the event number at a place of the sequence.

    Flink cuts the sequence into one range per subtask. The event numbers are dealt out one by one, as in Spark.
    """
    share = LAST // config.partitions
    return f"COALESCE(MOD({place}, {share}) * {config.partitions} + {place} / {share}, 0)"


def time(config: RunConfig) -> str | None:
    """Return SQL for the event time of the sequence's column `f0`; None if the query needs none, and no watermark."""
    if not event_time(config):
        return None
    stream = NexmarkConfig(seed=config.seed, rate=config.event_rate)
    milliseconds = f"{stream.base_time_ms} + {_number(config, 'f0')} * 1000 / {stream.rate}"
    return f"CAST(TO_TIMESTAMP_LTZ({milliseconds}, 3) AS TIMESTAMP(3))"


def _function(name: str, class_: str) -> str:
    return f"CREATE TEMPORARY SYSTEM FUNCTION {name} AS 'millpond.benchmark.{class_}' LANGUAGE JAVA"


def _key(config: RunConfig) -> str:
    drawn = f"DRAW({stream_id(config.seed, Stream.KEY)}, n)"
    if config.zipf:
        share = f"(CAST(MOD({drawn}, {1 << 53}) AS DOUBLE) / {float(1 << 53)!r})"
        power = 1.0 - config.zipf
        if abs(power) < 1e-9:
            rank = f"EXP({share} * LN(CAST({config.keys} AS DOUBLE)))"
        else:
            span, root = config.keys**power - 1.0, 1.0 / power
            rank = f"POWER(CAST({span!r} AS DOUBLE) * {share} + 1, CAST({root!r} AS DOUBLE))"
        key = f"LEAST(CAST({rank} AS BIGINT) - 1, {config.keys - 1})"
    else:
        key = f"MOD({drawn}, {config.keys})"
    if config.preload:
        key = f"CASE WHEN n < {config.keys} THEN n ELSE {key} END"
    return f"'k' || CAST({key} + 1000000000000000000 AS STRING)" if config.key_type == "string" else key


def select(config: RunConfig) -> str:
    """Return the query, over the table `numbers` and the views on it."""
    if config.workload == "rmw":
        amount = f"MOD(DRAW({stream_id(config.seed, Stream.VALUE)}, n), 1000000)"
        rows = f"SELECT {_key(config)} AS k, {amount} AS amount FROM numbers"
        return f"SELECT k, COUNT(*), SUM(amount), MAX(amount) FROM ({rows}) GROUP BY k"
    if config.workload == "read_write":
        start = f"MOD(DRAW({stream_id(config.seed, Stream.OFFSET)}, n), {POOL - PADDING})"
        padding = f"CUT({config.seed}, {POOL}, {start}, {PADDING})"
        rows = f"SELECT {_key(config)} AS id, {padding} AS padding FROM numbers"
        return f"SELECT id, COUNT(*), LAST_VALUE(padding) FROM ({rows}) GROUP BY id"
    if config.workload in ("sliding", "session"):
        windows = {
            "sliding": "HOP(TABLE timed, DESCRIPTOR(`dateTime`), INTERVAL '2' SECOND, INTERVAL '10' SECOND)",
            "session": "SESSION(TABLE timed PARTITION BY k, DESCRIPTOR(`dateTime`), INTERVAL '10' SECOND)",
        }
        table = f"TABLE({windows[config.workload]})"
        return f"SELECT window_start, window_end, k, COUNT(*) FROM {table} GROUP BY window_start, window_end, k"
    return QUERIES[config.query]


def _view(config: RunConfig, name: str) -> str:
    """Return the view of one kind of events over `numbers`. Columns that the query does not name are null."""
    query, columns = QUERIES[config.query], _COLUMNS[name]
    mask = sum(1 << i for i, column in enumerate(columns) if re.search(rf"\b{column}\b", query))
    stream = NexmarkConfig(seed=config.seed, rate=config.event_rate)
    arguments = f"{stream.seed}, {stream.rate}, {stream.base_time_ms}, {mask}, n"
    timed = "numbers" if event_time(config) else "made"
    chosen = ", ".join(f"{timed if column == 'dateTime' else 'made'}.`{column}`" for column in columns)
    names = ", ".join(f"`{column}`" for column in columns)
    function = f"LATERAL TABLE({_FUNCTIONS[name]}({arguments})) AS made({names})"
    return f"CREATE TEMPORARY VIEW {name} AS SELECT {chosen} FROM numbers, {function}"


def functions() -> list[str]:
    """Return the statements that register the Java functions."""
    classes = {
        "DRAW": "Draw",
        "CUT": "Cut",
        "BIDS": "Bids",
        "AUCTIONS": "Auctions",
        "PERSONS": "Persons",
        "SIDE": "Side",
    }
    return [_function(name, class_) for name, class_ in classes.items()]


def views(config: RunConfig) -> list[str]:
    """Return the statements that make the views of the table `numbers` that the query reads."""
    if config.workload in ("sliding", "session"):
        return [f"CREATE TEMPORARY VIEW timed AS SELECT {_key(config)} AS k, `dateTime` FROM numbers"]
    arriving = "CREATE TEMPORARY VIEW arriving AS SELECT bidder, PROCTIME() AS arrived FROM bid"
    return [*(_view(config, name) for name in _COLUMNS), arriving] if config.workload == "nexmark" else []


def statements(config: RunConfig) -> list[str]:
    """Return the statements before the query: functions, and views of the table `sequence` of 0 … `LAST` − 1."""
    columns = ", `dateTime`" if event_time(config) else ""
    numbers = f"CREATE TEMPORARY VIEW numbers AS SELECT {_number(config, 'm')} AS n{columns} FROM `sequence`"
    return [*functions(), numbers, *views(config)]
