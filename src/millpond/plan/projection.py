"""What an operator's input is made of, computed by Spark."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.reading.aggregate import Derived


def projected(catalyst: Catalyst, child: Node, raw: Sequence[Expression], columns: Sequence[Derived]) -> DataFrame:
    """The columns of an operator's input by name: derived of `raw`, which are of the rows of `child`."""
    aliases = [catalyst.alias(expression, f"raw{index}") for index, expression in enumerate(raw)]
    rows = catalyst.dataframe(catalyst.project(aliases, child))
    return rows.select(*(F.expr(c.sql.format(*(f"raw{r}" for r in c.raw))).alias(c.field.name) for c in columns))
