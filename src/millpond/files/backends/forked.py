"""A location that has some of its files elsewhere: names below `parents/<number>/` are read from other locations.

Nothing is written there. Whoever holds such a name uses it like any other, and so do stores that map files where they
lie: on a local disk, the place of such a name is the file's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, TypeVar

from millpond.errors import SettingError
from millpond.files.backends.filesystem import Buffer, FileInfo, FileSystem, MissingFileError, Write
from millpond.files.backends.local import LocalFiles

_FOLDER = "parents/"
T = TypeVar("T")


class Shared(NamedTuple):
    """A name that stands for an object of another location: the number of that, and the name that it has there."""

    parent: int
    name: str


def shared_name(parent: int, name: str) -> str:
    """The name here of an object that another location has under `name`."""
    return f"{_FOLDER}{parent}/{name}"


def parse_shared(name: str) -> Shared | None:
    """What a name stands for, None if for an object of this location."""
    if not name.startswith(_FOLDER):
        return None
    number, _, rest = name.removeprefix(_FOLDER).partition("/")
    return Shared(int(number), rest)


def with_parents(own: FileSystem, parents: Sequence[FileSystem]) -> FileSystem:
    """The location `own`, with names that stand for objects of `parents`.

    Raises:
        SettingError: files of a local disk are mapped where they lie, and a parent has none that can be.
    """
    if not isinstance(own, LocalFiles):
        return ForkedFiles(own, parents)
    local = [parent for parent in parents if isinstance(parent, LocalFiles)]
    if len(local) < len(parents):
        raise SettingError(
            f"{own.url} lies on a local disk, and reads files from where there is none: "
            f"{next(parent.url for parent in parents if not isinstance(parent, LocalFiles))}.",
            action="Both have to be on local disks, or both in object stores.",
        )
    return ForkedLocalFiles(own.path, local)


class ForkedFiles:
    """Objects of `own`, and under names that say so those of `parents`, which are only read."""

    def __init__(self, own: FileSystem, parents: Sequence[FileSystem]) -> None:
        self.own = own
        self.parents = tuple(parents)
        self.url = own.url

    def put(self, name: str, data: Sequence[Buffer], *, create: bool = False, sync: bool = True) -> None:
        """See `FileSystem.put`."""
        self.own.put(_writable(name), data, create=create, sync=sync)

    def upload(self, name: str) -> AbstractContextManager[Write]:
        """See `FileSystem.upload`."""
        return self.own.upload(_writable(name))

    def get(self, name: str) -> bytes:
        """See `FileSystem.get`."""
        return self._read(name, lambda files, at: files.get(at))

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """See `FileSystem.get_range`."""
        return self._read(name, lambda files, at: files.get_range(at, offset, length))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `FileSystem.get_ranges`."""
        return self._read(name, lambda files, at: files.get_ranges(at, ranges))

    def size(self, name: str) -> int:
        """See `FileSystem.size`."""
        return self._read(name, lambda files, at: files.size(at))

    def exists(self, name: str) -> bool:
        """See `FileSystem.exists`."""
        return self._read(name, lambda files, at: files.exists(at))

    def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        """See `FileSystem.list`; what lies elsewhere is not listed."""
        return self.own.list(prefix, after=after)

    def rename(self, src: str, dst: str) -> None:
        """See `FileSystem.rename`."""
        self.own.rename(_writable(src), _writable(dst))

    def delete(self, name: str) -> None:
        """See `FileSystem.delete`."""
        self.own.delete(_writable(name))

    def locate(self, name: str) -> str:
        """See `FileSystem.locate`: where the object really lies."""
        at = parse_shared(name)
        return self.own.locate(name) if at is None else self.parents[at.parent].locate(at.name)

    def _read(self, name: str, action: Callable[[FileSystem, str], T]) -> T:
        at = parse_shared(name)
        if at is None:
            return action(self.own, name)
        parent = self.parents[at.parent]
        with _naming_both(self.url, parent.url):
            return action(parent, at.name)


class ForkedLocalFiles(LocalFiles):
    """The same on a local disk."""

    def __init__(self, path: str, parents: Sequence[LocalFiles]) -> None:
        super().__init__(path)
        self.parents = tuple(parents)

    def put(self, name: str, data: Sequence[Buffer], *, create: bool = False, sync: bool = True) -> None:
        """See `FileSystem.put`."""
        super().put(_writable(name), data, create=create, sync=sync)

    def upload(self, name: str) -> AbstractContextManager[Write]:
        """See `FileSystem.upload`."""
        return super().upload(_writable(name))

    def rename(self, src: str, dst: str) -> None:
        """See `FileSystem.rename`."""
        super().rename(_writable(src), _writable(dst))

    def delete(self, name: str) -> None:
        """See `FileSystem.delete`."""
        super().delete(_writable(name))

    def publish(self, staged: str, name: str) -> None:
        """See `LocalFiles.publish`."""
        super().publish(staged, _writable(name))

    def locate(self, name: str) -> str:
        """See `FileSystem.locate`: where the object really lies."""
        at = parse_shared(name)
        return super().locate(name) if at is None else self.parents[at.parent].locate(at.name)

    def _path(self, name: str) -> str:
        at = parse_shared(name)
        return super()._path(name) if at is None else self.parents[at.parent]._path(at.name)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        at = parse_shared(name)
        if at is None:
            with super()._errors(name):
                yield
            return
        with _naming_both(self.url, self.parents[at.parent].url), super()._errors(name):
            yield


def _writable(name: str) -> str:
    if parse_shared(name) is not None:
        raise ValueError(f"{name} belongs to another location, which is only read")
    return name


@contextmanager
def _naming_both(fork: str, parent: str) -> Iterator[None]:
    try:
        yield
    except MissingFileError as error:
        raise MissingFileError(
            f"A state file is missing at {parent}, from which {fork} was forked and still reads.",
            action="Restore it from a backup of that location, or all of that if it was deleted or moved.",
            file=error.file,
        ) from error
