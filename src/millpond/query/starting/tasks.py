"""The tasks that slot stages of a run carry: query, operator, location of the state, and settings of slots."""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from typing import Literal

from pyspark.sql import SparkSession

from millpond.conf import Settings
from millpond.errors import SettingError
from millpond.files.locations.opening import join_url
from millpond.plan.catalyst.session import process_id
from millpond.plan.exchange.workers import on_one_host
from millpond.query.starting.host_memory import check_memory, in_containers
from millpond.slot.process.identity import identify
from millpond.spec.kinds.union import OperatorSpec
from millpond.tasks.operator_task import OperatorTask, SlotSettings

log = logging.getLogger("millpond")

_slot_memory: dict[str, int] = {}  # slot memory of the first query, by application


def operator_task(
    spark: SparkSession,
    settings: Settings,
    spec: OperatorSpec,
    query: str,
    location: str,
    checkpoint: str,
    partitions: int,
    mode: Literal["async", "sync"],
    *,
    operators: int = 1,
    hinted: bool = False,
    located: bool = False,
    restarts: int = 0,
) -> OperatorTask:
    """Return the task of a run's first operator, without a generation.

    Args:
        spark: the user's session.
        settings: the settings of the query.
        spec: the operator.
        query: the query's id.
        location: URL of the state.
        checkpoint: URL of Spark's checkpoint, whose offset log has the times of batches.
        partitions: the number of partitions of the state.
        mode: whether batches wait for their commits.
        operators: the number of the query's operators.
        hinted: whether the query calls `millpond.lookahead`.
        located: whether the rewritten query has markers with preferred hosts.
        restarts: how often the application has started the query again.

    Raises:
        SettingError: the local exchange is set, and tasks run on several hosts; or the executors' containers have no
            room for the slots.
    """
    application = spark.sparkContext.applicationId
    exchange = _exchange(spark, settings)
    slots = settings.slots or _cores(spark)
    check_memory(spark.sparkContext, min(slots, partitions), settings.slot_memory, operators)
    warn_of_other_memory(application, settings.slot_memory)
    # Off by default: in most queries, hints cost more than they save (docs/benchmarks/prefetching-figures.md).
    prefetching = settings.prefetch == "on" or (settings.prefetch == "auto" and hinted)
    return OperatorTask(
        application=application,
        query=query,
        run=uuid.uuid4().hex,
        operator=0,
        spec=spec,
        partitions=partitions,
        slots=slots,
        location=location,
        generation=0,
        offsets=join_url(checkpoint, "offsets"),
        exchange=exchange,
        jvm=_jvm(spark) if on_one_host(spark.sparkContext) else None,
        located=located,
        restarts=restarts,
        lookaheads=("source", "exchange") if prefetching and exchange == "local" else (),
        settings=SlotSettings(
            memory=settings.slot_memory,
            # Choose one folder for the whole host: a process that finds it full would choose another one.
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
    """Return the number of partitions of a new query's state."""
    return settings.partitions or int(spark.conf.get("spark.sql.shuffle.partitions", "200") or 200)


def _jvm(spark: SparkSession) -> tuple[int, int]:
    process = identify(process_id(spark))
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
    """Return the cores of one host, as the driver knows them: its own in local mode, else those of an executor."""
    if on_one_host(spark.sparkContext):
        return int(spark.sparkContext.defaultParallelism)
    # In containers, Spark's own default is one core.
    default = 1 if in_containers(spark.sparkContext) else os.cpu_count() or 1
    return int(spark.sparkContext.getConf().get("spark.executor.cores", str(default)))


def warn_of_other_memory(application: str, memory: int) -> None:
    """Warn if a query has other slot memory than the application's first query: slots are shared and keep theirs."""
    first = _slot_memory.setdefault(application, memory)
    if memory != first:
        log.warning(
            "spark.millpond.slot.memory is %dm here, but the slots of this application run with %dm, as its first query"
            " asked for. Set it alike for all queries, or start this one in an application of its own.",
            memory >> 20,
            first >> 20,
        )
