"""Millpond: a state engine for PySpark Structured Streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from millpond.lookup.table import LookupTable
    from millpond.query.importing import Import
    from millpond.query.writer import StreamWriter
    from millpond.worker.processors.asynchronous.base import AsyncStatefulProcessor
    from millpond.worker.processors.asynchronous.reads import gather

__all__ = [
    "AsyncStatefulProcessor",
    "__version__",
    "enrich",
    "explain",
    "gather",
    "import_checkpoint",
    "install",
    "lookahead",
    "read_state",
    "writeStream",
]

__version__: str
"""The version of the installed package."""


def __getattr__(name: str) -> Any:
    """Import an attribute on first access, to keep the import short in Spark's Python workers."""
    if name == "AsyncStatefulProcessor":
        from millpond.worker.processors.asynchronous.base import AsyncStatefulProcessor

        return AsyncStatefulProcessor
    if name == "gather":
        from millpond.worker.processors.asynchronous.reads import gather

        return gather
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("millpond")


def writeStream(df: DataFrame) -> StreamWriter:
    """Write a streaming DataFrame with its state on Millpond; replaces `df.writeStream`.

    Args:
        df: any streaming DataFrame of a classic (not Spark Connect) session.

    Returns:
        A `DataStreamWriter` of Spark. Its `start()` returns Spark's own `StreamingQuery`.

    Raises:
        UsageError: the session is a Spark Connect session, or its version of Spark was never tested.

    Examples:
        >>> clicks = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 6).load()
        >>> counts = clicks.groupBy((clicks.value % 2).alias("user")).count()
        >>> writer = millpond.writeStream(counts).outputMode("complete").format("memory").queryName("counts")
        >>> writer.option("checkpointLocation", "/tmp/counts").trigger(availableNow=True).start().awaitTermination()
        >>> spark.table("counts").orderBy("user").collect()
        [Row(user=0, count=3), Row(user=1, count=3)]
    """
    from millpond.query.writer import StreamWriter

    return StreamWriter(df)


def install(spark: SparkSession) -> None:
    """Make `df.writeStream` do what `millpond.writeStream(df)` does, for all DataFrames of one session.

    Args:
        spark: a classic session; other sessions are not affected.

    Raises:
        UsageError: the session is a Spark Connect session, or its version of Spark was never tested.

    Examples:
        >>> millpond.install(spark)
        >>> type(spark.readStream.format("rate").load().writeStream)
        <class 'millpond.query.writer.StreamWriter'>
    """
    from millpond.query.install import install_session

    install_session(spark)


@overload
def explain(df: DataFrame, output_mode: str = ..., *, as_dict: Literal[False] = ...) -> None: ...
@overload
def explain(df: DataFrame, output_mode: str = ..., *, as_dict: Literal[True]) -> dict[str, Any]: ...
def explain(df: DataFrame, output_mode: str = "append", *, as_dict: bool = False) -> dict[str, Any] | None:
    """Print where each stateful operator of a streaming DataFrame would run, its access pattern, and the reasons.

    Args:
        df: a streaming DataFrame of a classic session.
        output_mode: the output mode of the query: `append` (as for `writeStream`, the default), `update` or `complete`.
        as_dict: return the decision as plain data instead of printing it.

    Returns:
        The decision with `as_dict`, else None.

    Raises:
        UsageError: the DataFrame is not a stream; the output mode does not exist; the session is a Spark Connect
            session, or its version of Spark was never tested.

    Examples:
        >>> clicks = spark.readStream.format("rate").load()
        >>> millpond.explain(clicks.groupBy("value").count(), "update")
        1 stateful operator, update mode
          [millpond 0] aggregate by value
              read-modify-write: every function is associative and commutative: one row per key, updated in place
              keys: value: bigint
              functions: count(*): bigint
              rows combined before the exchange: yes, where that leaves few of them
              keys may be announced by: exchange
          commits: async
    """
    from millpond.conf import read_settings
    from millpond.errors import UsageError
    from millpond.plan import explain as explaining
    from millpond.plan.catalyst.session import settings_of
    from millpond.plan.decide import decide
    from millpond.query.starting.checks import check_session, unsupported_anywhere

    check_session(df)
    if not df.isStreaming:
        raise UsageError("The DataFrame is not a stream.", action="Read it with spark.readStream.")
    if output_mode.lower() not in ("append", "update", "complete"):
        raise UsageError(f"There is no output mode {output_mode!r}.", action="Give append, update or complete.")
    settings = read_settings(settings_of(df.sparkSession))
    decision = decide(df, output_mode, pattern=settings.store_pattern, map_groups=settings.map_groups)
    if as_dict:
        return explaining.as_dict(decision, unsupported_anywhere(df, decision))
    print(explaining.as_text(decision, unsupported_anywhere(df, decision)))
    return None


