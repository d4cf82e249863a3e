"""One engine as the demo sees it from outside: started, followed, killed, started again."""

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
# The demo measures batches, not processes: no samples.
_NO_SAMPLES = 3600.0
# Looking at files takes time of the cores that are measured.
_LOOK_SECONDS = 1.0


class EngineEnded(Exception):
    """An engine's process ended although it should run; the message holds the end of its log."""


class Side:
    """One engine's run.

    Args:
        plan: what it does; its folder is made.
        command: what to start; the plan's path is added.
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
        """What people call it."""
        return self.run.name

    @property
    def done(self) -> int:
        """Batches done, counted from the very first."""
        return self.run.done

    def start(self, batches: int = 0) -> None:
        """Start the engine's process, on its checkpoint if there is one; it ends after so many batches (0 = never)."""
        path = self._folder / "plan.json"
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(self.plan, batches=batches)))
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "TMPDIR": self.plan.temporary}
        self.status = "restarting" if self.run.starts else "starting"
        self.run.starts.append(time.time())
        command = [*self._command, str(path), str(os.getpid())]
        self._tree = ProcessTree(command, log=self._folder / "log.txt", env=environment, interval=_NO_SAMPLES)

    def look(self) -> None:
        """Take in what the engine has done since the last look.

        Raises:
            EngineEnded: its process is gone, with an error.
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
        from millpond.slot.reading.reader import StateReader

        checkpoint = self._folder / "checkpoint"
        ours = self.plan.engine == "millpond"
        self.state_bytes = tree_bytes(checkpoint / ("millpond" if ours else "state"))
        self.run.state_bytes = max(self.run.state_bytes, self.state_bytes)
        if ours:
            with suppress(MillpondError, OSError):
                self.behind = max(0, self.done - StateReader(str(checkpoint)).newest())
        else:
            self.behind = 0  # a batch of Spark's ends when its state is committed
        with suppress(OSError, msgspec.DecodeError):
            self.about = msgspec.json.decode((self._folder / "about.json").read_bytes(), type=About)
        self._looked = time.monotonic()

    def rows_of(self, batch: int) -> Path:
        """Where the rows of a batch are."""
        return self._folder / "rows" / f"batch={batch:06d}"

    def running(self) -> bool:
        """Whether a process was started and not seen off yet."""
        return self._tree is not None

    def kill(self) -> int:
        """SIGKILL the driver, its JVM, the workers and the slots at once; return how many processes that were."""
        if self._tree is None:
            return 0
        count = len(self._tree.members())
        self._tree.kill()
        self._tree = None
        self.run.kills.append(time.time())
        self.status = "killed"
        return count

    def close(self) -> None:
        """Wait for what ends by itself, and end what does not."""
        if self._tree is not None:
            self._tree.close(linger=15)
            self._tree.kill()
            self._tree = None
            self.status = "done"
            self._look_at_state()  # a short run may have ended between two looks
