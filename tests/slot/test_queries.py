"""Running queries are found by the location of their state, however it is spelled."""

import tempfile
from pathlib import Path

import pytest

from millpond.slot.process.identity import identify
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.queries import QueryRecord, find_running_query, record_query, remove_query


@pytest.fixture
def directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SlotDirectory:
    """The slot directory of an application that runs, where `find_running_query` looks."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    directory = SlotDirectory.named(str(folder), "app")
    directory.register(identify())
    return directory


@pytest.mark.parametrize(
    ("recorded", "asked", "found"),
    [
        ("s3a://bucket/state", "s3://bucket/state/", True),
        ("s3://bucket/state", "s3n://bucket/state", True),
        ("s3://bucket/state", "s3://bucket/other", False),
        ("file:{folder}/state", "{folder}/link", True),
        ("{folder}/link/", "file://{folder}/state", True),
        ("{folder}/state", "{folder}/other", False),
    ],
)
def test_a_query_is_found_under_another_spelling_of_its_location(
    directory: SlotDirectory, folder: Path, recorded: str, asked: str, found: bool
) -> None:
    (folder / "state").mkdir()
    (folder / "link").symlink_to(folder / "state")
    record = QueryRecord("key", "run", recorded.format(folder=folder), identify())
    record_query(directory, record)
    running = find_running_query(asked.format(folder=folder))
    assert (running is not None) is found
    if running is not None:
        assert (running[0].path, running[1]) == (directory.path, record)
    remove_query(directory, "key", "run")
    assert find_running_query(record.location) is None
