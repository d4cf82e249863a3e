"""The committer, which makes sealed versions durable in the background (MiSA §4.1–4.5).

A background thread groups sealed versions into one commit object per version, or several if they are large. It writes
the object with put-if-absent, checks that no newer generation exists, and only then acknowledges.

Sealed versions are batched into one put per slot. A group is flushed when all partitions have sealed, when a waiter
needs it, when the next batch starts, or after 1 s.

A failed put is repeated with backoff. If its outcome is unknown (a time-out, or a name that is suddenly taken), the
committer reads the object back. The thread updates a heartbeat. Waiters watch the heartbeat, and replace a thread that
died or is stuck in a put. A late put of the old thread is harmless: it has the same name and the same bytes.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace

from millpond.checkpoint.checkpoint import Checkpoint
from millpond.checkpoint.formats.commit import commit_name
from millpond.checkpoint.formats.manifest import PartitionManifest, Sealed
from millpond.checkpoint.sealed import SealedFiles
from millpond.errors import FencedError, MillpondError, TransientError
from millpond.files.backends.filesystem import AlreadyExistsError
from millpond.files.backends.uploads import MIN_BYTES_PER_SECOND

VersionKey = tuple[int, int, int]

MAX_SHARED_COMMIT_BYTES = 256 << 20
"""Largest commit object that several partitions share, in bytes.

