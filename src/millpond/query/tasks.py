"""Makes the description of each Millpond operator that pipes carry to Spark's workers."""

from __future__ import annotations

import os
import uuid

from pyspark.sql import SparkSession

from millpond.conf import Settings
from millpond.plan.decide import Decision
from millpond.slot.task import PipeTask, SlotSettings


def pipe_tasks(spark: SparkSession, decision: Decision, settings: Settings, checkpoint: str) -> list[PipeTask]:
    """One task per Millpond operator, by index."""
    query, run = str(uuid.uuid4()), str(uuid.uuid4())
    location = settings.state_location or (
        checkpoint if "://" in checkpoint else f"file://{os.path.abspath(checkpoint)}"
    )
    slot = SlotSettings(
        memory=settings.slot_memory, commit_mode=settings.commit_mode or "async", cache_disk=settings.cache_disk
    )
    return [
        PipeTask(
            application=spark.sparkContext.applicationId,
            query=query,
            run=run,
            operator=index,
            spec=spec,
            partitions=settings.partitions or int(spark.conf.get("spark.sql.shuffle.partitions", "200") or 200),
            slots=settings.slots or os.cpu_count() or 1,
            location=location,
            generation=1,
            offsets=f"{checkpoint}/offsets",
            settings=slot,
        )
        for index, spec in enumerate(decision.specs)
    ]
