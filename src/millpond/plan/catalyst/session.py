"""A Spark session beside its plans: its settings, its queries, and copies of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from py4j.java_gateway import JavaClass
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from millpond.errors import UsageError

STREAMING_CHECK = "spark.sql.streaming.unsupportedOperationCheck"
"""Setting: whether Spark checks that it supports a streaming query."""
_SEPARATOR = "\x1e\n"

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def java_class(spark: SparkSession, name: str) -> Any:
    """Return a class of the JVM by its full name; by package attributes, py4j would ask the JVM about each package."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    return JavaClass(name, gateway._gateway_client)


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Make a session the thread's active one meanwhile: Spark's rules and new expressions go by its settings."""
    sessions = java_class(spark, "org.apache.spark.sql.classic.SparkSession")
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def in_session(
    function: Callable[Concatenate[DataFrame, _Arguments], _Result],
) -> Callable[Concatenate[DataFrame, _Arguments], _Result]:
    """Decorate a function of a DataFrame: the DataFrame's session is active during a call (see `active`)."""

    @wraps(function)
    def run(df: DataFrame, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with active(df.sparkSession):
            return function(df, *args, **kwargs)

    return run


def copied_session(spark: SparkSession, settings: Mapping[str, str | None]) -> SparkSession:
    """Return a copy of a session with `settings` (None: not set).

    The session's streaming listeners do not see what runs in the copy.
    """
    copy = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())
    change_settings(copy, settings)
    return copy


def change_settings(spark: SparkSession, values: Mapping[str, str | None]) -> None:
    """Change settings of a session; None: not set."""
    # `spark.conf` refuses settings of the application, such as those of executors. `getOrCreate` puts these into a
    # session that is there already, so they have to be restored like others.
    conf = spark._jsparkSession.sessionState().conf()
    for name, value in values.items():
        if value is None:
            conf.unsetConf(name)
        else:
            conf.setConfString(name, value)


def session_id(spark: SparkSession) -> str:
    """Return the identifier of a session within the application."""
    return str(spark._jsparkSession.sessionUUID())


def settings_of(spark: SparkSession) -> dict[str, str]:
    """Return the settings set in a session, fetched in one call (PySpark needs a call per setting)."""
    text = str(spark._jsparkSession.conf().getAll().mkString(_SEPARATOR))
    name_and_value = (entry.partition(" -> ") for entry in text.split(_SEPARATOR) if entry)
    return {name: value for name, _, value in name_and_value}


def is_on(spark: SparkSession, name: str, default: bool) -> bool:
    """Return a boolean setting of Spark, which takes `True` for `true`, too."""
    return str(spark.conf.get(name, str(default))).strip().lower() == "true"


def process_id(spark: SparkSession) -> int:
    """Return the process id of the JVM."""
    return int(java_class(spark, "java.lang.ProcessHandle").current().pid())


def qualified(spark: SparkSession, path: str) -> str:
    """Return the absolute URL that Spark makes of a path, with its default file system.

    Raises:
        UsageError: it is not a path, or its file system is not configured in Spark.
    """
    try:
        hadoop = java_class(spark, "org.apache.hadoop.fs.Path")(path)
        system = hadoop.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        return str(system.makeQualified(hadoop).toString())
    except (Py4JJavaError, PySparkException) as error:
        cause = getattr(error, "java_exception", error)
        raise UsageError(
            f"Spark cannot use {path!r} as a location: {cause}.",
            action="Give a checkpointLocation that Spark can reach.",
        ) from None


def delete_at_exit(spark: SparkSession, folder: str) -> None:
    """Delete a local folder when the application ends, by the hook that deletes Spark's own temporary folders."""
    hooks = java_class(spark, "org.apache.spark.util.ShutdownHookManager")
    hooks.registerShutdownDeleteDir(java_class(spark, "java.io.File")(folder))


def delete_location(spark: SparkSession, path: str) -> None:
    """Delete a folder recursively; a path without a scheme is in Spark's default file system."""
    hadoop = java_class(spark, "org.apache.hadoop.fs.Path")(path)
    hadoop.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).delete(hadoop, True)


def check_sink(spark: SparkSession, name: str) -> None:
    """Check that Spark knows the sink's format; raise Spark's own error otherwise."""
    if name not in ("", "foreach", "foreachBatch", "memory"):
        source = java_class(spark, "org.apache.spark.sql.execution.datasources.DataSource")
        source.lookupDataSource(name, spark._jsparkSession.sessionState().conf())


def is_running(spark: SparkSession, query_id: str | None) -> bool:
    """Return whether the application runs the query of this id, in any session."""
    return query_id is not None and _active_run(spark, query_id) is not None


def stop_active_run(spark: SparkSession, query_id: str | None) -> None:
    """Stop the application's running query of this id, if any, as Spark does when it is restarted.

    Raises:
        UsageError: it runs, and `spark.sql.streaming.stopActiveRunOnRestart` is false.
    """
    running = None if query_id is None else _active_run(spark, query_id)
    if running is None:
        return
    if not is_on(spark, "spark.sql.streaming.stopActiveRunOnRestart", True):
        raise UsageError(
            f"The query with id {query_id} is running in this application already.",
            action="Stop it first, or set spark.sql.streaming.stopActiveRunOnRestart to true.",
        )
    running.stop()


def _active_run(spark: SparkSession, query_id: str) -> Any:
    queries = spark._jsparkSession.sharedState().activeStreamingQueries()
    return queries.get(java_class(spark, "java.util.UUID").fromString(query_id))
