"""What an operator's input is made of, computed by Spark."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.ddl import quoted
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.reading.aggregate import Derived


def prepared(
    catalyst: Catalyst, child: Node, raw: Sequence[Expression], columns: Sequence[Derived], hash_: str
) -> DataFrame:
    """Project what an operator needs: Spark evaluates the expressions, then the key hash over their values.

    The hash comes last. Spark's optimiser derives constraints from a projection's aliases in their order, and each
    alias doubles those about expressions that came before: a hash of 17 columns before them made 2¹⁷ constraints.
    """
    aliases = [catalyst.alias(expression, f"raw{index}") for index, expression in enumerate(raw)]
    projected = catalyst.dataframe(catalyst.project(aliases, child))
    named = projected.select(*(F.expr(c.sql.format(*(f"raw{r}" for r in c.raw))).alias(c.field.name) for c in columns))
    columns_ = [quoted(name) for name in named.columns]
    return named.select(*columns_, F.expr(hash_).alias("__hash"))
