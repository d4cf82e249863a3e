"""Forks without Spark: whatever crashes or goes on meanwhile, neither query loses what it needs."""

from __future__ import annotations

import itertools
import os
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpond.checkpoint.forks.parents import Parents, open_state, read_parents
from millpond.checkpoint.forks.pins import read_pins, unused_parents
from millpond.checkpoint.formats.deltas import read_delta
from millpond.checkpoint.formats.manifest import seal
from millpond.checkpoint.generation import claim
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.retention.collector import Collector
from millpond.checkpoint.retention.needs import IN_FLIGHT_BATCHES
from millpond.checkpoint.retention.orphans import find_orphans
from millpond.checkpoint.state_schema import OperatorSchema, StateSchema, plain
from millpond.errors import (
    MillpondError,
    SettingError,
    StateDamagedError,
    StateIncompatibleError,
    TransientError,
    UsageError,
)
from millpond.files.backends.filesystem import MissingFileError
from millpond.files.backends.local import LocalFiles
from millpond.files.backends.objects import ObjectFiles
from millpond.files.locations.forked import ForkedFiles, ForkedLocalFiles, with_parents
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import RunRef, TableManifest
from millpond.query.checkpoints.fork import check_fork, fork
from millpond.query.logs.query_logs import QueryLogs
from millpond.query.schema.comparison import write_or_check_schema
from tests.checkpoint.rig import Slot, slots
from tests.servers.s3 import s3
from tests.servers.seaweedfs import BUCKET
from tests.slot.conftest import GROUPED
from tests.support.interleave import Interleaved, schedules

RETAIN = 3
"""Spark's `minBatchesToRetain`."""
PINNED = StateSchema(64, (OperatorSchema("counts", plain(GROUPED), {"main": {}}),))
_places = itertools.count()


@pytest.fixture(autouse=True)
def _slots_end() -> Iterator[None]:
    yield
    while slots:
        slots.pop().die()


def somewhere() -> str:
    return f"memory:forks{next(_places)}/query"


State = list[bytes]
"""What a version of the only partition consists of: its runs, then its deltas."""


class Query:
    """A query with one partition; every third batch its deltas go into a run, and its older runs with them."""

    def __init__(self, location: str, folder: Path) -> None:
        self.location = location
        self.root = open_filesystem(location)
        self.query_logs = QueryLogs(self.root)
        check_fork(location, self.root)
        self.query_logs.identify()
        self.files = open_state(location)
        write_or_check_schema(self.files, PINNED)
        generation = claim(self.files, run="test", partitions=1, key_groups=64)
        recovery = Recovery(self.files, generation, 1)
        version = self.query_logs.last_committed + 1
        recovery.write_base([version])
        self.slot = Slot(self.files, generation.number, folder / uuid.uuid4().hex)
        self.manifest = self.slot.open(0, version)
        self.table = self.manifest.tables["main"].runs if version else TableManifest()
        self.now = 1e12  # far behind all that the store has
        self.collector = Collector(
            self.files,
            generation.number,
            retain=RETAIN,
            grace=60,
            clock=lambda: self.now,
            elapsed=lambda: self.now,
            keep_aside=1e18,
        )

    def batch(self) -> None:
        batch = self.query_logs.last_planned + 1
        self.root.put(f"offsets/{batch}", [b"planned"])
        if batch % 3 == 2:
            name = f"files/{uuid.uuid4().hex}.run"
            self.files.put(name, [b"run %d" % batch])
            self.table = TableManifest((RunRef(name, 1, 1, 0, 1),), batch)
        tables = {"main": (self.table, [b"delta %d" % batch])}
        sealed = self.slot.sealed.write(
            seal(self.manifest, tables, input_checksum=batch, input_rows=1), self.slot.generation
        )
        self.slot.committer.submit(sealed)
        self.slot.settle()
        self.manifest = sealed.manifest
        self.root.put(f"commits/{batch}", [b"done"])
        for log in ("offsets", "commits"):
            for old in self.query_logs.entry_times(log):
                if old < batch - RETAIN:
                    self.root.delete(f"{log}/{old}")

    def go(self, batches: int) -> Query:
        for _ in range(batches):
            self.batch()
        return self

    @property
    def version(self) -> int:
        return self.query_logs.last_committed + 1

    def collect(self) -> None:
        """Collect as the running query does each minute: some batches ago, and twice, with the grace period between."""
        for ago in (IN_FLIGHT_BATCHES, IN_FLIGHT_BATCHES, 0, 0):
            planned = self.query_logs.retained()
            self.collector.collect(planned.stop - 1 - ago, planned.start)
            self.now += 61

    def gc(self) -> None:
        """Remove files as `millpond state gc` does, long after."""
        planned = self.query_logs.entry_times("offsets")
        orphans = find_orphans(self.files, planned, now=1e12)
        assert not orphans.missing
        orphans.remove(self.files)

    def names(self, folder: str) -> list[str]:
        return [info.name for info in self.files.list(folder)]


