"""Compaction elsewhere: a real slot with workers that work, die, stall, or are not there."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from millpond.checkpoint.compaction.requests import (
    CompactionResult,
    Request,
    list_requests,
    put_request,
    put_result,
    read_result,
    remove_request,
    request_of_file,
)
from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.formats.documents import FORMAT
from millpond.checkpoint.generation import claim
from millpond.compactor.process import Locations
from millpond.compactor.worker import Worker, run_job
from millpond.errors import StateIncompatibleError
from millpond.files.backends.filesystem import FileInfo, FileSystem
from millpond.files.locations.forked import ForkedLocalFiles
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import RunRef
from millpond.layout import Column, RowLayout, TableSchema
from millpond.query.checkpoints.fork import fork
from millpond.slot.partition.remote_compaction import RemoteCompaction
from millpond.stores import delta_backlog
from millpond.stores.jobs import CompactSegments, MergeParts, MergeRuns
from millpond.stores.runs.pace import Pace
from millpond.stores.runs.run import Run
from millpond.stores.runs.run_set import RunSet
from millpond.stores.runs.run_store import RunStore
from millpond.tasks.operator_task import SlotSettings
from tests.servers.s3 import pointed_at
from tests.support.rows import Entry, decode, encode
from tests.support.waiting import wait_until

from .conftest import with_tests_on_path
from .test_damage import Counts

PATIENCE = 120.0


class Asking(Counts):
    """Counts whose slot has its files compacted elsewhere."""

    def __init__(self, folder: Path, scheme: str = "", timeout: float = 600.0) -> None:
        super().__init__(folder, scheme)
        self.settings = SlotSettings(
            directory=str(folder), open_timeout=0.0, compaction="remote", compaction_timeout=timeout
        )

    @property
    def remote(self) -> RemoteCompaction:
        assert self.server is not None
        running = self.server._query(self.task.key).running
        assert running is not None
        assert running.remote is not None
        return running.remote

    def until(self, condition: Callable[[], bool]) -> None:
        """Go on, batch by batch, until something is so."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.go(self.query_logs.last_committed + 2)
            if condition():
                return
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.05)


@pytest.fixture(autouse=True)
def _many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_backlog, "_MAX_DELTAS", 1)


@pytest.fixture
def application(tmp_path: Path) -> Iterator[Asking]:
    made = Asking(tmp_path)
    made.start()
    yield made
    made.close()


