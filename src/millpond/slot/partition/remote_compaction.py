"""Remote compaction client of a slot: submits requests, polls for answers, and falls back to local compaction."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from millpond.checkpoint.compaction.requests import (
    MAX_WAIT_SECONDS,
    Request,
    lease_name,
    put_request,
    read_result,
    remove_request,
    request_of_file,
)
from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.errors import MillpondError, StateDamagedError, TransientError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.refs import RunRef
from millpond.stores.jobs import Job
from millpond.stores.runs.run import close_runs

T = TypeVar("T")

SILENCE_SECONDS = 60.0
"""Seconds without a worker's sign of life after which a slot compacts locally. Another worker has time to take over
from one that died."""

_POLL_SECONDS = (0.25, 2.0)
_LOCAL_SECONDS = 300.0
"""Seconds for which no requests are made after no worker answered one."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _PendingRequest:
    """A pending request.

    Attributes:
        submitted_at: time of the request.
        last_sign: time of the last sign of life of a worker.
        next_poll: time of the next poll.
        lease: number of the worker's next lease.
        written: whether the request has been written.
        poll_seconds: seconds between polls.
    """

    id: str
    job: Callable[[], Job]
    local: Callable[[], Future[Any]]
    opened: Callable[[Sequence[RunRef]], Any]
    result: Future[Any]
    submitted_at: float
    last_sign: float
    next_poll: float
    lease: int = 1
    written: bool = False
    poll_seconds: float = _POLL_SECONDS[0]


@dataclass
class RemoteStats:
    """Compactions since the slot opened the query.

    Attributes:
        remote: number done by workers.
        local: number done by the slot because no worker answered.
        bytes: size of the files that workers made.
    """

    remote: int = 0
    local: int = 0
    bytes: int = 0


@dataclass(eq=False)
class _UsedResult:
    """A result in use, with the place (operator, partition) and the first version whose manifest names it."""

    place: tuple[int, int] | None = None
    version: int = 0


