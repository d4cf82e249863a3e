"""Operators over real tables in memory, batch after batch, with restarts from what they sealed."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.files.formats.append_file import ByteRange
from millpond.files.formats.segment import decode_rows
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import TableManifest
from millpond.layout import HashRange, RowLayout, TableSchema, Words
from millpond.operators.kinds.registry import open_operator
from millpond.operators.protocol import Operator, TableKind, Times
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.deduplicate import DeduplicateSpec
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import GLOBAL_HASH, AggregateCall, Field
from millpond.spec.types import parse_type
from millpond.stores.aligned.table import AlignedStore, AlignedTable
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.cache_table import CacheTable
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.compactor import Writer
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources
from millpond.stores.unaligned.table import UnalignedTable

Row = dict[str, Any]


def spec(keys: str, inputs: str, calls: Sequence[AggregateCall], mode: str = "update") -> AggregateSpec:
    """A spec from `name type; name type` lists."""
    return AggregateSpec(fields(keys), fields(inputs), tuple(calls), mode)


def fields(text: str) -> tuple[Field, ...]:
    """Fields from `name type; name type`."""
    return tuple(Field(*part.strip().split(" ", 1)) for part in text.split(";") if part.strip())


def record_batch(shape: OperatorSpec, rows: Sequence[Row], keys: Iterable[str], bits: int = 64) -> pa.RecordBatch:
    """The pipe's input for some rows; hashes are equal for equal keys and have only `bits` random bits."""
    columns = shape.input_fields
    names = list(keys)
    hashes = [hash_of(tuple(row[name] for name in names), bits) if names else GLOBAL_HASH for row in rows]
    arrays = [pa.array(hashes, pa.int64())]
    arrays += [pa.array([row[c.name] for row in rows], parse_type(c.type).arrow) for c in columns]
    return pa.RecordBatch.from_arrays(arrays, names=["__hash", *(c.name for c in columns)])


def normal(value: Any) -> Any:
    """A value such that those that group together are equal."""
    if isinstance(value, float):
        return "NaN" if value != value else value + 0.0
    if isinstance(value, dict):
        return tuple(normal(part) for part in value.values())
    if isinstance(value, list):
        return ("list", *(normal(part) for part in value))
    if isinstance(value, bool):
        return ("bool", value)
    return value


def hash_of(key: tuple[Any, ...], bits: int) -> int:
    """A signed 64-bit hash of a key, with `bits` bits that vary."""
    import xxhash

    hashed = xxhash.xxh64_intdigest(repr([normal(part) for part in key]).encode())
    return int(np.uint64(hashed >> (64 - bits) << (64 - bits)).astype(np.int64))


class Rig:
    """Runs an operator as a slot would; with a store, rows may leave memory."""

    def __init__(
        self, shape: OperatorSpec, budget: int = 64 << 20, memory: int = 64 << 20, store: Writer | None = None
    ) -> None:
        self.spec = shape
        self._store = store
        self._memory = memory
        self.version = 0
        self._budget = budget
        self._pool = ThreadPoolExecutor(1)
        self._deltas: list[dict[str, bytes]] = []
        self._manifests: dict[str, TableManifest] = {}
        self.operator: Operator
        self._open()

    def _open(self) -> None:
        budget = MemoryBudget(self._budget)
        self._made: list[RmwTable | UnalignedTable] = []

        self._appended = AlignedTables(self._deltas, budget, self._pool)

        def make(name: str, schema: TableSchema, initial: Words, *, kind: TableKind = "rmw") -> Any:
            if kind == "aligned":
                return self._appended.open(name, schema, self._manifests.get(name, TableManifest()).lowest)
            if kind == "spool":
                return self._appended.spool(schema)
            if kind == "cache":
                return CacheTable(schema, initial, budget, HashRange())
            if kind == "scratch":
                return RmwTable(schema, initial, no_runs(schema), TableResources(budget, self._pool))
            keys = self._manifests.get(name, TableManifest()).keys
            table: Any = RmwTable(
                schema, initial, no_runs(schema), TableResources(budget, self._pool), store=self._store, keys=keys
            )
            if kind == "unaligned":
                files, folder = self._appended.files, self._appended.folder
                table = UnalignedTable(
                    schema, files, TableResources(budget, self._pool), TableManifest(), directory=folder
                )
            for delta in self._deltas:
                for rows in decode_rows(delta[name], table.layout, name) if delta.get(name) else ():
                    table.load(rows)
            self._made.append(table)
            return table

        self.operator = open_operator(self.spec, make, list(self._manifests), memory=self._memory)

    def restart(self) -> None:
        """Forget everything that is in memory and read the deltas again."""
        self.close()
        self._open()

    def batch(self, *pieces: pa.RecordBatch, times: Times = Times()) -> pa.Table:  # noqa: B008
        """Run one batch; its output."""
        self.operator.begin(self.version, times)
        for piece in pieces:
            self.operator.process(piece)
        sealed = self.operator.finish()
        self._deltas.append({name: b"".join(bytes(p) for p in delta.pieces) for name, delta in sealed.items()})
        self._manifests = {name: table.manifest() for name, table in self.operator.tables.items()}
        self.version += 1
        out = list(self.operator.output())
        again = list(self.operator.output())
        assert out == again or str(out) == str(again)
        return pa.Table.from_batches(out) if out else pa.table({})

    def close(self) -> None:
        for table in self._made:
            table.close()
        self._appended.close()


class AlignedTables:
    """Tables of the aligned append store whose deltas lie in memory; they begin with what earlier batches sealed."""

    def __init__(self, deltas: Sequence[dict[str, bytes]], budget: MemoryBudget, pool: ThreadPoolExecutor) -> None:
        self._deltas = deltas
        self._budget = budget
        self._pool = pool
        self._temporary = TemporaryDirectory()
        self.folder = self._temporary.name
        self._files = open_filesystem(f"memory:{self.folder}")
        self.files = AppendFiles(self._files, self.folder)
        self._store: AlignedStore | None = None

    def open(self, name: str, schema: TableSchema, lowest: int = 0) -> AlignedTable:
        if self._store is None:
            self._store = AlignedStore(schema, self.files, self._budget, self._pool)
        slices = []
        for version, delta in enumerate(self._deltas):
            if delta.get(name):
                self._files.put(f"{version}-{name}", [delta[name]])
                slices.append(ByteRange(f"{version}-{name}", 0, len(delta[name])))
        return self._store.open(name, TableManifest(lowest=lowest), slices, layout=RowLayout(schema))

    def spool(self, schema: TableSchema) -> AlignedTable:
        return AlignedStore(schema, self.files, self._budget, self._pool).open("spool", TableManifest())

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._temporary.cleanup()


def no_runs(schema: TableSchema) -> RunSet:
    """An empty set of runs."""

    return RunSet(RowLayout(schema))


def as_rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """The rows of a table."""
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True)) if table.num_columns else []


__all__ = ["DeduplicateSpec", "Rig", "as_rows", "fields", "record_batch", "spec"]
