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

from millpond.files.backends.byte_ranges import near
from millpond.files.backends.filesystem import Buffer, FileInfo, FileSystem, Write

SHARE = 0.05
"""Largest number of hedges (second requests) per first request."""

_QUANTILE = 0.95
"""Quantile of recent response times after which a request is hedged.

It must not be closer to 1 than `1 - SHARE`. If two in a hundred requests are slow, their time is the 99th percentile,
and hedging after that time would gain nothing.
"""
_SOON = 0.005  # seconds after which a request is hedged at the earliest
_RECENT = 128  # recent response times that are kept per class of request
_FEW = 20  # response times of a class below which its requests are not hedged
_BURST = 8.0  # hedges that can be saved up
_SIDE_BY_SIDE = 8  # concurrent requests of one read
_THREADS = 128
_OVERTAKEN = 16  # overtaken and still unanswered requests from which on no request is hedged


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

    def __init__(self, inner: FileSystem, share: float = SHARE) -> None:
        self.inner = inner
        self.url = inner.url
        self.hedges = 0
        self.won = 0
        self._share = share
        self._lock = threading.Lock()
        self._saved = 0.0
        self._overtaken = 0
        self._times: dict[int, deque[float]] = {}
        self._patience: dict[int, float] = {}
        self._pool = ThreadPoolExecutor(_THREADS, "millpond-get")

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """See `FileSystem.get_range`."""
        return self.get_ranges(name, [(offset, length)])[0]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `FileSystem.get_ranges`; near ranges are one request, and each request is hedged independently."""
        if not self._share or not ranges:
            return self.inner.get_ranges(name, ranges)
        groups = near(ranges)
        asked = [[ranges[i] for i in group] for group in groups]
        pieces: list[Buffer] = [b""] * len(ranges)
        todo = deque(range(len(groups)))
        running: list[_Request] = []
        while todo or running:
            while todo and len(running) < _SIDE_BY_SIDE:
                number = todo.popleft()
                running.append(self._begin(name, number, asked[number]))
            _wait(running)
            for request in list(running):
                answer = self._answer(request)
                if answer is not None:
                    running.remove(request)
                    for i, data in zip(groups[request.number], answer, strict=True):
                        pieces[i] = data
                elif time.monotonic() >= request.deadline:
                    self._hedge(request, name, asked[request.number])
        return pieces

    def _begin(self, name: str, number: int, asked: list[tuple[int, int]]) -> _Request:
        kind = _kind(asked)
        with self._lock:
            self._saved = min(_BURST, self._saved + self._share)
            wait_seconds = self._patience.get(kind, math.inf)
        deadline = time.monotonic() + wait_seconds
        first = self._pool.submit(self._timed, name, asked, kind)
        return _Request(number, first, deadline, [first])

    def _timed(self, name: str, asked: list[tuple[int, int]], kind: int) -> list[Buffer]:
        """Send the first try and record its time.

        The time counts even if the hedge was faster; otherwise the time until a hedge would shrink continually.
        """
        began = time.monotonic()
        pieces = self.inner.get_ranges(name, asked)
        seconds = time.monotonic() - began
        with self._lock:
            times = self._times.setdefault(kind, deque(maxlen=_RECENT))
            times.append(seconds)
            if len(times) >= _FEW:
                self._patience[kind] = max(_SOON, sorted(times)[int(_QUANTILE * (len(times) - 1))])
        return pieces

    def _hedge(self, request: _Request, name: str, asked: list[tuple[int, int]]) -> None:
        """Send a hedge if the budget allows it. A request is considered only once."""
        request.deadline = math.inf
        with self._lock:
            if self._saved < 1.0 or self._overtaken >= _OVERTAKEN:
                return
            self._saved -= 1.0
            self.hedges += 1
        request.hedged = True
        request.pending.append(self._pool.submit(self.inner.get_ranges, name, asked))

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
                    self._overtake(request, won=future is not request.first)
                return future.result()
            if future is request.first or request.failure is None:
                request.failure = failure
        if request.pending:
            return None
        assert request.failure is not None
        raise request.failure

    def _overtake(self, request: _Request, *, won: bool) -> None:
        """Cancel the slower try, and count it as overtaken until it ends."""
        with self._lock:
            self.won += won
            self._overtaken += len(request.pending)
        for other in request.pending:
            other.add_done_callback(self._ended)
            other.cancel()

    def _ended(self, _: Future[list[Buffer]]) -> None:
        with self._lock:
            self._overtaken -= 1

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

    def rename(self, src: str, dst: str) -> None:
        """See `FileSystem.rename`."""
        self.inner.rename(src, dst)

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


def _kind(asked: Sequence[tuple[int, int]]) -> int:
    """Return the class of requests of similar duration: lengths within a factor of four, by powers of four bytes."""
    begin, end = asked[0][0], max(offset + length for offset, length in asked)
    return (end - begin).bit_length() // 2
