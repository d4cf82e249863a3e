"""The slot's side of compactions done elsewhere: asks for them, looks for answers by name, does them itself at last."""

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
"""Seconds without a sign of life from a worker after which a slot compacts itself: time enough for another worker to
take over from one that died."""

_POLL = (0.25, 2.0)
_ALONE = 300.0
"""Seconds for which nobody is asked after no worker has shown itself."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Asked:
    """A request under way.

    Attributes:
        since: when it was made; sign: when a worker was last heard of; lease: the number that its next one will have.
        put: whether the request is there. wait: seconds until the next look, which is at `due`.
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
    """Compactions since the query came to this slot: done elsewhere; done here though others were, or would be, asked.

    `bytes`: of the files that were made elsewhere.
    """

    remote: int = 0
    local: int = 0
    bytes: int = 0


@dataclass(eq=False)
class _Named:
    """A result that was taken: the first version of which place names it, once one does."""

    place: tuple[int, int] | None = None
    version: int = 0


@dataclass
class RemoteCompaction:
    """Has a query's compactions done by workers. Thread-safe; all requests are made by a thread of its own.

    Args:
        files: the location's `millpond/` folder.
        generation: the run's number.
        timeout: see `TIMEOUT`.
        limit: see `LIMIT`.
        threaded: run in a thread; without, the caller drives it by `step` (tests).
        clock: seconds, never set back.
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
        self._asked: list[_Asked] = []
        self._taken: dict[str, _Named] = {}
        self._to_withdraw: list[str] = []
        self._alone_until = float("-inf")
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait for an answer."""
        with self._changed:
            return len(self._asked)

    def submit(
        self,
        job: Callable[[], Job],
        local: Callable[[], Future[T]],
        opened: Callable[[Sequence[RunRef]], T],
    ) -> Future[T]:
        """See `stores.jobs.Elsewhere`."""
        now = self.clock()
        with self._changed:
            alone = now < self._alone_until
            self.stats.local += alone
        if alone:
            return local()
        result: Future[T] = Future()
        with self._changed:
            self._asked.append(_Asked(uuid.uuid4().hex, job, local, opened, result, now, now, now))
            if self.threaded and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="millpond-remote", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return result

    def sealed(self, manifest: PartitionManifest) -> None:
        """A version was sealed: it may be the first to name a result."""
        if not self._taken:
            return
        names = {made_for(run.name) for table in manifest.tables.values() for run in table.runs.runs}
        with self._changed:
            for identity, named in self._taken.items():
                if identity in names and (named.place is None or named.version >= manifest.version):
                    named.place, named.version = manifest.place, manifest.version
                elif identity not in names and named.place == manifest.place and named.version >= manifest.version:
                    named.place = None  # that version was made once more, from other files

    def durable(self, operator: int, partition: int, version: int) -> None:
        """A version that was sealed here is durable: the requests whose results it names have served."""
        if not self._taken:
            return
        with self._changed:
            for identity, named in list(self._taken.items()):
                if named.place == (operator, partition) and named.version <= version:
                    del self._taken[identity]
                    self._to_withdraw.append(identity)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for nothing any more; tables that wait for results are closed already.

        Requests whose results sealed versions name stay: these may still become durable.
        """
        with self._changed:
            self._closed = True
            self._to_withdraw += [one.id for one in self._asked]
            self._to_withdraw += [identity for identity, named in self._taken.items() if named.place is None]
            for one in self._asked:
                one.result.cancel()
            self._asked, self._taken = [], {}
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Wait, after `close`, until what nobody waits for any more is removed; what stays is collected."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._to_withdraw and not self._asked and not self._closed:
                    self._changed.wait()
                if self._closed and not self._to_withdraw:
                    return
                pause = min((one.due for one in self._asked), default=0.0) - self.clock()
                if not self._to_withdraw and pause > 0.0:
                    self._changed.wait(pause)
            self.step()

    def step(self) -> None:
        """Look once for everything whose time it is."""
        with self._changed:
            asked, withdrawn = list(self._asked), self._to_withdraw
            self._to_withdraw = []
        for identity in withdrawn:
            self._withdraw(identity)
        for one in asked:
            if one.result.cancelled():
                self._forget(one)
            elif self.clock() >= one.due:
                self._look(one)
                one.wait = min(one.wait * 1.5, _POLL[1])
                one.due = self.clock() + one.wait

    def _look(self, one: _Asked) -> None:
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
        except MillpondError as error:  # an answer that was cut off
            self._give_up(one, str(error))
        except Exception as error:  # the thread outlives it, and so does the merge
            self._give_up(one, repr(error))

    def _listen(self, one: _Asked) -> None:
        while self.files.exists(lease_name(self.generation, one.id, one.lease)):
            one.lease += 1
            one.sign = self.clock()
        if self._overdue(one):
            if one.lease == 1:
                self._alone_until = self.clock() + _ALONE
            self._give_up(one, "no worker has shown itself" if one.lease == 1 else "its worker has fallen silent")

    def _overdue(self, one: _Asked) -> bool:
        return self.clock() - one.sign >= self.timeout or self.clock() - one.since >= self.limit

    def _take(self, one: _Asked, refs: Sequence[RunRef]) -> None:
        if self.clock() - one.since >= self.limit:
            self._give_up(one, "its answer came too late")
            return
        try:
            found = one.opened(refs)
        except StateDamagedError as error:
            self._give_up(one, str(error))
            return
        with self._changed:
            if one not in self._asked:
                return  # closed meanwhile
            if any(ref.rows for ref in refs):
                self._taken[one.id] = _Named()
                self._asked.remove(one)
        if one in self._asked:
            self._forget(one)  # nothing is left of the inputs, and no manifest will name the result
        if one.result.set_running_or_notify_cancel():
            with self._changed:
                self.stats.remote += 1
                self.stats.bytes += sum(ref.bytes for ref in refs)
            one.result.set_result(found)
            return
        with self._changed:
            if self._taken.pop(one.id, None) is not None:
                self._to_withdraw.append(one.id)

    def _give_up(self, one: _Asked, why: str) -> None:
        """Do it here: from now on no result of others is used."""
        self._forget(one)
        if not one.result.set_running_or_notify_cancel():
            return
        with self._changed:
            self.stats.local += 1
        _log.info("A compaction is done by the slot itself: %s", why)
        try:
            one.local().add_done_callback(lambda done: _hand_on(done, one.result))
        except Exception as error:  # the slot is closing
            one.result.set_exception(error)

    def _forget(self, one: _Asked) -> None:
        with self._changed:
            if one in self._asked:
                self._asked.remove(one)
        self._withdraw(one.id)

    def _withdraw(self, identity: str) -> None:
        with suppress(MillpondError):  # what stays is collected
            withdraw(self.files, self.generation, identity)


def _hand_on(done: Future[T], to: Future[T]) -> None:
    if done.cancelled():
        to.set_exception(TransientError("A compaction was stopped.", action="It is done again when needed."))
    elif (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())
