"""The kinds of deduplications: the tables of their state, and the operators that they open."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.dedup.tables import seen_table, within_table
from millpond.operators.kind import Kind, Opening
from millpond.operators.protocol import MAIN, Operator, StateTable
from millpond.operators.tables.keyed import decode_rows
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec
from millpond.stores.memory.spool import Spool

_SPOOL_DIVISOR = 8  # of the memory of a partition: the part that rows to emit may take


def _first_rows(opening: Opening) -> Spool:
    """Return a spool of rows to emit: in the first batch of a query, that may be its whole input."""
    return Spool(None, opening.memory // _SPOOL_DIVISOR)


def _load() -> Callable[[DeduplicateSpec, Opening], Operator]:
    from millpond.operators.dedup.deduplicate import DeduplicateOperator

    return lambda spec, opening: DeduplicateOperator(spec, opening.make_table, opening.existing, _first_rows(opening))


def _tables(spec: DeduplicateSpec) -> dict[str, StateTable]:
    return {MAIN: seen_table(spec).state}


def _read(spec: DeduplicateSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    return decode_rows(seen_table(spec), [], spec.state_fields, rows)


DEDUPLICATE = Kind(_load, _tables, _read)


def _load_within() -> Callable[[WithinSpec, Opening], Operator]:
    from millpond.operators.dedup.within_watermark import WithinWatermarkOperator

    return lambda spec, opening: WithinWatermarkOperator(spec, opening.make_table, _first_rows(opening))


def _tables_within(spec: WithinSpec) -> dict[str, StateTable]:
    return {MAIN: within_table(spec).state}


def _read_within(spec: WithinSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    return decode_rows(within_table(spec), [], spec.state_fields, rows)


WITHIN = Kind(_load_within, _tables_within, _read_within)
