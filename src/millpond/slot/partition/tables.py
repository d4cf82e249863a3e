"""Opening of a partition's tables at a version, each in the store that its operator requires."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, overload

import msgspec

from millpond.checkpoint.formats.deltas import converted_rows
from millpond.errors import MillpondError
from millpond.files.formats.append_file import ByteRange
from millpond.files.refs import TableManifest, range_of
from millpond.layout import HashRange, RowLayout, TableSchema, Words
from millpond.operators.kinds.registry import state_tables
from millpond.operators.protocol import TableKind
from millpond.stores.aligned.table import AlignedStore, AlignedTable
from millpond.stores.ordered.table import OrderedTable
from millpond.stores.protocol import LoadedTable, Table
from millpond.stores.rmw.cache_table import CacheTable
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from millpond.stores.unaligned.table import UnalignedTable
from millpond.time_slices import base_name

if TYPE_CHECKING:
    from millpond.checkpoint.formats.manifest import PartitionManifest, TableState
    from millpond.checkpoint.state_schema import StateSchema
    from millpond.slot.partition.resources import QueryResources
    from millpond.spec.protocol import Spec
    from millpond.tasks.operator_task import OperatorTask

T = TypeVar("T", bound=LoadedTable)


class _TableRequest(NamedTuple):
    name: str
    schema: TableSchema
    initial: Words
    drop_matched: bool


class Tables:
    """The tables of one partition, opened at the version of a manifest.

    Args:
        query: the running query.
        task: the operator.
        number: the partition's number.
        manifest: contents of the tables. A table that it does not list is new.
    """

    def __init__(self, query: QueryResources, task: OperatorTask, number: int, manifest: PartitionManifest) -> None:
        self._query = query
        self._spec = task.spec
        self._settings = task.settings
        self._prefetches = bool(task.lookaheads)
        self._range = task.hash_range(number)
        self._states: Mapping[str, TableState] = manifest.tables
        self._state_tables = state_tables(task.spec)
        self._schemas = _schemas_by_number(query.checkpoint.state_schemas, task.operator)
        self._aligned: AlignedStore | None = None
        self._opened: dict[str, Table] = {}
        self._loaded: dict[str, LoadedTable] = {}

    @overload
    def open(
        self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["rmw", "scratch"] = "rmw"
    ) -> RmwTable: ...

    @overload
    def open(
        self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["ordered"], drop_matched: bool = False
    ) -> OrderedTable: ...

    @overload
    def open(
        self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["aligned", "spool"]
    ) -> AlignedTable: ...

    @overload
    def open(self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["unaligned"]) -> UnalignedTable: ...

    @overload
    def open(self, name: str, schema: TableSchema, initial: Words, *, kind: Literal["cache"]) -> CacheTable: ...

    def open(
        self, name: str, schema: TableSchema, initial: Words, *, kind: TableKind = "rmw", drop_matched: bool = False
    ) -> Table | CacheTable:
        """Open a table (see `operators.protocol.MakeTable`)."""
        with self._name_variable(name):
            table = _OPEN[kind](self, _TableRequest(name, schema, initial, drop_matched))
        # A failed opening closes these tables; temporary ones are closed by their user.
        if kind not in _TEMPORARY and not isinstance(table, CacheTable):
            self._opened[name] = table
        return table

    def _resources(self) -> TableResources:
        resources = self._query.resources
        return TableResources(
            resources.budget,
            self._query.merges,
            writers=resources.writers,
            namers=resources.namers,
            readers=resources.readers if self._prefetches else None,
            remote_compactor=self._query.remote,
        )

    def _open_rmw(self, request: _TableRequest) -> RmwTable:
        axis = self._state_tables[base_name(request.name)].axis
        table = RmwTable.open(
            request.schema,
            request.initial,
            self._manifest_of(request.name),
            self._query.runs,
            self._resources(),
            self._range if axis == "hash" else HashRange(),
            policy=self._settings.cache_policy,
            axis=axis,
            earlier=[tables[name] for tables in self._schemas.values() if (name := base_name(request.name)) in tables],
        )
        return self._register_loaded(request.name, table)

    def _open_ordered(self, request: _TableRequest) -> OrderedTable:
        table = OrderedTable.open(
            request.schema,
            self._manifest_of(request.name),
            self._query.runs,
            self._resources(),
            self._range,
            drop_matched=request.drop_matched,
        )
        return self._register_loaded(request.name, table)

    def _open_unaligned(self, request: _TableRequest) -> UnalignedTable:
        table = UnalignedTable(
            request.schema,
            self._query.append_files,
            self._resources(),
            self._manifest_of(request.name),
            directory=str(self._query.spill),
            read_batch_ratio=self._settings.read_batch_ratio,
            maximum_space_amplification=self._settings.max_space_amplification,
        )
        return self._register_loaded(request.name, table)

    def _open_aligned(self, request: _TableRequest) -> AlignedTable:
        name = request.name
        deltas = self._states[name].deltas if name in self._states else ()
        ranges = [ByteRange(ref.commit, ref.offset, ref.length, ref.visible) for ref in deltas if ref.length]
        return self._aligned_store(request.schema).open(
            name, self._manifest_of(name), ranges, layout=RowLayout(request.schema)
        )

    def _open_scratch(self, request: _TableRequest) -> RmwTable:
        # Scratch tables have no files and get no hints, so they need neither writers nor readers.
        resources = TableResources(self._query.resources.budget, self._query.merges)
        return RmwTable(request.schema, request.initial, RunSet(RowLayout(request.schema)), resources)

    def _open_spool(self, request: _TableRequest) -> AlignedTable:
        return self._aligned_store(request.schema).open(request.name, TableManifest(), layout=RowLayout(request.schema))

    def _open_cache(self, request: _TableRequest) -> CacheTable:
        return CacheTable(request.schema, request.initial, self._query.resources.budget, self._range)

    def _register_loaded(self, name: str, table: T) -> T:
        self._loaded[name] = table
        return table

    def _aligned_store(self, schema: TableSchema) -> AlignedStore:
        """Return the store that the partition's aligned tables share; the first table opened determines its schema."""
        if self._aligned is None:
            resources = self._query.resources
            self._aligned = AlignedStore(schema, self._query.append_files, resources.budget, self._query.merges)
        return self._aligned

    def _manifest_of(self, name: str) -> TableManifest:
        return self._states[name].runs if name in self._states else TableManifest()

    def counted(self, name: str) -> bool:
        """Return whether a table's rows count as state rows."""
        return self._state_tables[base_name(name)].counted

    def load(self) -> None:
        """Apply the deltas that are newer than the tables' files."""
        checkpoint = self._query.checkpoint
        for name, state in self._states.items():
            if base_name(name) not in self._state_tables:
                continue  # a deleted variable of a processor
            table = self._loaded.get(name)
            if table is None:
                assert name in self._opened  # an aligned table: it reads deltas from the commit objects on demand
                continue
            if isinstance(table, RmwTable):
                table.size_index_for_load(sum(ref.rows for ref in state.deltas))
            with self._name_variable(name):
                # In the order of versions: a later delta replaces rows of an earlier one.
                for ref, data in zip(state.deltas, checkpoint.read_deltas(state.deltas), strict=True):
                    before = self._schemas[ref.schema_number][base_name(name)] if self._schemas else table.layout.schema
                    for rows in converted_rows(ref, data, before, table.layout, checkpoint.files.locate(ref.commit)):
                        table.load(rows, range_of(ref.visible))

    @contextmanager
    def _name_variable(self, name: str) -> Iterator[None]:
        """Add the table's variable to errors raised in the block."""
        try:
            yield
        except MillpondError as error:
            raise error.at(variable=self._spec.part_of(base_name(name))) from None

    def discard(self) -> None:
        """Close the tables that were opened for an operator whose opening failed."""
        for table in self._opened.values():
            table.close()
        self.close()

    def close(self) -> None:
        """Close the store that the aligned tables share; the operator closes its tables."""
        if self._aligned is not None:
            self._aligned.close()
            self._aligned = None


