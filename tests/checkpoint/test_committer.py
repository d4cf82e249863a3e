import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from millpond.checkpoint.formats.commit import read_header
from millpond.checkpoint.formats.manifest import seal_again
from millpond.checkpoint.generation import claim
from millpond.errors import FencedError, TransientError
from millpond.files.backends.filesystem import AlreadyExistsError
from millpond.files.locations.faults import Faults, FaultyFiles
from tests.checkpoint.rig import Slot, begin, memory


class Intercepted:
    """Passes everything on to `inner`; `on_put` is called around each put of a commit."""

    def __init__(self, inner, on_put):
        self._inner = inner
        self._on_put = on_put

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def put(self, name, data, *, create=False, sync=True):
        if name.startswith("commits/"):
            self._on_put(lambda: self._inner.put(name, data, create=create, sync=sync), name)
        else:
            self._inner.put(name, data, create=create, sync=sync)


def slot_on(tmp_path, on_put, **options):
    files = memory()
    generation, _ = begin(files, partitions=4)
    threaded = options.pop("threaded", True)
    slot = Slot(Intercepted(files, on_put), generation.number, tmp_path, threaded=threaded, options=options)
    return files, slot


def test_what_is_sealed_goes_into_one_object_per_version(tmp_path):
    files, slot = slot_on(tmp_path, lambda put, name: put(), threaded=False)
    for partition in (0, 1, 2):
        first = slot.seal(slot.open(partition, 0), b"a")
        slot.seal(first.manifest, b"b")
    slot.settle()
    names = [info.name for info in files.list("commits/")]
    assert [len(read_header(files, name).manifests) for name in names] == [3, 3]
    assert slot.committer.stats.commits == 2


def test_what_is_much_goes_into_several_objects(tmp_path, monkeypatch):
    monkeypatch.setattr("millpond.checkpoint.committer.MAX_SHARED_COMMIT_BYTES", 10)
    files, slot = slot_on(tmp_path, lambda put, name: put(), threaded=False)
    for partition, size in enumerate((4, 6, 30, 10)):
        slot.seal(slot.open(partition, 0), b"x" * size)
    slot.settle()
    names = [info.name for info in files.list("commits/")]
    assert [[one.partition for one in read_header(files, name).manifests] for name in names] == [[0, 1], [2], [3]]
    fresh = Slot(files, slot.generation, tmp_path)
    assert [len(fresh.read(fresh.open(partition, 1))[0]) for partition in range(4)] == [4, 6, 30, 10]


def test_the_group_waits_for_nobody(tmp_path):
    # While one put is under way others are sealed; they go together into the next.
    gate, started = threading.Event(), threading.Event()

    def on_put(put, name):
        started.set()
        gate.wait(120)
        put()

    files, slot = slot_on(tmp_path, on_put)
    slot.seal(slot.open(0, 0), b"a")
    assert started.wait(60)
    for partition in (1, 2, 3):
        slot.seal(slot.open(partition, 0), b"a")
    gate.set()
    slot.committer.drain(60)
    sizes = sorted(len(read_header(files, info.name).manifests) for info in files.list("commits/"))
    assert sizes == [1, 3]


class Held:
    """Two partitions of a slot, their first version committed: the slot knows what belongs to the next one."""

    def __init__(self, tmp_path, **options):
        self.files, self.slot = slot_on(tmp_path, lambda put, name: put(), **options)
        self.last = [self.slot.seal(self.slot.open(partition, 0), b"a").manifest for partition in (0, 1)]
        self.slot.committer.drain(60)

    def seal(self, partition):
        self.last[partition] = self.slot.seal(self.last[partition], b"b").manifest

    def commits(self, version):
        """How many manifests each commit of a version has."""
        names = [info.name for info in self.files.list(f"commits/{version:012d}-")]
        return [len(read_header(self.files, name).manifests) for name in names]

    def wait_for(self, version, commits):
        deadline = time.monotonic() + 50  # less than `hold`
        while self.commits(version) != commits:
            assert time.monotonic() < deadline, self.commits(version)
            time.sleep(0.01)


