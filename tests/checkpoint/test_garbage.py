import pytest

from millpond.checkpoint.formats.manifest import seal
from millpond.checkpoint.generation import claim
from millpond.checkpoint.retention.collector import Collector
from millpond.checkpoint.retention.needs import IN_FLIGHT_BATCHES
from millpond.errors import FencedError, StateDamagedError
from millpond.files.refs import RunRef, TableManifest
from tests.checkpoint.rig import Slot, begin, litter, memory


class Clock:
    """The store's time cannot be set, so everything else moves against it."""

    def __init__(self, files):
        self.now = max((info.modified for info in files.list("")), default=0.0)

    def __call__(self):
        return self.now


class Job:
    """One partition; the delta of each version is flushed into a run two versions later."""

    def __init__(self, tmp_path):
        self.files = memory()
        self.generation, _ = begin(self.files, partitions=1)
        self.slot = Slot(self.files, self.generation.number, tmp_path)
        self.manifest = self.slot.open(0, 0)
        self.clock = Clock(self.files)

    def batch(self, *runs, flushed=0):
        refs = tuple(RunRef(f"files/{name}.run", 1, 1, 0, 1) for name in runs)
        tables = {"main": (TableManifest(refs, flushed), [b"delta"])}
        sealed = self.slot.sealed.write(
            seal(self.manifest, tables, input_checksum=self.manifest.version, input_rows=1), self.generation.number
        )
        self.slot.committer.submit(sealed)
        self.slot.settle()
        self.manifest = sealed.manifest

    def write_run(self, name):
        self.files.put(f"files/{name}.run", [b"run"])

    def collector(self, **options):
        defaults = {"retain": 2, "grace": 60, "clock": self.clock, "elapsed": self.clock}
        return Collector(self.files, self.generation.number, **defaults | options)

    def settled(self, running, **options):
        """A collector to which all files that are there have been known for some batches."""
        collector = self.collector(**options)
        for _ in range(2):
            collector.collect(running - IN_FLIGHT_BATCHES)
        return collector

    def names(self, folder):
        return [info.name for info in self.files.list(folder)]


def twice(job, collector, running):
    collector.collect(running)
    job.clock.now += 61
    return collector.collect(running)


def test_a_clock_that_is_set_forward_shortens_no_grace(tmp_path):
    job = Job(tmp_path)
    for _ in range(10):
        job.batch(flushed=job.manifest.version)
    now = [1e9]
    collector = job.collector(clock=lambda: now[0])
    collector.collect(9)
    now[0] += 30 * 86400
    assert not collector.collect(9).objects
    job.clock.now += 61
    assert collector.collect(9).objects


def test_old_versions_go_and_the_last_ones_stay(tmp_path):
    job = Job(tmp_path)
    for _ in range(10):
        job.batch(flushed=job.manifest.version)
    removed = twice(job, job.collector(), running=9)
    assert removed.objects == 5
    assert [int(name[8:20]) for name in job.names("commits/")] == [6, 7, 8, 9, 10]
    fresh = Slot(job.files, job.generation.number, tmp_path)
    for version in (8, 9, 10):
        assert fresh.read(fresh.open(0, version)) == [b"delta"]


def test_nothing_goes_while_a_retained_commit_is_damaged(tmp_path):
    job = Job(tmp_path)
    for name in ("of-it", "orphan"):
        job.write_run(name)
    for version in range(10):
        job.batch("of-it") if version == 7 else job.batch(flushed=version)
    collector, before = job.settled(9), job.names("")
    (name,) = [name for name in job.names("commits/") if int(name[8:20]) == 8]
    whole = job.files.get(name)
    job.files.put(name, [whole[:50]])
    with pytest.raises(StateDamagedError, match="cut short"):
        twice(job, job.collector(), running=9)
    assert job.names("") == before
    job.files.put(name, [whole])  # from a backup, say
    assert twice(job, collector, running=9).objects
    assert job.names("files/") == ["files/of-it.run"]


def test_retained_batches_stay(tmp_path):
    job = Job(tmp_path)
    for _ in range(10):
        job.batch(flushed=job.manifest.version)
    assert twice(job, job.collector(retain=100), running=9).objects == 0
    assert twice(job, job.collector(retain=6), running=9).objects == 2


def test_what_spark_s_ledger_goes_back_to_stays(tmp_path):
    job = Job(tmp_path)
    for _ in range(10):
        job.batch(flushed=job.manifest.version)
    collector = job.collector()
    collector.collect(9, 4)
    job.clock.now += 61
    assert collector.collect(9, 4).objects == 3
    assert [int(name[8:20]) for name in job.names("commits/")] == list(range(4, 11))


