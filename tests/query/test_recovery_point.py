"""The versions that a start builds on, and the batches that it repeats, after a change of the query's plan."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.checkpoint.generation import claim, generations_with_base, read_base
from millpond.checkpoint.recovery import Recovery
from millpond.errors import StateIncompatibleError
from millpond.files.backends.filesystem import FileSystem
from millpond.query.starting.recovery_point import write_base_and_find_replays
from tests.checkpoint.rig import Slot, memory


def crashed(folder: Path, versions: int) -> FileSystem:
    """A checkpoint with this many durable versions, made by the plan "as before"."""
    files = memory()
    generation = claim(files, run="before", partitions=1)
    Recovery(files, generation, 1).write_base([0], "as before")
    slot = Slot(files, generation.number, folder)
    manifest = slot.open(0, 0)
    for version in range(versions):
        manifest = slot.seal(manifest, b"%d" % version).manifest
    slot.settle()
    slot.die()
    return files


def start(files: FileSystem, plan: str, runs: bool | None, *, planned: int = 1, **options: Any) -> list[int]:
    """Start a query whose batch `planned` is planned and not committed; return the batches that it repeats."""
    generation = claim(files, run="now", partitions=1)
    logs: Any = SimpleNamespace(last_planned=planned, last_committed=planned - 1, next_batch=planned)
    return write_base_and_find_replays(
        Recovery(files, generation, 1), logs, plan, runs_planned=lambda batch: runs, **options
    )


def base(files: FileSystem) -> list[int]:
    """The versions that the newest run builds on."""
    return [version.version for version in read_base(files, generations_with_base(files)[-1]).versions]


@pytest.mark.parametrize(
    ("plan", "runs", "kept"),
    [
        ("as before", True, True),
        ("as before", False, True),
        ("as before", None, True),
        ("another", True, False),  # the sink runs the batch with this plan, which makes other state
        ("another", False, True),  # the sink skips the batch: its rows are those of the plan before
        ("another", None, True),  # the sink may skip it
    ],
)
def test_state_that_another_plan_made_of_a_planned_batch(
    tmp_path: Path, plan: str, runs: bool | None, kept: bool
) -> None:
    files = crashed(tmp_path, 2)
    assert start(files, plan, runs, even_if_changed=False) == []
    assert base(files) == ([1, 2] if kept else [1])


def test_a_planned_batch_that_a_sink_has_is_not_repeated_with_another_plan(tmp_path: Path) -> None:
    files = crashed(tmp_path, 1)
    with pytest.raises(StateIncompatibleError, match=r"Batch 1, which the sink has, .* has changed since") as refused:
        start(files, "another", False, even_if_changed=False)
    assert refused.value.version == 1
    assert base(files) == [0]
    assert start(files, "as before", False, even_if_changed=False) == [1]


@pytest.mark.parametrize("options", [{"even_if_changed": True}, {"even_if_changed": False, "evolves": True}])
def test_a_planned_batch_that_a_sink_has_is_repeated_if_the_user_allows_it(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    files = crashed(tmp_path, 1)
    assert start(files, "another", False, **options) == [1]
    assert base(files) == [1]


def test_the_first_batch_goes_to_the_query_that_starts_next(tmp_path: Path) -> None:
    for runs in (False, None):
        files = crashed(tmp_path, 0)
        assert start(files, "another", runs, planned=0, even_if_changed=False) == [0]


def test_an_interrupted_batch_is_made_with_the_plan_that_starts_next(tmp_path: Path) -> None:
    """Its state is not whole, so a sink that cannot be asked was not given all of its rows."""
    files = crashed(tmp_path, 1)
    assert start(files, "another", None, even_if_changed=False) == [1]
    assert base(files) == [1]