def test_a_version_is_held_until_all_partitions_of_the_slot_have_it(tmp_path):
    held = Held(tmp_path, hold=60)
    held.seal(0)
    time.sleep(0.2)
    assert held.commits(2) == []
    held.seal(1)
    held.wait_for(2, [2])


def test_nobody_waits_for_what_is_held(tmp_path):
    held = Held(tmp_path, hold=60)
    held.seal(0)
    held.slot.committer.wait_durable(0, 0, 1, timeout=60)  # it is durable, and says nothing of the next one
    assert held.commits(2) == []
    held.slot.committer.wait_durable(0, 0, 2, timeout=60)
    assert held.commits(2) == [1]


def test_a_partition_that_went_elsewhere_is_not_waited_for(tmp_path):
    held = Held(tmp_path, hold=60)
    held.seal(0)
    held.slot.committer.release(1)
    time.sleep(0.2)
    assert held.commits(2) == []
    held.slot.committer.release(2)  # the next batch has begun, so this one is over
    held.wait_for(2, [1])
    held.seal(0)
    held.wait_for(3, [1])


def test_what_is_held_is_committed_after_a_while(tmp_path):
    held = Held(tmp_path, hold=0.2)
    held.seal(0)
    held.wait_for(2, [1])


def test_a_commit_that_failed_says_why_and_where(tmp_path):
    """The store's own error, not where the store might be set."""

    def full(put, name):
        raise TransientError(
            "The disk failed: no space.", action="Free some space on the disk of /d.", file="file:/d/x"
        )

    _, slot = slot_on(tmp_path, full)
    slot.seal(slot.open(0, 0), b"a")
    slot.committer.step()
    with pytest.raises(TransientError) as failed:
        slot.committer.wait_durable(0, 0, 1, timeout=0.05)
    assert re.fullmatch(r"A commit is not durable after [\d.]+ s: The disk failed: no space\.", failed.value.message)
    assert failed.value.action == "Free some space on the disk of /d. Then restart the query."
    assert failed.value.file == "file:/d/x"


def test_acknowledged_only_after_the_put(tmp_path):
    gate = threading.Event()
    _, slot = slot_on(tmp_path, lambda put, name: (gate.wait(120), put()))
    slot.seal(slot.open(0, 0), b"a")
    late_commit = r"not durable after [\d.]+ s.*commits/000000000001-000000000000001-"
    with pytest.raises(TransientError, match=late_commit) as late:
        slot.committer.wait_durable(0, 0, 1, timeout=0.05)
    assert f"See whether the store at {slot.files.url} answers. Then restart" in str(late.value)
    assert list(tmp_path.rglob("*.sealed"))
    gate.set()
    slot.committer.wait_durable(0, 0, 1, timeout=60)
    slot.committer.wait_durable(0, 0, 0)
    slot.committer.wait_durable(0, 1, 0)


def test_newer_generation_prevents_the_acknowledgement(tmp_path):
    def on_put(put, name):
        put()
        claim(files, run="newer", partitions=4)

    files = memory()
    generation, _ = begin(files, partitions=4)
    slot = Slot(Intercepted(files, on_put), generation.number, tmp_path, threaded=True)
    sealed = slot.seal(slot.open(0, 0), b"a")
    with pytest.raises(FencedError, match="partition 0, version 1"):
        slot.committer.wait_durable(0, 0, 1, timeout=60)
    with pytest.raises(FencedError):
        slot.committer.drain(60)
    with pytest.raises(FencedError):
        slot.committer.submit(sealed)
    assert list(tmp_path.rglob("*.sealed")), "what is not acknowledged stays on disk"


