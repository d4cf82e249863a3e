"""Tables of one partition in memory, which can be opened anew from what their batches have sealed."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import finalize

from millpond.errors import UsageError
from millpond.files.backends.filesystem import open_filesystem
from millpond.files.formats.segment import decode_rows
from millpond.files.refs import TableManifest
from millpond.layout import RowLayout, TableSchema, Words
from millpond.operators.protocol import TableKind
from millpond.stores.aligned.table import AlignedStore
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.protocol import TableDelta
from millpond.stores.rmw.table import RmwTable
from millpond.stores.runs.run_set import RunSet

_MEMORY = 256 << 20
_SPOOLED = "memory:millpond-testing"
"""Where rows would go that have no room in memory."""


class MemoryTables:
    """The tables of a partition: they stay in memory, and live as long as this."""

    def __init__(self) -> None:
        self._budget = MemoryBudget(_MEMORY)
        self._beside = ThreadPoolExecutor(1)
        self._files = AppendFiles(open_filesystem(_SPOOLED), "")
        self._sealed: dict[str, list[bytes]] = {}
        self.version = 0
        finalize(self, self._beside.shutdown, wait=False)

    @property
    def names(self) -> list[str]:
        """The tables of which something has been sealed."""
        return list(self._sealed)

    def open(self, name: str, schema: TableSchema, initial: Words, *, kind: TableKind = "rmw") -> Any:
        """Open a table (see `operators.protocol.MakeTable`), with what has been sealed of it.

        Raises:
            UsageError: it is of a kind that is not to be had here.
        """
        if kind == "spool":
            return AlignedStore(schema, self._files, self._budget, self._beside).open(name, TableManifest())
        if kind not in ("rmw", "scratch"):
            raise UsageError(f"There are no tables of the kind {kind!r} in memory.")
        layout = RowLayout(schema)
        table = RmwTable(schema, initial, RunSet(layout), self._budget, self._beside)
        for delta in self._sealed.get(name, ()) if kind == "rmw" else ():
            for rows in decode_rows(delta, layout, name):
                table.load(rows)
        return table

    def seal(self, deltas: Mapping[str, TableDelta]) -> None:
        """Keep what a batch has changed: it is over."""
        for name, delta in deltas.items():
            if data := b"".join(map(bytes, delta.pieces)):
                self._sealed.setdefault(name, []).append(data)
        self.version += 1
