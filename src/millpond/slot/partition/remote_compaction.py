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
    LIMIT,
    Request,
    lease_name,
    made_for,
    put_request,
    read_done,
    withdraw,
)
from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.errors import MillpondError, StateDamagedError, TransientError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.refs import RunRef
from millpond.stores.jobs import Job

T = TypeVar("T")

TIMEOUT = 60.0
"""Seconds without a worker's sign of life after which a slot compacts locally. Another worker has time to take over
from one that died."""

_POLL = (0.25, 2.0)
_LOCAL_SECONDS = 300.0
"""Seconds for which no requests are made after no worker answered one."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _PendingRequest:
    """A pending request.

    Attributes:
        since: time of the request.
        sign: time of the last sign of life of a worker.
        due: time of the next poll.
        lease: number of the worker's next lease.
        put: whether the request has been written.
        wait: seconds between polls.
    """

    id: str
    job: Callable[[], Job]
    local: Callable[[], Future[Any]]
    opened: Callable[[Sequence[RunRef]], Any]
    result: Future[Any]
    since: float
    sign: float
    due: float
    lease: int = 1
    put: bool = False
    wait: float = _POLL[0]


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
class _Named:
    """A result in use, with the place (operator, partition) and the first version whose manifest names it."""

    place: tuple[int, int] | None = None
    version: int = 0


@dataclass
class RemoteCompaction:
    """Has a query's compactions done by workers. Thread-safe; one background thread makes all requests.

    Args:
        files: the location's `millpond/` folder.
        generation: generation of the run.
        timeout: see `TIMEOUT`.
        limit: see `LIMIT`.
        threaded: whether to run a thread; without one, the caller drives it by `step` (tests).
        clock: monotonic clock in seconds.
    """

    files: FileSystem
    generation: int
    timeout: float = TIMEOUT
    limit: float = LIMIT
    threaded: bool = True
    clock: Callable[[], float] = time.monotonic
    stats: RemoteStats = field(default_factory=RemoteStats)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: list[_PendingRequest] = []
        self._taken: dict[str, _Named] = {}
        self._to_withdraw: list[str] = []
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
            alone = now < self._local_until
            self.stats.local += alone
        if alone:
            return local()
        result: Future[T] = Future()
        with self._changed:
            self._pending.append(_PendingRequest(uuid.uuid4().hex, job, local, opened, result, now, now, now))
            if self.threaded and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="millpond-remote", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return result

    def sealed(self, manifest: PartitionManifest) -> None:
        """Record which results a sealed version is the first to name."""
        if not self._taken:
            return
        names = {made_for(run.name) for table in manifest.tables.values() for run in table.runs.runs}
        with self._changed:
            for identity, named in self._taken.items():
                if identity in names and (named.place is None or named.version >= manifest.version):
                    named.place, named.version = manifest.place, manifest.version
                elif identity not in names and named.place == manifest.place and named.version >= manifest.version:
                    named.place = None  # the version was sealed again, from other files

    def durable(self, operator: int, partition: int, version: int) -> None:
        """Withdraw the requests whose results a now durable version names: they are no longer needed."""
        if not self._taken:
            return
        with self._changed:
            for identity, named in list(self._taken.items()):
                if named.place == (operator, partition) and named.version <= version:
                    del self._taken[identity]
                    self._to_withdraw.append(identity)
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel all requests. The tables that wait for their results are closed already.

        Requests whose results sealed versions name are kept, as those versions may still become durable.
        """
        with self._changed:
            self._closed = True
            self._to_withdraw += [request.id for request in self._pending]
            self._to_withdraw += [identity for identity, named in self._taken.items() if named.place is None]
            for request in self._pending:
                request.result.cancel()
            self._pending, self._taken = [], {}
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Wait, after `close`, until withdrawn requests are removed. Garbage collection removes the remaining ones."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._to_withdraw and not self._pending and not self._closed:
                    self._changed.wait()
                if self._closed and not self._to_withdraw:
                    return
                pause = min((request.due for request in self._pending), default=0.0) - self.clock()
                if not self._to_withdraw and pause > 0.0:
                    self._changed.wait(pause)
            self.step()

    def step(self) -> None:
        """Handle all requests that are due once."""
        with self._changed:
            asked, withdrawn = list(self._pending), self._to_withdraw
            self._to_withdraw = []
        for identity in withdrawn:
            self._withdraw(identity)
        for request in asked:
            if request.result.cancelled():
                self._forget(request)
            elif self.clock() >= request.due:
                self._look(request)
                request.wait = min(request.wait * 1.5, _POLL[1])
                request.due = self.clock() + request.wait

    def _look(self, one: _PendingRequest) -> None:
        try:
            if not one.put:
                put_request(self.files, Request(one.id, self.generation, msgspec.msgpack.encode(one.job())))
                one.put = True
                return
            done = read_done(self.files, self.generation, one.id)
            if done is None:
                self._listen(one)
            elif done.error:
                self._give_up(one, done.error)
            else:
                self._take(one, done.files)
        except TransientError as error:
            if not one.put or self._overdue(one):
                self._give_up(one, str(error))
        except MillpondError as error:  # a truncated answer
            self._give_up(one, str(error))
        except Exception as error:  # neither the thread nor the merge may fail because of it
            self._give_up(one, repr(error))

    def _listen(self, one: _PendingRequest) -> None:
        # A worker writes numbered leases while it compacts: each new one is a sign of life.
        while self.files.exists(lease_name(self.generation, one.id, one.lease)):
            one.lease += 1
            one.sign = self.clock()
        if self._overdue(one):
            if one.lease == 1:
                # Without a first lease there is probably no worker at all: compact locally for a while.
                self._local_until = self.clock() + _LOCAL_SECONDS
            self._give_up(one, "no worker has shown itself" if one.lease == 1 else "its worker has fallen silent")

    def _overdue(self, one: _PendingRequest) -> bool:
        return self.clock() - one.sign >= self.timeout or self.clock() - one.since >= self.limit

    def _take(self, one: _PendingRequest, refs: Sequence[RunRef]) -> None:
        if self.clock() - one.since >= self.limit:
            self._give_up(one, "its answer came too late")
            return
        try:
            result = one.opened(refs)
        except StateDamagedError as error:
            self._give_up(one, str(error))
            return
        with self._changed:
            if one not in self._pending:
                return  # closed meanwhile
            if any(ref.rows for ref in refs):
                self._taken[one.id] = _Named()
                self._pending.remove(one)
        if one in self._pending:
            self._forget(one)  # the result has no rows, so no manifest will name it
        if one.result.set_running_or_notify_cancel():
            with self._changed:
                self.stats.remote += 1
                self.stats.bytes += sum(ref.bytes for ref in refs)
            one.result.set_result(result)
            return
        with self._changed:
            if self._taken.pop(one.id, None) is not None:
                self._to_withdraw.append(one.id)

    def _give_up(self, one: _PendingRequest, why: str) -> None:
        """Compact locally; results of workers are ignored from now on."""
        self._forget(one)
        if not one.result.set_running_or_notify_cancel():
            return
        with self._changed:
            self.stats.local += 1
        _log.info("A compaction is done by the slot itself: %s", why)
        try:
            one.local().add_done_callback(lambda done: _copy_result(done, one.result))
        except Exception as error:  # the executor is shut down: the slot is closing
            one.result.set_exception(error)

    def _forget(self, one: _PendingRequest) -> None:
        with self._changed:
            if one in self._pending:
                self._pending.remove(one)
        self._withdraw(one.id)

    def _withdraw(self, identity: str) -> None:
        with suppress(MillpondError):  # garbage collection removes requests that stay
            withdraw(self.files, self.generation, identity)


def _copy_result(done: Future[T], to: Future[T]) -> None:
    if done.cancelled():
        to.set_exception(TransientError("A compaction was stopped.", action="It is done again when needed."))
    elif (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())
