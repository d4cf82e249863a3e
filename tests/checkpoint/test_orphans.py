"""Garbage that is looked for once, from outside."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millpond.checkpoint.generation import claimed_generations
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.retention.orphans import (
    MAX_UPLOAD_SECONDS,
    MIN_AGE_SECONDS,
    STAGING_AGE_SECONDS,
    Orphans,
    find_orphans,
)
from millpond.errors import FencedError, StateDamagedError
from millpond.files.backends.filesystem import FileInfo
from millpond.files.backends.local import LocalFiles
from millpond.files.backends.uploads import PART_BYTES
from tests.checkpoint.rig import Slot, begin, litter
from tests.checkpoint.test_garbage import Job


def look(job: Job, planned: range, *, since: float = MIN_AGE_SECONDS + 60, files: Any = None) -> Orphans:
    """Look for orphans `since` seconds after all of the batches were planned."""
    at = max(info.modified for info in job.files.list(""))
    return find_orphans(files or job.files, dict.fromkeys(planned, at), now=at + since)


def names(orphans: Orphans) -> list[str]:
    return sorted(info.name for infos in orphans.unneeded.values() for info in infos)


def readable(job: Job, tmp_path: Path, version: int) -> list[bytes]:
    fresh = Slot(job.files, job.generation.number, tmp_path)
    return fresh.read(fresh.open(0, version))


def test_files_that_no_retained_version_names_go(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for name in ("kept", "old", "orphan"):
        job.write_run(name)
    for version in range(10):
        job.batch("kept", "old") if version < 4 else job.batch("kept")
    assert names(look(job, range(10))) == ["files/orphan.run"]
    orphans = look(job, range(5, 10))
    assert "files/old.run" in names(orphans)
    orphans.remove(job.files)
    assert job.names("files/") == ["files/kept.run"]
    assert not names(look(job, range(5, 10)))
    assert not look(job, range(5, 10)).missing


def test_initial_state_goes_once_the_second_batch_is_planned(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.files.put("initial/000000000000001-0.json", [b"{}"])
    job.batch()
    assert not names(look(job, range(1)))
    job.batch()
    assert not names(look(job, range(2), since=MIN_AGE_SECONDS - 60))
    assert names(look(job, range(2))) == ["initial/000000000000001-0.json"]


def test_commits_that_no_retained_version_needs_go(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for _ in range(10):
        job.batch(flushed=job.manifest.version)
    assert not names(look(job, range(10)))
    look(job, range(5, 10)).remove(job.files)
    assert [int(name[8:20]) for name in job.names("commits/")] == [5, 6, 7, 8, 9, 10]
    for version in range(5, 11):
        assert readable(job, tmp_path, version) == [b"delta"]


def test_deltas_that_a_retained_version_reads_stay(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for _ in range(10):
        job.batch(flushed=1)
    look(job, range(7, 10)).remove(job.files)
    assert [int(name[8:20]) for name in job.names("commits/")] == list(range(2, 11))
    assert len(readable(job, tmp_path, 10)) == 9


def test_nothing_goes_within_the_hour(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write_run("orphan")
    for _ in range(10):
        job.batch(flushed=job.manifest.version)
    assert not names(look(job, range(7, 10), since=MIN_AGE_SECONDS - 60))
    assert names(look(job, range(7, 10)))


def test_what_was_retained_an_hour_ago_stays_with_all_that_it_names(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for name in ("old", "orphan"):
        job.write_run(name)
    for version in range(20):
        job.batch("old", flushed=version) if version < 10 else job.batch(flushed=version)
    at = max(info.modified for info in job.files.list(""))
    now, listed, commits = at + 2 * MIN_AGE_SECONDS, job.files.list, job.names("commits/")

    def look_at(planned: dict[int, float], young: int) -> list[str]:
        """Look for orphans when the versions from `young` on were committed a minute ago."""
        times = {name: now - 60 for name in commits if int(name[8:20]) >= young}
        job.files.list = Dated(listed, times)  # type: ignore[method-assign]
        found = names(find_orphans(job.files, planned, now=now))
        assert "files/old.run" not in found
        return [name if name.startswith("files/") else str(int(name[8:20])) for name in found]

    planned = {batch: now - (60 if batch > 13 else MIN_AGE_SECONDS + 60) for batch in range(13, 20)}
    assert look_at(planned, 1) == ["1", "2", "3", "4", "5", "6", "files/orphan.run"]
    # Where all plans that are left are young, commits show which batch ran an hour ago: here batch 11.
    planned = dict.fromkeys(range(15, 20), now - 60)
    assert look_at(planned, 1) == ["files/orphan.run"]
    assert look_at(planned, 13) == ["1", "2", "3", "4", "5", "6", "files/orphan.run"]
    # A run that makes versions again from 8 on has not begun an hour ago: then it was at most batch 6 that ran.
    job.files.list = Dated(listed, {commits[7]: now - 60})  # type: ignore[method-assign]
    found = names(find_orphans(job.files, planned, now=now))
    assert [name for name in found if name.startswith("commits/")] == commits[:1]


def test_a_file_that_the_next_batches_may_name_stays_however_long_the_query_idles(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for _ in range(10):
        job.batch()
    job.write_run("flushed-in-the-background")
    assert not names(look(job, range(7, 10), since=1e6))
    job.batch("flushed-in-the-background")
    assert not names(look(job, range(8, 11), since=1e6))


def test_a_file_that_came_in_parts_may_be_younger_than_its_time(tmp_path: Path) -> None:
    """Some stores give it the time at which its upload began, as if that had been before the batches."""
    job = Job(tmp_path)
    job.files.put("files/long.run", [bytes(PART_BYTES + 1)])
    job.write_run("short")
    for _ in range(10):
        job.batch()
    assert names(look(job, range(10))) == ["files/short.run"]
    listed = job.files.list("files/")
    job.files.list = Dated(job.files.list, {info.name: info.modified - MAX_UPLOAD_SECONDS for info in listed})  # type: ignore[method-assign]
    assert names(look(job, range(10))) == ["files/long.run", "files/short.run"]


@dataclass
class Dated:
    """Lists of a store whose objects have other times."""

    listed: Callable[..., list[FileInfo]]
    times: dict[str, float]

    def __call__(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        found = self.listed(prefix, after=after)
        return [info._replace(modified=self.times.get(info.name, info.modified)) for info in found]


class Meanwhile:
    """Files of a query that goes on while commits are about to be listed."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._inner = job.files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def list(self, prefix: str, *, after: str = "") -> Any:
        if prefix == "commits/":
            self._job.write_run("new")
            self._job.batch("in-flight", "new")
        return self._inner.list(prefix, after=after)


