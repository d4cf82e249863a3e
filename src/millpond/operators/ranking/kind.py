"""The kinds of ranks and aggregates over rows: the tables of their state, and the operators that they open."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.kind import Kind, Opening
from millpond.operators.protocol import MAIN, Operator, StateTable
from millpond.operators.ranking.tables import rank_table, rows_table
from millpond.operators.tables.keyed import decode_rows
from millpond.spec.kinds.over import OverSpec
from millpond.spec.kinds.rank import RankSpec


def _load_rank() -> Callable[[RankSpec, Opening], Operator]:
    from millpond.operators.ranking.top_n import TopNOperator

    return lambda spec, opening: TopNOperator(spec, opening.make_table)


def _rank_tables(spec: RankSpec) -> dict[str, StateTable]:
    return {MAIN: rank_table(spec).state}


def _read_rank(spec: RankSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    return decode_rows(rank_table(spec), [], spec.state_fields, rows)


RANK = Kind(_load_rank, _rank_tables, _read_rank)


def _load_over() -> Callable[[OverSpec, Opening], Operator]:
    from millpond.operators.ranking.over_changelog import OverChangelogOperator
    from millpond.operators.ranking.over_rows import OverRowsOperator

    return lambda spec, opening: (OverChangelogOperator if spec.retracts else OverRowsOperator)(
        spec, opening.make_table
    )


def _over_tables(spec: OverSpec) -> dict[str, StateTable]:
    return {MAIN: rows_table(spec).state}


def _read_over(spec: OverSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    return decode_rows(rows_table(spec), [], spec.state_fields, rows)


OVER = Kind(_load_over, _over_tables, _read_over)
