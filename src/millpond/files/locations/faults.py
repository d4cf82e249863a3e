"""Fault injection for tests: a store with latency, failures, stalls, torn and repeated writes, driven by a seed.

`faults+<location>?latency_ms=23&bandwidth_mb=100&fail=0.05&torn=0.02&repeat=0.02&stall=0.01&stall_s=2&seed=7` is valid
as `spark.millpond.state.location`, so that slots in other processes get the same faults. (23 ms a request is object
storage, 1.5 ms HDFS: Flink 2.0, Table 1.)
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec

from millpond.errors import SettingError, TransientError
from millpond.files.backends.filesystem import Buffer, FileInfo, FileSystem, Write
from millpond.files.backends.uploads import PART_BYTES, upload_in_parts

T = TypeVar("T")

_HOLD_POLL_S = 0.05


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The faults to inject, and their probabilities per request.

    Attributes:
        latency_ms: latency added to every request, in milliseconds.
        bandwidth_mb: megabytes (10⁶) per second, shared by all requests of the process; 0 is unlimited.
        fail: probability that a request raises `TransientError`, half of the time after it took effect.
        torn: probability that a put (or an upload, at its end) leaves a truncated object, or none, and raises
            `TransientError`.
        repeat: probability that a put is sent twice; with `create`, the second finds the first's object.
        stall: probability of a stall.
        stall_s: duration of a stall in seconds.
        hold: path of a file of this machine; puts wait while it exists.
        retries: retries of a failed request (as obstore's own), except for puts of an object and the completion of an
            upload.
        seed: seed of the random choices.
    """

    latency_ms: float = 0.0
    bandwidth_mb: float = 0.0
    fail: float = 0.0
    torn: float = 0.0
    repeat: float = 0.0
    stall: float = 0.0
    stall_s: float = 30.0
    hold: str = ""
    retries: int = 3
    seed: int = 0


