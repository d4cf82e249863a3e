"""Forks with real operators, stores and files: both queries go on, each with its own rows."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.checkpoint.forks.parents import read_parents
from millpond.checkpoint.forks.pins import read_pins
from millpond.checkpoint.recovery import Recovery
from millpond.errors import MillpondError, StateDamagedError
from millpond.files.locations.forked import parse_shared
from millpond.query.checkpoints.fork import fork
from millpond.state_reader.reader import StateReader
from millpond.stores import delta_backlog

from .test_damage import Counts, rows_of
from .test_state_command import age, state

__all__ = ["state"]

BATCHES = 8
LONG_AGO = 30 * 86400.0


class Other(Counts):
    """The fork: from where it was made it gets rows of its own."""

    def rows(self, batch: int) -> dict[int, int]:
        return rows_of(batch if batch < BATCHES else batch + 100)


@pytest.fixture(autouse=True)
def _many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_backlog, "_MAX_DELTAS", 2)


@pytest.fixture(params=["", "faults+"], ids=["local", "remote"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def original(tmp_path: Path, scheme: str) -> Path:
    folder = tmp_path / "original"
    folder.mkdir()
    for batches in (BATCHES - 3, BATCHES):
        Counts(folder, scheme).through(batches)
    (folder / "metadata").write_text('{"id":"7c1d9a35-6f7e-4f0f-9d53-6d0a3a3f4a52"}')
    return folder


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return tmp_path / "new"


def shared(location: str) -> set[str]:
    """Files of parents in the newest version."""
    reader = StateReader(location)
    recovery = Recovery(reader.files)
    tables = [table for one in recovery.manifests(recovery.newest()) for table in one.tables.values()]
    names = [run.name for table in tables for run in table.runs.runs]
    names += [delta.commit for table in tables for delta in table.deltas]
    return {name for name in names if parse_shared(name)}


def retain(folder: Path, batches: int = 3) -> None:
    """As if Spark retained so few, and all that there is were old."""
    for log in ("offsets", "commits"):
        entries = sorted(int(path.name) for path in (folder / log).iterdir())
        for batch in entries[: -batches - 1]:
            (folder / log / str(batch)).unlink()
    for path in folder.rglob("*"):
        age(path, LONG_AGO)


def verified(state: Callable[..., tuple], location: str) -> str:
    code, lines = state("verify", location)
    assert code == 0, lines
    return str(lines[-1])


def test_both_go_on_from_one_state(original: Path, new: Path, scheme: str, state: Callable[..., tuple]) -> None:
    locations = [f"{scheme}{folder}" for folder in (original, new)]
    code, lines = state("fork", *locations)
    assert code == 0
    assert f"version {BATCHES}, 2 partitions, " in lines[-1]
    assert verified(state, locations[0]) == verified(state, locations[1])
    assert {name.split("/")[2] for name in shared(locations[1])} == {"commits", "files"}
    assert not list((new / "millpond").glob("files/*"))
    Counts(original, scheme).through(BATCHES + 3)
    Other(new, scheme).through(BATCHES + 5)
    Counts(original, scheme).through(BATCHES + 12)
    for folder, location in zip((original, new), locations, strict=True):
        retain(folder)
        code, lines = state("gc", location)
        assert code == 0, lines
    code, lines = state("gc", locations[0])
    assert any(f"kept for {StateReader(locations[1]).files.url}" in line for line in lines) == bool(
        read_pins(StateReader(locations[0]).files)
    )
    for location in locations:
        verified(state, location)
    Counts(original, scheme).through(BATCHES + 14)
    Other(new, scheme).through(BATCHES + 14)


def test_a_fork_parts_from_what_is_deleted_then(
    original: Path, new: Path, scheme: str, state: Callable[..., tuple]
) -> None:
    locations = [f"{scheme}{folder}" for folder in (original, new)]
    fork(*locations)
    batches = BATCHES
    assert shared(locations[1])
    known = read_parents(StateReader(locations[1]).files)
    assert known is not None
    code, lines = state("gc", locations[1])
    assert code == 0
    assert lines[-1] == f"{len(shared(locations[1]))} objects of {known.parents[0].location} still needed"
    while shared(locations[1]):
        batches += 8
        assert batches < 200, shared(locations[1])
        Other(new, scheme).through(batches)
    Other(new, scheme).through(batches + 4)
    retain(new)
    code, lines = state("gc", locations[1])
    assert code == 0
    assert not any("still needed" in line for line in lines)
    assert any(line.startswith("nothing of ") and str(original) in line for line in lines)
    assert not read_pins(StateReader(locations[0]).files)
    Counts(original, scheme).through(BATCHES + 4)
    retain(original)
    assert state("gc", locations[0])[0] == 0
    verified(state, locations[0])
    shutil.rmtree(original)
    verified(state, locations[1])
    Other(new, scheme).through(batches + 8)


def test_a_parent_that_is_gone_is_named(original: Path, new: Path, scheme: str, state: Callable[..., tuple]) -> None:
    locations = [f"{scheme}{folder}" for folder in (original, new)]
    fork(*locations)
    known = read_parents(StateReader(locations[1]).files)
    assert known is not None
    shutil.rmtree(original)
    code, lines = state("gc", locations[1])
    assert code == 1
    assert any(f"from which {StateReader(locations[1]).files.url} was forked" in line for line in lines)
    with pytest.raises(StateDamagedError) as raised:
        Other(new, scheme).through(BATCHES + 1)
    assert str(original) in str(raised.value)
    assert str(new) in str(raised.value)


def test_a_fork_is_refused_where_there_is_something(original: Path, new: Path, state: Callable[..., tuple]) -> None:
    new.mkdir()
    (new / "notes.txt").write_text("mine")
    code, (told,) = state("fork", original, new)
    assert code == 1
    assert told.startswith("[USAGE] There is something here already")
    assert not list((original / "millpond").glob("forks/*"))


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    folder = tmp_path / "fresh"
    folder.mkdir()
    return folder


def test_a_put_that_a_client_sends_twice_is_its_own(original: Path, new: Path, state: Callable[..., tuple]) -> None:
    made = fork(str(original), f"faults+{new}?repeat=1")
    assert StateReader(str(new)).versions() == [made.version]
    assert (new / "metadata").exists()


def test_what_has_not_run_is_not_forked(fresh: Path, new: Path) -> None:
    with pytest.raises(MillpondError, match="no offset log"):
        fork(str(fresh), str(new))
    assert not new.exists()
