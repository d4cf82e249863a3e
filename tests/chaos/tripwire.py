"""File systems that a world can trip up: before an operation, after it, in the middle, or by sending it too late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from millpond.errors import TransientError
from millpond.files.backends.filesystem import FileInfo, FileSystem, Write
from millpond.files.backends.local import LocalFiles
from millpond.files.backends.uploads import PART_BYTES

TICK = 0.001
"""Seconds that an object takes to be written."""


class Crash(BaseException):
    """The process that made the call is gone: nothing in it may catch this."""


class Clock:
    """The time, which goes on only when a world says so, and with each object that is written."""

    def __init__(self) -> None:
        self.now = 1e9
        self.written: dict[str, float] = {}
        self.uploaded: set[str] = set()

    def __call__(self) -> float:
        return self.now

    def note(self, url: str, begun: float | None = None) -> None:
        """An object is written now; if it was sent in parts, it is as old as the first of them, as on Amazon S3."""
        self.now += TICK
        self.written[url] = self.now if begun is None else begun
        if begun is not None:
            self.uploaded.add(url)


class Timed:
    """Passes operations to `inner`; its objects have the times of a clock."""

    def __init__(self, inner: FileSystem, clock: Clock) -> None:
        self.inner = inner
        self.url = inner.url
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def put(self, name: str, data: Any, *, create: bool = False, sync: bool = True) -> None:
        self.inner.put(name, data, create=create, sync=sync)
        self._clock.note(self.inner.locate(name))

    @contextmanager
    def upload(self, name: str) -> Iterator[Write]:
        begun = self._clock.now
        with self.inner.upload(name) as write:
            yield write
        self._clock.note(self.inner.locate(name), begun)

    def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        return [self._dated(info) for info in self.inner.list(prefix, after=after)]

    def _dated(self, info: FileInfo) -> FileInfo:
        url = self.inner.locate(info.name)
        size = info.size + PART_BYTES if url in self._clock.uploaded else info.size  # only what is long comes in parts
        return info._replace(size=size, modified=self._clock.written[url])


class Tripwire:
    """Passes operations to `inner`; `decide(step)` says what becomes of each: see `World.decide`.

    A step is named by the store, the operation and the kind of file, e.g. `state put commits`.

    Attributes:
        claimed: the newest generation that a run has claimed here and gone on with; the world says so.
    """

    claimed = 0

    def __init__(self, inner: FileSystem, store: str, decide: Callable[[str], str], delayed: list[Any]) -> None:
        self.inner = inner
        self.url = inner.url
        self._store = store
        self._decide = decide
        self._delayed = delayed

    def put(self, name: str, data: Any, *, create: bool = False, sync: bool = True) -> None:
        pieces = [bytes(memoryview(piece)) for piece in data]

        def act() -> None:
            self.inner.put(name, pieces, create=create, sync=sync)

        fate = self._decide(self._step("put", name))
        if fate.startswith("torn"):
            whole = b"".join(pieces)
            with suppress(FileExistsError):
                self.inner.put(name, [whole[: len(whole) // 2]], create=create, sync=sync)
        elif fate.startswith("late") and create:
            self._delayed.append(act)  # on its way in the network: it arrives at some time, or never
        elif fate == "twice":
            act()
            act()
            return
        self._run(act, fate, name, done=fate.startswith(("torn", "late")))

    @contextmanager
    def upload(self, name: str) -> Iterator[Write]:
        pieces: list[bytes] = []  # the parts; no reader sees them before they are put together
        with ExitStack() as begun:
            write = begun.enter_context(self.inner.upload(name))
            yield lambda data: pieces.append(bytes(memoryview(data)))
            whole = b"".join(pieces)

            def act(length: int = len(whole)) -> None:
                write(whole[:length])
                begun.close()

            fate = self._decide(self._step("put", name))
            if fate.startswith("torn"):
                act(len(whole) // 2)
            self._run(act, fate, name, done=fate.startswith(("torn", "late")))

    def get(self, name: str) -> bytes:
        return self._run(lambda: self.inner.get(name), self._decide(self._step("get", name)), name)

    def get_range(self, name: str, offset: int, length: int) -> Any:
        fate = self._decide(self._step("get", name))
        return self._run(lambda: self.inner.get_range(name, offset, length), fate, name)

    def get_ranges(self, name: str, ranges: Any) -> Any:
        return self._run(lambda: self.inner.get_ranges(name, ranges), self._decide(self._step("get", name)), name)

    def size(self, name: str) -> int:
        return self._run(lambda: self.inner.size(name), self._decide(self._step("get", name)), name)

    def exists(self, name: str) -> bool:
        return self._run(lambda: self.inner.exists(name), self._decide(self._step("get", name)), name)

    def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        fate = self._decide(self._step("list", prefix))
        return self._run(lambda: self.inner.list(prefix, after=after), fate, prefix)

    def delete(self, name: str) -> None:
        fate = self._decide(self._step("delete", name))
        if fate.startswith("late"):  # no name is used twice: whenever it arrives, it does what it was to do
            self._delayed.append(lambda: self.inner.delete(name))
        self._run(lambda: self.inner.delete(name), fate, name, done=fate.startswith("late"))

    def locate(self, name: str) -> str:
        return self.inner.locate(name)

    def _step(self, operation: str, name: str) -> str:
        kind = name.partition("/")[0] if "/" in name else name.rpartition(".")[2]
        return f"{self._store} {operation} {kind}"

    def _run(self, act: Callable[[], Any], fate: str, name: str, *, done: bool = False) -> Any:
        when, _, what = fate.partition(" ")
        result = None
        if not done and when != "before":
            result = act()
        if what == "crash":
            raise Crash(name)
        if what == "failure":
            raise TransientError("Injected failure.", file=self.inner.locate(name))
        return result


class LocalTripwire(Tripwire, LocalFiles):
    """The same over a local disk, where files are written aside and mapped where they lie."""

    def __init__(self, inner: LocalFiles, store: str, decide: Callable[[str], str], delayed: list[Any]) -> None:
        LocalFiles.__init__(self, inner.path)
        Tripwire.__init__(self, inner, store, decide, delayed)

    def publish(self, staged: str, name: str) -> None:
        fate = self._decide(self._step("put", name))
        if fate.startswith(("torn", "late")):  # a file that is written aside is there as a whole, or not at all
            fate = "before " + fate.partition(" ")[2]
        self._run(lambda: LocalFiles.publish(self, staged, name), fate, name)
