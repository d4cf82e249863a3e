"""What a source will give next: a batch DataFrame of the rows behind an offset, with the source's columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millpond.plan.catalyst.nodes import Node


class Upcoming(Protocol):
    """What a source will give."""

    def after(self, spark: SparkSession, offset: str) -> DataFrame | None:
        """The rows of the batch that begins at an offset, as far as they are there; None if there are none."""


class Numbered:
    """The source `rate-micro-batch`: each batch has the next so many numbers."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._rows = int(options.get("rowsperbatch", "0"))
        self._partitions = int(options.get("numpartitions", "0")) or None

    def after(self, spark: SparkSession, offset: str) -> DataFrame | None:
        """See `Upcoming`."""
        place = json.loads(offset)
        start = int(place["offset"])
        numbers = spark.range(start, start + self._rows, 1, self._partitions)
        time = F.timestamp_millis(F.lit(int(place["timestamp"])))
        return numbers.select(time.alias("timestamp"), F.col("id").alias("value"))


class Kafka:
    """Records that are there behind the offsets, as long as a batch takes all that there are."""

    _LIMITS = ("maxoffsetspertrigger", "minoffsetspertrigger", "maxtriggerdelay")
    _OFFSETS = ("startingoffsets", "endingoffsets", "startingtimestamp", "endingtimestamp", "failondataloss")

    def __init__(self, options: Mapping[str, str]) -> None:
        left_out = {*self._LIMITS, *self._OFFSETS, "startingoffsetsbytimestamp", "endingoffsetsbytimestamp"}
        self._options = {name: value for name, value in options.items() if name not in left_out}

    def after(self, spark: SparkSession, offset: str) -> DataFrame | None:
        """See `Upcoming`."""
        reader = spark.read.format("kafka").options(**self._options)
        reader = reader.option("startingOffsets", offset).option("endingOffsets", "latest")
        return reader.option("failOnDataLoss", "false").load()


def upcoming(source: Node) -> Upcoming | None:
    """What is known of a source's next rows; None where nothing is."""
    options = {name.lower(): value for name, value in source.relation_options.items()}
    kind = source.source.rpartition(".")[2].lower()
    if kind == "rate-micro-batch" and "rowsperbatch" in options:
        return Numbered(options)
    if kind == "kafka" and not any(limit in options for limit in Kafka._LIMITS):
        return Kafka(options)
    return None
