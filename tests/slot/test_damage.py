"""A checkpoint with any one of its files cut short or altered: the next start names a file, or its rows are right.

Elsewhere: sealed files (`checkpoint/test_sealed.py`), local copies of runs (`stores/test_run_store.py`).
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.errors import StateDamagedError
from millpond.slot.process.messages import RunBatch
from millpond.stores import delta_backlog
from tests.support.application import Application

from .conftest import GROUPED, TIME, grouped, table_of

PARTITIONS = 2
BATCHES = 7
"""Batches that Spark has committed; one more is planned."""
SEEDS = range(12)

KINDS = {
    "query": "millpond/query.json",
    "claim": "millpond/generations/???????????????.json",
    "base": "millpond/generations/*.base.json",
    "commit": "millpond/commits/*",
    "run": "millpond/files/*.run",
    "journal": "millpond/rolled-back/pending-*.json",
}


def rows_of(batch: int) -> dict[int, int]:
    """Keys and values: some keys come in every batch, others in one."""
    return {**{key: key + batch for key in range(40)}, 1000 + batch: batch}


class Counts(Application):
    """Counts and sums by key."""

    def __init__(self, folder: Path, scheme: str = "") -> None:
        super().__init__(folder, GROUPED, PARTITIONS, scheme)

    def planned(self, batch: int) -> bytes:
        return b"offsets %d" % batch

    def rows(self, batch: int) -> dict[int, int]:
        """The rows of a batch."""
        return rows_of(batch)

    def expected(self, batch: int) -> dict[int, tuple[int, int]]:
        """Rows that a batch must emit: for each of its keys count and sum so far."""
        so_far = [self.rows(earlier) for earlier in range(batch + 1)]
        return {
            key: (sum(key in rows for rows in so_far), sum(rows.get(key, 0) for rows in so_far))
            for key in self.rows(batch)
        }

    def run(self, batch: int) -> None:
        assert self.server is not None
        output: dict[int, tuple[int, ...]] = {}
        for partition in range(PARTITIONS):
            own = {key: value for key, value in self.rows(batch).items() if key % PARTITIONS == partition}
            piece = grouped(partition, list(own), list(own.values()), partitions=PARTITIONS, time=TIME + batch)
            output |= table_of(self.server.run(RunBatch(self.task, partition, batch, 0), iter([piece])))
        assert output == self.expected(batch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three runs; the third was killed in the middle of a replay."""
    folder = tmp_path_factory.mktemp("history")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_backlog, "_MAX_DELTAS", 2)
        for batches in (BATCHES - 3, BATCHES):
            Counts(folder).through(batches)
        dead = folder.with_name("dead")
        application = Counts(folder)
        application.start()
        application.query_logs.put("offsets", BATCHES, b"offsets %d" % BATCHES)
        application.run(BATCHES)
        application.close()  # nothing comes or goes below what is copied
        with application.roll_back.replaying(BATCHES - 1):
            shutil.copytree(folder, dead)
    return dead


def damage(path: Path, choice: random.Random) -> None:
    """Cut a file short, or flip some of its bits."""
    content = bytearray(path.read_bytes())
    if choice.random() < 0.4:
        del content[choice.randrange(len(content)) :]
    else:
        for _ in range(choice.randint(1, 3)):
            content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
    path.write_bytes(content)


@pytest.mark.parametrize("scheme", ["", "faults+"], ids=["local", "remote"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_named_or_harmless(checkpoint: Path, tmp_path: Path, kind: str, scheme: str) -> None:
    outcomes = set()
    for seed in SEEDS:
        choice = random.Random(seed)
        folder = tmp_path / str(seed)
        shutil.copytree(checkpoint, folder)
        victims = sorted(path for path in folder.glob(KINDS[kind]) if kind != "claim" or ".base" not in path.name)
        damage(choice.choice(victims), choice)
        application = Counts(folder, scheme)
        try:
            application.through(BATCHES + 2)
        except StateDamagedError as error:
            assert error.file, error  # noqa: PT017
            outcomes.add("named")
        else:
            assert application.query_logs.read("commits", BATCHES - 1) == b"commit %d" % (BATCHES - 1)
            assert application.query_logs.read("offsets", BATCHES) == b"offsets %d" % BATCHES
            outcomes.add("harmless")
    assert "named" in outcomes


def test_the_same_checkpoint_whole(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    shutil.copytree(checkpoint, folder)
    Counts(folder).through(BATCHES + 2)
    assert all(any(folder.glob(pattern)) for kind, pattern in KINDS.items() if kind != "journal")
