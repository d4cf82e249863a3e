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
    from millpond.slot.pipe.processors.asynchronous.base import AsyncStatefulProcessor
    from millpond.slot.pipe.processors.asynchronous.reads import gather

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
    """Look up when it is asked for what Spark's Python workers, which import this package, seldom ask for."""
    if name == "AsyncStatefulProcessor":
        from millpond.slot.pipe.processors.asynchronous.base import AsyncStatefulProcessor

        return AsyncStatefulProcessor
    if name == "gather":
        from millpond.slot.pipe.processors.asynchronous.reads import gather

        return gather
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("millpond")


def writeStream(df: DataFrame) -> StreamWriter:
    """Write a streaming DataFrame, with its state on Millpond: use it where `df.writeStream` stood.

    Args:
        df: any streaming DataFrame of a classic (not Spark Connect) session.

    Returns:
        Spark's `DataStreamWriter`, whose `start()` gives Spark's own `StreamingQuery`.

    Raises:
        UsageError: the session is a Spark Connect session, or of a version of Spark that was never tested.
    """
    from millpond.query.writer import StreamWriter

    return StreamWriter(df)


def install(spark: SparkSession) -> None:
    """Make `df.writeStream` itself do what `millpond.writeStream(df)` does, for all DataFrames of this session.

    Args:
        spark: a classic session; others are not affected.

    Raises:
        UsageError: the session is a Spark Connect session, or of a version of Spark that was never tested.
    """
    from millpond.query.install import install_session

    install_session(spark)


@overload
def explain(df: DataFrame, output_mode: str = ..., *, as_dict: Literal[False] = ...) -> None: ...
@overload
def explain(df: DataFrame, output_mode: str = ..., *, as_dict: Literal[True]) -> dict[str, Any]: ...
def explain(df: DataFrame, output_mode: str = "update", *, as_dict: bool = False) -> dict[str, Any] | None:
    """Print where each stateful operator of a streaming DataFrame would run, with which access pattern, and why.

    Args:
        df: a streaming DataFrame of a classic session.
        output_mode: the output mode that the query will be started with.
        as_dict: return the decision as plain data instead of printing it.

    Raises:
        UsageError: the DataFrame is none of a stream; there is no such output mode; the session is a Spark Connect
            session, or of a version of Spark that was never tested.
    """
    from millpond.conf import read_settings
    from millpond.errors import UsageError
    from millpond.plan import explain as explaining
    from millpond.plan.catalyst.jvm import Catalyst
    from millpond.plan.decide import decide
    from millpond.query.starting.checks import check_session, runs_nowhere

    check_session(df)
    if not df.isStreaming:
        raise UsageError("A streaming DataFrame is wanted, not one of batch.", action="Read it with spark.readStream.")
    if output_mode.lower() not in ("append", "update", "complete"):
        raise UsageError(f"There is no output mode {output_mode!r}.", action="Give append, update or complete.")
    settings = read_settings(Catalyst(df.sparkSession).settings)
    decision = decide(df, output_mode, pattern=settings.store_pattern, map_groups=settings.map_groups)
    if as_dict:
        return explaining.as_dict(decision, runs_nowhere(df, decision))
    print(explaining.as_text(decision, runs_nowhere(df, decision)))
    return None


def lookahead(df: DataFrame, *columns: str) -> DataFrame:
    """Announce keys to stateful operators as rows pass this place of the plan, before what follows works on them.

    Rows and columns are the same, and Spark alone does nothing. Under `writeStream` this is one more lookahead
    (Keyed Prefetching §IV-A) of the operators that its rows get to, if what they are keyed by is among the columns, or
    computed from them by expressions of Spark. Its hints are used when keys are missing from memory, and those of later
    lookaheads come too late; `millpond.explain` says whose keys it may announce.

    Args:
        df: a stream or a batch DataFrame.
        columns: names of the columns that make up the keys.

    Raises:
        UsageError: no column is named, or one that there is not, or of which there are two; the session is a Spark
            Connect session, or of a version of Spark that was never tested.
    """
    from millpond.plan.lookahead.stages import staged
    from millpond.query.starting.checks import check_session

    check_session(df)
    return staged(df, columns)