def attach_context(error: BaseException, spec: Spec, manifest: PartitionManifest) -> None:
    """Add the variable to an error that names one of the state's files, if the operator has variables."""
    if isinstance(error, MillpondError) and error.file is not None:
        for name, state in manifest.tables.items():
            if any(error.file.endswith(run.name) for run in state.runs.runs):
                error.at(variable=spec.part_of(base_name(name)))


def _schemas_by_number(state_schemas: Mapping[int, StateSchema], operator: int) -> dict[int, dict[str, TableSchema]]:
    """Return the schemas of an operator's tables by table name, for each state schema of the query."""
    return {
        number: {name: msgspec.convert(table, TableSchema) for name, table in schema.operators[operator].tables.items()}
        for number, schema in state_schemas.items()
    }


_TEMPORARY = frozenset({"scratch", "spool", "cache"})
"""Kinds of temporary tables: they are in no checkpoint, and their user closes them."""

_OPEN: Mapping[TableKind, Callable[[Tables, _TableRequest], Table | CacheTable]] = {
    "rmw": Tables._open_rmw,
    "ordered": Tables._open_ordered,
    "aligned": Tables._open_aligned,
    "unaligned": Tables._open_unaligned,
    "scratch": Tables._open_scratch,
    "spool": Tables._open_spool,
    "cache": Tables._open_cache,
}
"""Function that opens a table, by kind."""
