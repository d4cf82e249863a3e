"""Spark's ledger as Millpond reads and mends it."""

from pathlib import Path

import pytest

from millpond.files.filesystem import open_filesystem
from millpond.query.ledger import Ledger

UNFINISHED = [
    ".0.1b671a64-40d5-491e-99b0-da01ff1f3341.tmp",
    "..0.1b671a64-40d5-491e-99b0-da01ff1f3341.tmp.crc",
]
OTHERS = ["0.tmp", ".0.tmp", "notes.txt", ".x.1b671a64-40d5-491e-99b0-da01ff1f3341.tmp"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for log in ("offsets", "commits"):
        (tmp_path / log).mkdir()
        for name in UNFINISHED + OTHERS:
            (tmp_path / log / name).touch()
    return tmp_path


def left(checkpoint: Path) -> set[str]:
    return {f"{path.parent.name}/{path.name}" for path in checkpoint.glob("*/*")}


def test_unfinished_first_entries_are_forgotten(checkpoint: Path) -> None:
    Ledger(open_filesystem(str(checkpoint))).forget_interrupted_start()
    assert left(checkpoint) == {f"{log}/{name}" for log in ("offsets", "commits") for name in OTHERS}


def test_nothing_is_touched_once_a_batch_was_planned(checkpoint: Path) -> None:
    (checkpoint / "offsets/0").touch()
    before = left(checkpoint)
    Ledger(open_filesystem(str(checkpoint))).forget_interrupted_start()
    assert left(checkpoint) == before


def test_a_new_checkpoint_has_no_logs(tmp_path: Path) -> None:
    Ledger(open_filesystem(str(tmp_path))).forget_interrupted_start()
    assert not list(tmp_path.iterdir())