def test_each_waiter_of_a_fenced_run_gets_an_error_of_its_own(tmp_path):
    files = memory()
    generation, _ = begin(files)
    slot = Slot(files, generation.number, tmp_path)
    sealed = [slot.seal(slot.open(partition, 0), b"a") for partition in (0, 1)]
    claim(files, run="newer", partitions=2)
    slot.settle()
    for partition in (0, 1):
        with pytest.raises(FencedError, match=f"partition {partition}, version 1"):
            slot.committer.wait_durable(0, partition, 1)
    with pytest.raises(FencedError, match="has taken over") as drained:
        slot.committer.drain()
    with pytest.raises(FencedError, match="has taken over") as submitted:
        slot.committer.submit(sealed[0])
    assert drained.value is not submitted.value
    assert (drained.value.partition, submitted.value.partition) == (None, None)


def test_failing_puts_are_repeated(tmp_path):
    tries = []

    def on_put(put, name):
        tries.append(name)
        if len(tries) < 4:
            raise TransientError("no")
        put()

    files, slot = slot_on(tmp_path, on_put)
    slot.seal(slot.open(0, 0), b"a")
    slot.committer.wait_durable(0, 0, 1, timeout=60)
    assert len(set(tries)) == 1
    assert slot.committer.stats.retries == 3
    assert len(files.list("commits/")) == 1


def test_put_of_unknown_outcome_is_settled_by_reading_back(tmp_path):
    tries = []

    def on_put(put, name):
        tries.append(name)
        put()
        if len(tries) == 1:
            raise TransientError("time-out, though it took effect")

    files, slot = slot_on(tmp_path, on_put)
    slot.seal(slot.open(0, 0), b"a")
    slot.committer.wait_durable(0, 0, 1, timeout=60)
    assert len(tries) == 2
    assert len(files.list("commits/")) == 1


def test_torn_put_is_left_alone_and_repeated_under_another_name(tmp_path):
    tries = []

    def on_put(put, name):
        tries.append(name)
        if len(tries) == 1:
            files.put(name, [b"MILLCMIT torn"])
            raise TransientError("connection reset")
        put()

    files, slot = slot_on(tmp_path, on_put)
    manifest = slot.seal(slot.open(0, 0), b"a").manifest
    slot.seal(manifest, b"b")
    slot.committer.drain(60)
    assert tries[0] == tries[1] != tries[2]
    assert slot.read(Slot(files, 1, tmp_path).open(0, 2)) == [b"a", b"b"]


def test_commit_never_overwrites(tmp_path):
    created = []
    _, slot = slot_on(tmp_path, lambda put, name: put(), threaded=False)
    inner = slot.files._inner.put
    slot.files._inner.put = lambda name, data, *, create=False, sync=True: (
        created.append((create, sync)),
        inner(name, data, create=create, sync=sync),
    )
    slot.seal(slot.open(0, 0), b"a")
    slot.settle()
    assert created == [(True, True)]


def test_past_the_limit_waiters_get_an_error_that_names_file_and_store(tmp_path):
    def on_put(put, name):
        raise TransientError("The store failed: no route to host.")

    _, slot = slot_on(tmp_path, on_put, limit=0.05)
    slot.seal(slot.open(0, 0), b"a")
    with pytest.raises(TransientError, match="no route to host") as error:
        slot.committer.wait_durable(0, 0, 1)
    assert error.value.file.startswith("memory:")
    assert "commits/000000000001-000000000000001-" in error.value.file
    assert (error.value.partition, error.value.version) == (0, 1)


def test_it_goes_on_trying_after_the_limit(tmp_path):
    broken = threading.Event()
    broken.set()

    def on_put(put, name):
        if broken.is_set():
            raise TransientError("no")
        put()

    _, slot = slot_on(tmp_path, on_put, limit=0.05, report_after=0.0)
    assert slot.committer.commit_failure() == ""
    slot.seal(slot.open(0, 0), b"a")
    with pytest.raises(TransientError):
        slot.committer.wait_durable(0, 0, 1)
    assert re.search(
        r"failed for 0 s: no \(file memory:.*commits/.*\)\. See whether .* Meanwhile they are tried again",
        slot.committer.commit_failure(),
    )
    broken.clear()
    slot.committer.wait_durable(0, 0, 1, timeout=60)
    assert slot.committer.commit_failure() == ""


