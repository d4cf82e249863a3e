"""In-memory tables of one partition, which can be reopened from sealed deltas."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import finalize

from millpond.errors import UsageError
from millpond.files.formats.segment import decode_rows
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import TableManifest
from millpond.layout import RowLayout, TableSchema, Words
from millpond.operators.protocol import TableKind
from millpond.stores.aligned.table import AlignedStore
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.protocol import TableDelta
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet
from millpond.stores.table_resources import TableResources

_MEMORY_BYTES = 256 << 20
_SPOOL_URL = "memory:millpond-testing"
"""URL to which rows that do not fit in memory would be spilled."""


class MemoryTables:
    """The tables of a partition, in memory. They live as long as this object."""

    def __init__(self) -> None:
        self._budget = MemoryBudget(_MEMORY_BYTES)
        self._executor = ThreadPoolExecutor(1)
        self._files = AppendFiles(open_filesystem(_SPOOL_URL), "")
        self._spools: AlignedStore | None = None
        self._sealed: dict[str, list[bytes]] = {}
        self.version = 0
        finalize(self, self._executor.shutdown, wait=False)

    @property
    def names(self) -> list[str]:
        """The tables that have sealed deltas."""
        return list(self._sealed)

    def open(self, name: str, schema: TableSchema, initial: Words, *, kind: TableKind = "rmw") -> Any:
        """Open a table (see `operators.protocol.MakeTable`) and replay its sealed deltas.

        Raises:
            UsageError: memory tables do not support this kind.
        """
        layout = RowLayout(schema)
        if kind == "spool":
            # All share one store, as in a slot: each store has a memory account for as long as it is open.
            if self._spools is None:
                self._spools = AlignedStore(schema, self._files, self._budget, self._executor)
            return self._spools.open(name, TableManifest(), layout=layout)
        if kind not in ("rmw", "scratch"):
            raise UsageError(f"There are no tables of the kind {kind!r} in memory.")
        table = RmwTable(schema, initial, RunSet(layout), TableResources(self._budget, self._executor))
        for delta in self._sealed.get(name, ()) if kind == "rmw" else ():
            for rows in decode_rows(delta, layout, name):
                table.load(rows)
        return table

    def seal(self, deltas: Mapping[str, TableDelta]) -> None:
        """Keep a batch's deltas, and advance the version."""
        for name, delta in deltas.items():
            if data := b"".join(map(bytes, delta.pieces)):
                self._sealed.setdefault(name, []).append(data)
        self.version += 1
