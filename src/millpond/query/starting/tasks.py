"""What the pipes of a run carry: whose state they work on, where it is, and what slots obey."""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from typing import Literal

from pyspark.sql import SparkSession

from millpond.conf import Settings
from millpond.errors import SettingError
from millpond.files.backends.filesystem import join_url
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.workers import on_one_host
from millpond.slot.batch.task import PipeTask, SlotSettings
from millpond.slot.process.identity import identify
from millpond.spec.kinds.union import OperatorSpec

log = logging.getLogger("millpond")

_slot_memory: dict[str, int] = {}  # by application: what its first query asked for


def pipe_task(
    spark: SparkSession,
    settings: Settings,
    spec: OperatorSpec,
    query: str,
    location: str,
    checkpoint: str,
    partitions: int,
    mode: Literal["async", "sync"],
) -> PipeTask:
    """The task of a run's first operator, without a generation.

    Args:
        spark: the user's session. settings: of the query. spec: the operator. query: its id.
        location: URL of the state. checkpoint: URL of Spark's checkpoint, whose offsets tell the time.
        partitions: of the state. mode: whether batches wait for their commits.

    Raises:
        SettingError: the local exchange is asked for where tasks run on several hosts.
    """
    application = spark.sparkContext.applicationId
    exchange = _exchange(spark, settings)
    warn_of_other_memory(application, settings.slot_memory)
    return PipeTask(
        application=application,
        query=query,
        run=uuid.uuid4().hex,
        operator=0,
        spec=spec,
        partitions=partitions,
        slots=settings.slots or _cores(spark),
        location=location,
        generation=0,
        offsets=join_url(checkpoint, "offsets"),
        exchange=exchange,
        jvm=_jvm(spark) if on_one_host(spark.sparkContext) else None,
        lookaheads=("source", "exchange") if settings.prefetch == "on" and exchange == "local" else (),
        settings=SlotSettings(
            memory=settings.slot_memory,
            # One answer for all of this host: a process that finds the folder full would choose another.
            directory=tempfile.gettempdir() if on_one_host(spark.sparkContext) else "",
            commit_mode=mode,
            cache_disk=settings.cache_disk,
            cache_admission=settings.cache_admission,
            hedging=settings.requests_hedged,
            read_batch_ratio=settings.read_batch_ratio,
            max_space_amplification=settings.max_space_amplification,
            cache_policy=settings.cache_policy,
            hot=settings.prefetch_hot,
            compaction=settings.compaction,
            compaction_timeout=settings.compaction_timeout,
        ),
    )


def first_partitions(spark: SparkSession, settings: Settings) -> int:
    """How many partitions the state of a new query has."""
    return settings.partitions or int(spark.conf.get("spark.sql.shuffle.partitions", "200") or 200)


def _jvm(spark: SparkSession) -> tuple[int, int]:
    process = identify(Catalyst(spark).process_id)
    return process.pid, process.start


def _exchange(spark: SparkSession, settings: Settings) -> Literal["local", "spark"]:
    one_host = on_one_host(spark.sparkContext)
    if settings.exchange == "auto":
        return "local" if one_host else "spark"
    if settings.exchange == "local" and not one_host:
        raise SettingError(
            "spark.millpond.exchange=local needs all tasks on one host, and the master is "
            f"{spark.sparkContext.master}.",
            action="Leave the setting out.",
        )
    return settings.exchange


def _cores(spark: SparkSession) -> int:
    """Cores of one host, as far as the driver knows: its own in local mode, else an executor's."""
    if on_one_host(spark.sparkContext):
        return int(spark.sparkContext.defaultParallelism)
    return int(spark.sparkContext.getConf().get("spark.executor.cores", str(os.cpu_count() or 1)))


def warn_of_other_memory(application: str, memory: int) -> None:
    """Say so if a query asks for other slot memory than the application's first: slots are shared and keep theirs."""
    first = _slot_memory.setdefault(application, memory)
    if memory != first:
        log.warning(
            "spark.millpond.slot.memory is %dm here, but the slots of this application run with %dm, as its first query"
            " asked for. Set it alike for all queries, or start this one in an application of its own.",
            memory >> 20,
            first >> 20,
        )