def lookahead(df: DataFrame, *columns: str) -> DataFrame:
    """Send prefetch hints to stateful operators when rows pass this place of the plan.

    Rows and columns do not change, and without Millpond the call has no effect. Under `writeStream`, it adds a
    lookahead (Keyed Prefetching §IV-A) to the stateful operators above. An operator gets hints if its keys are among
    the columns, or if Spark computes its keys from them. Hints are used while keys are missing from memory and the
    hints of later lookaheads come too late. `millpond.explain` shows the operators that may get hints.

    Args:
        df: a streaming or batch DataFrame.
        columns: names of the columns that the keys consist of.

    Returns:
        A DataFrame with the rows and columns of `df`.

    Raises:
        UsageError: no column is named, a column does not exist or is ambiguous; the session is a Spark Connect
            session, or its version of Spark was never tested.

    Examples:
        >>> clicks = spark.readStream.format("rate").load()
        >>> counts = millpond.lookahead(clicks, "value").groupBy("value").count()
        >>> millpond.explain(counts, "update")
        1 stateful operator, update mode
          [millpond 0] aggregate by value
              ...
              keys may be announced by: lookahead(value), exchange
          commits: async
    """
    from millpond.plan.lookahead.stages import lookahead_stage
    from millpond.query.starting.checks import check_session

    check_session(df)
    return lookahead_stage(df, columns)


def read_state(
    spark: SparkSession,
    checkpoint: str | PathLike[str],
    operator: int | None = None,
    version: int | None = None,
    variable: str | None = None,
) -> DataFrame:
    """Return the state of one operator as a DataFrame: its keys and, for aggregates, their results.

    Windows are structs of `start` and `end`. Sliding windows are mostly kept as panes, which several windows share; the
    struct then holds the bounds of a pane.

    A processor (`transformWithState`) is read one state variable at a time: a row for each key, with its value, its
    list, or its map as a list of entries. With a time to live, each part has its `expiry`, and expired parts may still
    be present.

    Args:
        spark: a classic session.
        checkpoint: the query's checkpoint location (or, with `spark.millpond.state.location`, its folder there).
        operator: the operator's number in `explain`; the first operator with state by default.
        version: the state after batch `version - 1`; the newest durable version by default.
        variable: for a processor, the name of a state variable, or `timers` for the times at which timers are due.

    Returns:
        A DataFrame that Spark's executors read from the state's files.

    Raises:
        UsageError: the state, operator, version or variable does not exist; the message lists those that exist.
        StateDamagedError: the version is not whole, and some of its commits are damaged.

    Examples:
        >>> clicks = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 6).load()
        >>> counts = clicks.groupBy((clicks.value % 2).alias("user")).count()
        >>> writer = millpond.writeStream(counts).outputMode("update").format("noop")
        >>> writer.option("checkpointLocation", "/tmp/counts").trigger(availableNow=True).start().awaitTermination()
        >>> millpond.read_state(spark, "/tmp/counts").orderBy("user").collect()
        [Row(user=0, count=3), Row(user=1, count=3)]
    """
    from millpond.query.state import read_state as read

    return read(spark, checkpoint, operator, version, variable)


