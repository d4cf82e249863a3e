"""State of every kind of operator with one of its files altered, cut short or removed: right rows, or the file's name.

The files that every checkpoint has beside these: `slot/test_damage.py`.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from millpond.checkpoint.recovery import Recovery
from millpond.errors import StateDamagedError
from millpond.slot.process.messages import RunBatch
from millpond.stores import delta_backlog
from millpond.stores.aligned import table as aligned
from millpond.tasks.operator_task import SlotSettings
from tests.chaos.kinds import KINDS, ordered, part_of, shown
from tests.chaos.operators import marked, truth
from tests.operators.called import Called
from tests.support.application import Application

pytestmark = pytest.mark.costly

PARTITIONS = 2
BATCHES = 9
"""Batches that Spark has committed."""
MORE = 4
"""Batches that run on what is damaged: time enough for all of it to be read or to expire."""
SHORT_RETRY = 30.0
"""Seconds in which all of this must end."""
THOROUGH = "MILLPOND_SCHEDULES" in os.environ
CHOSEN = (
    "aggregate",
    "tumbling",
    "panes",
    "holistic panes",
    "sessions",
    "distinct by time",
    "within",
    "join full_outer",
    "join left_semi",
    "top-n",
    "over",
    "processor by the clock",
)
DAMAGE = ("flipped", "cut", "removed")


class Live(NamedTuple):
    """Bytes of a file below `millpond/` that are state."""

    name: str
    begin: int
    end: int

    @property
    def kind(self) -> str:
        return Path(self.name).suffix if self.name.startswith("files/") else "delta"


class Job(Application):
    """An operator of one kind and its stream."""

    def __init__(self, folder: Path, kind: str, scheme: str = "") -> None:
        settings = SlotSettings(memory=64 << 20, directory=str(folder), open_timeout=0.0, commit_timeout=20.0)
        self.kind = KINDS[kind]
        super().__init__(folder, self.kind.spec, PARTITIONS, scheme, settings)
        self.stream, self.expected = truth(kind, 0)

    def planned(self, batch: int) -> bytes:
        closed, processing = self.stream[batch].times[1:]
        return b'v1\n{"batchWatermarkMs":%d,"batchTimestampMs":%d}\n0' % (closed, processing)

    def run(self, batch: int) -> None:
        assert self.server is not None
        rows, found = self.stream[batch].rows, []
        user = self.kind.user
        for partition in range(PARTITIONS):
            piece = marked(part_of(rows, partition, PARTITIONS), partition, PARTITIONS)
            caller = None if user is None else Called(user)
            output = self.server.run(RunBatch(self.task, partition, batch, 0), iter([piece]), caller=caller)
            found += shown(list(output))
        assert ordered(found) == self.expected[batch], f"batch {batch}"

    def go_back(self, version: int) -> None:
        """Have Spark's logs end before a version."""
        for batch in range(version, self.query_logs.last_planned + 1):
            self.query_logs.remove("offsets", batch)
            self.query_logs.remove("commits", batch)

    def live(self) -> list[Live]:
        """The files of the newest version of the state."""
        recovery = Recovery(self.files)
        version = recovery.newest()
        found = set()
        for partition in range(PARTITIONS):
            for table in recovery.manifest(0, partition, version).tables.values():
                found |= {Live(run.name, 0, run.bytes) for run in table.runs.runs if not run.pending}
                found |= {Live(d.commit, d.offset, d.offset + d.length) for d in table.deltas if d.length}
        return sorted(found)


@contextmanager
def soon() -> Iterator[None]:
    """Stores flush and merge after a few batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_backlog, "_MAX_DELTAS", 1)
        patch.setattr(aligned, "_MAX_SMALL_SEGMENTS", 1)
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The state of each kind, made when it is first asked for: by two runs, the second with what the first wrote."""

    class Made(dict[str, Path]):
        def __missing__(self, kind: str) -> Path:
            folder = tmp_path_factory.mktemp("state")
            with soon():
                for batches in (BATCHES - 2, BATCHES):
                    Job(folder, kind).through(batches)
            shutil.rmtree(folder / "host")
            self[kind] = folder
            return folder

    return Made()


def damage(folder: Path, victim: Live, how: str, choice: random.Random) -> None:
    """Flip a bit, cut the file short there, or remove it."""
    path = folder / "millpond" / victim.name
    if how == "removed":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    at = choice.randrange(victim.begin, victim.end)
    if how == "cut":
        del content[at:]
    else:
        content[at] ^= 1 << choice.randrange(8)
    path.write_bytes(content)


def outcome(folder: Path, kind: str, scheme: str, victim: str = "") -> str:
    """Start on this state and run some batches: the error has `named` the damaged file, or it is `harmless`."""
    application = Job(folder, kind, scheme)
    began = time.monotonic()
    try:
        application.through(BATCHES + MORE)
    except StateDamagedError as error:
        assert error.operator is not None, error  # noqa: PT017
        assert error.partition is not None, error  # noqa: PT017
        assert error.version is not None, error  # noqa: PT017
        assert error.file, error  # noqa: PT017
        assert (error.variable is not None) == kind.startswith("processor"), error  # noqa: PT017
        if application.server is not None:
            assert error.query == "query", error  # noqa: PT017
            assert error.file.endswith(victim), error  # noqa: PT017
        return "named"
    finally:
        assert time.monotonic() - began < SHORT_RETRY
    return "harmless"


@pytest.mark.parametrize("kind", KINDS if THOROUGH else CHOSEN)
def test_damage_is_named_or_harmless(checkpoints: dict[str, Path], tmp_path: Path, kind: str) -> None:
    whole = checkpoints[kind]
    live = Job(whole, kind).live()
    outcomes: dict[tuple[str, str], set[str]] = {}
    for seed in range(10 if THOROUGH else 2):
        for file, how in product(sorted({each.kind for each in live}), DAMAGE):
            choice = random.Random(f"{seed} {kind} {file} {how}")
            victim = choice.choice([each for each in live if each.kind == file])
            folder = tmp_path / f"{seed}{file}{how}"
            shutil.copytree(whole, folder)
            damage(folder, victim, how, choice)
            found = outcome(folder, kind, ("", "faults+")[seed % 2], victim.name)
            outcomes.setdefault((file, how), set()).add(found)
            shutil.rmtree(folder)
    seldom = {("delta", "removed"), ("delta", "cut"), (".run", "flipped")}  # made again, or not read any more
    assert all("named" in found for what, found in outcomes.items() if what not in seldom), outcomes


@pytest.mark.parametrize("kind", KINDS if THOROUGH else CHOSEN)
@pytest.mark.parametrize("scheme", ["", "faults+"], ids=["local", "remote"])
def test_the_same_state_whole(checkpoints: dict[str, Path], tmp_path: Path, kind: str, scheme: str) -> None:
    folder = tmp_path / "whole"
    shutil.copytree(checkpoints[kind], folder)
    assert outcome(folder, kind, scheme) == "harmless"


@pytest.mark.parametrize("kind", KINDS if THOROUGH else CHOSEN)
def test_older_versions_are_there(checkpoints: dict[str, Path], tmp_path: Path, kind: str) -> None:
    for version in range(BATCHES + 1) if THOROUGH else (2, BATCHES - 3, BATCHES - 1):
        folder = tmp_path / str(version)
        shutil.copytree(checkpoints[kind], folder)
        Job(folder, kind).go_back(version)
        assert outcome(folder, kind, ("", "faults+")[version % 2]) == "harmless"
        shutil.rmtree(folder)