def test_what_a_query_names_meanwhile_is_neither_garbage_nor_missing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for _ in range(10):
        job.batch()
    job.write_run("in-flight")
    orphans = look(job, range(7, 10), since=1e6, files=Meanwhile(job))
    assert not names(orphans)
    assert not orphans.missing
    assert job.names("files/") == ["files/in-flight.run", "files/new.run"]


def test_what_is_needed_and_not_there_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for name in ("early", "late"):
        job.write_run(name)
    for version in range(10):
        job.batch("early") if version < 4 else job.batch("late", flushed=version)
    job.files.delete("files/late.run")
    job.files.delete("files/early.run")
    gone = next(name for name in job.names("commits/") if int(name[8:20]) == 2)
    job.files.delete(gone)
    assert look(job, range(10)).missing == {gone: 4, "files/early.run": 4, "files/late.run": 10}
    assert look(job, range(6, 10)).missing == {"files/late.run": 10}


class Shared:
    """The files of a fork: listings do not have what its parent wrote, and asking for it is a request."""

    def __init__(self, files: Any, of_parent: str) -> None:
        self._files, self._of_parent, self.asked = files, of_parent, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def list(self, prefix: str, **arguments: Any) -> list[FileInfo]:
        return [info for info in self._files.list(prefix, **arguments) if info.name != self._of_parent]

    def exists(self, name: str) -> bool:
        self.asked += name == self._of_parent
        return bool(self._files.exists(name))


