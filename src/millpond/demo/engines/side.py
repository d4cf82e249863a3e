"""Control of one engine's process: start, follow, kill, restart."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from millpond.demo.engines.engine import About, Figures, Plan
from millpond.demo.engines.figures import Run
from millpond.errors import MillpondError
from millpond.workloads.process import ProcessTree, tree_bytes

ENGINE = (sys.executable, "-m", "millpond.demo.engines.engine")
# No samples of processes: the demo measures batches.
_NO_SAMPLES = 3600.0
# Reading files takes time on the measured cores.
_LOOK_SECONDS = 1.0


class EngineEnded(Exception):
    """An engine's process ended although it should run; the message holds the end of its log."""


class Side:
    """One engine's run.

    Args:
        plan: the work of the engine; its folder is created.
        command: the command to start; the path of the plan is appended.
    """

    def __init__(self, plan: Plan, command: Sequence[str] = ENGINE) -> None:
        self.plan = plan
        self.run = Run(plan.engine)
        self.status = "waiting"
        self.state_bytes = 0
        self.behind: int | None = None
        self.about = About("", "")
        self._folder = Path(plan.folder)
        self._command = command
        self._read = 0
        self._looked = 0.0
        self._tree: ProcessTree | None = None
        Path(plan.temporary).mkdir(parents=True)
        self._folder.mkdir(parents=True, exist_ok=True)

    @property
    def name(self) -> str:
        """The display name of the engine."""
        return self.run.name

    @property
    def done(self) -> int:
        """Number of finished batches, counted from the very first."""
        return self.run.done

    def start(self, batches: int = 0) -> None:
        """Start the engine's process, on its checkpoint if there is one.

        Args:
            batches: the number of batches, counted from the very first, after which it ends; 0: never.
        """
        path = self._folder / "plan.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(self.plan, batches=batches)))
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "TMPDIR": self.plan.temporary}
        self.status = "restarting" if self.run.starts else "starting"
        self.run.starts.append(time.time())
        command = [*self._command, str(path), str(os.getpid())]
        self._tree = ProcessTree(command, log=self._folder / "log.txt", env=environment, interval=_NO_SAMPLES)

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
            if self._tree.process.returncode:
                log = (self._folder / "log.txt").read_text(errors="replace").splitlines()[-15:]
                raise EngineEnded(f"{self.name} ended with status {self._tree.process.returncode}:\n" + "\n".join(log))

    def _look_at_state(self) -> None:
        from millpond.state_reader.reader import StateReader

        checkpoint = self._folder / "checkpoint"
        ours = self.plan.engine == "millpond"
        self.state_bytes = tree_bytes(checkpoint / ("millpond" if ours else "state"))
        self.run.state_bytes = max(self.run.state_bytes, self.state_bytes)
        if ours:
            with suppress(MillpondError, OSError):
                self.behind = max(0, self.done - StateReader(str(checkpoint)).newest())
        else:
            self.behind = 0  # Spark commits state within the batch
        with suppress(OSError, msgspec.DecodeError):
            self.about = msgspec.json.decode((self._folder / "about.json").read_bytes(), type=About)
        self._looked = time.monotonic()

    def rows_of(self, batch: int) -> Path:
        """Return the folder with the rows of a batch."""
        return self._folder / "rows" / f"batch={batch:06d}"

    def running(self) -> bool:
        """Return whether a process was started and not closed or killed yet."""
        return self._tree is not None

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
