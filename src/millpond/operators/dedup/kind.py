"""How deduplications are opened, and what their state is."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.dedup.deduplicate import DeduplicateOperator
from millpond.operators.dedup.tables import seen_table, within_table
from millpond.operators.dedup.within_watermark import WithinOperator
from millpond.operators.kind import Kind, Opening
from millpond.operators.protocol import MAIN, Operator, StateTable
from millpond.operators.tables.keyed import decode_rows
from millpond.spec.deduplicate import DeduplicateSpec
from millpond.spec.within import WithinSpec


def _open(spec: DeduplicateSpec, opening: Opening) -> Operator:
    return DeduplicateOperator(spec, opening.make_table, opening.existing)


def _tables(spec: DeduplicateSpec) -> dict[str, StateTable]:
    return {MAIN: seen_table(spec).state}


def _read(spec: DeduplicateSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    return decode_rows(seen_table(spec), [], spec.state_fields, rows)


DEDUPLICATE = Kind(_open, _tables, _read)


def _open_within(spec: WithinSpec, opening: Opening) -> Operator:
    return WithinOperator(spec, opening.make_table)


def _tables_within(spec: WithinSpec) -> dict[str, StateTable]:
    return {MAIN: within_table(spec).state}


def _read_within(spec: WithinSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    return decode_rows(within_table(spec), [], spec.state_fields, rows)


WITHIN = Kind(_open_within, _tables_within, _read_within)