def compactor(location: str, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from millpond.cli import main; main()", "compactor", location, *options]
    return subprocess.Popen(command, env=with_tests_on_path(), stderr=subprocess.PIPE)


def named(application: Asking) -> set[str]:
    """Files in the state that workers have made."""
    assert application.server is not None
    partitions = application.server._query(application.task.key).partitions.values()
    tables = [one.runs for each in partitions if each._manifest for one in each._manifest.tables.values()]
    return {run.name for table in tables for run in table.runs if request_of_file(run.name)}


def test_a_worker_s_process_is_killed_and_another_goes_on(tmp_path: Path) -> None:
    application = Asking(tmp_path)
    application.start()
    slow = f"faults+{tmp_path}?latency_ms=400"
    first = compactor(slow, "--poll", "0.1", "--lease", "2")
    try:
        asked(application)
        wait_until(lambda: any(known.lease for known in list_requests(application.files).values()), PATIENCE)
        first.kill()
        first.wait()
        assert application.remote.stats.remote == 0
        second = compactor(str(tmp_path), "--poll", "0.1", "--lease", "1")
        try:
            wait_until(lambda: any(known.has_result for known in list_requests(application.files).values()), PATIENCE)
            application.until(lambda: application.remote.stats.remote > 0)
            application.until(lambda: bool(named(application)))
            application.until(lambda: not application.remote._used_results or application.remote.stats.remote > 3)
        finally:
            second.terminate()
            said = second.communicate(timeout=120)[1].decode()
        assert second.returncode == 0, said
        assert "done" in said
        assert "ends" in said
        assert application.remote.stats.local == 0
    finally:
        first.kill()
        application.close()
    Counts(tmp_path).through(application.query_logs.last_committed + 3)  # the next run reads what workers have made


def test_sigterm_does_not_wait_for_a_store_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store, pointed_at(f"http://127.0.0.1:{store.getsockname()[1]}"):
        store.settimeout(60)
        slow = compactor("s3://bucket/state")
        with store.accept()[0]:
            slow.terminate()
            said = slow.communicate(timeout=120)[1].decode()
    assert slow.returncode == 0, said
    assert "ends in the middle of a request" in said


def test_sigterm_hands_the_work_over_at_once(tmp_path: Path) -> None:
    application = Asking(tmp_path)
    application.start()
    slow = compactor(f"faults+{tmp_path}?latency_ms=500", "--poll", "0.1", "--lease", "600")
    try:
        asked(application)
        wait_until(lambda: any(known.leased for known in list_requests(application.files).values()), PATIENCE)
        slow.terminate()
        identity = next(identity for identity, known in list_requests(application.files).items() if known.lease)
        wait_until(lambda: not list_requests(application.files)[identity].leased)
        said = slow.communicate(timeout=120)[1].decode()
        assert slow.returncode == 0, said
        assert "ends: 0 done" in said
        known = list_requests(application.files)[identity]
        assert known.request is not None
        assert not known.has_result
        assert not [info.name for info in application.files.list(f"files/{identity}")]
        worker = Worker([application.files], lease=600.0)
        assert worker.step()
        assert list_requests(application.files)[identity].has_result
        application.until(lambda: application.remote.stats.remote > 0)
        assert application.remote.stats.local == 0
    finally:
        slow.kill()
        application.close()


def test_nobody_works_on_what_was_withdrawn(application: Asking) -> None:
    identity = asked(application)
    known = list_requests(application.files)[identity]
    worker = Worker([application.files], lease=0.3)

    def slowly(files: FileSystem, request: Request, pace: Pace) -> list[RunRef]:
        remove_request(files, request.generation, request.id)
        for _ in pace.throttle(range(600)):
            time.sleep(0.05)
        raise AssertionError("it was not stopped")

    worker._run_job = slowly  # type: ignore[method-assign]
    assert not worker.step()
    assert identity not in list_requests(application.files)
    assert known.request is not None


def test_what_was_taken_last_leaves_no_request_behind(application: Asking) -> None:
    """The last version that names a result becomes durable as the query ends."""
    asked(application)
    worker = Worker([application.files], renews_lease=False)
    assert worker.step()
    application.until(lambda: bool(named(application)))
    assert application.remote._used_results
    application.close()
    assert not any(known.request for known in list_requests(application.files).values())
    Counts(application.folder).through(application.query_logs.last_committed + 2)


def test_what_nobody_has_answered_leaves_no_request_behind(application: Asking) -> None:
    """A query ends while it waits for compactors."""
    asked(application)
    assert application.remote.waiting
    application.close()
    wait_until(lambda: not list_requests(application.files))


@pytest.mark.parametrize("closed", ["table", "query"])
def test_runs_opened_for_what_is_closed_meanwhile_are_closed(tmp_path: Path, closed: str) -> None:
    files, generation = open_filesystem(f"faults+{tmp_path}/state"), 7
    layout = RowLayout(TableSchema((Column("k", "word"),), (Column("v", "word"),)))
    store = RunStore(files, str(tmp_path), disk=0, memory=1 << 20)
    now, runs = [0.0], []
    remote = RemoteCompaction(files, generation, threaded=False, clock=lambda: now[0])

    def opened(refs: Sequence[RunRef]) -> list[Run]:
        runs.extend(store.open(ref, layout) for ref in refs)
        if closed == "table":
            result.cancel()
        else:
            remote.close()
        return runs

    def step() -> None:
        now[0] += 10.0
        remote.step()

    try:
        result = remote.submit(lambda: JOBS["runs"], Future, opened)
        step()
        (identity,) = list_requests(files)
        ref = store.write(encode([Entry(1 << 32, (1,), (2,))], layout), layout).ref
        assert ref is not None
        put_result(files, generation, identity, CompactionResult("one", (ref, ref)))
        step()
        assert result.cancelled()
        assert len(runs) == 2
        assert all(run.source.closed for run in runs)
        step()
        assert not list_requests(files)
    finally:
        store.close()


def test_files_of_a_schema_that_the_table_has_had(tmp_path: Path) -> None:
    """A query was changed, and its state has followed: what it had written is converted on the way."""
    files = open_filesystem(f"faults+{tmp_path}/state")
    key, value, more = Column("k", "word"), Column("v", "word"), Column("more", "word", null=True)
    before, now = TableSchema((key,), (value,)), TableSchema((key,), (more, value))
    store = RunStore(files, str(tmp_path), disk=0, memory=1 << 20)

    def write(schema: TableSchema, rows: dict[int, tuple[int, ...]]) -> RunRef:
        layout = RowLayout(schema)
        ref = store.write(encode([Entry(key << 32, (key,), value) for key, value in rows.items()], layout), layout).ref
        assert ref is not None
        return ref

    try:
        newest, older = write(now, {1: (7, 10), 2: (8, 20)}), write(before, {2: (1,), 3: (2,)})
        oldest = write(before, {3: (3,), 4: (4,)})
        job = MergeRuns(now, (newest, older, oldest), 0, 0, (1 << 64) - 1, True, 4096, (before,))
        (made,) = run_job(files, job, str(tmp_path), Pace(1.0))
        layout = RowLayout(now)
        found = [
            one for piece in RunSet(layout, [store.open(made, layout)]).scan(size=10) for one in decode(piece, layout)
        ]
        assert {one.key[0]: one.value for one in found} == {1: (7, 10), 2: (8, 20), 3: (None, 2), 4: (None, 4)}
        with pytest.raises(StateIncompatibleError):
            run_job(files, msgspec.structs.replace(job, earlier=()), str(tmp_path), Pace(1.0))
    finally:
        store.close()


class Stalling(Worker):
    """A worker that stalls between its work and its answer, until it may go on."""

    held: tuple[FileSystem, Request, CompactionResult] | None = None

    def _answer(self, files: FileSystem, request: Request, done: CompactionResult) -> None:
        self.held = files, request, done

    def go_on(self) -> None:
        assert self.held is not None
        super()._answer(*self.held)


def asked(application: Asking) -> str:
    """A request that is there."""
    application.until(lambda: any(known.request for known in list_requests(application.files).values()))
    return next(identity for identity, known in list_requests(application.files).items() if known.request)


@pytest.mark.parametrize("scheme", ["", "faults+"], ids=["local", "remote"])
def test_of_two_that_finish_one_counts(tmp_path: Path, scheme: str) -> None:
    application = Asking(tmp_path, scheme)
    application.start()
    try:
        asked(application)
        now = [0.0]
        first = Stalling([application.files], clock=lambda: now[0], renews_lease=False)
        second = Worker([application.files], clock=lambda: now[0], renews_lease=False)
        assert first.step()
        assert first.held is not None
        identity, made = first.held[1].id, first.held[2]
        assert all(application.files.exists(ref.name) for ref in made.files)
        while second.step():
            pass
        assert not list_requests(application.files)[identity].has_result, "it was in another's hand"
        now[0] += 31.0
        assert second.step()
        assert second.done
        first.go_on()
        assert first.done == 0
        assert not any(application.files.exists(ref.name) for ref in made.files)
        application.until(lambda: any(request_of_file(name) == identity for name in named(application)))
        application.until(lambda: identity not in application.remote._used_results)
        wait_until(lambda: identity not in list_requests(application.files))
    finally:
        application.close()


def test_without_a_worker_the_slot_does_it(tmp_path: Path) -> None:
    application = Asking(tmp_path, timeout=0.5)
    application.start()
    try:
        application.until(lambda: application.remote.stats.local > 1)
        assert application.remote.stats.remote == 0
        wait_until(lambda: not list_requests(application.files))
    finally:
        application.close()


def test_a_missing_input_fails_the_job_and_nothing_else(application: Asking) -> None:
    asked(application)
    worker = Worker([application.files], renews_lease=False)
    hidden = {info.name: application.files.get(info.name) for info in application.files.list("files/")}
    for name in hidden:
        application.files.delete(name)
    assert worker.step()
    for name, data in hidden.items():
        application.files.put(name, [data])
    application.until(lambda: application.remote.stats.local > 0)
    assert application.remote.stats.remote == 0


JOBS = {
    "runs": MergeRuns(TableSchema((), ()), (), 0, 0, 1, False, 1),
    "parts": MergeParts(TableSchema((), ()), (), (), 0, 1, (), False, 1),
    "segments": CompactSegments(TableSchema((), ()), (), (), (), 1),
}


@pytest.mark.parametrize("kind", JOBS)
def test_a_job_that_says_more_than_is_known_is_not_done(tmp_path: Path, kind: str) -> None:
    """A field that a later version has added may change the job's result."""
    files = open_filesystem(str(tmp_path))
    number = claim(files, run="later", partitions=1).number
    job = msgspec.msgpack.encode(msgspec.to_builtins(JOBS[kind]) | {"but_not": [7]})
    put_request(files, Request("one", number, job))
    assert Worker([files], renews_lease=False).step()
    done = read_result(files, number, "one")
    assert done is not None
    assert "unknown field `but_not`" in done.error
    assert not done.files


def test_a_request_of_another_format_is_left_to_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The slot that wrote it would wait for the worker that claims it."""
    files = open_filesystem(str(tmp_path))
    number = claim(files, run="later", partitions=1).number
    put_request(files, Request("one", number, msgspec.msgpack.encode(JOBS["runs"]), format=FORMAT + 1))
    put_request(files, Request("two", number, msgspec.msgpack.encode(JOBS["runs"])))
    worker = Worker([files], renews_lease=False)
    worker._run_job = lambda *_: []  # type: ignore[method-assign]
    assert worker.step()
    assert not worker.step()
    assert not list_requests(files)["one"].leased
    assert read_result(files, number, "two") is not None
    (left,) = [record.getMessage() for record in caplog.records if "is left to a compactor" in record.getMessage()]
    assert f"A checkpoint file has format {FORMAT + 1}" in left


def test_a_defect_in_a_job_is_answered_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else it would end the compactor for all its locations, and then the next one, which takes the same request."""
    files = open_filesystem(str(tmp_path))
    number = claim(files, run="one", partitions=1).number
    put_request(files, Request("one", number, msgspec.msgpack.encode(JOBS["runs"])))
    worker = Worker([files], renews_lease=False)

    def defect(*_: object) -> list[RunRef]:
        raise IndexError("a defect")

    worker._run_job = defect  # type: ignore[method-assign]
    assert worker.step()
    done = read_result(files, number, "one")
    assert done is not None
    assert done.error == "a defect"
    assert caplog.records[-1].exc_info
    assert not worker.step()


def test_a_defect_at_a_location_keeps_no_others_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = open_filesystem(str(tmp_path / "broken")), open_filesystem(str(tmp_path / "whole"))

    def defect(*_: object) -> list[FileInfo]:
        raise IndexError("a defect")

    broken.list = defect  # type: ignore[method-assign]
    number = claim(whole, run="one", partitions=1).number
    put_request(whole, Request("one", number, msgspec.msgpack.encode(JOBS["runs"])))
    worker = Worker([broken, whole], renews_lease=False)
    worker._run_job = lambda *_: []  # type: ignore[method-assign]
    assert worker.step()
    assert worker.done == 1
    assert f"{broken.url}: an unexpected error" in caplog.text


def test_an_answer_that_is_cut_off_or_names_nothing_is_not_used(application: Asking) -> None:
    identity = asked(application)
    known = list_requests(application.files)[identity]
    application.files.put(f"compaction/{known.generation:015d}/{identity}.done", [b"{"])
    application.until(lambda: application.remote.stats.local > 0)
    other = asked(application)
    worker = Worker([application.files], renews_lease=False)
    worker._run_job = lambda *_: [msgspec.structs.replace(ref_of(application), name="files/gone.run")]  # type: ignore
    assert other
    before = application.remote.stats.local
    assert worker.step()
    application.until(lambda: application.remote.stats.local > before)
    assert application.remote.stats.remote == 0


def ref_of(application: Asking):  # type: ignore[no-untyped-def]
    assert application.server is not None
    for each in application.server._query(application.task.key).partitions.values():
        for table in each._manifest.tables.values() if each._manifest else ():
            for run in table.runs.runs:
                return run
    raise AssertionError("there is no file")


def test_requests_of_a_fenced_run_are_left_alone(application: Asking) -> None:
    asked(application)
    claim(application.files, run="other", partitions=2)
    worker = Worker([application.files], renews_lease=False)
    assert not worker.step()
    assert not any(known.lease for known in list_requests(application.files).values())


def test_a_query_that_begins_later_is_found(tmp_path: Path) -> None:
    """A compactor may be there first: only a start shows where the state lies, and what a fork shares."""
    locations = Locations([str(tmp_path), str(tmp_path / "fork")])
    assert not list(locations)
    Counts(tmp_path).through(2)
    assert [files.url for files in locations] == [open_state(str(tmp_path)).url]
    query_logs = open_filesystem(str(tmp_path))
    query_logs.put("metadata", [b'{"id": "original"}'])
    fork(str(tmp_path), str(tmp_path / "fork"))
    original, forked = locations
    assert isinstance(forked, ForkedLocalFiles)
    assert not isinstance(original, ForkedLocalFiles)


def test_a_damaged_checkpoint_keeps_no_others_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged = tmp_path / "damaged/millpond/claims/000000000000001.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"torn")
    Counts(tmp_path / "whole").through(2)
    locations = Locations([str(tmp_path / "damaged"), str(tmp_path / "whole")])
    for _ in range(2):
        assert [files.url for files in locations] == [open_state(str(tmp_path / "whole")).url]
    assert caplog.text.count(str(damaged)) == 1, "it is told once"


def test_the_worker_imports_nothing_of_spark() -> None:
    code = (
        "import sys, millpond.compactor.process; print([m for m in sys.modules if m.startswith(('pyspark', 'py4j'))])"
    )
    said = subprocess.run([sys.executable, "-c", code], env=with_tests_on_path(), capture_output=True, check=True)
    assert said.stdout.strip() == b"[]"


def test_a_worker_s_own_claim_is_its_own_if_it_was_sent_twice(tmp_path: Path) -> None:
    application = Asking(tmp_path)
    application.start()
    asked(application)
    repeating = Worker([open_filesystem(f"faults+{tmp_path}/millpond?repeat=1")], directory=str(tmp_path))
    repeating.run(0.01, once=True)
    assert repeating.done >= 1
    application.until(lambda: application.remote.stats.remote >= 1)
    application.close()
