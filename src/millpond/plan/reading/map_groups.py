"""Reads `applyInPandas` and `applyInArrow` by event time, to be called once for each group of a closed window.

Spark calls them on streams with the rows that a micro-batch has of each group; so this has to be asked for.
"""

from __future__ import annotations

from pyspark.sql.types import StructField

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.reading.aggregate import Reading, read_groupings
from millpond.plan.reading.reasons import Reason, Unsupported

MAPS = {"FlatMapGroupsInPandas": "applyInPandas", "FlatMapGroupsInArrow": "applyInArrow"}
"""Nodes that map groups to rows → how to call them."""


def title_of(node: Node) -> str:
    """The operator in a few words."""
    return f"{MAPS[node.kind]} by {', '.join(grouping.name for grouping in _groupings(node))}"


def read_map_groups(catalyst: Catalyst, node: Node, output_mode: str) -> Reading:
    """Read a node that maps groups to rows.

    Its child is a projection of the groupings, then all columns of its own child, which the function sees.

    Raises:
        Unsupported: it cannot be called once for each group of a closed window.
    """
    if output_mode != "append":
        raise Unsupported(Reason("MP-MAP", "append mode"))
    (projection,) = node.children
    groupings = _groupings(node)
    reading = Reading()
    read_groupings(reading, projection, [(one.name, one) for one in groupings], closing=True)
    if reading.session is not None:
        raise Unsupported(Reason("MP-MAP", "windows that do not merge; session windows do"))
    if reading.time is None:
        raise Unsupported(Reason("MP-MAP", "a grouping by windows of time, or times, that have a watermark"))
    users = reading.users
    users.keys = len(groupings)
    users.columns = [StructField(attribute.name, attribute.data_type) for attribute in node.list("groupingAttributes")]
    users.add(catalyst, node.expression("functionExpr"), lambda operand: reading.add_input([operand]))
    reading.calls.append(users.rows([column.field for column in reading.inputs]))
    return reading


def _groupings(node: Node) -> list[Expression]:
    """What is grouped by, over the columns of the projection's child."""
    (projection,) = node.children
    named = projection.list("projectList")[: len(node.list("groupingAttributes"))]
    return [one.children[0] if one.kind == "Alias" else one for one in named]