Stores accept some gigabytes in one put, but a failed put is repeated as a whole.
"""


@dataclass
class CommitterStats:
    """Counters of the committer, for progress reports."""

    commits: int = 0
    retries: int = 0
    restarts: int = 0
    seconds: float = 0.0
    """Latency of the last commit: from the first seal of its group to the acknowledgement, in seconds."""


class Committer:
    """Background writer of commit objects. Thread-safe.

    Args:
        checkpoint: the checkpoint to commit to.
        slot: uuid of the slot.
        sealed: the slot's local files; durable versions are removed from them.
        limit: seconds of failing after which waiters get an error (the committer keeps trying).
        report_after: seconds of failing after which `commit_failure` reports it; shorter failures are normal.
        stuck: seconds after which a new thread takes over a put that has not returned (longer for large puts).
        backoff: first and longest pause between tries, in seconds; a random half of it is jitter.
        hold: longest time in seconds that a sealed version waits for the other partitions of its version.
        threaded: run in a thread; if False, the caller drives it by `step()` (tests).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        slot: str,
        sealed: SealedFiles,
        *,
        limit: float = 120.0,
        report_after: float = 5.0,
        stuck: float = 20.0,
        backoff: tuple[float, float] = (0.05, 5.0),
        hold: float = 1.0,
        threaded: bool = True,
    ) -> None:
        self.checkpoint = checkpoint
        self.slot = slot
        self.stats = CommitterStats()
        self._sealed = sealed
        self._failure_limit = limit
        self._report_after = report_after
        self._stuck_seconds = stuck
        self._backoff = backoff
        self._max_hold_seconds = hold
        self._threaded = threaded
        self.heartbeat = time.monotonic()
        self._changed = threading.Condition()
        self._pending: dict[str, Sealed] = {}  # by manifest id, in the order of submission
        self._submitted_at: dict[str, float] = {}  # time of submission of each pending version, by manifest id
        self._maybe_durable: set[str] = set()  # ids of adopted pending versions, which may be durable already
        self._in_flight: _Group | None = None
        self._submitted_places: dict[int, set[tuple[int, int]]] = {}  # partitions submitted, for the last versions
        self._hold_start = 0.0  # time of the first submission of the newest version
        self._released_version = 0  # versions up to this one are not held any more
        self._latest: dict[VersionKey, str] = {}  # id of the newest seal of a version
        self._durable: dict[tuple[int, int], int] = {}
        self._lost: dict[str, TransientError] = {}
        self._fenced: FencedError | None = None
        self._failure: MillpondError | None = None
        self._failing_since: float | None = None
        self._failed_tries = 0
        self._acknowledged_at = -math.inf
        self._random = random.Random()
        self._number = 0
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def mark_durable(self, manifest: PartitionManifest) -> None:
        """Record that a version was opened from the store, so it is durable."""
        with self._changed:
            self._durable[manifest.place] = max(manifest.version, self._durable.get(manifest.place, 0))

    def submit(self, sealed: Sealed, *, adopted: bool = False) -> None:
        """Submit a sealed version (as `SealedFiles.write` or `adopt` returned it). Non-blocking.

        Args:
            sealed: the version to make durable. Its parent must be durable or submitted before.
            adopted: the version comes from a dead slot, which may have committed it already: the store is checked.

        Raises:
            FencedError: a newer run has taken over.
        """
        with self._changed:
            if self._fenced is not None:
                raise copy(self._fenced)
            self._drop_earlier_attempt(sealed)
            self._pending[sealed.manifest.id] = sealed
            self._submitted_at[sealed.manifest.id] = time.monotonic()
            self._record_submission(sealed.manifest)
            self._latest[sealed.key] = sealed.manifest.id
            if adopted:
                self._maybe_durable.add(sealed.manifest.id)
            if self._threaded and self._thread is None:
                self._start_thread()
            self._changed.notify_all()

    def release(self, version: int) -> None:
        """Stop holding this version and earlier ones for grouping: a batch that reads it has begun."""
        with self._changed:
            if version > self._released_version:
                self._released_version = version
                self._changed.notify_all()

    def wait_durable(self, operator: int, partition: int, version: int, timeout: float | None = None) -> None:
        """Wait until the newest seal of this version is acknowledged.

        Returns at once for version 0 and for versions that were opened.

        Args:
            operator, partition, version: the version to wait for.
            timeout: seconds without an acknowledgement, beyond the time that the upload of the group in flight may
                take; None waits until the committer has failed for `limit` seconds.

        Raises:
            TransientError: the time is up, or the store has failed for too long (names the file and the failure), or
                the committer is closed.
            FencedError: a newer run has taken over.
        """
        key = (operator, partition, version)
        try:
            self._wait(lambda: self._is_durable(key), timeout, version)
        except MillpondError as error:
            raise error.at(operator=str(operator), partition=partition, version=version) from None

    def is_durable(self, operator: int, partition: int, version: int) -> bool:
        """Return whether `wait_durable` would return at once."""
        with self._changed:
            return self._is_durable((operator, partition, version))

    def commit_failure(self) -> str:
        """Describe the failure, its duration and its file if commits have failed for some seconds; else return ""."""
        with self._changed:
            failing = 0.0 if self._failing_since is None else time.monotonic() - self._failing_since
            if failing <= self._report_after:
                return ""
            what = f"Commits have failed for {failing:.0f} s"
            return str(self._late_error(what, "Meanwhile they are tried again and again."))

    def drain(self, timeout: float | None = None) -> None:
        """Wait until all submitted versions are acknowledged; raises as `wait_durable` does."""
        self._wait(lambda: not self._pending, timeout)

    def close(self) -> None:
        """Stop the thread after its current try; versions that are not durable stay in the sealed files."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()

    def step(self) -> bool:
        """Try once to commit one group, in the calling thread; return False if nothing is pending."""
        group = self._take_group()
        if group is None:
            return False
        try:
            self._commit(group)
        except FencedError as error:
            with self._changed:
                self._fenced = error
                self._changed.notify_all()
        except Exception as error:  # the committer survives every failure; waiters decide when to give up
            self._back_off(group, error)
        return True

    def _drop_earlier_attempt(self, sealed: Sealed) -> None:
        """Drop an earlier attempt at the same version unless its put is in flight.

        No later version is computed from the earlier attempt any more.
        """
        earlier = self._pending.get(self._latest.get(sealed.key, ""))
        # A put in flight cannot be recalled: it may be durable already.
        in_flight = self._in_flight.members if self._in_flight else []
        if earlier is not None and not any(earlier is member for member in in_flight):
            del self._pending[earlier.manifest.id]
            self._submitted_at.pop(earlier.manifest.id, None)
            self._sealed.remove(earlier)

    def _record_submission(self, manifest: PartitionManifest) -> None:
        """Record that a partition has sealed a version; only the last two versions are kept."""
        submitted = self._submitted_places
        if manifest.version not in submitted:
            self._hold_start = time.monotonic()
        submitted.setdefault(manifest.version, set()).add(manifest.place)
        # Two versions suffice: a version is complete once all partitions of the version before have sealed it.
        self._submitted_places = {
            version: places for version, places in submitted.items() if version >= manifest.version - 1
        }

    def _hold_seconds(self) -> float:
        """Return the seconds for which the oldest pending version may still wait for its other partitions.

        It does not wait once every partition of the version before has submitted this one.
        """
        version = min(sealed.manifest.version for sealed in self._pending.values())
        complete = self._submitted_places.get(version - 1, set()) <= self._submitted_places.get(version, set())
        if self._in_flight is not None or self._fenced is not None or complete or version <= self._released_version:
            return 0.0
        return max(0.0, self._hold_start + self._max_hold_seconds - time.monotonic())

    def _take_group(self) -> _Group | None:
        """Return the group in flight, else form one of the oldest pending version; None if nothing is pending."""
        with self._changed:
            self.heartbeat = time.monotonic()
            if self._fenced is not None:
                return None
            if self._in_flight is None and self._pending:
                # The oldest version first: a manifest names deltas of its parent, which must be durable before.
                version = min(sealed.manifest.version for sealed in self._pending.values())
                sealed = [sealed for sealed in self._pending.values() if sealed.manifest.version == version]
                # The first member always fits, so a partition above the limit gets a commit object of its own.
                offsets = itertools.accumulate((member.bytes for member in sealed), initial=0)
                members = [
                    member
                    for member, offset in zip(sealed, offsets, strict=False)
                    if not offset or offset + member.bytes <= MAX_SHARED_COMMIT_BYTES
                ]
                self._in_flight = _Group(self._number, members)
            return self._in_flight

    def _commit(self, group: _Group) -> None:
        """Put a group's commit object, check the fence, and acknowledge.

        A version whose parent is not durable is marked as lost. Its waiters get an error, and a restart of the query
        repeats the batch.
        """
        ready = []
        for sealed in group.members:
            if sealed.manifest.id in self._maybe_durable and self._is_committed(sealed.manifest):
                continue
            earlier = self.checkpoint.find_cached(sealed.manifest.place, sealed.same_as)
            if earlier is not None:
                # It is durable: the new manifest names its deltas, and the commit has no bytes but its header.
                ready.append((replace(sealed, pieces={}), earlier))
            elif (parent := self.checkpoint.parent_of(sealed.manifest)) is not None:
                ready.append((sealed, parent))
            else:
                self._mark_lost(sealed)
        if ready:
            try:
                self.checkpoint.put_commit(self.slot, group.number, ready)
            except AlreadyExistsError:
                self._advance_number(group)  # the name holds an earlier torn put of this slot
                raise
        # The fence check is a request of its own, so its time does not count as that of the put.
        self.heartbeat = time.monotonic()
        # The fence is checked after the put: a run that claims later lists after its claim, so it sees this commit.
        self.checkpoint.check_fence()
        self._acknowledge(group)

    def _acknowledge(self, group: _Group) -> None:
        with self._changed:
            if self._in_flight is not group:
                return  # another thread took over and has acknowledged the group
            self._in_flight = None
            self._acknowledged_at = time.monotonic()
            if self._threaded:
                # The thread that acknowledges goes on, and its successor ends: that one may be stuck in the same put.
                self._thread = threading.current_thread()
            self._advance_number(group)
            self._failure = self._failing_since = None
            self._failed_tries = 0
            since = [self._submitted_at.pop(sealed.manifest.id, math.inf) for sealed in group.members]
            for sealed in group.members:
                manifest = sealed.manifest
                self._pending.pop(manifest.id, None)
                self._maybe_durable.discard(manifest.id)
                if manifest.id not in self._lost:
                    self._durable[manifest.place] = max(manifest.version, self._durable.get(manifest.place, 0))
                    # Older versions are answered from `_durable`, so `_latest` does not grow.
                    self._latest.pop((*manifest.place, manifest.version - 2), None)
            self.stats.commits += 1
            self.stats.seconds = max(0.0, time.monotonic() - min(since, default=math.inf))
            self._changed.notify_all()
        for sealed in group.members:
            with suppress(MillpondError):  # a slot that adopts a leftover file finds its version durable
                self._sealed.remove(sealed)

    def _is_committed(self, manifest: PartitionManifest) -> bool:
        # A commit of another attempt is enough. If that attempt saw other input, a second commit would contradict it,
        # and the version would be uncertain.
        return bool(self.checkpoint.commits_of(*manifest.place, manifest.version))

    def _mark_lost(self, sealed: Sealed) -> None:
        """Mark a version as lost: its parent is neither durable nor known."""
        manifest = sealed.manifest
        with self._changed:
            self._lost[manifest.id] = TransientError(
                "The version that this one was computed from is lost.",
                action="Restart the query: it repeats the batch.",
            )

    def _advance_number(self, group: _Group) -> None:
        """Give the group a new object number, for its next put or, after its commit, for the next group."""
        with self._changed:
            self._number = max(self._number, group.number + 1)
            group.number = self._number

    def _back_off(self, group: _Group, error: Exception) -> None:
        """Record a failed try, then wait for the backoff, or until the committer closes."""
        with self._changed:
            if self._in_flight is not group:
                return  # the thread was replaced and fails late: its successor has committed the group
            if not isinstance(error, MillpondError):
                error = TransientError(f"The committer failed: {error!r}.", action="Try again.")
            self._failure = error
            now = time.monotonic()
            if self._failing_since is None:
                self._failing_since = now
            self.stats.retries += 1
            self._failed_tries += 1
            # Jitter keeps the slots of a query from repeating their puts at the same moment.
            first, longest = self._backoff
            # The exponent is bounded, as an outage may last for days.
            pause = min(longest, first * 2 ** min(self._failed_tries, 20)) * self._random.uniform(0.5, 1.0)
            self.heartbeat = now
            self._changed.notify_all()
        self._closed.wait(pause)

    def _is_durable(self, key: VersionKey) -> bool:
        identity = self._latest.get(key)
        if identity is not None:
            if identity in self._lost:
                raise copy(self._lost[identity])
            return identity not in self._pending
        if key[2] == 0 or self._durable.get(key[:2], 0) >= key[2]:
            return True
        raise TransientError("This slot has not sealed the version.", action="Restart the query.")

    def _wait(self, done: Callable[[], bool], timeout: float | None, version: int | None = None) -> None:
        """Wait until `done()`, and flush held versions up to `version` (None: all), as the caller needs them."""
        began = time.monotonic()
        limit = math.inf if timeout is None else timeout
        with self._changed:
            failures_before = self.stats.retries + self.stats.restarts
            while not done():
                if self._fenced is not None:
                    raise copy(self._fenced)  # callers add their place, and each raise adds to the traceback
                if self._closed.is_set():
                    raise TransientError("The committer is closed: its query has stopped.")
                self.release(max(self._submitted_places, default=0) if version is None else version)
                now = time.monotonic()
                if now >= max(began, self._acknowledged_at) + limit + self._upload_seconds():
                    raise self._late_error(f"A commit is not durable after {now - began:.2f} s")
                self._replace_stuck_thread(now)
                new_failures = self.stats.retries + self.stats.restarts - failures_before
                failing = 0.0 if self._failing_since is None else now - self._failing_since
                if failing > self._failure_limit and new_failures > 1:  # it has also failed since this waiter came
                    raise self._late_error(f"Commits have failed for {failing:.0f} s")
                if self._threaded:
                    # Wake up regularly: without a notification, only waiters see that the thread is dead or stuck.
                    self._changed.wait(min(0.5, self._stuck_seconds / 4, limit))
                else:
                    self.step()

    def _replace_stuck_thread(self, now: float) -> None:
        """Replace the thread if it died or if its put does not return (MiSA §4.5)."""
        if not self._threaded or not self._pending:
            return
        alive = self._thread is not None and self._thread.is_alive()
        late = now - self.heartbeat > self._stuck_seconds + self._upload_seconds()
        if alive and not (late and self._in_flight):
            return
        if self._failing_since is None:
            self._failing_since = self.heartbeat
        self._failure = TransientError("A put does not return." if alive else "The committer's thread died.")
        self.stats.restarts += 1
        self._start_thread()

    def _upload_seconds(self) -> float:
        """Return the longest time in seconds that the upload of the group in flight may take."""
        size = sum(sealed.bytes for sealed in self._in_flight.members) if self._in_flight else 0
        return size / MIN_BYTES_PER_SECOND

    def _late_error(self, what: str, then: str = "Then restart the query.") -> TransientError:
        """Build the error for a commit that is late, with the last failure and its file."""
        version = min((sealed.manifest.version for sealed in self._pending.values()), default=0)
        number = self._in_flight.number if self._in_flight else self._number
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
        # A daemon: a put that never returns must not keep the slot from exiting.
        self._thread = threading.Thread(target=self._run, name="millpond-committer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                while self._thread is me and not self._closed.is_set():
                    held = self._hold_seconds() if self._pending else None
                    if held == 0.0:
                        break
                    self._changed.wait(held)
                # A thread that was replaced while its put was stuck ends here.
                if self._thread is not me or self._closed.is_set() or self._fenced is not None:
                    return
            self.step()


@dataclass
class _Group:
    """Sealed versions of one commit object; they are retried together until they are acknowledged."""

    number: int
    members: list[Sealed]
