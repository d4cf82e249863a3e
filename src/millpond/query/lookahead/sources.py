"""The next rows of a source: a batch DataFrame of the rows behind an offset, with the source's columns."""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import unquote, urlsplit

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from millpond.files.backends.filesystem import FileSystem
from millpond.plan.catalyst.nodes import Node
from millpond.plan.lookahead.source import predictable_kind


class UpcomingRows(Protocol):
    """The next rows of a source. Each row is returned once: a repeated call returns rows that arrived meanwhile."""

    def after(self, spark: SparkSession, offset: str) -> DataFrame | None:
        """Return available rows behind an offset that were not returned yet; None without such rows.

        Args:
            spark: a session.
            offset: the end offset of the planned batch, as in the offset log.
        """


class Numbered:
    """The source `rate-micro-batch`: each batch has the next `rowsPerBatch` numbers."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._rows = int(options.get("rowsperbatch", "0"))
        self._partitions = int(options.get("numpartitions", "0")) or None
        self._returned = -1

    def after(self, spark: SparkSession, offset: str) -> DataFrame | None:
        """See `UpcomingRows`."""
        position = json.loads(offset)
        start = int(position["offset"])
        if start <= self._returned:
            return None
        self._returned = start
        numbers = spark.range(start, start + self._rows, 1, self._partitions)
        time = F.timestamp_millis(F.lit(int(position["timestamp"])))
        return numbers.select(time.alias("timestamp"), F.col("id").alias("value"))


class Kafka:
    """Records of Kafka behind the offsets, for a query whose batches take all available records."""

    _OFFSETS = ("startingoffsets", "endingoffsets", "startingtimestamp", "endingtimestamp", "failondataloss")

    def __init__(self, options: Mapping[str, str]) -> None:
        left_out = {*self._OFFSETS, "startingoffsetsbytimestamp", "endingoffsetsbytimestamp"}
        self._options = {name: value for name, value in options.items() if name not in left_out}
        self._returned: dict[str, dict[str, int]] = {}

    def after(self, spark: SparkSession, offset: str) -> DataFrame | None:
        """See `UpcomingRows`."""
        planned: dict[str, dict[str, int]] = json.loads(offset)
        start = {
            topic: {
                part: max(start_offset, self._returned.get(topic, {}).get(part, 0))
                for part, start_offset in parts.items()
            }
            for topic, parts in planned.items()
        }
        # Lost records cost hints only; the query itself decides whether they are an error.
        reader = spark.read.format("kafka").options(**self._options).option("failOnDataLoss", "false")
        reader = reader.option("startingOffsets", json.dumps(start))
        ends = reader.load().groupBy("topic", "partition").agg(F.max("offset").alias("last")).collect()
        if not ends:
            return None
        end = {topic: dict(parts) for topic, parts in start.items()}
        for row in ends:
            # The end offset is exclusive, the largest offset is that of the last record.
            end[row.topic][str(row.partition)] = row["last"] + 1
        self._returned = end
        return reader.option("endingOffsets", json.dumps(end)).load()


class Files:
    """Files that no batch has read: all of them, or the oldest `maxFilesPerTrigger` ones.

    Args:
        source: the node of the plan.
        options: the options of the source, with lower-case names.
        checkpoint: the checkpoint of the query, whose source log lists the files that were read.
    """

    _READ = re.compile(r"sources/0/(\d+)(\.compact)?")

    def __init__(self, source: Node, options: Mapping[str, str], checkpoint: FileSystem) -> None:
        self._format = source.source
        self._schema = StructType([StructField(column.name, column.data_type) for column in source.output])
        self._options = {name: value for name, value in options.items() if name not in ("path", "maxfilespertrigger")}
        self._path = options["path"]
        self._folder = unquote(urlsplit(self._path).path)
        self._most = int(options.get("maxfilespertrigger", "0"))
        self._checkpoint = checkpoint
        self._known: set[str] = set()  # paths read by a planned batch, or returned for the next one
        self._logged: set[str] = set()
        self._listed: set[str] = set()  # names in the folder when all its files were returned
        self._offset = ""
        self._returned: set[str] = set()  # paths returned since that offset, with maxFilesPerTrigger

    def after(self, spark: SparkSession, offset: str) -> DataFrame | None:
        """See `UpcomingRows`."""
        if offset != self._offset:
            self._offset, self._returned = offset, set()
        room = self._most - len(self._returned)
        with os.scandir(self._folder) as entries:
            listed = {entry.name for entry in entries}
        if listed == self._listed or (self._most and room <= 0):
            return None
        self._catch_up()
        reader = spark.read.format(self._format).schema(self._schema).options(**self._options)
        paths = [unquote(urlsplit(path).path) for path in reader.load(self._path).inputFiles()]
        self._known.intersection_update(paths)  # files removed from the folder do not come again
        fresh = [path for path in paths if path not in self._known and path not in self._returned]
        if self._most:
            # Spark's file source takes the oldest files first, by modification time.
            fresh = heapq.nsmallest(room, fresh, key=os.path.getmtime)
            self._returned.update(fresh)
        else:  # a batch takes all
            self._listed = listed
            self._known.update(fresh)
        return reader.load(fresh) if fresh else None

    def _catch_up(self) -> None:
        names = {entry.name for entry in self._checkpoint.list("sources/0/") if self._READ.fullmatch(entry.name)}
        self._logged &= names  # Spark has removed the others
        for name in names - self._logged:
            self._logged.add(name)
            lines = self._checkpoint.get(name).decode().splitlines()[1:]
            self._known |= {unquote(urlsplit(json.loads(line)["path"]).path) for line in lines}


def upcoming_rows(source: Node, checkpoint: FileSystem) -> UpcomingRows | None:
    """Return the next rows of a query's only source; None if they cannot be known before the batch."""
    options = {name.lower(): value for name, value in source.relation_options.items()}
    kind = predictable_kind(source)
    if kind == "numbers":
        return Numbered(options)
    if kind == "kafka":
        return Kafka(options)
    return None if kind is None else Files(source, options, checkpoint)
