"""The events alone: the rows that a query's operators would get, without the operators.

They bound the rate of every engine, because they cost nothing for state and for bringing rows to it. The rows still
have to be made, with the columns that operators ask for, the key hash among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Node
from millpond.plan.decide import decide
from millpond.plan.exchange.map_side import MapSides
from millpond.plan.rewriter import rewrite_plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_STAGE = "MapInArrow"


def events_alone(frame: DataFrame, output_mode: str) -> DataFrame:
    """Return the rows from sources to a query's operators, with the columns that each operator asks for.

    Args:
        frame: a streaming query. output_mode: the mode in which it would run.

    Returns:
        A stateless query. It is the union of the operators' inputs, each in columns of its own.
    """
    decision = decide(frame, output_mode)
    stages = [_through] * len(decision.on_millpond)
    catalyst = Catalyst(frame.sparkSession)
    plan = catalyst.analyzed(rewrite_plan(frame, decision, 1, stages, MapSides(stages)))
    inputs = [
        catalyst.dataframe(node).toDF(*(f"c{number}_{column}" for column in range(len(node.output))))
        for number, node in enumerate(_inputs(plan))
    ]
    return reduce(lambda left, right: left.unionByName(right, allowMissingColumns=True), inputs)


def _inputs(node: Node) -> Iterator[Node]:
    """Yield the largest parts of a plan that read a source and contain no slot stage."""
    kinds = {below.kind for below in node.walk()}
    if _STAGE in kinds:
        for child in node.children:
            yield from _inputs(child)
    elif any(kind.startswith("StreamingRelation") for kind in kinds):
        yield node


def _through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches
