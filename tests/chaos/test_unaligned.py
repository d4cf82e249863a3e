"""The unaligned append store under crashes, restarts at retained versions and damage, without an operator.

Batches append rows to lists and take lists whose windows are over; what is taken has to be what a dictionary has.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millpond.errors import StateDamagedError, TransientError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.backends.local import LocalFiles
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import TableManifest
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.table_resources import TableResources
from millpond.stores.unaligned.table import UnalignedTable
from tests.chaos.later import Later
from tests.chaos.operators import small
from tests.chaos.test_schedules import CRASHES, FAILURES, FIRST, SCHEDULES, USUAL
from tests.chaos.tripwire import Crash, LocalTripwire, Tripwire
from tests.selection import scaled
from tests.stores.test_unaligned import BYTES, Append, Evict, Freeze, Rig, Take, shrink
from tests.support.rows import Entry

BATCHES = 10
RETAINED = 4
EACH = scaled(20) if SCHEDULES == USUAL else max(1, SCHEDULES // 10)
DAMAGES = 6 if SCHEDULES == USUAL else 60

Step = Append | Take | Freeze | Evict


def script(seed: int) -> list[list[Step]]:
    """Draw the steps of each batch; the same for each seed."""
    choice = random.Random(seed)
    return [[_step(choice) for _ in range(choice.randrange(1, 7))] for _ in range(BATCHES)]


def _step(choice: random.Random) -> Step:
    kind = choice.random()
    if kind < 0.5:
        return Append([(_entry(choice), choice.randrange(100)) for _ in range(choice.randrange(1, 20))])
    if kind < 0.75:
        return Take([choice.randrange(30) for _ in range(choice.randrange(5))], choice.random() < 0.3)
    return Freeze() if kind < 0.93 else Evict()


def _entry(choice: random.Random) -> Entry:
    key = (5, choice.choice([b"", b"k" * 12, b"k" * 13]), choice.randrange(4))
    return Entry(
        choice.randrange(4) << 60, key, (choice.choice([None, bytes(choice.randrange(30))]), choice.getrandbits(64))
    )


@dataclass
class Life(Rig):
    """A table whose process dies, and whose background is as far as it is."""

    choice: random.Random = field(default_factory=random.Random)
    lives: int = 0

    def _open(self, manifest: TableManifest) -> UnalignedTable:
        self.lives += 1
        self.later = Later(self.choice)
        self.append_files = AppendFiles(self.files, self.local)
        self.append_files._requests = self.append_files._readers = Later()  # type: ignore[assignment]
        return UnalignedTable(
            self.layout.schema,
            self.append_files,
            TableResources(MemoryBudget(8 << 20), self.later),
            manifest,
            directory=self.local,
            read_batch_ratio=self.ratio,
        )

    def go_on(self, batches: list[list[Any]], last: int) -> None:
        """Run the batches that are missing up to a version."""
        while self.version < last:
            self.batch(batches[self.version])
            while self.choice.random() < 0.5 and self.later.step():
                pass


def survive(rig: Life, batches: list[list[Any]], quiet: Callable[[], None]) -> None:
    """Run all batches, whatever happens; each death is followed by a start at the last version or one before."""
    for _ in range(200):
        try:
            rig.go_on(batches, BATCHES)
            break
        except (Crash, TransientError):
            back(rig, rig.choice.choice([0, 0, 0, *range(RETAINED)]))
    else:
        raise AssertionError("it does not come to an end")
    quiet()
    for version in range(len(rig.history) - 1, -1, -1):
        rig.restart(version)
        rig.table.begin(version)
        rig.take(sorted(rig.model))
        rig.table.seal()


def back(rig: Life, versions: int) -> None:
    """A new process opens the version that lies `versions` behind the last one."""
    for _ in range(200):
        with suppress(Crash, TransientError):
            return rig.restart(max(0, len(rig.history) - 1 - versions))
    raise AssertionError("it cannot be opened")


def tripping(seed: int, folder: Path, quiet: list[bool]) -> FileSystem:
    choice = random.Random(seed * 7919)
    crash, fail = choice.choice([(0.05, 0.0), (0.02, 0.1), (0.0, 0.3), (0.1, 0.1)])

    def decide(step: str) -> str:
        if not quiet and choice.random() < crash:
            return choice.choice(CRASHES)
        if not quiet and choice.random() < (fail if " put " in step else fail / 5):
            return choice.choice(FAILURES)
        return "ok"

    if choice.random() < 0.5:
        return LocalTripwire(LocalFiles(str(folder / "store")), "state", decide, [])
    return Tripwire(open_filesystem(f"memory:{folder}"), "state", decide, [])


def test_lists_survive(tmp_path: Path) -> None:
    lives = 0
    with small(), pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        for seed in range(FIRST, FIRST + EACH):
            folder = tmp_path / str(seed)
            folder.mkdir()
            quiet: list[bool] = []
            files = tripping(seed, folder, quiet)
            choice = random.Random(seed)
            rig = Life(BYTES, files, str(folder), choice.choice([0.0, 0.3, 1.0]), choice=choice)
            try:
                survive(rig, script(seed), lambda: quiet.append(True))  # noqa: B023
            except BaseException:
                print(f"MILLPOND_SEED={seed}")
                raise
            lives += rig.lives
            rig.table.close()
            rig.append_files.close()
    assert EACH < 20 or lives > EACH * (BATCHES + 2)


@pytest.mark.parametrize("where", ["disk", "remote"])
@pytest.mark.parametrize("how", ["flipped", "cut", "removed"])
def test_damage_is_named_or_harmless(tmp_path: Path, how: str, where: str) -> None:
    """One segment of the newest version is damaged: lists are right, or the error names it."""
    outcomes = set()
    with small(), pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        for seed in range(FIRST, FIRST + DAMAGES):
            folder = tmp_path / str(seed)
            folder.mkdir()
            files = open_filesystem(f"{'faults+' if where == 'remote' else ''}{folder}/store")
            choice = random.Random(seed)
            rig = Life(BYTES, files, str(folder), 0.3, choice=choice)
            rig.go_on(script(seed), BATCHES)
            rig.later.finish()
            rig.batch([])  # what is written is taken over
            refs = rig.table.manifest().runs
            if not refs:
                continue
            ref = choice.choice(refs)
            _damage(folder / "store" / ref.name, how, choice)
            try:
                rig.restart(rig.version)
                rig.table.begin(rig.version)
                rig.take(sorted(rig.model))
            except StateDamagedError as error:
                assert error.file, error  # noqa: PT017
                assert os.path.basename(ref.name) in error.file, error  # noqa: PT017
                outcomes.add("named")
            else:
                outcomes.add("harmless")
    assert "named" in outcomes
    assert how == "flipped" or outcomes == {"named"}


def _damage(path: Path, how: str, choice: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
        return
    if how == "cut":
        del content[choice.randrange(len(content)) :]
    else:
        content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
    path.write_bytes(content)
