"""`millpond.lookahead`: a stage in the user's plan whose rows reveal upcoming keys.

In the plan that Spark alone runs, a stage is a filter by a constant that is true; Spark's optimiser removes it.
Operators are decided without it. In a second copy of the plan, a stage is a projection that differs from its input by
metadata only. So conditions move past it, as they would without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.errors import UsageError
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.session import is_on

_MARK = "millpond.lookahead"


def lookahead_stage(df: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Return the DataFrame of a stage; arguments as for `millpond.lookahead`.

    Raises:
        UsageError: there is no such column, or there are several.
    """
    if not columns:
        raise UsageError("There is no column to look at.", action="Name the columns of a key: lookahead(df, 'key').")
    sensitive = is_on(df.sparkSession, "spark.sql.caseSensitive", False)
    names = []
    for name in columns:
        if not isinstance(name, str):
            raise UsageError(f"{name!r} is no name of a column.", action="Name each: lookahead(df, 'key', 'other').")
        same = [column for column in df.columns if column == name or (not sensitive and column.lower() == name.lower())]
        if not same:
            raise UsageError(f"There is no column {name!r} to look at.", action=f"There are {df.columns}.")
        if len(same) > 1:
            raise UsageError(f"Two columns are called {name}.", action="Rename one.")
        names += [column for column in same if column not in names]
    return df.where(F.isnotnull(F.lit(f"{_MARK}({json.dumps(names)})")))


def without_stages(catalyst: Catalyst, node: Node) -> Node:
    """Return the plan without stages; the same object if there are none."""
    children = [without_stages(catalyst, child) for child in node.children]
    if _marked_columns(node) is not None:
        return children[0]
    return catalyst.with_children(node, children)


def with_stage_projections(catalyst: Catalyst, node: Node) -> Node:
    """Return the plan with each stage as a projection that `stage_columns` recognises."""
    children = [with_stage_projections(catalyst, child) for child in node.children]
    names = _marked_columns(node)
    if names is None:
        return catalyst.with_children(node, children)
    first = next(column for column in children[0].output if column.name in names)
    tagged = catalyst.with_metadata(first, _MARK, json.dumps(names))
    return catalyst.project([tagged if column is first else column for column in children[0].output], children[0])


def stage_columns(node: Node) -> tuple[str, ...] | None:
    """Return the columns that a stage names; None for other nodes."""
    tagged = (
        next((result for result in node.list("projectList") if _is_marked(result)), None)
        if node.kind == "Project"
        else None
    )
    return None if tagged is None else tuple(json.loads(tagged.metadata[_MARK]))


def unmarked_columns(node: Node) -> list[Expression]:
    """Return the columns of a stage's projection without the stage's metadata."""
    return [result.children[0] if _is_marked(result) else result for result in node.list("projectList")]


def stage_title(columns: Sequence[str]) -> str:
    """Return the title of a stage."""
    return f"lookahead({', '.join(columns)})"


def _marked_columns(node: Node) -> list[str] | None:
    if node.kind != "Filter":
        return None
    condition = node.expression("condition")
    if condition.kind != "IsNotNull" or condition.children[0].kind != "Literal":
        return None
    text = str(condition.children[0].constant_or_none)
    return json.loads(text[len(_MARK) + 1 : -1]) if text.startswith(f"{_MARK}([") else None


def _is_marked(result: Expression) -> bool:
    return (
        result.kind == "Alias"
        and _MARK in result.metadata
        and result.children[0].kind == "AttributeReference"
        and result.children[0].expr_id == result.expr_id
    )
