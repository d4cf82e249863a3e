"""Grouped aggregation without event time: keeps every group, and emits it when it changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from millpond.layout import HashRange, Rows, Words
from millpond.operators.aggregate.groups import Groups, combined_rows
from millpond.operators.protocol import NO_EXTRA_METRICS, MakeTable, Times
from millpond.operators.tables.keyed import decode_rows
from millpond.spec.kinds.aggregate import AggregateSpec

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta
    from millpond.stores.rmw.table import RmwTable


class AggregateOperator:
    """An `AggregateSpec` without `time` on one partition.

    Args:
        spec: keys, inputs and calls.
        make_table: opens the partition's tables.
        owns_global: for an aggregate without keys, whether this partition holds its one group, which is emitted in
            every batch even before any input.
    """

    extra_metrics = NO_EXTRA_METRICS
    late_rows = 0

    def __init__(self, spec: AggregateSpec, make_table: MakeTable, *, owns_global: bool = True) -> None:
        self.spec = spec
        self._groups = Groups(spec, make_table)
        self._global = owns_global and not spec.keys

    @property
    def tables(self) -> Mapping[str, RmwTable]:
        """The operator's tables by name."""
        return self._groups.tables

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._groups.begin(version)
        if self._global:
            self._groups.ensure_global()

    def passes(self, rows: int) -> int:
        """Return the number of passes over hash ranges that a batch of `rows` rows takes."""
        return int(self._groups.table.passes(rows))

    def prefetch(self, hashes: Words, needed: int) -> None:
        """Prefetch the groups of keys (see `Prefetchable`)."""
        self._groups.prefetch(hashes, needed)

    def restrict(self, range_: HashRange) -> None:
        """Restrict the rows that follow to a hash range, until the next call or the next batch."""
        self._groups.restrict(range_)

    def process(self, batch: pa.RecordBatch) -> None:
        """Fold in rows of the batch: the column `__hash`, then keys and inputs in the order of the spec."""
        self._groups.fold(batch)

    def process_combined(self, batch: pa.RecordBatch) -> int:
        """Fold in combined rows (see `Combining`)."""
        self._groups.merge(batch)
        return combined_rows(batch)

    def adopt(self, batch: pa.RecordBatch) -> None:
        """Adopt partial results: the column `__hash`, then keys and the state columns of all calls."""
        self._groups.adopt(batch)

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: seal all tables."""
        return self._groups.seal()

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the groups that the batch changed, or in complete mode all groups; with `changes`, their changelog."""
        groups, changelog = self._groups, self._groups.changelog
        if changelog is not None and self.spec.changes:
            # A group that has lost its last row has to be deleted above.
            for rows in groups.removed():
                yield from changelog.changes(rows, self._decoded)
        for rows in groups.scan() if self.spec.output_mode == "complete" else groups.touched():
            if changelog is None:
                yield from self._decoded(rows)
            elif self.spec.changes:
                yield from changelog.changes(rows, self._decoded)
            else:
                yield from self._decoded(changelog.existing(rows))

    def _decoded(self, rows: Rows, before: bool = False) -> Iterator[pa.RecordBatch]:
        groups = self._groups
        fields = self.spec.output_fields[: len(self.spec.keys) + len(self.spec.calls)]
        yield from decode_rows(groups.main, groups.before if before else groups.calls, fields, rows)

    def close(self) -> None:
        """Release all memory."""
        self._groups.close()
