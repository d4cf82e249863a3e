"""The worker: finds requests beside the state of queries, claims them, and does them."""

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
    Done,
    Known,
    Request,
    claim_lease,
    file_prefix,
    give_up_lease,
    holder,
    lease_name,
    put_done,
    read_done,
    read_request,
    request_name,
    requests,
)
from millpond.checkpoint.generation import check_fence
from millpond.errors import FencedError, MillpondError, StateDamagedError, TransientError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem
from millpond.files.backends.patience import patiently
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

LEASE = 30.0
"""Seconds without a new lease after which a worker counts as gone."""

_BEATS = 3  # leases in that time
_MEMORY = 256 << 20

_log = logging.getLogger("millpond.compactor")


@dataclass
class Worker:
    """Does what queries ask for below some locations, one request at a time. It keeps nothing: it may be killed.

    Args:
        locations: the `millpond/` folders, gone through at each look.
        directory: for temporary files.
        lease: see `LEASE`.
        clock: seconds, never set back.
        beats: whether it gives signs of life while it works (tests have it fall silent).

    Attributes:
        name: in leases. stop: set it to give up the lease at once, and end work at the next piece.
        done: requests answered.
    """

    locations: Iterable[FileSystem]
    directory: str = field(default_factory=tempfile.gettempdir)
    lease: float = LEASE
    clock: Callable[[], float] = time.monotonic
    beats: bool = True
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    stop: threading.Event = field(default_factory=threading.Event)
    done: int = 0

    def __post_init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # the newest lease of each request, and since when

    def run(self, poll: float, *, once: bool = False, idle_exit: float | None = None) -> None:
        """Work until stopped.

        Args:
            poll: seconds between two looks when there is nothing to do.
            once: end when a look finds nothing to do. idle_exit: end after so many seconds of that.
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
        """Look once at each location, and do its oldest request that nobody has in hand; whether there was one."""
        seen, self._seen = self._seen, {}
        worked = False
        for files in self.locations:
            try:
                # One at each location: what is asked for at the first must not keep others waiting.
                worked |= any(self._try(files, *one) for one in self._open(files, seen) if not self.stop.is_set())
            except MillpondError as error:
                _log.warning("%s: %s", files.url, error)
        return worked

    def _open(self, files: FileSystem, seen: dict[str, tuple[int, float]]) -> Iterator[tuple[str, Known]]:
        """The requests that nobody has in hand, oldest first, of runs that are not fenced."""
        now = self.clock()
        free: list[tuple[float, str, Known]] = []
        for identity, known in requests(files).items():
            if known.request is None or known.done:
                continue
            lease, since = seen.get(identity, (-1, now))
            since = since if lease == known.lease else now
            self._seen[identity] = known.lease, since
            if not known.taken or now - since >= self.lease:
                free.append((known.request.modified, identity, known))
        fenced: dict[int, bool] = {}
        for _, identity, known in sorted(free, key=lambda one: one[:2]):
            if known.generation not in fenced:
                fenced[known.generation] = _fenced(files, known.generation)
            if not fenced[known.generation]:
                yield identity, known

    def _try(self, files: FileSystem, identity: str, known: Known) -> bool:
        try:
            claim_lease(files, known.generation, identity, known.lease + 1, self.name)
        except AlreadyExistsError:
            if holder(files, known.generation, identity, known.lease + 1) != self.name:
                return False  # another was faster
        self._seen[identity] = known.lease + 1, self.clock()
        try:
            request = read_request(files, known.generation, identity)
        except MillpondError as error:  # of another version of Millpond
            _log.warning("%s: request %s cannot be read: %s", files.url, identity, error)
            return False
        if request is None:
            if not files.exists(request_name(known.generation, identity)):
                files.delete(lease_name(known.generation, identity, known.lease + 1))  # it was withdrawn
            return False
        started = time.perf_counter()
        pace = Pace(1.0)
        try:
            with self._beating(files, request, known.lease + 1, pace):
                made = self._do(files, request, pace)
            done = Done(uuid.uuid4().hex, tuple(made), seconds=time.perf_counter() - started)
        except TransientError as error:
            _log.warning("%s: request %s is left to others: %s", files.url, identity, error)
            return False
        except (MillpondError, OSError, ValueError, msgspec.MsgspecError) as error:
            _log.warning("%s: request %s cannot be done: %s", files.url, identity, error)
            done = Done(uuid.uuid4().hex, error=str(error) or repr(error))
        self._answer(files, request, done)
        return True

    def _do(self, files: FileSystem, request: Request, pace: Pace) -> list[RunRef]:
        job = msgspec.msgpack.decode(request.job, type=Job)
        size = sum(ref.bytes for ref in job.inputs)
        _log.info("%s: request %s: %d files, %d bytes", files.url, request.id, len(job.inputs), size)
        with tempfile.TemporaryDirectory(prefix="millpond-compactor-", dir=self.directory) as local:
            return do_job(files, job, local, pace, file_prefix(request.id))

    def _answer(self, files: FileSystem, request: Request, done: Done) -> None:
        """Put the answer, unless there is one, the request is gone, or its run is fenced."""
        generation, identity = request.generation, request.id
        if _fenced(files, generation) or not files.exists(request_name(generation, identity)):
            _log.info("%s: request %s is not waited for any more", files.url, identity)
            _remove(files, done.files)  # of which nobody was told
            return
        try:
            patiently(lambda: put_done(files, generation, identity, done))
        except AlreadyExistsError:
            if not self._mine(files, request, done):
                _log.info("%s: request %s was answered by another worker", files.url, identity)
                return
        self.done += 1
        rows, size = sum(ref.rows for ref in done.files), sum(ref.bytes for ref in done.files)
        _log.info("%s: request %s done: %d rows, %d bytes, %.1f s", files.url, identity, rows, size, done.seconds)

    def _mine(self, files: FileSystem, request: Request, done: Done) -> bool:
        """Whether an answer that is there is this one; files of which another's knows nothing are removed."""
        try:
            found = read_done(files, request.generation, request.id)
        except StateDamagedError:
            return False
        if found is None or found.attempt == done.attempt:
            return found is not None
        _remove(files, done.files)
        return False

    @contextmanager
    def _beating(self, files: FileSystem, request: Request, lease: int, pace: Pace) -> Iterator[None]:
        """Give signs of life meanwhile; work ends when another has taken over, or this worker is to stop.

        Who is to stop may be in the middle of a long request to the store: others need not wait for its end.
        """
        if not self.beats:
            yield
            return
        ended = threading.Event()
        number = lease

        def give_up() -> None:
            with suppress(MillpondError):  # it runs out
                give_up_lease(files, request.generation, request.id, number, self.name)

        def beat() -> None:
            nonlocal number
            due = self.clock() + self.lease / _BEATS
            while not ended.wait(0.1):
                if self.stop.is_set():
                    pace.stop()
                    give_up()
                    return
                if self.clock() < due:
                    continue
                due = self.clock() + self.lease / _BEATS
                try:
                    if not files.exists(request_name(request.generation, request.id)):
                        pace.stop()  # nobody waits for it any more
                        return
                    claim_lease(files, request.generation, request.id, number + 1, self.name)
                except AlreadyExistsError:
                    with suppress(MillpondError):
                        if holder(files, request.generation, request.id, number + 1) not in ("", self.name):
                            pace.stop()
                            return
                except MillpondError as error:
                    _log.debug("no sign of life could be given: %s", error)
                    continue
                number += 1

        thread = threading.Thread(target=beat, name="millpond-lease", daemon=True)
        thread.start()
        left = False
        try:
            yield
        except TransientError:
            left = True
            raise
        finally:
            ended.set()
            thread.join()
            if left and self.stop.is_set():
                give_up()


def do_job(files: FileSystem, job: Job, local: str, pace: Pace, prefix: str = "") -> list[RunRef]:
    """Do a compaction: the files that it makes.

    Args:
        files: the location that has the inputs, and gets the result.
        job: what is to be done. local: a directory for temporary files. pace: at which. prefix: of the files' names.

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
    store = RunStore(files, local, disk=0, memory=_MEMORY, prefix=prefix)
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
    marks = [np.frombuffer(each, np.uint64) if each else None for each in job.marks]
    inputs = [Input(Part.of_run(layout, run, 0), bits) for run, bits in zip(runs, marks, strict=True)]
    made: list[Run] = []
    try:
        return _refs(merge_parts(job, inputs, layout, store, pace, made))
    except BaseException:
        _remove(files, _refs(made))  # of some of the windows
        raise


def _remove(files: FileSystem, refs: Sequence[RunRef]) -> None:
    for ref in refs:
        with suppress(MillpondError):  # what stays is collected
            files.delete(ref.name)


def _refs(runs: Sequence[Run]) -> list[RunRef]:
    return [run.ref for run in runs if run.ref is not None]


def _fenced(files: FileSystem, generation: int) -> bool:
    try:
        check_fence(files, generation)
    except FencedError:
        return True
    return False
