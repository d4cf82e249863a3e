"""File systems of forks: names below `parents/<number>/` refer to objects of other locations, which are only read.

All code uses such a name like any other. Stores can map such a file in place: on a local disk, the path of the name is
the parent's own file.
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
    """A reference to an object of another location.

    Attributes:
        parent: number of the parent location.
        name: the object's name there.
    """

    parent: int
    name: str


def shared_name(parent: int, name: str) -> str:
    """Return a fork's name of the object `name` of a parent."""
    return f"{_FOLDER}{parent}/{name}"


def parse_shared(name: str) -> Shared | None:
    """Parse a fork's name of a parent's object; return None for an object of the fork itself."""
    if not name.startswith(_FOLDER):
        return None
    number, _, parent_name = name.removeprefix(_FOLDER).partition("/")
    return Shared(int(number), parent_name)


def with_parents(own: FileSystem, parents: Sequence[FileSystem]) -> FileSystem:
    """Return the file system of a fork: location `own`, with names that refer to objects of `parents`.

    Raises:
        SettingError: the fork is on a local disk, whose files are mapped in place, and a parent is not.
    """
    if not isinstance(own, LocalFiles):
        return ForkedFiles(own, parents)
    local = [parent for parent in parents if isinstance(parent, LocalFiles)]
    if len(local) < len(parents):
        raise SettingError(
            f"{own.url} is on a local disk, but shares files of a location that is not: "
            f"{next(parent.url for parent in parents if not isinstance(parent, LocalFiles))}.",
            action="Both have to be on local disks, or both in object stores.",
        )
    return ForkedLocalFiles(own.path, local)


class ForkedFiles:
    """The objects of `own`, and read-only access to objects of `parents` by their names in the fork."""

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
        return self._read(name, lambda files, owner_name: files.get(owner_name))

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """See `FileSystem.get_range`."""
        return self._read(name, lambda files, owner_name: files.get_range(owner_name, offset, length))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `FileSystem.get_ranges`."""
        return self._read(name, lambda files, owner_name: files.get_ranges(owner_name, ranges))

    def size(self, name: str) -> int:
        """See `FileSystem.size`."""
        return self._read(name, lambda files, owner_name: files.size(owner_name))

    def exists(self, name: str) -> bool:
        """See `FileSystem.exists`."""
        return self._read(name, lambda files, owner_name: files.exists(owner_name))

    def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        """See `FileSystem.list`; objects of parents are not listed."""
        return self.own.list(prefix, after=after)

    def delete(self, name: str) -> None:
        """See `FileSystem.delete`."""
        self.own.delete(_writable(name))

    def locate(self, name: str) -> str:
        """See `FileSystem.locate`: where the object really lies."""
        shared = parse_shared(name)
        return self.own.locate(name) if shared is None else self.parents[shared.parent].locate(shared.name)

    def _read(self, name: str, action: Callable[[FileSystem, str], T]) -> T:
        shared = parse_shared(name)
        if shared is None:
            return action(self.own, name)
        parent = self.parents[shared.parent]
        with _explain_missing_file(self.url, parent.url):
            return action(parent, shared.name)


class ForkedLocalFiles(LocalFiles):
    """The counterpart of `ForkedFiles` on local disks."""

    def __init__(self, path: str, parents: Sequence[LocalFiles]) -> None:
        super().__init__(path)
        self.parents = tuple(parents)

    def put(self, name: str, data: Sequence[Buffer], *, create: bool = False, sync: bool = True) -> None:
        """See `FileSystem.put`."""
        super().put(_writable(name), data, create=create, sync=sync)

    def upload(self, name: str) -> AbstractContextManager[Write]:
        """See `FileSystem.upload`."""
        return super().upload(_writable(name))

    def delete(self, name: str) -> None:
        """See `FileSystem.delete`."""
        super().delete(_writable(name))

    def publish(self, staged: str, name: str) -> None:
        """See `LocalFiles.publish`."""
        super().publish(staged, _writable(name))

    def locate(self, name: str) -> str:
        """See `FileSystem.locate`: where the object really lies."""
        shared = parse_shared(name)
        return super().locate(name) if shared is None else self.parents[shared.parent].locate(shared.name)

    def _path(self, name: str) -> str:
        shared = parse_shared(name)
        return super()._path(name) if shared is None else self.parents[shared.parent]._path(shared.name)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        shared = parse_shared(name)
        if shared is None:
            with super()._errors(name):
                yield
            return
        with _explain_missing_file(self.url, self.parents[shared.parent].url), super()._errors(name):
            yield


def _writable(name: str) -> str:
    if parse_shared(name) is not None:
        raise ValueError(f"{name} belongs to another location, which is only read")
    return name


@contextmanager
def _explain_missing_file(fork: str, parent: str) -> Iterator[None]:
    try:
        yield
    except MissingFileError as error:
        raise MissingFileError(
            f"A state file is missing at {parent}, from which {fork} was forked and still reads.",
            action="Restore it from a backup of that location, or all of that if it was deleted or moved.",
            file=error.file,
        ) from error
