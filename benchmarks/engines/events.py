"""The events alone: what a query's operators would be given, and nothing that they would do with it.

What a query would take if state, and bringing rows to it, cost nothing: the rows still have to be made, with the
columns that operators ask for, the key hash among them.
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

_PIPE = "MapInArrow"


def events_alone(frame: DataFrame, output_mode: str) -> DataFrame:
    """The rows that come from sources to the operators of a query, each with the columns that its operator asks for.

    Args:
        frame: a streaming query. output_mode: the mode in which it would run.

    Returns:
        A stateless query; where there are several inputs, their rows one after another, each in columns of its own.
    """
    decision = decide(frame, output_mode)
    pipes = [_through] * len(decision.on_millpond)
    catalyst = Catalyst(frame.sparkSession)
    plan = catalyst.analyzed(rewrite_plan(frame, decision, 1, pipes, MapSides(pipes)))
    inputs = [
        catalyst.dataframe(node).toDF(*(f"c{number}_{column}" for column in range(len(node.output))))
        for number, node in enumerate(_inputs(plan))
    ]
    return reduce(lambda some, other: some.unionByName(other, allowMissingColumns=True), inputs)


def _inputs(node: Node) -> Iterator[Node]:
    """The largest parts of a plan that read a source and no pipe."""
    kinds = {below.kind for below in node.walk()}
    if _PIPE in kinds:
        for child in node.children:
            yield from _inputs(child)
    elif any(kind.startswith("StreamingRelation") for kind in kinds):
        yield node


def _through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches
