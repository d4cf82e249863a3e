"""The committer: makes sealed versions durable behind the batch's back (MiSA §4.1–4.5).

A background thread groups what is sealed into one commit object per version (several, if it is much), puts it with
put-if-absent, checks that no newer generation exists, and only then acknowledges. What is sealed is held for the slot's
other partitions, so that a batch is one put, but only until it is released, by who waits for it or by the next batch,
or until a second is over.
A put that fails is repeated with backoff; one whose outcome is not known (a time-out, a name that is suddenly taken) is
settled by reading it back. The thread leaves a heartbeat; whoever waits for it watches that, and replaces a thread that
died or is stuck in a put: its put, should it still take effect, has the same name and the same bytes.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from millpond.checkpoint.checkpoint import Checkpoint
from millpond.checkpoint.formats.commit import commit_name
from millpond.checkpoint.formats.manifest import PartitionManifest, Sealed
from millpond.checkpoint.sealed import SealedFiles
from millpond.errors import FencedError, MillpondError, TransientError
from millpond.files.backends.filesystem import AlreadyExistsError
from millpond.files.backends.uploads import SLOWEST

Key = tuple[int, int, int]

LARGE = 256 << 20
"""Bytes up to which partitions share a commit: stores take some gigabytes in one put, and one that fails is made again
as a whole."""


@dataclass
class CommitterStats:
    """What the committer has done; for progress reports."""

    commits: int = 0
    versions: int = 0
    bytes: int = 0
    retries: int = 0
    restarts: int = 0
    seconds: float = 0.0
    """From when the first of a group was sealed to the group's acknowledgement, of the last commit."""


