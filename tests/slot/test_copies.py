"""Local copies that outlive a slot and its application: found again, used by one at a time, gone in the end."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from millpond.files.formats.blocks import sort_rows
from millpond.files.tiers.local_copies import CachedSource
from millpond.slot.partition.copies import KEPT_SECONDS, claim_copies, remove_old_copies
from millpond.slot.partition.partitions import PartitionServer
from millpond.slot.partition.resources import QueryResources
from millpond.stores.runs.run import Run
from millpond.stores.runs.run_set import RunSet
from millpond.tasks.operator_task import OperatorTask
from tests.support.rows import FIXED, random_rows

from .conftest import begin

ROWS = sort_rows(random_rows(50_000, FIXED, 1), FIXED)
Opens = Callable[[OperatorTask, str], QueryResources]


@pytest.fixture
def far(counting: OperatorTask, folder: Path) -> OperatorTask:
    task = msgspec.structs.replace(counting, location=f"faults+file:{folder}/far")
    begin(task)
    return task


@pytest.fixture
def opens(folder: Path) -> Iterator[Opens]:
    """Opens a query in a slot of an application."""
    servers = []

    def make(task: OperatorTask, application: str) -> QueryResources:
        directory = folder / application
        directory.mkdir(exist_ok=True)
        servers.append(PartitionServer(directory))
        return QueryResources(task, servers[-1]._slot_resources(task))

    yield make
    for server in servers:
        server.close()


def mapped(run: Run) -> bool:
    assert isinstance(run.source, CachedSource)
    return run.source.mapped


def found(run: Run) -> int:
    return len(RunSet(FIXED, [run]).lookup(ROWS, np.arange(0, 50_000, 50)).positions)


def test_the_next_application_finds_the_copies(far: OperatorTask, opens: Opens, folder: Path) -> None:
    first = opens(far, "first")
    ref = first.runs.write(ROWS, FIXED).ref
    assert ref is not None
    first.close()
    second = opens(far, "second")
    run = second.runs.open(ref, FIXED)
    before = second.new_figures(1)["gets"]
    assert mapped(run)
    assert found(run) == 1000
    told = second.new_figures(1)
    assert told["gets"] == 0 <= before
    assert told["disk_blocks"] > 0 == told["remote_blocks"]
    second.close()
    assert not list((folder / "second").rglob("*.run"))


def test_a_copy_that_was_damaged_meanwhile_is_not_believed(far: OperatorTask, opens: Opens, folder: Path) -> None:
    first = opens(far, "first")
    ref = first.runs.write(ROWS, FIXED).ref
    assert ref is not None
    other = first.runs.write(sort_rows(random_rows(50_000, FIXED, 2), FIXED), FIXED).ref
    assert other is not None
    third = first.runs.write(ROWS, FIXED).ref
    assert third is not None
    first.close()
    copies = folder / "copies" / far.key / "0"
    path = copies / os.path.basename(ref.name)
    data = bytearray(path.read_bytes())
    data[100_000:500_000] = bytes(400_000)  # as after a power cut
    path.write_bytes(data)
    os.replace(copies / os.path.basename(other.name), copies / os.path.basename(third.name))
    second = opens(far, "second")
    assert found(second.runs.open(ref, FIXED)) == 1000
    assert found(second.runs.open(third, FIXED)) == 1000  # not the rows of the other
    second.close()


def test_who_comes_while_the_folder_is_in_use_goes_without(far: OperatorTask, opens: Opens) -> None:
    first = opens(far, "first")
    ref = first.runs.write(ROWS, FIXED).ref
    assert ref is not None
    second = opens(msgspec.structs.replace(far, settings=msgspec.structs.replace(far.settings, cache_disk=0)), "second")
    run = second.runs.open(ref, FIXED)
    assert not mapped(run)
    assert found(run) == 1000
    second.close()
    first.close()
    third = opens(far, "third")
    assert mapped(third.runs.open(ref, FIXED))
    third.close()


@pytest.mark.parametrize("meanwhile", ["nobody", "somebody"])
def test_a_folder_that_is_deleted_is_taken_again(far: OperatorTask, opens: Opens, folder: Path, meanwhile: str) -> None:
    query = opens(far, "first")
    query.runs.write(ROWS, FIXED)
    shutil.rmtree(folder / "copies")
    other = claim_copies(folder / "copies", far.key, 0) if meanwhile == "somebody" else None
    run = query.runs.write(ROWS, FIXED)
    assert mapped(run)
    assert found(run) == 1000
    copies = [path.relative_to(folder).parts[0] for path in folder.rglob("*.run") if "far" not in path.parts]
    assert copies == ["copies" if other is None else "first"]
    if other is not None:
        other.release()
    else:
        assert claim_copies(folder / "copies", far.key, 0) is None
    query.close()


def test_without_a_disk_copies_of_earlier_runs_go(far: OperatorTask, opens: Opens, folder: Path) -> None:
    first = opens(far, "first")
    first.runs.write(ROWS, FIXED)
    first.close()
    assert list((folder / "copies").rglob("*.run"))
    settings = msgspec.structs.replace(far.settings, cache_disk=0)
    opens(msgspec.structs.replace(far, settings=settings), "second").close()
    assert not list((folder / "copies").rglob("*.run"))


def test_queries_of_a_slot_share_the_free_space(
    far: OperatorTask, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=64_000_000))
    server = PartitionServer(folder)
    resources = server._slot_resources(far)
    first = QueryResources(far, resources)
    first.runs.write(ROWS, FIXED)
    held = first.runs.copies.bytes
    assert held > 0
    assert first.runs.copies.limit == 64_000_000 // (2 * far.slots)
    other = msgspec.structs.replace(far, location=f"{far.location}2")
    begin(other)
    second = QueryResources(other, resources)
    left = 64_000_000 - far.slots * (first.runs.copies.limit - held)
    assert second.runs.copies.limit == left // (2 * far.slots)
    second.close()
    first.close()
    assert resources.unfilled_cache_bytes == 0
    server.close()


def test_state_on_a_disk_has_no_copies(counting: OperatorTask, opens: Opens, folder: Path) -> None:
    query = opens(counting, "first")
    query.runs.write(ROWS, FIXED)
    query.close()
    assert not (folder / "copies").exists()


def test_copies_of_queries_that_are_gone_go(tmp_path: Path) -> None:
    old, used, young = (claim_copies(tmp_path, name, 3) for name in ("old", "used", "young"))
    assert old is not None and used is not None and young is not None  # noqa: PT018
    for folder in (old, used, young):
        (folder.path / "x.run").write_bytes(b"x")
        (folder.path / "y.run.1.2.tmp").write_bytes(b"x")
    (tmp_path / ".removed-1").mkdir()
    old.release()
    young.release()
    long_ago = time.time() - KEPT_SECONDS - 100
    for folder in (old, used):
        os.utime(folder.path / "lock", (long_ago, long_ago))
        os.utime(folder.path, (long_ago, long_ago))
    remove_old_copies(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used", "young"]
    assert (used.path / "x.run").exists()
    assert claim_copies(tmp_path, "used", 3) is None
    again = claim_copies(tmp_path, "young", 3)
    assert again is not None
    assert sorted(path.name for path in again.path.iterdir()) == ["lock", "x.run"]
    new = claim_copies(tmp_path, "old", 3)
    assert new is not None
    assert new.bytes == 0
    for folder in (again, new, used):
        folder.release()


def test_a_place_where_nothing_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert claim_copies(tmp_path / "file", "q", 0) is None
    remove_old_copies(tmp_path / "file")
    remove_old_copies(tmp_path / "none")


def test_a_query_that_cannot_be_opened_leaves_the_folder_to_the_next(
    far: OperatorTask, opens: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("millpond.slot.partition.resources.SealedFiles", Mock(side_effect=OSError("no space left")))
        with pytest.raises(OSError, match="no space left"):
            opens(far, "first")
    query = opens(far, "first")
    assert query._copies is not None
    query.close()