def test_stuck_put_is_taken_over_by_a_new_thread(tmp_path):
    release, tries = threading.Event(), []

    def on_put(put, name):
        tries.append(name)
        if len(tries) == 1:
            release.wait(120)
        put()

    files, slot = slot_on(tmp_path, on_put, stuck=3)  # not so soon that a put on a busy machine is stuck too
    slot.seal(slot.open(0, 0), b"a")
    first = slot.committer._thread
    slot.committer.wait_durable(0, 0, 1, timeout=60)
    assert slot.committer.stats.restarts == 1
    release.set()  # the first put takes effect late: it finds its own bytes and changes nothing
    first.join(60)
    assert not first.is_alive()
    assert len(files.list("commits/")) == 1
    assert slot.committer.stats.commits == 1
    slot.seal(slot.open(0, 1), b"b")
    slot.committer.drain(60)
    assert slot.read(Slot(files, 1, tmp_path).open(0, 2)) == [b"a", b"b"]


def test_a_late_put_goes_on_while_its_successor_is_stuck(tmp_path):
    late, stuck, tries = threading.Event(), threading.Event(), []

    def on_put(put, name):
        tries.append(name)
        if len(tries) == 1:
            late.wait(120)
        elif len(tries) == 2:
            late.set()
            stuck.wait(120)
        put()

    _, slot = slot_on(tmp_path, on_put, stuck=1)
    try:
        first = slot.seal(slot.open(0, 0), b"a").manifest
        slot.committer.wait_durable(0, 0, 1, timeout=60)
        slot.seal(first, b"b")
        slot.committer.wait_durable(0, 0, 2, timeout=60)
    finally:
        stuck.set()