def test_a_file_of_the_parent_that_many_versions_need_is_asked_for_once(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write_run("old")
    for _ in range(10):
        job.batch("old")
    shared = Shared(job.files, "files/old.run")
    assert look(job, range(10), files=shared).missing == {}
    assert shared.asked == 1


def test_nothing_is_known_when_a_retained_commit_cannot_be_read(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for _ in range(5):
        job.batch()
    name = job.names("commits/")[2]
    job.files.put(name, [bytes(job.files.get(name))[:50]])
    with pytest.raises(StateDamagedError, match="cut short"):
        look(job, range(5))


def test_files_that_were_never_finished_go_after_a_day(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.files.put("staging/left-by-a-dead-writer", [b"half"])
    assert not names(look(job, range(1), since=STAGING_AGE_SECONDS - 60))
    assert names(look(job, range(1), since=STAGING_AGE_SECONDS + 60)) == ["staging/left-by-a-dead-writer"]


def test_a_file_is_as_old_as_it_has_its_name(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    staged = Path(files.new_staging_path())
    staged.write_bytes(b"run")
    os.utime(staged, (1_000_000, 1_000_000))
    files.publish(str(staged), "files/slow.run")
    assert files.list("files/")[0].modified > 1_000_000


def runs_again(job: Job, tmp_path: Path, batches: int = 1) -> int:
    """The next run of a query, as short as it is; its generation."""
    job.generation, _ = begin(job.files, partitions=1)
    job.slot = Slot(job.files, job.generation.number, tmp_path)
    job.manifest = job.slot.open(0, job.manifest.version)
    for _ in range(batches):
        job.batch(flushed=job.manifest.version)
    return job.generation.number


def test_generations_stay_by_which_retained_versions_are_read(tmp_path: Path) -> None:
    job = Job(tmp_path)
    first = job.generation.number
    for _ in range(4):
        job.batch(flushed=job.manifest.version)
    made = [runs_again(job, tmp_path) for _ in range(20)]  # each makes a version, from 5 on
    look(job, range(4, 25)).remove(job.files)
    assert claimed_generations(job.files) == [first, *made], "version 4 is of the first run"
    look(job, range(8, 29)).remove(job.files)
    assert claimed_generations(job.files) == made[3:]
    recovery = Recovery(job.files)
    assert all(recovery.durable(version) for version in range(8, 25))
    look(job, range(20, 24)).remove(job.files)
    assert claimed_generations(job.files) == made[-16:]
    assert Recovery(job.files).newest() == 24


def test_the_last_generations_stay_and_older_runs_are_fenced(tmp_path: Path) -> None:
    job = Job(tmp_path)
    old = job.slot
    for _ in range(20):
        runs_again(job, tmp_path, batches=0)
    job.batch()
    assert not names(look(job, range(1), since=MIN_AGE_SECONDS - 60))
    orphans = look(job, range(1))
    (infos,) = [infos for infos in orphans.unneeded.values() if infos]
    marks = [info.name.endswith(".fenced") for info in infos]
    assert marks == sorted(marks), "a mark goes after its claim"
    orphans.remove(job.files)
    assert len(job.names("generations/")) == 16 + 16 + 15  # claims, bases, and marks of all but the newest
    with pytest.raises(FencedError):
        old.checkpoint.check_fence()


def test_foreign_files_beside_the_commits_are_no_orphans(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for version in range(10):
        job.batch(flushed=version)
    before = names(look(job, range(5, 10)))
    assert before
    litter(job.files)
    assert names(look(job, range(5, 10))) == before