def state(location: str, version: int) -> State:
    """Content of a version, read from the store."""
    files = open_state(location)
    (manifest,) = Recovery(files).manifests(version)
    table = manifest.tables["main"]
    runs = [files.get(run.name) for run in table.runs.runs]
    return runs + [bytes(memoryview(read_delta(files, delta))) for delta in table.deltas]


def truth(version: int) -> State:
    """Content that a version has to have."""
    flushed = max(batch for batch in range(version) if batch % 3 == 2)
    return [b"run %d" % flushed, *(b"delta %d" % batch for batch in range(flushed, version))]


@pytest.fixture
def original(tmp_path: Path) -> Query:
    return Query(somewhere(), tmp_path).go(10)


def test_a_fork_has_the_state_and_goes_on_by_itself(original: Query, tmp_path: Path) -> None:
    new = somewhere()
    made = fork(original.location, new)
    assert (made.version, made.partitions, made.objects) == (10, 1, 3)
    assert state(new, 10) == state(original.location, 10) == [b"run 8", b"delta 8", b"delta 9"]
    assert QueryLogs(open_filesystem(new)).query_id() == made.query != original.query_logs.query_id()
    copy = Query(new, tmp_path).go(1)
    original.go(2)
    assert state(new, 11) == [b"run 8", b"delta 8", b"delta 9", b"delta 10"]
    assert state(original.location, 12) == [b"run 11", b"delta 11"]
    assert copy.version == 11


def test_both_go_on_collect_and_part(original: Query, tmp_path: Path) -> None:
    new = somewhere()
    fork(original.location, new)
    (pin,) = read_pins(original.files).values()
    shared = [name for name in pin.objects if name.startswith("files/")]
    original.go(10)
    original.collect()
    original.gc()
    assert set(shared) < set(original.names("files/"))
    assert state(new, 10) == [b"run 8", b"delta 8", b"delta 9"]
    copy = Query(new, tmp_path).go(2)
    assert state(new, 12) == [b"run 11", b"delta 11"]
    copy.collect()
    assert read_pins(original.files), "older versions of the fork still have what is shared"
    copy.go(4)
    copy.collect()
    assert not read_pins(original.files)
    before = original.names("files/")
    original.collect()
    assert set(before) - set(original.names("files/")) == set(shared)
    assert state(new, copy.version) == [b"run 14", b"delta 14", b"delta 15"]
    assert state(original.location, original.version) == [b"run 17", b"delta 17", b"delta 18", b"delta 19"]


@pytest.mark.parametrize("where", ["local", "s3"])
def test_on_a_disk_and_in_an_object_store(tmp_path: Path, where: str) -> None:
    with nullcontext(str(tmp_path)) if where == "local" else s3() as place:
        original = Query(f"{place}/original", tmp_path).go(10)
        new = f"{place}/new"
        fork(original.location, new)
        original.go(10).collect()
        original.gc()
        assert state(new, 10) == truth(10)
        copy = Query(new, tmp_path).go(7)
        copy.collect()
        assert not read_pins(original.files)
        original.collect()
        original.gc()
        assert state(new, 17) == truth(17)
        assert state(original.location, 20) == truth(20)


def test_gc_gives_back_what_a_fork_does_not_need(original: Query, tmp_path: Path) -> None:
    new = somewhere()
    fork(original.location, new)
    copy = Query(new, tmp_path)
    copy.gc()
    assert read_pins(original.files)
    copy.go(6).gc()
    assert not read_pins(original.files)
    original.go(10).gc()
    assert state(new, copy.version)