def test_deltas_that_a_manifest_names_stay(tmp_path):
    job = Job(tmp_path)
    for _ in range(10):
        job.batch(flushed=1)
    twice(job, job.collector(), running=9)
    assert [int(name[8:20]) for name in job.names("commits/")] == list(range(2, 11))
    fresh = Slot(job.files, job.generation.number, tmp_path)
    assert len(fresh.read(fresh.open(0, 10))) == 9


def test_runs_go_when_no_retained_manifest_names_them(tmp_path):
    job = Job(tmp_path)
    for name in ("old", "kept", "orphan"):
        job.write_run(name)
    for version in range(12):
        job.batch("kept", "old") if version < 5 else job.batch("kept")
    twice(job, job.settled(6), running=6)
    assert job.names("files/") == ["files/kept.run", "files/old.run"]
    twice(job, job.settled(11), running=11)
    assert job.names("files/") == ["files/kept.run"]


def test_run_that_no_manifest_names_yet_stays_however_long_the_query_idles(tmp_path):
    job = Job(tmp_path)
    for _ in range(10):
        job.batch()
    job.write_run("flushed-in-the-background")
    job.clock.now += 1e6
    twice(job, job.collector(), running=10)
    assert job.names("files/") == ["files/flushed-in-the-background.run"]
    job.batch("flushed-in-the-background")
    twice(job, job.collector(), running=11)
    assert job.names("files/") == ["files/flushed-in-the-background.run"]


def test_a_file_that_was_sent_for_long_stays_until_a_version_can_name_it(tmp_path, monkeypatch):
    """Some stores give what came in parts the time at which its upload began."""
    job = Job(tmp_path)
    job.write_run("merged")
    for _ in range(10):
        job.batch()
    listed = job.files.list
    with monkeypatch.context() as patch:  # while it is being sent it is not there
        patch.setattr(
            job.files, "list", lambda *at, **more: [one for one in listed(*at, **more) if "merged" not in one.name]
        )
        collector = job.collector()
        collector.collect(10)
    for running in (10, 10, 11, 12):  # it was there while batch 10 ran: version 12 may name it
        job.clock.now += 61
        collector.collect(running)
    assert job.names("files/") == ["files/merged.run"]
    job.batch()
    job.batch("merged")
    for running in (13, 14):
        job.clock.now += 61
        collector.collect(running)
    assert job.names("files/") == ["files/merged.run"]


def test_a_file_goes_once_no_version_can_name_it(tmp_path):
    job = Job(tmp_path)
    job.write_run("orphan")
    for _ in range(14):
        job.batch()
    collector = job.collector()
    for running in (10, 10, 12, 12):
        collector.collect(running)
        job.clock.now += 61
    assert job.names("files/") == ["files/orphan.run"]
    collector.collect(13)
    job.clock.now += 61
    collector.collect(13)
    assert not job.names("files/")


def test_nothing_goes_before_the_grace_period(tmp_path):
    job = Job(tmp_path)
    for _ in range(10):
        job.batch(flushed=job.manifest.version)
    collector = job.collector()
    assert collector.collect(9).objects == 0
    job.clock.now += 59
    assert collector.collect(9).objects == 0
    job.clock.now += 2
    assert collector.collect(9).objects == 5


def test_fenced_run_deletes_nothing(tmp_path):
    job = Job(tmp_path)
    for _ in range(10):
        job.batch(flushed=job.manifest.version)
    collector = job.collector()
    collector.collect(9)
    claim(job.files, run="newer", partitions=1)
    job.clock.now += 61
    with pytest.raises(FencedError):
        collector.collect(9)
    assert len(job.names("commits/")) == 10


def test_what_was_set_aside_stays_for_a_week(tmp_path):
    job = Job(tmp_path)
    job.files.put("rolled-back/batch-3.json", [b"{}"])
    job.files.put("staging/left-by-a-dead-writer", [b"half"])
    collector = job.collector()
    job.clock.now += 6 * 86400
    assert collector.collect(1).objects == 0
    job.clock.now += 2 * 86400
    assert collector.collect(1).objects == 2


def test_foreign_files_beside_the_commits_stay_and_stop_nothing(tmp_path):
    job = Job(tmp_path)
    for _ in range(10):
        job.batch(flushed=job.manifest.version)
    foreign = litter(job.files)
    assert twice(job, job.collector(), running=9).objects == 5
    left = job.names("commits/")
    assert set(foreign) < set(left)
    assert len(left) == len(foreign) + 5
