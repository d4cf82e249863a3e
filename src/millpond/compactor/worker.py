"""The compaction worker: finds requests beside the state of queries, claims them, and executes them."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np

from millpond.checkpoint.compaction.requests import (
    CompactionResult,
    Request,
    RequestState,
    claim_lease,
    file_prefix,
    lease_holder,
    list_requests,
    put_result,
    read_request,
    read_result,
    release_lease,
    request_name,
)
from millpond.checkpoint.generation import check_fence
from millpond.errors import FencedError, MillpondError, StateDamagedError, StateIncompatibleError, TransientError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem
from millpond.files.backends.retry import with_retries
from millpond.files.refs import RunRef
from millpond.layout import HashRange, RowLayout
from millpond.stores.append_files import AppendFiles
from millpond.stores.jobs import CompactSegments, Job, MergeParts, MergeRuns
from millpond.stores.ordered.files import do_merge as merge_parts
from millpond.stores.ordered.layout import OrderedLayout
from millpond.stores.ordered.merge import Input
from millpond.stores.ordered.parts import Part
from millpond.stores.runs.compactor import do_merge as merge_runs
from millpond.stores.runs.pace import Pace
from millpond.stores.runs.run import Run
from millpond.stores.runs.run_store import RunStore
from millpond.stores.unaligned.compaction import CompactionInput, compact
from millpond.stores.unaligned.segment import ENTRY

LEASE_SECONDS = 30.0
"""Seconds without a new lease after which a worker counts as dead."""

_RENEWALS_PER_LEASE = 3  # leases written per `LEASE_SECONDS`
_CACHE_BYTES = 256 << 20

_log = logging.getLogger("millpond.compactor")


@dataclass
class Worker:
    """Worker that executes compaction requests, one at a time. It has no durable state and may be killed.

    Args:
        locations: the `millpond/` folders to look at, iterated at each step.
        directory: the folder for temporary files.
        lease: see `LEASE_SECONDS`.
        clock: a monotonic clock in seconds.
        renews_lease: whether it renews its lease during work (tests switch this off).

    Attributes:
        name: the worker's name in leases.
        stop: set it to release the lease at once, and to stop work at the next piece.
        done: the number of answered requests.
    """

    locations: Iterable[FileSystem]
    directory: str = field(default_factory=tempfile.gettempdir)
    lease: float = LEASE_SECONDS
    clock: Callable[[], float] = time.monotonic
    renews_lease: bool = True
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    stop: threading.Event = field(default_factory=threading.Event)
    done: int = 0

    def __post_init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # by request: the newest lease, and when it was first seen
        self._unreadable: set[str] = set()  # requests of another format: each is read and logged once

    def run(self, poll: float, *, once: bool = False, idle_exit: float | None = None) -> None:
        """Execute requests until stopped.

        Args:
            poll: seconds between two steps without a request.
            once: return after the first step without a request.
            idle_exit: return after this number of seconds without a request.
        """
        idle = self.clock()
        while not self.stop.is_set():
            if self.step():
                idle = self.clock()
                continue
            if once or (idle_exit is not None and self.clock() - idle >= idle_exit):
                return
            self.stop.wait(poll)

    def step(self) -> bool:
        """Execute the oldest free request of each location; return whether there was one."""
        seen, self._seen = self._seen, {}
        self._unreadable &= seen.keys()
        worked = False
        for files in self.locations:
            try:
                # One request for each location: requests at the first location must not delay other locations.
                worked |= any(
                    self._try_request(files, *request)
                    for request in self._free_requests(files, seen)
                    if not self.stop.is_set()
                )
            except MillpondError as error:
                _log.warning("%s: %s", files.url, error)
            except Exception:  # an error at one location must not stop the work at the others
                _log.exception("%s: an unexpected error", files.url)
        return worked

    def _free_requests(
        self, files: FileSystem, seen: dict[str, tuple[int, float]]
    ) -> Iterator[tuple[str, RequestState]]:
        """Yield the free requests of runs that are not fenced, oldest first.

        A request is free if no worker holds it, or if its newest lease has not changed for the lease time. The time is
        measured by this worker's own clock: clocks of machines are never compared.
        """
        now = self.clock()
        free: list[tuple[float, str, RequestState]] = []
        for identity, state in list_requests(files).items():
            if state.request is None or state.has_result:
                continue
            lease, since = seen.get(identity, (-1, now))
            since = since if lease == state.lease else now
            self._seen[identity] = state.lease, since
            if identity not in self._unreadable and (not state.leased or now - since >= self.lease):
                free.append((state.request.modified, identity, state))
        fenced: dict[int, bool] = {}
        for _, identity, state in sorted(free, key=lambda one: one[:2]):
            if state.generation not in fenced:
                fenced[state.generation] = _fenced(files, state.generation)
            if not fenced[state.generation]:
                yield identity, state

    def _try_request(self, files: FileSystem, identity: str, state: RequestState) -> bool:
        # The request is read before it is claimed: its slot waits for the worker that holds the lease, and this worker
        # may be of a version that does not know the request's format.
        try:
            request = read_request(files, state.generation, identity)
        except StateIncompatibleError as error:
            _log.warning("%s: request %s is left to a compactor of its version: %s", files.url, identity, error)
            self._unreadable.add(identity)
            return False
        if request is None:
            return False  # it was withdrawn since it was listed, or was cut off when it was written
        try:
            claim_lease(files, state.generation, identity, state.lease + 1, self.name)
        except AlreadyExistsError:
            if lease_holder(files, state.generation, identity, state.lease + 1) != self.name:
                return False  # another worker was faster
        self._seen[identity] = state.lease + 1, self.clock()
        started = time.perf_counter()
        pace = Pace(1.0)
        try:
            with self._renewed_lease(files, request, state.lease + 1, pace):
                refs = self._run_job(files, request, pace)
            done = CompactionResult(uuid.uuid4().hex, tuple(refs), seconds=time.perf_counter() - started)
        except TransientError as error:
            _log.warning("%s: request %s failed, and another worker may execute it: %s", files.url, identity, error)
            return False
        except Exception as error:  # without an answer, the next worker would take the request and fail, too
            defect = not isinstance(error, MillpondError)
            _log.warning("%s: request %s cannot be done: %s", files.url, identity, error, exc_info=defect)
            done = CompactionResult(uuid.uuid4().hex, error=str(error) or repr(error))
        self._answer(files, request, done)
        return True

    def _run_job(self, files: FileSystem, request: Request, pace: Pace) -> list[RunRef]:
        job = msgspec.msgpack.decode(request.job, type=Job)
        size = sum(ref.bytes for ref in job.inputs)
        _log.info("%s: request %s: %d files, %d bytes", files.url, request.id, len(job.inputs), size)
        with tempfile.TemporaryDirectory(prefix="millpond-compactor-", dir=self.directory) as local:
            return run_job(files, job, local, pace, file_prefix(request.id))

    def _answer(self, files: FileSystem, request: Request, done: CompactionResult) -> None:
        """Write the answer, unless there is an answer already, the request was withdrawn, or its run is fenced."""
        generation, identity = request.generation, request.id
        # A result without a request would stay until a collection removes it.
        if _fenced(files, generation) or not files.exists(request_name(generation, identity)):
            _log.info("%s: request %s was withdrawn, or its run is fenced", files.url, identity)
            _remove(files, done.files)  # files that no answer names
            return
        try:
            with_retries(lambda: put_result(files, generation, identity, done))
        except AlreadyExistsError:
            if not self._is_own_result(files, request, done):
                _log.info("%s: request %s was answered by another worker", files.url, identity)
                return
        self.done += 1
        rows, size = sum(ref.rows for ref in done.files), sum(ref.bytes for ref in done.files)
        _log.info("%s: request %s done: %d rows, %d bytes, %.1f s", files.url, identity, rows, size, done.seconds)

    def _is_own_result(self, files: FileSystem, request: Request, done: CompactionResult) -> bool:
        """Return whether the existing answer is this worker's; remove this worker's files if it is not."""
        try:
            answer = read_result(files, request.generation, request.id)
        except StateDamagedError:
            return False
        if answer is None or answer.attempt == done.attempt:
            return answer is not None
        _remove(files, done.files)
        return False

    @contextmanager
    def _renewed_lease(self, files: FileSystem, request: Request, lease: int, pace: Pace) -> Iterator[None]:
        """Renew the lease during work; stop the work when another worker has taken over, or this worker has to stop.

        On a stop, the lease is released at once: the work may be in a long request to the store, whose end other
        workers need not wait for.
        """
        if not self.renews_lease:
            yield
            return
        ended = threading.Event()
        number = lease

        def release() -> None:
            with suppress(MillpondError):  # if this fails, the lease expires
                release_lease(files, request.generation, request.id, number, self.name)

        def renew() -> None:
            nonlocal number
            due = self.clock() + self.lease / _RENEWALS_PER_LEASE
            while not ended.wait(0.1):
                if self.stop.is_set():
                    pace.stop()
                    release()
                    return
                if self.clock() < due:
                    continue
                due = self.clock() + self.lease / _RENEWALS_PER_LEASE
                try:
                    if not files.exists(request_name(request.generation, request.id)):
                        pace.stop()  # the request was withdrawn
                        return
                    claim_lease(files, request.generation, request.id, number + 1, self.name)
                except AlreadyExistsError:
                    with suppress(MillpondError):
                        if lease_holder(files, request.generation, request.id, number + 1) not in ("", self.name):
                            pace.stop()
                            return
                except MillpondError as error:
                    _log.debug("the lease could not be renewed: %s", error)
                    continue
                number += 1

        thread = threading.Thread(target=renew, name="millpond-lease", daemon=True)
        thread.start()
        failed = False
        try:
            yield
        except TransientError:
            failed = True
            raise
        finally:
            ended.set()
            thread.join()
            if failed and self.stop.is_set():
                release()


def run_job(files: FileSystem, job: Job, local: str, pace: Pace, prefix: str = "") -> list[RunRef]:
    """Execute a compaction, and return references to the new files.

    Args:
        files: the location of the inputs and of the result.
        job: the compaction.
        local: a directory for temporary files.
        pace: the pace of the work, by which it can be stopped.
        prefix: the prefix of the names of new files.

    Raises:
        StateDamagedError: an input is missing or damaged.
        TransientError: the pace was stopped, or the store failed.
    """
    layout = RowLayout(job.schema)
    if isinstance(job, CompactSegments):
        appended = AppendFiles(files, local, prefix=prefix)
        try:
            inputs = []
            for ref, alive, rows in zip(job.inputs, job.alive, job.rows, strict=True):
                file = appended.open(ref, [layout, ENTRY])
                bits = np.unpackbits(np.frombuffer(alive, np.uint8), count=file.sections[1].rows, bitorder="little")
                inputs.append(CompactionInput(file, bits, rows))
            return [compact(appended, inputs, layout, local, job.piece, pace)[0]]
        finally:
            appended.close()
    store = RunStore(files, local, disk=0, memory=_CACHE_BYTES, prefix=prefix)
    try:
        if isinstance(job, MergeRuns):
            runs = store.open_all(job.inputs, layout, axis=job.axis, earlier=job.earlier)
            return _refs([merge_runs(job, runs, store, pace)])
        return _merge_parts(job, files, store, pace)
    finally:
        store.close()


def _merge_parts(job: MergeParts, files: FileSystem, store: RunStore, pace: Pace) -> list[RunRef]:
    layout = OrderedLayout.of(job.schema)
    runs = store.open_all(job.inputs, layout.rows, HashRange(job.lowest, job.highest + 1))
    marks = [np.frombuffer(bits_of_input, np.uint64) if bits_of_input else None for bits_of_input in job.marks]
    inputs = [Input(Part.of_run(layout, run, 0), bits) for run, bits in zip(runs, marks, strict=True)]
    new_runs: list[Run] = []
    try:
        return _refs(merge_parts(job, inputs, layout, store, pace, new_runs))
    except BaseException:
        _remove(files, _refs(new_runs))  # the result is incomplete
        raise


def _remove(files: FileSystem, refs: Sequence[RunRef]) -> None:
    for ref in refs:
        with suppress(MillpondError):  # files that stay are removed by the garbage collection
            files.delete(ref.name)


def _refs(runs: Sequence[Run]) -> list[RunRef]:
    return [run.ref for run in runs if run.ref is not None]


def _fenced(files: FileSystem, generation: int) -> bool:
    try:
        check_fence(files, generation)
    except FencedError:
        return True
    return False