@dataclass
class RemoteCompaction:
    """Has a query's compactions done by workers. Thread-safe; one background thread makes all requests.

    Args:
        files: the location's `millpond/` folder.
        generation: generation of the run.
        timeout: see `SILENCE_SECONDS`.
        limit: see `MAX_WAIT_SECONDS`.
        threaded: whether to run a thread; without one, the caller drives it by `step` (tests).
        clock: monotonic clock in seconds.
    """

    files: FileSystem
    generation: int
    timeout: float = SILENCE_SECONDS
    limit: float = MAX_WAIT_SECONDS
    threaded: bool = True
    clock: Callable[[], float] = time.monotonic
    stats: RemoteStats = field(default_factory=RemoteStats)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: list[_PendingRequest] = []
        self._used_results: dict[str, _UsedResult] = {}
        self._to_remove: list[str] = []
        self._local_until = float("-inf")
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Number of requests without an answer."""
        with self._changed:
            return len(self._pending)

    def submit(
        self,
        job: Callable[[], Job],
        local: Callable[[], Future[T]],
        opened: Callable[[Sequence[RunRef]], T],
    ) -> Future[T]:
        """See `stores.jobs.RemoteCompactor`."""
        now = self.clock()
        with self._changed:
            is_local = now < self._local_until
            self.stats.local += is_local
        if is_local:
            return local()
        result: Future[T] = Future()
        with self._changed:
            if self.threaded and self._thread is None:
                thread = threading.Thread(target=self._run, name="millpond-remote", daemon=True)
                thread.start()  # may fail, if this process has too many threads: then there is none, and no request
                self._thread = thread
            self._pending.append(_PendingRequest(uuid.uuid4().hex, job, local, opened, result, now, now, now))
            self._changed.notify_all()
        return result

    def record_sealed(self, manifest: PartitionManifest) -> None:
        """Record which results a sealed version is the first to name."""
        if not self._used_results:
            return
        names = {request_of_file(run.name) for table in manifest.tables.values() for run in table.runs.runs}
        with self._changed:
            for identity, named in self._used_results.items():
                if identity in names and (named.place is None or named.version >= manifest.version):
                    named.place, named.version = manifest.place, manifest.version
                elif identity not in names and named.place == manifest.place and named.version >= manifest.version:
                    named.place = None  # the version was sealed again, from other files

    def mark_durable(self, operator: int, partition: int, version: int) -> None:
        """Remove the requests whose results a now durable version names: they are no longer needed."""
        if not self._used_results:
            return
        with self._changed:
            for identity, named in list(self._used_results.items()):
                if named.place == (operator, partition) and named.version <= version:
                    del self._used_results[identity]
                    self._to_remove.append(identity)
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel all requests. The tables that wait for their results are closed already.

        Requests whose results sealed versions name are kept, as those versions may still become durable.
        """
        with self._changed:
            self._closed = True
            self._to_remove += [request.id for request in self._pending]
            self._to_remove += [identity for identity, named in self._used_results.items() if named.place is None]
            for request in self._pending:
                request.result.cancel()
            self._pending, self._used_results = [], {}
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Wait, after `close`, until withdrawn requests are removed. Garbage collection removes the remaining ones."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._to_remove and not self._pending and not self._closed:
                    self._changed.wait()
                if self._closed and not self._to_remove:
                    return
                pause = min((request.next_poll for request in self._pending), default=0.0) - self.clock()
                if not self._to_remove and pause > 0.0:
                    self._changed.wait(pause)
            self.step()

    def step(self) -> None:
        """Handle all requests that are due once."""
        with self._changed:
            requests, removed = list(self._pending), self._to_remove
            self._to_remove = []
        # The store is called without the lock, so that `submit` does not block a batch.
        for identity in removed:
            self._remove(identity)
        for request in requests:
            if request.result.cancelled():
                self._drop(request)
            elif self.clock() >= request.next_poll:
                self._poll(request)
                request.poll_seconds = min(request.poll_seconds * 1.5, _POLL_SECONDS[1])
                request.next_poll = self.clock() + request.poll_seconds

    def _poll(self, request: _PendingRequest) -> None:
        try:
            if not request.written:
                put_request(self.files, Request(request.id, self.generation, msgspec.msgpack.encode(request.job())))
                request.written = True
                return
            done = read_result(self.files, self.generation, request.id)
            if done is None:
                self._check_leases(request)
            elif done.error:
                self._compact_locally(request, done.error)
            else:
                self._accept(request, done.files)
        except TransientError as error:
            if not request.written or self._is_overdue(request):
                self._compact_locally(request, str(error))
        except MillpondError as error:  # a truncated answer
            self._compact_locally(request, str(error))
        except Exception as error:  # neither the thread nor the merge may fail because of it
            self._compact_locally(request, repr(error))

    def _check_leases(self, request: _PendingRequest) -> None:
        # A worker writes numbered leases while it compacts: each new one is a sign of life.
        while self.files.exists(lease_name(self.generation, request.id, request.lease)):
            request.lease += 1
            request.last_sign = self.clock()
        if self._is_overdue(request):
            if request.lease == 1:
                # Without a first lease there is probably no worker at all: compact locally for a while.
                self._local_until = self.clock() + _LOCAL_SECONDS
            self._compact_locally(
                request, "no worker has shown itself" if request.lease == 1 else "its worker has fallen silent"
            )

    def _is_overdue(self, request: _PendingRequest) -> bool:
        return self.clock() - request.last_sign >= self.timeout or self.clock() - request.submitted_at >= self.limit

    def _accept(self, request: _PendingRequest, refs: Sequence[RunRef]) -> None:
        if self.clock() - request.submitted_at >= self.limit:
            self._compact_locally(request, "its answer came too late")
            return
        try:
            result = request.opened(refs)
        except StateDamagedError as error:
            self._compact_locally(request, str(error))
            return
        with self._changed:
            # If `close` has taken the request meanwhile, its result is cancelled.
            if request in self._pending and any(ref.rows for ref in refs):
                # Registered before the result is set: the table may name its files in the next seal.
                self._used_results[request.id] = _UsedResult()
                self._pending.remove(request)
        if request in self._pending:
            self._drop(request)  # the result has no rows, so no manifest will name it
        if request.result.set_running_or_notify_cancel():
            with self._changed:
                self.stats.remote += 1
                self.stats.bytes += sum(ref.bytes for ref in refs)
            request.result.set_result(result)
            return
        close_runs(result)  # the table is closed
        with self._changed:
            if self._used_results.pop(request.id, None) is not None:
                self._to_remove.append(request.id)

    def _compact_locally(self, request: _PendingRequest, why: str) -> None:
        """Compact locally; results of workers are ignored from now on."""
        self._drop(request)
        if not request.result.set_running_or_notify_cancel():
            return
        with self._changed:
            self.stats.local += 1
        _log.info("A compaction is done by the slot itself: %s", why)
        try:
            request.local().add_done_callback(lambda done: _copy_result(done, request.result))
        except Exception as error:  # the executor is shut down: the slot is closing
            request.result.set_exception(error)

    def _drop(self, request: _PendingRequest) -> None:
        with self._changed:
            if request in self._pending:
                self._pending.remove(request)
        self._remove(request.id)

    def _remove(self, identity: str) -> None:
        with suppress(MillpondError):  # garbage collection removes requests that stay
            remove_request(self.files, self.generation, identity)


def _copy_result(done: Future[T], to: Future[T]) -> None:
    if done.cancelled():
        to.set_exception(TransientError("A compaction was stopped.", action="It is done again when needed."))
    elif (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())
