"""Opens the tables of a partition at a version, each in the store that its operator asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpond.files.formats.append_file import Slice
from millpond.files.formats.segment import decode_rows
from millpond.files.refs import TableManifest
from millpond.layout import HashRange, RowLayout, TableSchema, Words
from millpond.operators.protocol import MAIN, TableKind, base_name
from millpond.stores.aligned.table import AlignedStore, AlignedTable
from millpond.stores.ordered.table import OrderedTable
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.unaligned.table import UnalignedTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millpond.checkpoint.manifest import PartitionManifest, TableState
    from millpond.slot.partition.running import RunningQuery
    from millpond.slot.task import PipeTask

Table = RmwTable | OrderedTable | AlignedTable | UnalignedTable


class Tables:
    """The tables of one partition, opened at the version of a manifest.

    Args:
        query: the running query. task: the operator. number: the partition.
        manifest: says what the tables hold. A table that it does not know is new.
    """

    def __init__(self, query: RunningQuery, task: PipeTask, number: int, manifest: PartitionManifest) -> None:
        self._query = query
        self._settings = task.settings
        self._range = HashRange(*task.hash_range(number))
        self._states: Mapping[str, TableState] = manifest.tables
        self._aligned: AlignedStore | None = None
        self._opened: dict[str, Table] = {}

    def open(self, name: str, schema: TableSchema, initial: Words, *, kind: TableKind = "rmw") -> Table:
        """Open a table: its name, its schema, the words of a fresh row, and the store that it is in."""
        means = self._query.means
        if kind == "scratch":
            return RmwTable(schema, initial, RunSet(RowLayout(schema)), means.budget, means.merges)
        if kind == "spool":
            return self._appends(schema).open(name, TableManifest(), layout=RowLayout(schema))
        if kind == "aligned":
            self._opened[name] = self._open_aligned(name, schema)
        elif kind == "unaligned":
            self._opened[name] = UnalignedTable(
                schema,
                self._query.append_files,
                means.budget,
                means.merges,
                self._runs(name),
                directory=str(self._query.spill),
                read_batch_ratio=self._settings.read_batch_ratio,
                maximum_space_amplification=self._settings.max_space_amplification,
                writers=means.writers,
            )
        else:
            self._opened[name] = RmwTable.open(
                schema,
                initial,
                self._runs(name),
                self._query.runs,
                means.budget,
                means.merges,
                self._range if base_name(name) == MAIN else HashRange(),
                writers=means.writers,
            )
        return self._opened[name]

    def _open_aligned(self, name: str, schema: TableSchema) -> AlignedTable:
        deltas = self._states[name].deltas if name in self._states else ()
        at = [Slice(ref.commit, ref.offset, ref.length) for ref in deltas if ref.length]
        return self._appends(schema).open(name, self._runs(name), at, layout=RowLayout(schema))

    def _appends(self, schema: TableSchema) -> AlignedStore:
        """The store that the partition's aligned tables share; they are of the schema that is first asked for."""
        if self._aligned is None:
            means = self._query.means
            self._aligned = AlignedStore(schema, self._query.append_files, means.budget, means.merges)
        return self._aligned

    def open_ordered(self, name: str, schema: TableSchema, drop_matched: bool) -> OrderedTable:
        """Open an ordered table: its name, its schema, and whether matched rows are of no use."""
        means = self._query.means
        table = OrderedTable.open(
            schema,
            self._runs(name),
            self._query.runs,
            means.budget,
            means.merges,
            self._range,
            writers=means.writers,
            drop_matched=drop_matched,
        )
        self._opened[name] = table
        return table

    def _runs(self, name: str) -> TableManifest:
        return self._states[name].runs if name in self._states else TableManifest()

    def load(self) -> None:
        """Apply the deltas behind the tables' files."""
        checkpoint = self._query.checkpoint
        for name, state in self._states.items():
            table = self._opened[name]
            if isinstance(table, AlignedTable):
                continue  # it reads its deltas where they lie
            for ref, data in zip(state.deltas, checkpoint.read_deltas(state.deltas), strict=True):
                for rows in decode_rows(data, table.layout, checkpoint.files.locate(ref.commit)):
                    table.load(rows)

    def discard(self) -> None:
        """Close what was opened for an operator that could not be."""
        for table in self._opened.values():
            table.close()
        self.close()

    def close(self) -> None:
        """Close what the operator does not: the store that its aligned tables share."""
        if self._aligned is not None:
            self._aligned.close()
            self._aligned = None
