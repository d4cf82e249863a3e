"""One engine as the demo sees it from outside: started, followed, killed, started again."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from millpond.demo.engine import Figures, Plan
from millpond.workloads.process import ProcessTree, tree_bytes


class EngineEnded(Exception):
    """An engine's process ended although it should run; the message holds the end of its log."""


class Side:
    """One engine's run.

    Args:
        engine: `spark` or `millpond`.
        folder: of its own; made if need be.
    """

    def __init__(self, engine: str, folder: Path, rows_per_batch: int, cores: int) -> None:
        self.engine = engine
        self.folder = folder
        self._plan = Plan(engine, str(folder), rows_per_batch, 0, cores)
        self.batches: list[Figures] = []
        self.state_bytes = 0
        self.status = "waiting"
        self.kills: list[float] = []
        self.restarted: float | None = None
        self._keys: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._counted = 0
        self._read = 0
        self._tree: ProcessTree | None = None
        (folder / "local").mkdir(parents=True)

    @property
    def name(self) -> str:
        """What people call it."""
        return "Millpond" if self.engine == "millpond" else "Spark (RocksDB)"

    @property
    def keys(self) -> int:
        """How many keys have come up so far, counted in the rows that the engine wrote."""
        return len(self._keys)

    @property
    def done(self) -> int:
        """Batches done, counted from the very first."""
        return self.batches[-1].batch + 1 if self.batches else 0

    def start(self, batches: int = 0) -> None:
        """Start the engine's process, on its checkpoint if there is one; it ends after so many batches (0 = never)."""
        path = self.folder / "plan.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(self._plan, batches=batches)))
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
        command = [sys.executable, "-m", "millpond.demo.engine", str(path)]
        self.status = "starting"
        if self.kills:
            self.restarted = time.time()
        self._tree = ProcessTree(command, log=self.folder / "log.txt", env=environment)

    def look(self) -> None:
        """Take in what the engine has done since the last look.

        Raises:
            EngineEnded: its process is gone.
        """
        path = self.folder / "figures.jsonl"
        text = path.read_bytes() if path.exists() else b""
        end = text.rfind(b"\n") + 1
        for line in text[self._read : end].splitlines():
            self.status = "running"
            self.batches.append(msgspec.json.decode(line, type=Figures))
        self._read = end
        for figures in self.batches[self._counted :]:
            table = pq.read_table(self.rows_of(figures.batch), columns=["auction"])
            self._keys = np.union1d(self._keys, table["auction"].to_numpy())
        self._counted = len(self.batches)
        self.state_bytes = tree_bytes(
            self.folder / "checkpoint" / ("millpond" if self.engine == "millpond" else "state")
        )
        if self._tree is not None and not self._tree.running():
            self.status = "done"
            if self._tree.process.returncode:
                log = (self.folder / "log.txt").read_text(errors="replace").splitlines()[-15:]
                raise EngineEnded(f"{self.name} ended with status {self._tree.process.returncode}:\n" + "\n".join(log))

    def rows_of(self, batch: int) -> Path:
        """Where the rows of a batch are."""
        return self.folder / "rows" / f"batch={batch:06d}"

    def kill(self) -> int:
        """SIGKILL the driver, its JVM, the workers and the slots at once; return how many processes that were."""
        if self._tree is None:
            return 0
        count = len(self._tree.members())
        self._tree.kill()
        self._tree = None
        self.kills.append(time.time())
        self.status = "killed"
        return count

    def close(self) -> None:
        """End what still runs."""
        if self._tree is not None:
            self._tree.close(linger=10)
            self._tree.kill()
            self._tree = None