class FaultyFiles:
    """A wrapper of the file system `inner` that injects `faults`; counts requests by kind in `requests`."""

    def __init__(self, inner: FileSystem, faults: Faults) -> None:
        self.inner = inner
        self.url = inner.url
        self.faults = faults
        self.requests: dict[str, int] = {}
        self._random = random.Random(faults.seed)
        self._lock = threading.Lock()
        self._free = 0.0

    def put(self, name: str, data: Sequence[Buffer], *, create: bool = False, sync: bool = True) -> None:
        """See `FileSystem.put`."""
        size = sum(memoryview(piece).nbytes for piece in data)
        keep = self._torn_length(size)
        if keep is not None:
            self._tear(name, data, keep, create)
            raise self._failure(name, "a put was torn")
        is_repeated = self._chance(self.faults.repeat)

        def act() -> None:
            for _ in range(2 if is_repeated else 1):
                self.inner.put(name, data, create=create, sync=sync)

        self._request("put", name, act, size, retries=0)

    def upload(self, name: str) -> AbstractContextManager[Write]:
        """See `FileSystem.upload`."""
        return upload_in_parts(lambda data: self.put(name, [data]), lambda: _FaultyParts(self, name))

    def get(self, name: str) -> bytes:
        """See `FileSystem.get`."""
        data = self._request("get", name, lambda: self.inner.get(name))
        self._transfer(len(data))
        return data

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """See `FileSystem.get_range`."""
        return self._request("get", name, lambda: self.inner.get_range(name, offset, length), length)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `FileSystem.get_ranges`; one request, as near ranges are fetched together."""
        return self._request("get", name, lambda: self.inner.get_ranges(name, ranges), sum(n for _, n in ranges))

    def size(self, name: str) -> int:
        """See `FileSystem.size`."""
        return self._request("head", name, lambda: self.inner.size(name))

    def exists(self, name: str) -> bool:
        """See `FileSystem.exists`."""
        return self._request("head", name, lambda: self.inner.exists(name))

    def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        """See `FileSystem.list`."""
        return self._request("list", prefix, lambda: self.inner.list(prefix, after=after))

    def delete(self, name: str) -> None:
        """See `FileSystem.delete`."""
        self._request("delete", name, lambda: self.inner.delete(name))

    def locate(self, name: str) -> str:
        """See `FileSystem.locate`."""
        return self.inner.locate(name)

    def _request(self, kind: str, name: str, act: Callable[[], T], size: int = 0, retries: int | None = None) -> T:
        retries_left = self.faults.retries if retries is None else retries
        while True:
            with self._lock:
                self.requests[kind] = self.requests.get(kind, 0) + 1
            time.sleep(self.faults.latency_ms / 1e3)
            if self._chance(self.faults.stall):
                time.sleep(self.faults.stall_s)
            while kind == "put" and self.faults.hold and Path(self.faults.hold).exists():
                time.sleep(_HOLD_POLL_S)
            self._transfer(size)
            failing = self._chance(self.faults.fail)
            late = failing and self._chance(0.5)
            if not failing or late:
                result = act()
                if not failing:
                    return result
            if retries_left == 0:
                raise self._failure(name, f"a {kind} failed" + (", though it took effect" if late else ""))
            retries_left -= 1

    def _transfer(self, size: int) -> None:
        if not size or not self.faults.bandwidth_mb:
            return
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size / (self.faults.bandwidth_mb * 1e6)
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))

    def _torn_length(self, size: int) -> int | None:
        """Decide whether an object of `size` bytes is torn; return the bytes to keep (-1: no object), else None."""
        if not self._chance(self.faults.torn):
            return None
        with self._lock:
            return self._random.randrange(-1, max(1, size))

    def _tear(self, name: str, data: Sequence[Buffer], keep: int, create: bool) -> None:
        if keep >= 0:
            whole = b"".join(bytes(memoryview(piece)) for piece in data)
            self._request("put", name, lambda: self.inner.put(name, [whole[:keep]], create=create), keep, 0)

    def _chance(self, probability: float) -> bool:
        if probability <= 0:
            return False
        with self._lock:
            return self._random.random() < probability

    def _failure(self, name: str, what: str) -> TransientError:
        return TransientError(f"Injected: {what}.", action="Try again.", file=self.locate(name))


class _FaultyParts:
    """A multipart upload with faults; each part is a request (see `Parts`)."""

    def __init__(self, files: FaultyFiles, name: str) -> None:
        self._files = files
        self._name = name
        self._bytes_left = files._torn_length(3 * PART_BYTES)
        self._inner = ExitStack()
        upload = files.inner.upload(name)
        self._write = files._request("put", name, _once(lambda: self._inner.enter_context(upload)))

    def send(self, data: bytes) -> None:
        """See `Parts.send`."""

        def send() -> None:
            kept = data if self._bytes_left is None else data[: max(0, self._bytes_left)]
            self._write(kept)
            if self._bytes_left is not None:
                self._bytes_left -= len(kept)

        self._files._request("put", self._name, _once(send), len(data))

    def complete(self) -> None:
        """See `Parts.complete`."""
        if self._bytes_left is not None:
            if self._bytes_left >= 0:
                self._inner.close()
            raise self._files._failure(self._name, "an upload was torn")
        self._files._request("put", self._name, self._inner.close, retries=0)

    def abort(self) -> None:
        """See `Parts.abort`."""
        error = self._files._failure(self._name, "an upload was given up")
        self._inner.__exit__(type(error), error, None)


def _once(act: Callable[[], T]) -> Callable[[], T]:
    """Wrap an action so that repeated calls run it once and return the same result."""
    done: list[T] = []

    def ask() -> T:
        if not done:
            done.append(act())
        return done[0]

    return ask


def parse_faults(url: str) -> tuple[str, Faults]:
    """Split a `faults+<location>?<faults>` URL into the location and its faults.

    Raises:
        SettingError: a fault is unknown or malformed.
    """
    location, _, query = url.removeprefix("faults+").partition("?")
    try:
        faults = msgspec.convert(dict(parse_qsl(query, strict_parsing=bool(query))), Faults, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise SettingError(
            f"The faults of {url!r} are malformed: {error}.",
            action=f"Known ones: {', '.join(Faults.__struct_fields__)}.",
        ) from error
    return location, faults
