"""The workloads as Flink SQL, into a sink that keeps nothing."""

from __future__ import annotations

from benchmarks.config import RunConfig
from benchmarks.workloads import PADDING, POOL, Stream
from millpond.workloads.draws import stream_id
from millpond.workloads.nexmark import NexmarkConfig

_BID_COLUMNS = ("auction", "bidder", "price", "channel", "url", "dateTime", "extra")
_DAY = "DATE_FORMAT(`dateTime`, 'yyyy-MM-dd')"
_RANKS = ("price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000")
_CHANNEL_ID = "REGEXP_EXTRACT(url, '(&|^)channel_id=([^&]*)', 2)"


# Divides by any sensible parallelism.
LAST = 720_720 * 10**6


def _by_rank(aggregate: str) -> str:
    return ", ".join([aggregate, *(f"{aggregate} FILTER (WHERE {rank})" for rank in _RANKS)])


_COUNTS = _by_rank("COUNT(*)")
_DISTINCT = f"{_by_rank('COUNT(DISTINCT bidder)')}, {_by_rank('COUNT(DISTINCT auction)')}"
_QUERIES = {
    "q0": "SELECT auction, bidder, price, `dateTime`, extra FROM bid",
    "q1": "SELECT auction, bidder, 0.908 * price, `dateTime`, extra FROM bid",
    "q2": "SELECT auction, price FROM bid WHERE MOD(auction, 123) = 0",
    "q14": (
        "SELECT auction, bidder, 0.908 * price,"
        " CASE WHEN HOUR(`dateTime`) >= 8 AND HOUR(`dateTime`) <= 18 THEN 'dayTime'"
        " WHEN HOUR(`dateTime`) <= 6 OR HOUR(`dateTime`) >= 20 THEN 'nightTime' ELSE 'otherTime' END,"
        " `dateTime`, extra,"
        " CHAR_LENGTH(extra) - CHAR_LENGTH(REPLACE(extra, 'c', '')) FROM bid"
        " WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000"
    ),
    "q15": f"SELECT {_DAY}, {_COUNTS}, {_DISTINCT} FROM bid GROUP BY {_DAY}",
    "q16": (
        f"SELECT channel, {_DAY}, MAX(DATE_FORMAT(`dateTime`, 'HH:mm')), {_COUNTS}, {_DISTINCT}"
        f" FROM bid GROUP BY channel, {_DAY}"
    ),
    "q17": (
        f"SELECT auction, {_DAY}, {_COUNTS}, MIN(price), MAX(price), AVG(price), SUM(price)"
        f" FROM bid GROUP BY auction, {_DAY}"
    ),
    "q21": (
        "SELECT auction, bidder, price, channel, CASE WHEN LOWER(channel) = 'apple' THEN '0'"
        " WHEN LOWER(channel) = 'google' THEN '1' WHEN LOWER(channel) = 'facebook' THEN '2'"
        f" WHEN LOWER(channel) = 'baidu' THEN '3' ELSE {_CHANNEL_ID} END FROM bid"
        f" WHERE {_CHANNEL_ID} IS NOT NULL OR LOWER(channel) IN ('apple', 'google', 'facebook', 'baidu')"
    ),
    "q22": (
        "SELECT auction, bidder, price, channel, SPLIT_INDEX(url, '/', 3), SPLIT_INDEX(url, '/', 4),"
        " SPLIT_INDEX(url, '/', 5) FROM bid"
    ),
}


def _numbers(config: RunConfig) -> str:
    """Flink cuts the sequence `m` into one range per subtask; `n` deals the events out one by one, as Spark does."""
    share = LAST // config.partitions
    number = f"COALESCE(MOD(m, {share}) * {config.partitions} + m / {share}, 0)"
    return f"CREATE TEMPORARY VIEW numbers AS SELECT {number} AS n FROM `sequence`"


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
    """The query, over the table `numbers`."""
    if config.workload == "rmw":
        amount = f"MOD(DRAW({stream_id(config.seed, Stream.VALUE)}, n), 1000000)"
        rows = f"SELECT {_key(config)} AS k, {amount} AS amount FROM numbers"
        return f"SELECT k, COUNT(*), SUM(amount), MAX(amount) FROM ({rows}) GROUP BY k"
    if config.workload == "read_write":
        start = f"MOD(DRAW({stream_id(config.seed, Stream.OFFSET)}, n), {POOL - PADDING})"
        padding = f"CUT({config.seed}, {POOL}, {start}, {PADDING})"
        rows = f"SELECT {_key(config)} AS id, {padding} AS padding FROM numbers"
        return f"SELECT id, COUNT(*), LAST_VALUE(padding) FROM ({rows}) GROUP BY id"
    query = _QUERIES[config.query]
    columns = sum(1 << i for i, name in enumerate(_BID_COLUMNS) if name in query)
    stream = NexmarkConfig(seed=config.seed, rate=config.event_rate)
    arguments = f"{stream.seed}, {stream.rate}, {stream.base_time_ms}, {columns}, n"
    names = ", ".join(f"`{name}`" for name in _BID_COLUMNS)
    bids = f"(SELECT bid.* FROM numbers, LATERAL TABLE(BIDS({arguments})) AS bid({names}))"
    return query.replace("FROM bid", f"FROM {bids}")


def statements(config: RunConfig) -> list[str]:
    """What comes before the query: its functions and its view of the table `sequence` of 0 … `LAST` − 1."""
    return [_function("DRAW", "Draw"), _function("CUT", "Cut"), _function("BIDS", "Bids"), _numbers(config)]