def test_an_older_version_is_forked_with_spark_s_ledger_up_to_it(original: Query, tmp_path: Path) -> None:
    new = somewhere()
    fork(original.location, new, 9)
    assert state(new, 9) == [b"run 8", b"delta 8"]
    assert QueryLogs(open_filesystem(new)).last_planned == QueryLogs(open_filesystem(new)).last_committed == 8
    assert Query(new, tmp_path).go(3).version == 12
    for version in (3, 7, 11):
        with pytest.raises(UsageError, match=f"version {version}"):
            fork(original.location, somewhere(), version)


def test_other_partitions_take_their_parts_of_what_is_shared(original: Query, tmp_path: Path) -> None:
    new = somewhere()
    fork(original.location, new)
    files = open_state(new)
    generation = claim(files, run="test", partitions=2, key_groups=64)
    Recovery(files, generation, 1).write_base([10])
    slot = Slot(files, generation.number, tmp_path)
    for partition in range(2):
        opened = slot.open(partition, 10)
        assert slot.read(opened) == [b"delta 8", b"delta 9"]
        runs = opened.tables["main"].runs.runs
        assert [files.get(run.name) for run in runs] == ([] if partition else [b"run 8"])


def test_forks_of_forks_have_pins_of_their_own(original: Query, tmp_path: Path) -> None:
    first, second, third = somewhere(), somewhere(), somewhere()
    fork(original.location, first)
    between = Query(first, tmp_path).go(1)
    fork(first, second)
    known = read_parents(open_state(second))
    assert known is not None
    assert {parent.location for parent in known.parents} == {original.location, first}
    expected = state(second, 11)
    assert expected == [b"run 8", b"delta 8", b"delta 9", b"delta 10"]
    fork(second, third)
    assert state(third, 11) == expected
    between.go(10).collect()
    assert len(read_pins(original.files)) == 2
    original.go(10).collect()
    original.gc()
    between.gc()
    assert state(second, 11) == state(third, 11) == expected
    Query(third, tmp_path).go(7).collect()
    Query(second, tmp_path).go(7).collect()
    assert not read_pins(original.files)
    assert not read_pins(between.files)


class Crash(BaseException):
    """The process is gone."""


def _with(hook: Callable[[str, str], Callable[[], None] | None], operation: str, real: Callable[..., Any]) -> Any:
    def call(self: ObjectFiles, name: str, *rest: Any, **more: Any) -> Any:
        after = hook(operation, name)
        try:
            return real(self, name, *rest, **more)
        finally:
            if after is not None:
                after()

    return call


@contextmanager
def hooked(hook: Callable[[str, str], Callable[[], None] | None], *also: str) -> Iterator[None]:
    """Have `hook` called before each request to a store (operation and name), and what it gives after it."""
    with pytest.MonkeyPatch.context() as patch:
        for operation in ("put", "delete", *also):
            real = getattr(ObjectFiles, operation)
            patch.setattr(ObjectFiles, operation, _with(hook, operation, real))
        yield


class Trip:
    """At one request, before or after it took effect, something happens."""

    def __init__(self, at: int, when: str, what: Callable[[], None]) -> None:
        self.left = at
        self.when = when
        self.what = what
        self.happened = False
        self._inside = False

    def __call__(self, operation: str, name: str) -> Callable[[], None] | None:
        if self._inside:
            return None
        self.left -= 1
        if self.left != -1:
            return None
        if self.when == "before":
            self._happen()
            return None
        return self._happen

    def _happen(self) -> None:
        self.happened = self._inside = True
        self.what()
        self._inside = False


def fail() -> None:
    raise TransientError("Injected failure.")


def die() -> None:
    raise Crash


def is_complete(new: str) -> bool:
    """Whether a query may be started there."""
    root = open_filesystem(new)
    try:
        check_fork(new, root)
    except StateIncompatibleError:
        return False
    return root.exists("metadata")


ALL = ("get", "list", "get_ranges", "size")


