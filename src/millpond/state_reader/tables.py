"""Rows of one table at one version, for tables of any store: its files and the deltas since."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from millpond.checkpoint.formats.deltas import converted_rows, read_deltas, rows_of
from millpond.checkpoint.formats.manifest import TableState
from millpond.files.backends.filesystem import FileSystem
from millpond.files.formats.append_file import ByteRange
from millpond.files.formats.blocks import sort_rows
from millpond.files.refs import range_of
from millpond.layout import HashRange, RowLayout, Rows, TableSchema
from millpond.operators.protocol import StateTable, TableKind
from millpond.stores.aligned.hash_intervals import read_gradually
from millpond.stores.append_files import AppendFiles
from millpond.stores.hash_filter import axis_word, inside
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.ordered.table import OrderedTable
from millpond.stores.protocol import LoadedTable
from millpond.stores.runs.merge import PIECE_ROWS
from millpond.stores.runs.run import memory_run
from millpond.stores.runs.run_set import RunSet
from millpond.stores.runs.run_store import RunStore
from millpond.stores.table_resources import TableResources
from millpond.stores.unaligned.table import UnalignedTable

Schemas = Mapping[int, TableSchema]
"""Schemas that a table has had, by number of the query's state schema; only read-modify-write tables have several."""

_MEMORY = 64 << 20
"""Size of a reader's block cache in bytes."""

_COMPRESSION = 4  # bytes of rows per byte of their files, roughly


def rows_of_table(
    files: FileSystem, table: StateTable, state: TableState, range_: HashRange, earlier: Schemas
) -> Iterator[Rows]:
    """Yield the rows of a table, block by block.

    Args:
        files: the query's folder of state.
        table: the operator's description of the table.
        state: the table's entry in the version's manifest.
        range_: the partition's range of hashes.
        earlier: schemas that the table has had.

    Raises:
        StateDamagedError: a file is missing, truncated or altered.
    """
    with tempfile.TemporaryDirectory(prefix="millpond-read-") as local:
        yield from _READ[table.kind](files, table, state, range_, earlier, local)


def _read_modify_write(
    files: FileSystem, table: StateTable, state: TableState, range_: HashRange, earlier: Schemas, local: str
) -> Iterator[Rows]:
    layout = RowLayout(table.schema)
    store = RunStore(files, local, disk=0, memory=_MEMORY)
    try:
        axis = axis_word(layout, state.runs.axis)
        opened = store.open_all(state.runs.runs, layout, range_, axis, list(earlier.values()))
        runs = RunSet(layout, opened, range_)
        for ref, data in zip(state.deltas, read_deltas(files, state.deltas), strict=True):
            for rows in converted_rows(ref, data, earlier[ref.schema_number], layout, files.locate(ref.commit)):
                rows = inside(rows, range_of(ref.visible), axis)
                runs.add(memory_run(sort_rows(rows, layout), layout, filtered=False))
        yield from runs.scan(size=piece_rows(state))
    finally:
        store.close()


def piece_rows(state: TableState) -> int:
    """Return the number of rows that take an eighth of a reader's memory, roughly: rows of state may be large."""
    rows = sum(ref.rows for ref in state.runs.runs) + sum(ref.rows for ref in state.deltas)
    stored = sum(ref.bytes for ref in state.runs.runs) + sum(ref.length for ref in state.deltas)
    row_bytes = max(1, _COMPRESSION * stored // max(1, rows))
    return max(1, min(PIECE_ROWS, _MEMORY // 8 // row_bytes))


def _ordered(
    files: FileSystem, table: StateTable, state: TableState, range_: HashRange, _: Schemas, local: str
) -> Iterator[Rows]:
    store = RunStore(files, local, disk=0, memory=_MEMORY)
    try:
        with ThreadPoolExecutor(1) as executor:
            opened = OrderedTable.open(
                table.schema,
                state.runs,
                store,
                TableResources(MemoryBudget(_MEMORY), executor),
                range_,
                drop_matched=table.drop_matched,
                writable=False,
            )
            yield from _scanned(files, opened, state)
    finally:
        store.close()


def _aligned(
    files: FileSystem, table: StateTable, state: TableState, range_: HashRange, _: Schemas, local: str
) -> Iterator[Rows]:
    layout = RowLayout(table.schema)
    store = AppendFiles(files, local)
    try:
        opened = [store.open(ref, [layout]) for ref in reversed(state.runs.runs)]
        for ref in state.deltas:
            if ref.length:
                opened += store.open_range(ByteRange(ref.commit, ref.offset, ref.length, ref.visible), [layout])
        yield from read_gradually([opened], layout, _MEMORY // 8, range_.meet(HashRange(state.runs.lowest)))
    finally:
        store.close()


def _unaligned(
    files: FileSystem, table: StateTable, state: TableState, range_: HashRange, _: Schemas, local: str
) -> Iterator[Rows]:
    store = AppendFiles(files, local)
    try:
        with ThreadPoolExecutor(1) as executor:
            opened = UnalignedTable(
                table.schema,
                store,
                TableResources(MemoryBudget(_MEMORY), executor),
                state.runs,
                directory=local,
                read_batch_ratio=0.0,
                maximum_space_amplification=math.inf,
                writable=False,
            )
            yield from _scanned(files, opened, state)
    finally:
        store.close()


def _scanned(files: FileSystem, table: LoadedTable, state: TableState) -> Iterator[Rows]:
    """Apply the deltas to a table that was opened on its files, then yield its rows."""
    for ref, data in zip(state.deltas, read_deltas(files, state.deltas), strict=True):
        for rows in rows_of(ref, data, table.layout, files.locate(ref.commit)):
            table.load(rows, range_of(ref.visible))
    yield from table.scan()


_READ: Mapping[TableKind, Callable[[FileSystem, StateTable, TableState, HashRange, Schemas, str], Iterator[Rows]]] = {
    "rmw": _read_modify_write,
    "ordered": _ordered,
    "aligned": _aligned,
    "unaligned": _unaligned,
}
