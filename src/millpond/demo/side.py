"""Control of one engine's process: start, follow, kill, restart."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from millpond.demo.engine import Plan
from millpond.demo.figures import Figures, Measurement
from millpond.demo.processes import ProcessTree, tree_bytes
from millpond.errors import MillpondError
from millpond.state_reader.reader import StateReader

ENGINE = (sys.executable, "-m", "millpond.demo.engine")
_LOOK_SECONDS = 1.0  # reading files takes time on the measured cores


class EngineEnded(Exception):
    """An engine's process ended although it should run; the message holds the end of its log."""


class Side:
    """One engine's run; the path of its plan is appended to the command."""

    def __init__(self, plan: Plan, command: Sequence[str] = ENGINE) -> None:
        self.plan = plan
        self.run = Measurement(plan.engine)
        self.status = "waiting"
        self.state_bytes = 0
        self.behind: int | None = None
        self.about = {"versions": "", "explained": ""}
        self._folder = Path(plan.folder)
        self._command = command
        self._read = 0
        self._looked = 0.0
        self._tree: ProcessTree | None = None
        for folder in (plan.temporary, plan.folder):
            Path(folder).mkdir(parents=True, exist_ok=True)

    def start(self, batches: int = 0) -> None:
        """Start the engine on its checkpoint, if any, until `batches` batches are done in all (0: for ever)."""
        path = self._folder / "plan.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(self.plan, batches=batches)))
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "TMPDIR": self.plan.temporary}
        self.status = "restarting" if self.run.starts else "starting"
        self.run.starts.append(time.time())
        command = [*self._command, str(path), str(os.getpid())]
        self._tree = ProcessTree(command, log=self._folder / "log.txt", env=environment)

    def look(self) -> None:
        """Read the figures that the engine has written since the last call.

        Raises:
            EngineEnded: its process has ended with an error.
        """
        ended = self._tree is not None and not self._tree.running()
        path = self._folder / "figures.jsonl"
        text = path.read_bytes() if path.exists() else b""
        end = text.rfind(b"\n") + 1
        for line in text[self._read : end].splitlines():
            self.status = "running"
            self.run.batches.append(msgspec.json.decode(line, type=Figures))
        self._read = end
        if time.monotonic() - self._looked > _LOOK_SECONDS or ended:
            self._look_at_state()
        if ended and self._tree is not None:
            self.status = "done"
            if status := self._tree.process.returncode:
                log = (self._folder / "log.txt").read_text(errors="replace").splitlines()[-15:]
                raise EngineEnded(f"{self.run.name} ended with status {status}:\n" + "\n".join(log))

    def _look_at_state(self) -> None:
        checkpoint, ours = self._folder / "checkpoint", self.plan.engine == "millpond"
        self.state_bytes = tree_bytes(checkpoint / ("millpond" if ours else "state"))
        self.run.state_bytes = max(self.run.state_bytes, self.state_bytes)
        with suppress(MillpondError, OSError):  # Spark commits state within the batch
            self.behind = max(0, self.run.done - StateReader(str(checkpoint)).newest()) if ours else 0
        with suppress(OSError, msgspec.DecodeError):
            self.about = msgspec.json.decode((self._folder / "about.json").read_bytes())
        self._looked = time.monotonic()

    def rows_of(self, batch: int) -> Path:
        """Return the folder with the rows of a batch."""
        return self._folder / "rows" / f"batch={batch:06d}"

    def kill(self) -> int:
        """Kill the driver, its JVM, the workers and the slots at once; return the number of processes."""
        if self._tree is None:
            return 0
        count = len(self._tree.members())
        self._tree.kill()
        self._tree = None
        self.run.kills.append(time.time())
        self.status = "killed"
        return count

    def close(self) -> None:
        """Wait for the process to end by itself, then kill the processes that remain."""
        if self._tree is not None:
            self._tree.close(linger=15)
            self._tree.kill()
            self._tree = None
            self.status = "done"
            self._look_at_state()  # a short run may have ended between two looks
