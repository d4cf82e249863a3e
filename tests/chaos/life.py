"""One run of the job (`job.py`) that can be killed at a random moment."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

JOB = Path(__file__).with_name("job.py")


class Life:
    """One life of the job: it is killed a moment after a given line, or ends by itself.

    Its input, output and checkpoint are in `folder`, unless `checkpoint` is a URL elsewhere.
    """

    def __init__(self, query: str, folder: Path, partitions: int, job: Path = JOB, checkpoint: str = "") -> None:
        self.log = folder / "log.txt"
        places = [str(folder / "in"), str(folder / "out"), checkpoint or str(folder / "checkpoint")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(job), query, *places],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "PARTITIONS": str(partitions)},
            )
        self.known: set[int] = set()

    def run(self, victim: str | None, rng: random.Random, after: int | None = None) -> tuple[bool, bool]:
        """Whether the kill was carried out (after `after` lines, or one to three), and whether the job has ended."""
        assert self.process.stdout is not None
        lines_left, pause, killed, done = after or rng.randint(1, 3), rng.uniform(0.0, 0.4), False, False
        for line in self.process.stdout:
            self._look_around()
            done = done or line.strip() == "done"
            lines_left -= 1
            if victim and not killed and not done and lines_left <= 0:
                time.sleep(pause)  # anywhere in the batch that runs now
                killed = self._kill(victim, rng)
        self.process.wait()
        return killed, done

    def _look_around(self) -> None:
        with suppress(psutil.Error):
            self.known |= {p.pid for p in psutil.Process(self.process.pid).children(recursive=True)}

    def _kill(self, victim: str, rng: random.Random) -> bool:
        self._look_around()
        if victim == "driver":
            targets = [*self.known, self.process.pid]
        else:
            named = {"slot": "millpond.slot.template", "worker": "millpond.worker.daemon"}[victim]
            candidates = [p.pid for p in psutil.process_iter() if _says(p, named) and self._ours(p)]
            targets = [rng.choice(sorted(candidates))] if candidates else []
        for pid in targets:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(targets)

    def _ours(self, process: psutil.Process) -> bool:
        """Slots leave the job's session, but inherit its environment."""
        with suppress(psutil.Error):
            return process.pid in self.known or process.environ().get("MILLPOND_TEST_JOB") == str(os.getpid())
        return False


def _says(process: psutil.Process, name: str) -> bool:
    with suppress(psutil.Error):
        return any(name in part for part in process.cmdline())
    return False
