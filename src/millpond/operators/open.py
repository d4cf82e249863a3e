"""Opens the operator that a spec describes."""

from __future__ import annotations

from millpond.operators.aggregate import AggregateOperator
from millpond.operators.deduplicate import DeduplicateOperator
from millpond.operators.over_rows import OverRowsOperator
from millpond.operators.protocol import MakeTable, Operator
from millpond.operators.spec import DeduplicateSpec, OperatorSpec, OverSpec, RankSpec
from millpond.operators.top_n import TopNOperator


def open_operator(spec: OperatorSpec, make_table: MakeTable, *, owns_global: bool = True) -> Operator:
    """Open an operator on one partition.

    Args:
        spec: what it computes.
        make_table: opens a table of the partition by name, schema and the words of a fresh row. The table `MAIN` holds
            the partition's range of hashes; the others, whose hashes are mixed, the whole range.
        owns_global: for an aggregate without keys, whether the partition's range holds `spec.GLOBAL_HASH`.
    """
    if isinstance(spec, DeduplicateSpec):
        return DeduplicateOperator(spec, make_table)
    if isinstance(spec, OverSpec):
        return OverRowsOperator(spec, make_table)
    if isinstance(spec, RankSpec):
        return TopNOperator(spec, make_table)
    return AggregateOperator(spec, make_table, owns_global=owns_global)
