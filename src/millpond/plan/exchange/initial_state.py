"""Rows of a processor's initial state, as input of its operator's first batch."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.key_groups import partition_sql
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.reading.aggregate import project_input
from millpond.plan.reading.processor import InitialReading


def initial_state(catalyst: Catalyst, reading: InitialReading, partitions: int) -> DataFrame:
    """Return the columns of an initial state, the key hash last, with each row in its hash's partition.

    Args:
        catalyst: of the session.
        reading: the reading of the initial state.
        partitions: the number of partitions of the operator's state.
    """
    # The same hash and partitions as the operator's rows, so that a key's initial state is where its rows go.
    rows = project_input(catalyst, reading.node, reading.raw, reading.columns, reading.hash)
    return rows.repartitionById(partitions, F.expr(partition_sql("__hash", partitions)))
