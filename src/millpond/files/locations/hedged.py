"""Hedged reads: the slowest requests to an object store are sent a second time, and the first answer counts."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass

from millpond.files.backends.byte_ranges import group_ranges
from millpond.files.backends.filesystem import Buffer, FileInfo, FileSystem, Write

MAX_HEDGE_SHARE = 0.05
"""Largest number of hedges (second requests) per first request."""

_QUANTILE = 0.95
"""Quantile of recent response times after which a request is hedged.

It must not be closer to 1 than `1 - MAX_HEDGE_SHARE`. If two in a hundred requests are slow, their time is the 99th
percentile, and hedging after that time would gain nothing.
"""
_MIN_HEDGE_SECONDS = 0.005  # seconds after which a request is hedged at the earliest
_MAX_SAMPLES = 128  # recent response times that are kept per class of request
_MIN_SAMPLES = 20  # response times of a class below which its requests are not hedged
_MAX_SAVED_HEDGES = 8.0  # hedges that can be saved up
_MAX_CONCURRENT = 8  # concurrent requests of one read
_THREADS = 128
_MAX_CANCELLED = 16  # cancelled and still unanswered requests from which on no request is hedged


@dataclass(eq=False)
class _Request:
    """One range that is being fetched.

    Attributes:
        number: number of the range.
        first: the first try.
        deadline: time of the hedge.
        pending: tries without an answer.
        hedged: whether a second try was sent.
        failure: error of a failed try; the first try's if both failed.
    """

    number: int
    first: Future[list[Buffer]]
    deadline: float
    pending: list[Future[list[Buffer]]]
    hedged: bool = False
    failure: BaseException | None = None


class HedgedFiles:
    """A wrapper of the file system `inner` that hedges slow reads of ranges. Thread-safe.

    A request is hedged if it takes longer than 95 of 100 recent requests of about its length. Hedges are limited to one
    per twenty first requests. Only reads of ranges are hedged: their length, and so their usual time, is known in
    advance.

    Args:
        inner: an object store.
        share: largest number of hedges per first request; 0 disables hedging.

    Attributes:
        hedges: hedges so far.
        won: hedges that were answered before the first request.
    """

    def __init__(self, inner: FileSystem, share: float = MAX_HEDGE_SHARE) -> None:
        self.inner = inner
        self.url = inner.url
        self.hedges = 0
        self.won = 0
        self._share = share
        self._lock = threading.Lock()
        self._saved_hedges = 0.0
        self._cancelled = 0
        self._times: dict[int, deque[float]] = {}
        self._hedge_after: dict[int, float] = {}
        self._pool = ThreadPoolExecutor(_THREADS, "millpond-get")

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """See `FileSystem.get_range`."""
        return self.get_ranges(name, [(offset, length)])[0]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `FileSystem.get_ranges`; near ranges are one request, and each request is hedged independently."""
        if not self._share or not ranges:
            return self.inner.get_ranges(name, ranges)
        groups = group_ranges(ranges)
        requests = [[ranges[i] for i in group] for group in groups]
        pieces: list[Buffer] = [b""] * len(ranges)
        todo = deque(range(len(groups)))
        running: list[_Request] = []
        while todo or running:
            while todo and len(running) < _MAX_CONCURRENT:
                number = todo.popleft()
                running.append(self._begin(name, number, requests[number]))
            _wait(running)
            for request in list(running):
                answer = self._answer(request)
                if answer is not None:
                    running.remove(request)
                    for i, data in zip(groups[request.number], answer, strict=True):
                        pieces[i] = data
                elif time.monotonic() >= request.deadline:
                    self._hedge(request, name, requests[request.number])
        return pieces

    def _begin(self, name: str, number: int, ranges: list[tuple[int, int]]) -> _Request:
        size_class = _size_class(ranges)
        with self._lock:
            self._saved_hedges = min(_MAX_SAVED_HEDGES, self._saved_hedges + self._share)
            wait_seconds = self._hedge_after.get(size_class, math.inf)
        deadline = time.monotonic() + wait_seconds
        first = self._pool.submit(self._timed_read, name, ranges, size_class)
        return _Request(number, first, deadline, [first])

    def _timed_read(self, name: str, ranges: list[tuple[int, int]], size_class: int) -> list[Buffer]:
        """Send the first try and record its time.

        The time counts even if the hedge was faster; otherwise the time until a hedge would shrink continually.
        """
        began = time.monotonic()
        pieces = self.inner.get_ranges(name, ranges)
        seconds = time.monotonic() - began
        with self._lock:
            times = self._times.setdefault(size_class, deque(maxlen=_MAX_SAMPLES))
            times.append(seconds)
            if len(times) >= _MIN_SAMPLES:
                self._hedge_after[size_class] = max(
                    _MIN_HEDGE_SECONDS, sorted(times)[int(_QUANTILE * (len(times) - 1))]
                )
        return pieces

    def _hedge(self, request: _Request, name: str, ranges: list[tuple[int, int]]) -> None:
        """Send a hedge if the budget allows it. A request is considered only once."""
        request.deadline = math.inf
        with self._lock:
            if self._saved_hedges < 1.0 or self._cancelled >= _MAX_CANCELLED:
                return
            self._saved_hedges -= 1.0
            self.hedges += 1
        request.hedged = True
        request.pending.append(self._pool.submit(self.inner.get_ranges, name, ranges))

    def _answer(self, request: _Request) -> list[Buffer] | None:
        """Return the first successful answer; None while a try is pending.

        Raises:
            MillpondError: all tries have failed; this is the first try's failure.
        """
        for future in [future for future in request.pending if future.done()]:
            request.pending.remove(future)
            failure = future.exception()
            if failure is None:
                if request.hedged:
                    self._cancel_slower(request, won=future is not request.first)
                return future.result()
            if future is request.first or request.failure is None:
                request.failure = failure
        if request.pending:
            return None
        assert request.failure is not None
        raise request.failure

    def _cancel_slower(self, request: _Request, *, won: bool) -> None:
        """Cancel the slower try, and count it until it ends."""
        with self._lock:
            self.won += won
            self._cancelled += len(request.pending)
        for other in request.pending:
            other.add_done_callback(self._cancelled_ended)
            other.cancel()

    def _cancelled_ended(self, _: Future[list[Buffer]]) -> None:
        with self._lock:
            self._cancelled -= 1

    def put(self, name: str, data: Sequence[Buffer], *, create: bool = False, sync: bool = True) -> None:
        """See `FileSystem.put`."""
        self.inner.put(name, data, create=create, sync=sync)

    def upload(self, name: str) -> AbstractContextManager[Write]:
        """See `FileSystem.upload`."""
        return self.inner.upload(name)

    def get(self, name: str) -> bytes:
        """See `FileSystem.get`."""
        return self.inner.get(name)

    def size(self, name: str) -> int:
        """See `FileSystem.size`."""
        return self.inner.size(name)

    def exists(self, name: str) -> bool:
        """See `FileSystem.exists`."""
        return self.inner.exists(name)

    def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        """See `FileSystem.list`."""
        return self.inner.list(prefix, after=after)

    def delete(self, name: str) -> None:
        """See `FileSystem.delete`."""
        self.inner.delete(name)

    def locate(self, name: str) -> str:
        """See `FileSystem.locate`."""
        return self.inner.locate(name)

    def close(self) -> None:
        """Shut down the threads; each ends with its current request. Ranges cannot be read afterwards."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _wait(running: Sequence[_Request]) -> None:
    """Wait until a try ends, or until the next request is due for a hedge."""
    due = min(request.deadline for request in running)
    timeout = None if due == math.inf else max(0.0, due - time.monotonic())
    wait([future for request in running for future in request.pending], timeout, FIRST_COMPLETED)


def _size_class(ranges: Sequence[tuple[int, int]]) -> int:
    """Return the class of requests of similar duration: lengths within a factor of four, by powers of four bytes."""
    begin, end = ranges[0][0], max(offset + length for offset, length in ranges)
    return (end - begin).bit_length() // 2