@pytest.mark.parametrize("what", [die, fail])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_while_forking_costs_neither_anything(tmp_path: Path, what: Callable[[], None], when: str) -> None:
    for at in itertools.count():
        original = Query(somewhere(), tmp_path).go(10)
        new = somewhere()
        trip = Trip(at, when, what)
        dead = False

        def hook(operation: str, name: str, trip: Trip = trip) -> Callable[[], None] | None:
            nonlocal dead
            if dead:
                raise Crash  # so does everything that the process would have done afterwards
            dead = trip.left == 0 and what is die and when == "before"
            return trip(operation, name)

        try:
            with hooked(hook):
                fork(original.location, new)
        except (Crash, TransientError):
            pass
        original.go(10).collect()
        original.gc()
        assert state(original.location, 20) == truth(20)
        if is_complete(new):
            assert state(new, 10) == truth(10)
            assert Query(new, tmp_path).go(7).version == 17
        elif what is fail and not open_filesystem(new).exists("metadata"):
            assert not read_pins(original.files) or open_filesystem(new).exists("commits/9")
        if not trip.happened:
            assert is_complete(new)
            assert at > 10
            return


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_goes_on_while_forking_is_noticed_or_harmless(tmp_path: Path, when: str) -> None:
    outcomes = set()
    for at in itertools.count():
        original = Query(somewhere(), tmp_path).go(10)
        new = somewhere()

        def meanwhile(original: Query = original) -> None:
            original.collect()
            original.go(10).collect()

        trip = Trip(at, when, meanwhile)
        try:
            with hooked(trip, *ALL):
                fork(original.location, new, 10)
        except MillpondError:
            outcomes.add("refused")
            assert not is_complete(new)
        else:
            outcomes.add("made")
            assert is_complete(new)
            original.go(5).collect()
            assert state(new, 10) == truth(10)
        if not trip.happened:
            break
    assert outcomes == {"refused", "made"}
    assert at > 30


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_fork_that_is_made_while_garbage_is_collected(tmp_path: Path, when: str) -> None:
    made = 0
    for at in itertools.count():
        original = Query(somewhere(), tmp_path).go(13)
        original.collect()
        original.go(1)
        planned = original.query_logs.retained()
        version = planned.start + 2
        new = somewhere()
        outcome = []

        def meanwhile(
            original: Query = original, new: str = new, version: int = version, outcome: Any = outcome
        ) -> None:
            outcome.append(fork(original.location, new, version))
            original.go(10)

        trip = Trip(at, when, meanwhile)
        with hooked(trip, *ALL):
            original.collect()
            original.collect()
        if outcome:
            made += 1
            original.collect()
            original.gc()
            assert state(new, version) == truth(version)
        if not trip.happened:
            break
    assert made > 10