def import_checkpoint(
    df: DataFrame, source: str | PathLike[str], checkpoint: str | PathLike[str], output_mode: str = "append"
) -> Import:
    """Make a Millpond checkpoint from the checkpoint of a query that ran on Spark's own state store.

    Then start the query with `writeStream` and the new checkpoint. It goes on with the planned batch if that was not
    committed, else with the batch after the last committed one. The old checkpoint does not change. The query keeps its
    id, so that a sink that knows the id skips batches that it has; do not start the query on both checkpoints.

    Args:
        df: the query's streaming DataFrame, as it ran natively.
        source: the checkpoint location of the native query, which must not run.
        checkpoint: the new checkpoint location, which must be empty.
        output_mode: the output mode of the query.

    Returns:
        An `Import`: the new location, the query's id, the version, the number of partitions and of operators.

    Raises:
        UsageError: the checkpoint does not exist, the new location is not empty, or the query is running.
        StateIncompatibleError: the state is of another query, or part of it cannot be imported. Nothing was written.
        SettingError: `spark.millpond.state.location` is set.

    Examples:
        >>> clicks = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 6).load()
        >>> counts = clicks.groupBy((clicks.value % 2).alias("user")).count()
        >>> writer = counts.writeStream.outputMode("update").format("noop").trigger(availableNow=True)
        >>> writer.option("checkpointLocation", "/tmp/native").start().awaitTermination()
        >>> millpond.import_checkpoint(counts, "/tmp/native", "/tmp/imported", "update").version
        1
        >>> millpond.read_state(spark, "/tmp/imported").orderBy("user").collect()
        [Row(user=0, count=3), Row(user=1, count=3)]
    """
    from millpond.query.importing import import_checkpoint as import_

    return import_(df, source, checkpoint, output_mode)


def enrich(
    df: DataFrame,
    table: LookupTable,
    *,
    on: str | Sequence[str] | Mapping[str, str],
    columns: str | StructType,
    how: Literal["left", "inner"] = "left",
    cache: int = 1_000_000,
    ttl: float | None = 60.0,
    timeout: float = 5.0,
    retries: int = 4,
    concurrency: int = 4,
    batch: int = 500,
    on_error: Literal["fail", "null", "side"] = "fail",
) -> DataFrame:
    """Join each row with the current row of its key in an external table, such as a key-value store (lookup join).

    The DataFrame also runs with Spark alone, as a stream or a batch. Under `writeStream`, the slot that owns a key
    looks it up: in a cache in its memory, else by an asynchronous request for many keys, with each key once.

    Args:
        df: a streaming or batch DataFrame. Its watermark is kept.
        table: a `millpond.lookup.RedisTable`, a `PostgresTable`, or a class of your own (`LookupTable`).
        on: the key columns: one name, several names, or a mapping from the stream's names to the table's names. The
            stream's names follow `spark.sql.caseSensitive`; the table's names are used as written. A row with a null in
            a key column has no match.
        columns: the columns to look up, with types, as DDL (`name string, price decimal(10,2)`) or as a `StructType`.
        how: `left` gives nulls for a key without a match, `inner` drops such rows.
        cache: the largest number of keys in memory for each partition; `spark.millpond.slot.memory` is a second bound.
            The least recently used keys are evicted first.
        ttl: seconds for which a result is valid, "no match" included; None: as long as it is cached.
        timeout: seconds that one request may take.
        retries: how often a failed request is repeated, first after 0.1 s, then after three times the last wait, up to
            10 s; 4 retries cover 4 s.
        concurrency: requests in flight at a time, for each slot.
        batch: the largest number of keys in one request.
        on_error: what happens to keys whose lookup fails. `fail` fails the batch. `null` gives nulls, with `inner`,
            too. `side` gives nulls and adds a column `_error`, a struct of `kind` and `message` that is null for all
            other rows.

    Returns:
        A DataFrame with the columns of `df` and the columns that were looked up.

    Raises:
        UsageError: an argument is not valid; the session is a Spark Connect session, or its version of Spark was never
            tested.

    Examples:
        >>> from millpond.lookup import RedisTable
        >>> ads = RedisTable("redis://redis.example.org:6379/0", key="ad:{ad_id}")
        >>> clicks = spark.createDataFrame([(7,)], "ad_id bigint")
        >>> millpond.enrich(clicks, ads, on="ad_id", columns="campaign bigint, price decimal(10,2)")
        DataFrame[ad_id: bigint, campaign: bigint, price: decimal(10,2)]
    """
    from millpond.plan.lookup_join import lookup_join
    from millpond.query.starting.checks import check_session

    check_session(df)
    return lookup_join(df, table, on, columns, how, cache, ttl, timeout, retries, concurrency, batch, on_error)
