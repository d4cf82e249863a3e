"""Garbage collection of requests to compactors and of the files that compactors make."""

from __future__ import annotations

from pathlib import Path

from millpond.checkpoint.compaction.requests import (
    CLOCK_MARGIN_SECONDS,
    MAX_WAIT_SECONDS,
    Request,
    claim_lease,
    list_requests,
    put_request,
    release_lease,
    remove_request,
    request_name,
    request_of_file,
)
from millpond.checkpoint.generation import claim
from tests.checkpoint.test_garbage import Job, twice
from tests.checkpoint.test_orphans import look, names


def ask(job: Job, identity: str) -> int:
    number = job.generation.number
    put_request(job.files, Request(identity, number, b""))
    claim_lease(job.files, number, identity, 1, "worker")
    job.write_run(f"{identity}-result")
    return number


def test_a_result_stays_as_long_as_its_request(tmp_path: Path) -> None:
    job = Job(tmp_path)
    number = ask(job, "one")
    job.write_run("orphan")
    assert request_of_file("files/one-result.run") == "one"
    for _ in range(10):
        job.batch(flushed=job.manifest.version)
    twice(job, job.settled(9), running=9)
    assert job.names("files/") == ["files/one-result.run"]
    assert list_requests(job.files)["one"].lease == 1
    remove_request(job.files, number, "one")
    assert not job.names("compaction/")
    twice(job, job.settled(9), running=9)
    assert not job.names("files/")


def test_a_result_that_is_named_meanwhile_stays(tmp_path: Path) -> None:
    """The slot names it and withdraws its request while a collection is under way."""
    job = Job(tmp_path)
    number = ask(job, "one")
    for _ in range(10):
        job.batch(flushed=job.manifest.version)
    collector = job.collector(grace=0)
    listed = job.files.list

    class Files:
        def __getattr__(self, name: str) -> object:
            return getattr(job.files, name)

        def list(self, prefix: str, *, after: str = "") -> object:
            if prefix == "commits/":
                job.batch("one-result")
                remove_request(job.files, number, "one")
            return listed(prefix, after=after)

    collector.files = Files()  # type: ignore[assignment]
    collector.collect(9)
    assert job.names("files/") == ["files/one-result.run"]


def test_requests_of_older_runs_go(tmp_path: Path) -> None:
    job = Job(tmp_path)
    ask(job, "old")
    for _ in range(10):
        job.batch(flushed=job.manifest.version)
    older, job.generation = job.generation, claim(job.files, run="newer", partitions=1, key_groups=64)
    ask(job, "new")
    found = names(look(job, range(5, 10)))
    assert "files/old-result.run" in found
    assert not any("new" in name for name in found)
    assert request_name(older.number, "old") in found
    twice(job, job.settled(9), running=9)
    assert [request_of_file(name) for name in job.names("files/")] == ["new"]
    assert set(list_requests(job.files)) == {"new"}


def test_what_a_dead_slot_has_asked_goes_when_no_version_can_name_it(tmp_path: Path) -> None:
    job = Job(tmp_path)
    ask(job, "one")
    for _ in range(20):
        job.batch(flushed=job.manifest.version)
    collector = job.collector()
    twice(job, collector, running=12)
    job.clock.now += MAX_WAIT_SECONDS + CLOCK_MARGIN_SECONDS
    twice(job, collector, running=12)
    twice(job, collector, running=17)  # the oldest version that may be opened is 14
    assert set(list_requests(job.files)) == {"one"}
    twice(job, collector, running=18)
    assert not job.names("compaction/")
    twice(job, collector, running=18)
    assert not job.names("files/")


def test_a_lease_that_is_given_up_is_free_until_the_next(tmp_path: Path) -> None:
    job = Job(tmp_path)
    number = ask(job, "one")
    assert list_requests(job.files)["one"].leased
    claim_lease(job.files, number, "one", 2, "worker")
    release_lease(job.files, number, "one", 1, "worker")  # by one that had another since
    assert list_requests(job.files)["one"].leased
    release_lease(job.files, number, "one", 2, "worker")
    assert not list_requests(job.files)["one"].leased
    claim_lease(job.files, number, "one", 3, "other")
    known = list_requests(job.files)["one"]
    assert known.leased
    assert (known.lease, known.released, len(known.replies)) == (3, 2, 5)
    remove_request(job.files, number, "one")
    assert not job.names("compaction/")
