"""The checkpoint location of a query, by default where Spark puts it; and the batches that its sink has."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import uuid
from contextlib import suppress
from dataclasses import dataclass

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millpond.errors import MillpondError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.backends.local import LocalFiles
from millpond.files.locations.opening import open_filesystem
from millpond.plan.catalyst.session import delete_at_exit, delete_location, is_on, qualified
from millpond.query.running.companion import after
from millpond.slot.process.client import drain
from millpond.tasks.operator_task import OperatorTask

log = logging.getLogger("millpond")

_SINKS_WITHOUT_CHECKPOINT = frozenset({"memory", "foreach", "foreachBatch", "console", "noop"})
"""Sinks that Spark lets run in a temporary checkpoint."""


_SINKS_WITHOUT_LOG = frozenset({"foreach", "foreachBatch", "console", "noop", "kafka"})
"""Sinks that always run a planned batch again after a crash."""

_SINKS_WITH_LOG = frozenset({"parquet", "orc", "json", "csv", "text"})
"""Sinks that log their batches below `_spark_metadata/` of their path, and skip logged batches."""

_SINK_LOG_ENTRY = re.compile(r"_spark_metadata/(\d+)(\.compact)?")


def runs_planned(spark: SparkSession, sink: str, path: str | None, batch: int) -> bool | None:
    """Return whether the sink runs a batch that was planned and not committed.

    Args:
        spark: the query's session.
        sink: the sink's format, or `foreach`/`foreachBatch`.
        path: where a file sink writes.
        batch: the planned batch.

    Returns:
        True if the sink certainly runs it, False if the sink has it and skips it, None if the sink may do either.
    """
    # Spark ignores the case of formats. `foreachBatch` is a method of the writer, not a format.
    sink = sink if sink == "foreachBatch" else sink.lower()
    if sink in _SINKS_WITHOUT_LOG:
        return True
    if sink not in _SINKS_WITH_LOG or path is None:
        return None
    try:
        # A file sink skips batches that its own log has, so whether it runs a batch depends on that log.
        names = [info.name for info in open_filesystem(qualified(spark, path)).list("_spark_metadata/")]
    except (MillpondError, OSError):  # a path that only Spark can read
        return None
    return max((int(found[1]) for name in names if (found := _SINK_LOG_ENTRY.fullmatch(name))), default=-1) < batch


def is_refused(sink: str, path: str | None, output_mode: str) -> bool:
    """Return whether Spark certainly refuses to start into this sink.

    Only file sinks are checked. Spark would have to create any other sink, which runs the sink's own code.

    Args:
        sink: the sink's format, or `foreach`/`foreachBatch`.
        path: where a file sink writes.
        output_mode: `append`, `update` or `complete`.
    """
    return sink.lower() in _SINKS_WITH_LOG and (path is None or output_mode != "append")


@dataclass(frozen=True)
class CheckpointLocation:
    """The location of a query's checkpoint.

    Attributes:
        path: path or URL, in any form that Spark accepts.
        temporary: whether it is deleted after the query.
    """

    path: str
    temporary: bool = False


def choose_checkpoint(
    spark: SparkSession, sink: str, name: str | None, given: str | None, state_location: str | None
) -> CheckpointLocation | None:
    """Choose the checkpoint location of a query.

    Args:
        spark: the query's session.
        sink: the sink's format, or `foreach`/`foreachBatch`.
        name: the query's name.
        given: the option `checkpointLocation`.
        state_location: the setting `spark.millpond.state.location`.

    Returns:
        The location, or None where Spark refuses to start without one.
    """
    named = named_checkpoint(spark, name or str(uuid.uuid4()), given)
    if named is not None:
        return CheckpointLocation(named)
    if sink not in _SINKS_WITHOUT_CHECKPOINT:
        return None
    temporary = tempfile.mkdtemp(prefix="temporary-millpond-")
    log.warning(
        "no checkpointLocation: the query's progress is kept in %s, and its state %s; both are deleted "
        "when the query stops",
        temporary,
        "there, too" if state_location is None else f"in a folder at {state_location}",
    )
    # A query that fails keeps its checkpoint for a look at it, as Spark does; this is the last chance to delete it.
    delete_at_exit(spark, temporary)
    return CheckpointLocation(temporary, temporary=True)


def named_checkpoint(spark: SparkSession, name: str | None, given: str | None) -> str | None:
    """Return the user's checkpoint location, by option or by setting and query name; None without one."""
    base = spark.conf.get("spark.sql.streaming.checkpointLocation", None)
    if given is not None or base is None or name is None:
        return given
    return f"{base.rstrip('/')}/{name}"


def delete_when_stopped(query: StreamingQuery, spark: SparkSession, path: str, task: OperatorTask) -> None:
    """Delete a temporary checkpoint and its state when the query has stopped, as Spark does with the checkpoint.

    After a failure the checkpoint stays until the application ends, unless Spark's settings force its deletion. State
    outside the checkpoint then stays for good, because the user may have moved the checkpoint to go on with it.

    Args:
        query: the running query.
        spark: its session.
        path: the temporary checkpoint, a path without a scheme. Spark resolves it in its default file system.
        task: any operator of the query; its slots have to release the checkpoint first.
    """
    forced = is_on(spark, "spark.sql.streaming.forceDeleteTempCheckpointLocation", False)
    # With `spark.millpond.state.location`, the state has a folder of its own, which is named after the query's id.
    state = None if task.location == qualified(spark, path) else open_filesystem(task.location)

    def delete(error: Exception | None) -> None:
        if error is not None and not forced:
            log.debug("the temporary checkpoint %s stays until the application ends: %s", path, error)
            if state is not None:
                log.warning("the state of a failed query without checkpointLocation is left at %s", state.url)
            return
        with suppress(MillpondError, OSError):  # commits to a checkpoint that is being deleted may fail
            drain(task)
        with suppress(Py4JError, PySparkException):  # the JVM may have ended
            delete_location(spark, path)
        shutil.rmtree(path, ignore_errors=True)  # the folder of `mkdtemp`, if the default file system is another one
        if state is not None:
            _delete_all(state)

    after(query, "millpond-temporary", delete).start()


def _delete_all(files: FileSystem) -> None:
    """Delete a location with all its objects. Best effort; failures in an object store are logged."""
    if isinstance(files, LocalFiles):
        shutil.rmtree(files.path, ignore_errors=True)
        return
    try:
        for info in files.list(""):
            files.delete(info.name)
    except (MillpondError, OSError) as error:
        log.warning("the state of an ended query without checkpointLocation is left at %s: %s", files.url, error)
