"""What a query has to answer: the same query in batch over the same events, and the image that updates leave."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.workloads.nexmark_spark import numbers_between
from millpond.workloads.queries.query import Query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millpond.workloads.nexmark import NexmarkConfig

WINDOW_END = "endtime"
_PLACE = "place"


def oracle(
    spark: SparkSession, query: Query, start: int, stop: int, config: NexmarkConfig | None = None, partitions: int = 2
) -> pa.Table:
    """The query's rows over the events `start` … `stop` − 1, by Spark in batch."""
    return query.over(numbers_between(spark, start, stop, partitions), config).toArrow()


def closed(rows: pa.Table, watermark: datetime) -> pa.Table:
    """The rows of windows that a watermark has closed: what a stream has answered by then in append mode."""
    ends = rows[WINDOW_END]
    return rows.filter(pc.less_equal(ends, pa.scalar(watermark, ends.type)))


def final_image(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The last row of each key, of rows in the order in which a stream in update mode gave them."""
    placed = rows.append_column(_PLACE, pa.array(np.arange(rows.num_rows)))
    last = placed.select([*keys, _PLACE]).group_by(list(keys)).aggregate([(_PLACE, "max")])
    return rows.take(last[f"{_PLACE}_max"].combine_chunks().sort())


def in_order(rows: pa.Table, columns: Sequence[str] = ()) -> pa.Table:
    """The rows sorted by all of these columns (default: every one), to be compared with others."""
    chosen = rows.select(list(columns) or rows.column_names).combine_chunks()
    return chosen.sort_by([(name, "ascending") for name in chosen.column_names])