def test_a_wait_counts_from_the_last_commit(tmp_path, monkeypatch):
    """The longest wait counts from the last commit, since much state takes long to upload."""
    now = [1000.0]
    monkeypatch.setattr("millpond.checkpoint.committer.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("millpond.checkpoint.committer.MAX_SHARED_COMMIT_BYTES", 1)

    def on_put(put, name):
        put()
        now[0] += 100.0

    files, slot = slot_on(tmp_path, on_put, threaded=False)
    for partition in range(4):
        slot.seal(slot.open(partition, 0), b"large")
    slot.committer.wait_durable(0, 3, 1, timeout=120.0)
    assert len(files.list("commits/")) == 4


def test_late_failure_of_a_replaced_thread_is_no_failure_of_an_idle_committer(tmp_path):
    tries = []

    def on_put(put, name):
        tries.append(name)
        if len(tries) == 1:
            slot.committer.step()  # as another thread, which takes over while this put is stuck
            raise TransientError("time-out")
        put()

    _, slot = slot_on(tmp_path, on_put, threaded=False, report_after=0.0)
    slot.seal(slot.open(0, 0), b"a")
    slot.committer.step()
    assert len(tries) == 2
    assert slot.committer.is_durable(0, 0, 1)
    assert slot.committer.commit_failure() == ""
    assert slot.committer.stats.retries == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_thread_is_recreated(tmp_path):
    class Killed(BaseException):
        pass

    tries = []

    def on_put(put, name):
        tries.append(name)
        if len(tries) == 1:
            raise Killed
        put()

    _, slot = slot_on(tmp_path, on_put)
    slot.seal(slot.open(0, 0), b"a")
    slot.committer.wait_durable(0, 0, 1, timeout=60)
    assert slot.committer.stats.restarts == 1


def test_earlier_attempt_that_is_not_on_its_way_is_dropped(tmp_path):
    files, slot = slot_on(tmp_path, lambda put, name: put(), threaded=False)
    base = slot.open(0, 0)
    slot.seal(base, b"first attempt")
    slot.seal(base, b"second attempt")
    slot.settle()
    assert slot.read(Slot(files, 1, tmp_path).open(0, 1)) == [b"second attempt"]
    assert not list(tmp_path.rglob("*.sealed"))


def test_later_attempt_with_the_same_deltas_names_those_that_are_durable(tmp_path):
    files, slot = slot_on(tmp_path, lambda put, name: put(), threaded=False)
    sealed = slot.seal(slot.open(0, 0), b"a" * 1000, attempt=1)
    for attempt in (2, 3):
        slot.settle()
        later = slot.sealed.write(seal_again(sealed, attempt), slot.generation)
        sealed = replace(later, same_as=sealed.manifest.id)
        slot.committer.submit(sealed)
    slot.settle()
    headers = [read_header(files, info.name) for info in files.list("commits/")]
    assert sorted(header.payload for header in headers) == [0, 0, 1000]
    opened = Slot(files, slot.generation, tmp_path).open(0, 1)
    assert (opened.id, opened.attempt) == (sealed.manifest.id, 3)
    next_ = slot.seal(opened, b"b")
    slot.settle()
    fresh = Slot(files, slot.generation, tmp_path)
    assert fresh.read(fresh.open(0, 2)) == [b"a" * 1000, b"b"]
    assert next_.manifest.parent == sealed.manifest.id


def test_later_attempt_brings_its_deltas_where_the_earlier_one_was_dropped(tmp_path):
    files, slot = slot_on(tmp_path, lambda put, name: put(), threaded=False)
    sealed = slot.seal(slot.open(0, 0), b"a", attempt=1)
    later = slot.sealed.write(seal_again(sealed, 2), slot.generation)
    slot.committer.submit(replace(later, same_as=sealed.manifest.id))
    slot.settle()
    assert slot.read(Slot(files, slot.generation, tmp_path).open(0, 1)) == [b"a"]


def test_waiting_for_what_was_never_sealed_is_an_error_at_once(tmp_path):
    _, slot = slot_on(tmp_path, lambda put, name: put())
    with pytest.raises(TransientError, match="has not sealed"):
        slot.committer.wait_durable(0, 0, 3, timeout=60)


def test_close_leaves_the_rest_on_disk(tmp_path):
    gate = threading.Event()
    _, slot = slot_on(tmp_path, lambda put, name: (gate.wait(120), put()))
    slot.seal(slot.open(0, 0), b"a")
    slot.committer.close()
    gate.set()
    slot.sealed.close()
    assert Slot(slot.files, 1, tmp_path).sealed.adopt(1) != [] or slot.committer.stats.commits == 1


def test_a_closed_committer_keeps_no_waiter_and_starts_no_thread(tmp_path):
    def on_put(put, name):
        raise TransientError("no")

    _, slot = slot_on(tmp_path, on_put)
    slot.seal(slot.open(0, 0), b"a")
    slot.committer.close()
    slot.committer._thread.join(60)
    with pytest.raises(TransientError, match="its query has stopped") as stopped:
        slot.committer.wait_durable(0, 0, 1, timeout=5)
    assert (stopped.value.partition, stopped.value.version) == (0, 1)
    with pytest.raises(TransientError, match="its query has stopped"):
        slot.committer.drain(5)
    assert slot.committer.stats.restarts == 0


def test_already_exists_is_an_error_of_its_own():
    assert issubclass(AlreadyExistsError, FileExistsError)


@pytest.mark.parametrize("seed", range(30))
def test_any_faults_end_in_the_right_state(tmp_path, seed):
    files = memory()
    generation, _ = begin(files)
    faults = Faults(fail=0.3, torn=0.2, repeat=0.2, seed=seed, retries=50)
    slot = Slot(FaultyFiles(files, Faults(retries=0)), generation.number, tmp_path)
    slot.checkpoint.files = FaultyFiles(files, faults)
    manifests = [slot.open(partition, 0) for partition in (0, 1)]
    for version in (1, 2, 3):
        manifests = [slot.seal(manifest, b"%d" % version).manifest for manifest in manifests]
        if version != 2:
            slot.settle()
    other = Slot(files, generation.number, tmp_path)
    for partition in (0, 1):
        assert other.read(other.open(partition, 3)) == [b"1", b"2", b"3"]