class Committer:
    """Makes sealed versions durable. Thread-safe.

    Args:
        checkpoint: where commits go.
        slot: uuid of the slot.
        sealed: the slot's local files; what is durable is removed from them.
        limit: seconds of failing after which waiters get an error (the committer keeps trying).
        trouble: seconds of failing after which it is told: a store may fail now and then.
        stuck: seconds after which a put that has not returned is taken over by a new thread (more for large ones).
        backoff: first and longest pause between tries, in seconds; a random half of it is jitter.
        hold: seconds for which what is sealed waits for the other partitions that the version before had, at most.
        threaded: run in a thread; without, the caller drives it by `step()` (tests).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        slot: str,
        sealed: SealedFiles,
        *,
        limit: float = 120.0,
        trouble: float = 5.0,
        stuck: float = 20.0,
        backoff: tuple[float, float] = (0.05, 5.0),
        hold: float = 1.0,
        threaded: bool = True,
    ) -> None:
        self.checkpoint = checkpoint
        self.slot = slot
        self.stats = CommitterStats()
        self._sealed = sealed
        self._limit = limit
        self._trouble = trouble
        self._stuck = stuck
        self._backoff = backoff
        self._hold = hold
        self._threaded = threaded
        self.heartbeat = time.monotonic()
        self._changed = threading.Condition()
        self._pending: dict[str, Sealed] = {}  # by manifest id, in the order of submission
        self._since: dict[str, float] = {}  # of those: when they were submitted
        self._unsure: set[str] = set()  # of those, adopted ones: they may be durable already
        self._group: _Group | None = None
        self._places: dict[int, set[tuple[int, int]]] = {}  # of the last versions: what was submitted of them
        self._held_since = 0.0  # when the first of the newest version was
        self._released = 0  # nothing is held of versions up to this one
        self._latest: dict[Key, str] = {}  # id of the newest seal of a version
        self._durable: dict[tuple[int, int], int] = {}
        self._lost: dict[str, TransientError] = {}
        self._fenced: FencedError | None = None
        self._failure: MillpondError | None = None
        self._failing_since: float | None = None
        self._tries = 0
        self._random = random.Random()
        self._number = 0
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def opened(self, manifest: PartitionManifest) -> None:
        """Note that a version came from the store, so it is durable."""
        with self._changed:
            self._durable[manifest.place] = max(manifest.version, self._durable.get(manifest.place, 0))

    def submit(self, sealed: Sealed, *, adopted: bool = False) -> None:
        """Hand over a sealed version (as `SealedFiles.write` or `adopt` returned it); returns at once.

        Args:
            sealed: what to make durable. Its parent must be durable or submitted before.
            adopted: it comes from a dead slot, which may have put it already: look first.

        Raises:
            FencedError: a newer run has taken over.
        """
        with self._changed:
            if self._fenced is not None:
                raise self._fenced
            self._forget_attempt(sealed)
            self._pending[sealed.manifest.id] = sealed
            self._since[sealed.manifest.id] = time.monotonic()
            self._note_place(sealed.manifest)
            self._latest[sealed.key] = sealed.manifest.id
            if adopted:
                self._unsure.add(sealed.manifest.id)
            if self._threaded and self._thread is None:
                self._start_thread()
            self._changed.notify_all()

    def release(self, version: int) -> None:
        """Hold nothing back any more of this version and those before it: a batch that reads it has begun."""
        with self._changed:
            if version > self._released:
                self._released = version
                self._changed.notify_all()

    def wait_durable(self, operator: int, partition: int, version: int, timeout: float | None = None) -> None:
        """Return once the newest seal of this version is acknowledged; at once for version 0 and what was `opened`.

        Args:
            operator, partition, version: what to wait for.
            timeout: seconds; None leaves it to the committer's `limit` of failing.

        Raises:
            TransientError: time is up, or the store has failed for too long (names the file and the failure).
            FencedError: a newer run has taken over.
        """
        key = (operator, partition, version)
        try:
            self._wait(lambda: self._is_durable(key), timeout, version)
        except MillpondError as error:
            raise error.at(operator=str(operator), partition=partition, version=version) from None

    def trouble(self) -> str:
        """What fails, since when and where, if commits have failed for some seconds; else empty."""
        with self._changed:
            failing = 0.0 if self._failing_since is None else time.monotonic() - self._failing_since
            if failing <= self._trouble:
                return ""
            what = f"Commits have failed for {failing:.0f} s"
            return str(self._overdue(what, "Meanwhile they are tried again and again."))

    def drain(self, timeout: float | None = None) -> None:
        """Return once everything submitted is acknowledged; raises as `wait_durable` does."""
        self._wait(lambda: not self._pending, timeout)

    def close(self) -> None:
        """End the thread after its present try; what is not durable stays in the sealed files."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()

    def step(self) -> bool:
        """One try to commit one group, in the calling thread; False when nothing is sealed."""
        group = self._take_group()
        if group is None:
            return False
        try:
            self._commit(group)
        except FencedError as error:
            with self._changed:
                self._fenced = error
                self._changed.notify_all()
        except Exception as error:  # the committer outlives every failure; waiters decide when it is too much
            self._failed(error)
        return True

    def _forget_attempt(self, sealed: Sealed) -> None:
        """Drop an earlier attempt at the same version that is not on its way: nothing is computed from it any more."""
        before = self._pending.get(self._latest.get(sealed.key, ""))
        on_its_way = self._group.members if self._group else []
        if before is not None and not any(before is member for member in on_its_way):
            del self._pending[before.manifest.id]
            self._since.pop(before.manifest.id, None)
            self._sealed.remove(before)

    def _note_place(self, manifest: PartitionManifest) -> None:
        known = self._places
        if manifest.version not in known:
            self._held_since = time.monotonic()
        known.setdefault(manifest.version, set()).add(manifest.place)
        self._places = {version: places for version, places in known.items() if version >= manifest.version - 1}

    def _held(self) -> float:
        """Seconds for which what is sealed may still wait for the rest of its version."""
        version = min(sealed.manifest.version for sealed in self._pending.values())
        whole = self._places.get(version - 1, set()) <= self._places.get(version, set())
        if self._group is not None or self._fenced is not None or whole or version <= self._released:
            return 0.0
        return max(0.0, self._held_since + self._hold - time.monotonic())

    def _take_group(self) -> _Group | None:
        with self._changed:
            self.heartbeat = time.monotonic()
            if self._fenced is not None:
                return None
            if self._group is None and self._pending:
                version = min(sealed.manifest.version for sealed in self._pending.values())
                sealed = [sealed for sealed in self._pending.values() if sealed.manifest.version == version]
                before = itertools.accumulate((one.bytes for one in sealed), initial=0)
                members = [
                    one for one, size in zip(sealed, before, strict=False) if not size or size + one.bytes <= LARGE
                ]
                self._group = _Group(self._number, members)
            return self._group

    def _commit(self, group: _Group) -> None:
        ready = []
        for sealed in group.members:
            if sealed.manifest.id in self._unsure and self._is_stored(sealed.manifest):
                continue
            parent = self.checkpoint.parent_of(sealed.manifest)
            if parent is None:
                self._lose(sealed)
            else:
                ready.append((sealed, parent))
        if ready:
            try:
                self.checkpoint.put_commit(self.slot, group.number, ready)
            except AlreadyExistsError:
                self._next_number(group)  # a torn put of ours lies there
                raise
        self.heartbeat = time.monotonic()
        self.checkpoint.check_fence()
        self._acknowledge(group, sum(sealed.bytes for sealed, _ in ready))

    def _acknowledge(self, group: _Group, size: int) -> None:
        with self._changed:
            if self._group is not group:
                return  # another thread took over and has done this
            self._group = None
            self._next_number(group)
            self._failure = self._failing_since = None
            self._tries = 0
            since = [self._since.pop(sealed.manifest.id, math.inf) for sealed in group.members]
            for sealed in group.members:
                manifest = sealed.manifest
                self._pending.pop(manifest.id, None)
                self._unsure.discard(manifest.id)
                if manifest.id not in self._lost:
                    self._durable[manifest.place] = max(manifest.version, self._durable.get(manifest.place, 0))
                    self._latest.pop((*manifest.place, manifest.version - 2), None)
            self.stats.commits += 1
            self.stats.versions += len(group.members)
            self.stats.bytes += size
            self.stats.seconds = max(0.0, time.monotonic() - min(since, default=math.inf))
            self._changed.notify_all()
        for sealed in group.members:
            with suppress(MillpondError):  # a file that stays is found durable by whoever adopts it
                self._sealed.remove(sealed)

    def _is_stored(self, manifest: PartitionManifest) -> bool:
        # Another attempt's commit will do, and if it saw other input, a second one would only put it in doubt.
        return bool(self.checkpoint.commits_of(*manifest.place, manifest.version))

    def _lose(self, sealed: Sealed) -> None:
        manifest = sealed.manifest
        with self._changed:
            self._lost[manifest.id] = TransientError(
                "The version that this one was computed from is lost.",
                action="Restart the query: it repeats the batch.",
            )

    def _next_number(self, group: _Group) -> None:
        with self._changed:
            self._number = max(self._number, group.number + 1)
            group.number = self._number

    def _failed(self, error: Exception) -> None:
        with self._changed:
            if not isinstance(error, MillpondError):
                error = TransientError(f"The committer failed: {error!r}.", action="Try again.")
            self._failure = error
            now = time.monotonic()
            if self._failing_since is None:
                self._failing_since = now
            self.stats.retries += 1
            self._tries += 1
            first, longest = self._backoff
            pause = min(longest, first * 2 ** min(self._tries, 20)) * self._random.uniform(0.5, 1.0)
            self.heartbeat = now
            self._changed.notify_all()
        self._closed.wait(pause)

    def _is_durable(self, key: Key) -> bool:
        identity = self._latest.get(key)
        if identity is not None:
            if identity in self._lost:
                raise self._lost[identity]
            return identity not in self._pending
        if key[2] == 0 or self._durable.get(key[:2], 0) >= key[2]:
            return True
        raise TransientError("This slot has not sealed the version.", action="Restart the query.")

    def _wait(self, done: Callable[[], bool], timeout: float | None, version: int | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            before = self.stats.retries + self.stats.restarts
            while not done():
                if self._fenced is not None:
                    raise self._fenced
                self.release(max(self._places, default=0) if version is None else version)
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    raise self._overdue(f"A commit is not durable after {timeout:g} s")
                self._watch(now)
                fresh = self.stats.retries + self.stats.restarts - before
                failing = 0.0 if self._failing_since is None else now - self._failing_since
                if failing > self._limit and fresh > 1:  # it still fails, and not only for waiters before this one
                    raise self._overdue(f"Commits have failed for {failing:.0f} s")
                if self._threaded:
                    self._changed.wait(min(0.5, self._stuck / 4, max(0.0, (deadline or now + 1) - now)))
                else:
                    self.step()

    def _watch(self, now: float) -> None:
        """Replace the thread if it died or if its put does not return (MiSA §4.5)."""
        if not self._threaded or not self._pending:
            return
        alive = self._thread is not None and self._thread.is_alive()
        size = sum(sealed.bytes for sealed in self._group.members) if self._group else 0
        late = now - self.heartbeat > self._stuck + size / SLOWEST
        if alive and not (late and self._group):
            return
        if self._failing_since is None:
            self._failing_since = self.heartbeat
        self._failure = TransientError("A put does not return." if alive else "The committer's thread died.")
        self.stats.restarts += 1
        self._start_thread()

    def _overdue(self, what: str, then: str = "Then restart the query.") -> TransientError:
        version = min((sealed.manifest.version for sealed in self._pending.values()), default=0)
        number = self._group.number if self._group else self._number
        name = commit_name(version, self.checkpoint.generation, self.slot, number)
        files, failure = self.checkpoint.files, self._failure
        helps = failure.action if failure and failure.action else f"See whether the store at {files.url} answers."
        return TransientError(
            f"{what}: {failure.message}" if failure else f"{what}.",
            action=f"{helps} {then}",
            file=failure.file if failure and failure.file else files.locate(name),
        )

    def _start_thread(self) -> None:
        self.heartbeat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="millpond-committer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                while self._thread is me and not self._closed.is_set():
                    held = self._held() if self._pending else None
                    if held == 0.0:
                        break
                    self._changed.wait(held)
                if self._thread is not me or self._closed.is_set() or self._fenced is not None:
                    return
            self.step()


@dataclass
class _Group:
    """What goes into one commit object: sealed versions that are repeated together until they are settled."""

    number: int
    members: list[Sealed]
