"""Memory and threads that a slot shares among its tables."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from millpond.stores.jobs import RemoteCompactor
from millpond.stores.memory.budget import MemoryBudget


@dataclass(frozen=True)
class TableResources:
    """Memory and threads that the tables of a slot share.

    Attributes:
        budget: the memory.
        background: runs merges and compactions.
        writers: writes rows that leave memory; must not wait behind merges. `background` if not given.
        namers: writes the names of matched rows, which it reads from files; must not wait behind merges, as deltas of
            joins stay until then. `background` if not given.
        readers: reads the state of hinted keys. Without it, hints are ignored.
        remote_compactor: submits merges and compactions to remote workers. Without it, all run in this process.
    """

    budget: MemoryBudget
    background: Executor
    writers: Executor | None = None
    namers: Executor | None = None
    readers: Executor | None = None
    remote_compactor: RemoteCompactor | None = None

    @property
    def write_pool(self) -> Executor:
        """Threads that write rows that leave memory."""
        return self.writers or self.background

    @property
    def naming_pool(self) -> Executor:
        """Threads that write the names of matched rows."""
        return self.namers or self.background
