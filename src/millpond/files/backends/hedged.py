"""Reads from an object store whose slowest few are asked for a second time: whichever answer is first counts."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass

from millpond.files.backends.filesystem import Buffer, FileInfo, FileSystem, Write
from millpond.files.backends.objects import near

SHARE = 0.05
"""Second requests for each first one, at most."""

_QUANTILE = 0.95
"""Of recent requests, the share that was answered sooner than one is waited for. It cannot be closer to 1 than `SHARE`
allows: where two in a hundred are slow, their time is the 99th percentile, and waiting for that would win nothing."""
_SOON = 0.005  # seconds within which nothing is asked for twice
_RECENT = 128  # requests of a class by whose times the next are judged
_FEW = 20  # of a class, with which nothing is known yet
_BURST = 8.0  # second requests that may be saved up
_SIDE_BY_SIDE = 8  # requests of one read
_THREADS = 128
_OVERTAKEN = 16  # requests that were overtaken and not answered yet, at most


@dataclass(eq=False)
class _Request:
    """One range as it is got.

    Attributes:
        number: of the range. first: the first try. deadline: when it is time for a second one.
        pending: tries that are not answered yet. hedged: whether there is a second one.
        failure: of a try that failed, the first one's if both did.
    """

    number: int
    first: Future[list[Buffer]]
    deadline: float
    pending: list[Future[list[Buffer]]]
    hedged: bool = False
    failure: BaseException | None = None


class HedgedFiles:
    """The file system `inner`, with ranges that take long asked for once more. Thread-safe.

    A range is asked for again if it is not there when 95 of 100 recent ones of about its length were. Second requests
    are few, whatever happens: for each twenty first ones, one. Only ranges are asked for twice, as of them alone the
    length, and so the usual time, is known before.

    Args:
        inner: an object store. share: second requests for each first one, at most; 0 for none.

    Attributes:
        hedges: second requests so far. won: those of them that were answered first.
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
        """See `FileSystem.get_ranges`; near ranges are one request, and each of these is waited for by itself."""
        if not self._share or not ranges:
            return self.inner.get_ranges(name, ranges)
        groups = near(ranges)
        asked = [[ranges[i] for i in group] for group in groups]
        found: list[Buffer] = [b""] * len(ranges)
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
                        found[i] = data
                elif time.monotonic() >= request.deadline:
                    self._hedge(request, name, asked[request.number])
        return found

    def _begin(self, name: str, number: int, asked: list[tuple[int, int]]) -> _Request:
        kind = _kind(asked)
        with self._lock:
            self._saved = min(_BURST, self._saved + self._share)
            patience = self._patience.get(kind, math.inf)
        deadline = time.monotonic() + patience
        first = self._pool.submit(self._timed, name, asked, kind)
        return _Request(number, first, deadline, [first])

    def _timed(self, name: str, asked: list[tuple[int, int]], kind: int) -> list[Buffer]:
        """The first try. Its own time counts, also if the second was faster: else waiting would grow ever shorter."""
        began = time.monotonic()
        found = self.inner.get_ranges(name, asked)
        seconds = time.monotonic() - began
        with self._lock:
            times = self._times.setdefault(kind, deque(maxlen=_RECENT))
            times.append(seconds)
            if len(times) >= _FEW:
                self._patience[kind] = max(_SOON, sorted(times)[int(_QUANTILE * (len(times) - 1))])
        return found

    def _hedge(self, request: _Request, name: str, asked: list[tuple[int, int]]) -> None:
        """Ask once more, if there is a request to spare; either way, no more than this once."""
        request.deadline = math.inf
        with self._lock:
            if self._saved < 1.0 or self._overtaken >= _OVERTAKEN:
                return
            self._saved -= 1.0
            self.hedges += 1
        request.hedged = True
        request.pending.append(self._pool.submit(self.inner.get_ranges, name, asked))

    def _answer(self, request: _Request) -> list[Buffer] | None:
        """The first good answer; None if it may still come.

        Raises:
            MillpondError: all tries have failed; this is the first one's failure.
        """
        for one in [one for one in request.pending if one.done()]:
            request.pending.remove(one)
            failure = one.exception()
            if failure is None:
                if request.hedged:
                    self._overtake(request, won=one is not request.first)
                return one.result()
            if one is request.first or request.failure is None:
                request.failure = failure
        if request.pending:
            return None
        assert request.failure is not None
        raise request.failure

    def _overtake(self, request: _Request, *, won: bool) -> None:
        """Let go of the try that was slower."""
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
        """End the threads, each with the request that it waits for; ranges can be got no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _wait(running: Sequence[_Request]) -> None:
    """Until something is answered, or it is time for a second try."""
    due = min(request.deadline for request in running)
    left = None if due == math.inf else max(0.0, due - time.monotonic())
    wait([one for request in running for one in request.pending], left, FIRST_COMPLETED)


def _kind(asked: Sequence[tuple[int, int]]) -> int:
    """The class of requests that take about as long as this one: of a quarter to the whole of a power of four bytes."""
    begin, end = asked[0][0], max(offset + length for offset, length in asked)
    return (end - begin).bit_length() // 2