def read_state(
    spark: SparkSession,
    checkpoint: str | PathLike[str],
    operator: int | None = None,
    version: int | None = None,
    variable: str | None = None,
) -> DataFrame:
    """The state of one operator as a DataFrame: its keys and, for aggregates, their results.

    A `window` that the query groups by is shown as one timestamp, when it begins. Windows that slide are kept as the
    panes that several of them share: there it is when a pane begins. Session windows have start and end.

    Of a processor (`transformWithState`) one variable is read: a row for each key, with its value, its list, or its map
    as a list of entries. With a time to live each part has its `expiry`, and what has expired may still be there.

    Args:
        spark: a classic session.
        checkpoint: the query's checkpoint location (or, with `spark.millpond.state.location`, its folder there).
        operator: which of the query's operators, as `explain` numbers them; the first that has state by default.
        version: the state after batch `version - 1`; the newest durable one by default.
        variable: of a processor, the name of a state variable, or `timers`: the times at which they are due.

    Raises:
        UsageError: there is no such state, operator, version or variable; the message says what there is.
        StateDamagedError: the version is not whole, and some of its commits are damaged.
    """
    from millpond.query.state import read_state as read

    return read(spark, checkpoint, operator, version, variable)


def import_checkpoint(
    df: DataFrame, source: str | PathLike[str], checkpoint: str | PathLike[str], output_mode: str = "append"
) -> Import:
    """Make a checkpoint with which a query that ran on Spark's own state store goes on with its state on Millpond.

    Start the query with `writeStream` and the new checkpoint then: it goes on with the batch after the last one that
    was committed, or, if one was planned and not committed, with that. The old checkpoint stays as it is. The query
    keeps its id, so that sinks which know it skip what they have; do not start it on both.

    Args:
        df: the query's streaming DataFrame, as it was natively.
        source: the checkpoint location of the native query, which must not run.
        checkpoint: the new checkpoint location, where there is nothing yet.
        output_mode: of the query.

    Returns:
        Where it is, the query's id, the version and the number of partitions of the state.

    Raises:
        UsageError: there is no such checkpoint, something is at the new place, or the query is running.
        StateIncompatibleError: the state is of another query, or some of it cannot be taken over. Nothing was written.
        SettingError: `spark.millpond.state.location` is set.
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
    """Join each row with what a table outside of Spark, a key-value store say, has of its key at that time.

    The DataFrame runs with Spark alone, as a stream or a batch. Under `writeStream` keys are looked up where they are
    owned: from a cache in the slot's memory, else asynchronously, each once, many at a time.

    Args:
        df: a stream or a batch DataFrame. A watermark that it has goes on.
        table: a `millpond.lookup.RedisTable`, a `PostgresTable`, or a class of your own (`LookupTable`).
        on: the columns to look rows up by: one, several, or each with what the table calls it. The stream's are told
            apart as Spark does it (`spark.sql.caseSensitive`), the table's are taken as they are written. A row in
            which one of them is null has nothing in the table.
        columns: what to look up, with types, as DDL: `name string, price decimal(10,2)`, or as a `StructType`.
        how: `left` gives nulls where the table has nothing, `inner` leaves such rows out.
        cache: keys that are kept in memory for each partition, at most; it is bounded by `spark.millpond.slot.memory`
            besides. Those go first that were used longest ago.
        ttl: seconds for which what was found is good, also that there was nothing; None for as long as it is kept.
        timeout: seconds that one request may take. retries: how often it is made again when it fails, after 0.1 s, and
            then after three times as long each time, up to 10 s: 4 of them cover 4 s.
        concurrency: requests on their way at a time, for each slot. batch: keys of one request, at most.
        on_error: what to do with keys that cannot be looked up: `fail` the batch; give `null`s, as if there were
            nothing (but also with `inner`); or the same with a column `_error` on the `side`, a struct of `kind` and
            `message` that is null for all other rows.

    Returns:
        The DataFrame's columns and those that were looked up.

    Raises:
        UsageError: an argument does not fit; the session is a Spark Connect session, or of a version of Spark that was
            never tested.
    """
    from millpond.plan.enriching import enriched
    from millpond.query.starting.checks import check_session

    check_session(df)
    return enriched(df, table, on, columns, how, cache, ttl, timeout, retries, concurrency, batch, on_error)