class Requests(Interleaved):
    """Two pieces of work in turns, a request to a store a step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._here = threading.local()
        for operation in ("put", "delete", *ALL):
            patch.setattr(ObjectFiles, operation, self._stepped(getattr(ObjectFiles, operation)))

    def at_once(self, action: Callable[[], object]) -> None:
        """Do something in one step."""
        actor, self._here.actor = self._here.actor, None
        action()
        self._here.actor = actor


def test_a_fork_that_is_made_while_its_version_goes_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(monkeypatch)
    outcomes = []
    for schedule in schedules(70, most=250):
        original = Query(somewhere(), tmp_path).go(10)
        new = somewhere()

        def make(original: Query = original, new: str = new) -> int | None:
            try:
                return fork(original.location, new).version
            except MillpondError:
                return None

        def go_on(original: Query = original) -> None:
            requests.at_once(lambda: original.go(10))
            original.collect()
            requests.at_once(lambda: original.go(3))

        version, _ = requests.run(schedule, [make, go_on])
        outcomes.append(version)
        original.collect()
        original.gc()
        assert (version is not None) == is_complete(new)
        assert version is None or state(new, version) == truth(version)
        assert state(original.location, original.version) == truth(23)
    assert {None, 10} < set(outcomes)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("collected", [Query.collect, Query.gc])
def test_a_crash_while_a_fork_gives_back(tmp_path: Path, when: str, collected: Callable[[Query], None]) -> None:
    for at in itertools.count():
        original = Query(somewhere(), tmp_path).go(10)
        new = somewhere()
        fork(original.location, new)
        copy = Query(new, tmp_path).go(8)
        trip = Trip(at, when, die)
        try:
            with hooked(trip):
                collected(copy)
        except Crash:
            pass
        original.go(10).collect()
        for version in range(copy.version - RETAIN, copy.version + 1):
            assert state(new, version) == truth(version)
        if not trip.happened:
            assert not read_pins(original.files)
            return


def test_a_damaged_pin_ends_a_collection_before_it_removes_anything(original: Query) -> None:
    fork(original.location, somewhere())
    (name,) = read_pins(original.files)
    original.files.put(name, [b"{}"])
    original.go(10)
    before = original.names("")
    with pytest.raises(StateDamagedError, match="A pin is altered"):
        Collector(original.files, original.slot.generation, retain=RETAIN, grace=0).collect(19, 16)
    with pytest.raises(StateDamagedError, match="A pin is altered"):
        original.gc()
    assert original.names("") == before


def test_a_fork_whose_commits_cannot_be_read_gives_nothing_back(original: Query, tmp_path: Path) -> None:
    new = somewhere()
    fork(original.location, new)
    copy = Query(new, tmp_path)
    (name,) = copy.names("commits/")
    whole = copy.files.get(name)
    copy.files.put(name, [whole[:40]])
    with pytest.raises(StateDamagedError, match="cut short"):
        copy.collect()
    copy.files.put(name, [whole])
    original.go(10).collect()
    assert state(new, 10) == [b"run 8", b"delta 8", b"delta 9"]


def test_an_unfinished_fork_is_refused(original: Query, tmp_path: Path) -> None:
    new = somewhere()
    fork(original.location, new)
    open_filesystem(new).delete("metadata")
    with pytest.raises(StateIncompatibleError, match="interrupted"):
        Query(new, tmp_path)
    with pytest.raises(StateIncompatibleError, match="interrupted"):
        fork(new, somewhere())
    with pytest.raises(UsageError, match=r"something here already: .* interrupted has left"):
        fork(original.location, new)


def test_a_newest_version_that_is_damaged_is_not_passed_over(original: Query) -> None:
    for name in original.names("commits/")[-1:]:
        original.files.put(name, [bytes(original.files.get(name))[:40]])
    new = somewhere()
    fork(original.location, new)  # as the original would, it repeats the last batch
    assert state(new, 9) == truth(9)
    name = original.names("commits/")[-2]
    original.files.put(name, [bytes(original.files.get(name))[:40]])
    with pytest.raises(StateDamagedError, match="not whole"):
        fork(original.location, somewhere())
    assert fork(original.location, somewhere(), 8).version == 8


def test_a_query_that_is_just_recovering_is_not_forked(original: Query) -> None:
    original.root.put("millpond/rolled-back/pending-000000000000001.json", [b"{}"])
    with pytest.raises(UsageError, match="interrupted, or is going on"):
        fork(original.location, somewhere())


def copied(location: str) -> str:
    """The same checkpoint at another place."""
    new, files = somewhere(), open_filesystem(location)
    for info in files.list(""):
        open_filesystem(new).put(info.name, [files.get(info.name)])
    return new


def test_a_copy_of_a_fork_is_refused_and_a_fork_that_was_moved_is_not(original: Query, tmp_path: Path) -> None:
    new = somewhere()
    fork(original.location, new)
    other = copied(new)
    with pytest.raises(StateIncompatibleError, match="is a copy of"):
        Query(other, tmp_path)
    files = open_filesystem(new)
    for info in files.list(""):
        files.delete(info.name)
    moved = Query(other, tmp_path).go(8)
    moved.collect()
    moved.gc()
    assert read_pins(original.files), "it does not know whether another fork has this pin"


def test_what_the_parent_has_lost_is_an_error_that_names_both(original: Query, tmp_path: Path) -> None:
    new = somewhere()
    fork(original.location, new)
    for info in original.root.list(""):
        original.root.delete(info.name)
    for action in (lambda: state(new, 10), lambda: fork(new, somewhere())):
        with pytest.raises(MissingFileError) as raised:
            action()
        assert original.location in str(raised.value)
    with pytest.raises(MissingFileError) as raised:
        state(new, 10)
    assert new in str(raised.value)


def test_what_cannot_be_forked_is_refused(original: Query, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no offset log"):
        fork(somewhere(), somewhere())
    with pytest.raises(UsageError, match="is empty"):
        fork(original.location, " ")
    with pytest.raises(SettingError, match="on local disks, or both in object stores"):
        fork(original.location, str(tmp_path / "new"))
    original.root.put("state/0/0/1.delta", [b"rows"])
    with pytest.raises(UsageError, match="Spark's own state store"):
        fork(original.location, somewhere())
    original.root.delete("state/0/0/1.delta")
    original.root.put("state/0/_metadata/metadata", [b"{}"])
    original.root.put("sources/0/9.compact", [b"files"])
    original.root.put("sources/0/.9.compact.crc", [b"sum"])
    new = somewhere()
    fork(original.location, new)
    names = {info.name for info in open_filesystem(new).list("s")}
    assert names == {"state/0/_metadata/metadata", "sources/0/9.compact"}


def test_folders_that_hadoop_has_marked_are_passed_over(tmp_path: Path) -> None:
    with s3() as bucket:
        original = Query(f"{bucket}/query", tmp_path).go(9)
        original.root.put("sources/0/0", [b"files"])
        original.root.put("state/0/_metadata/metadata", [b"{}"])
        for folder in ("", "sources/", "sources/0/", "sources/1/", "state/", "state/0/", "state/0/_metadata/"):
            mark(f"query/{folder}")
        mark("new/")
        new = f"{bucket}/new"
        assert fork(original.location, new).version == 9
        assert {info.name for info in open_filesystem(new).list("s")} == {"sources/0/0", "state/0/_metadata/metadata"}
        assert state(new, 9) == truth(9)


def mark(key: str) -> None:
    """Put an object of S3 as Hadoop does where it makes a folder: names of the file layer never end in a slash."""
    address = f"{os.environ['AWS_ENDPOINT_URL']}/{BUCKET}/{key}"
    urllib.request.urlopen(urllib.request.Request(address, data=b"", method="PUT")).close()


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_names_of_a_parent_are_read_and_not_written(tmp_path: Path, kind: str) -> None:
    where = str(tmp_path) if kind == "local" else somewhere()
    parent, own = (open_filesystem(f"{where}/{name}") for name in ("parent", "own"))
    parent.put("files/x", [b"0123456789"])
    own.put("files/x", [b"own"])
    files = with_parents(own, [parent])
    assert isinstance(files, ForkedLocalFiles if kind == "local" else ForkedFiles)
    name = "parents/0/files/x"
    assert files.get(name) == b"0123456789"
    assert files.get("files/x") == b"own"
    assert bytes(memoryview(files.get_range(name, 2, 3))) == b"234"
    assert [bytes(memoryview(one)) for one in files.get_ranges(name, [(0, 1), (9, 1)])] == [b"0", b"9"]
    assert files.size(name) == 10
    assert files.exists(name)
    assert not files.exists("parents/0/files/y")
    assert files.locate(name) == parent.locate("files/x")
    assert [info.name for info in files.list("")] == ["files/x"]
    if isinstance(files, LocalFiles):
        assert Path(files.path_of(name)).read_bytes() == b"0123456789"
        with pytest.raises(ValueError, match="only read"):
            files.publish(files.new_staging_path(), name)
    for action in (
        lambda: files.put(name, [b""]),
        lambda: files.delete(name),
    ):
        with pytest.raises(ValueError, match="only read"):
            action()
    with pytest.raises(MissingFileError, match="was forked") as raised:
        files.get("parents/0/files/y")
    assert raised.value.file == parent.locate("files/y")
    assert own.url in str(raised.value)


@pytest.mark.parametrize(
    ("made", "run", "same"),
    [
        ("s3://bucket/a/millpond", "s3a://bucket/a/millpond/", True),
        ("s3n://bucket/a", "s3a://bucket/a", True),
        ("s3://bucket/a", "s3://bucket/b", False),
        ("s3://bucket/a", "gs://bucket/a", False),
        ("file:///a", "file:///a", True),
    ],
)
def test_a_fork_is_at_home_however_its_place_is_written(made: str, run: str, same: bool) -> None:
    assert Parents(made, ()).was_created_at(run) is same


def test_a_fork_that_is_run_under_another_name_of_its_place_gives_back(original: Query, tmp_path: Path) -> None:
    new = somewhere()
    fork(original.location, new)
    copy = Query(new, tmp_path)
    known = read_parents(copy.files)
    assert known is not None
    live = {"commits/0"}
    assert set(unused_parents(known, copy.files, live)) == {0}
    assert not unused_parents(msgspec.structs.replace(known, fork="s3://elsewhere/millpond"), copy.files, live)
    at_s3 = msgspec.structs.replace(known, fork="s3://bucket/a/millpond")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy.files, "url", "s3a://bucket/a/millpond")
        assert set(unused_parents(at_s3, copy.files, live)) == {0}
