"""The file system interface: named immutable objects below one location.

`open_filesystem` picks a backend by URL. All code above works with names relative to the location and is independent
of the backend (Flink 2.0 §5.1, the unified file system). Commits rely on one primitive, `put(..., create=True)`: of
all writers in all processes, exactly one succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from millpond.errors import MillpondError, StateDamagedError

if TYPE_CHECKING:
    from typing_extensions import Buffer as Buffer
else:
    Buffer = object  # anything with the buffer protocol: bytes, memoryview, a contiguous array


Write = Callable[[Buffer], object]
"""Writes the next bytes of an object; the caller may reuse their memory afterwards."""


class AlreadyExistsError(MillpondError, FileExistsError):
    """The name of a put-if-absent is taken; `file` is its full URL."""

    code = "ALREADY_EXISTS"


class MissingFileError(StateDamagedError):
    """No object has this name; `file` is its full URL."""

    code = "STATE_FILE_MISSING"


class FileInfo(NamedTuple):
    """One object of a listing.

    Attributes:
        name: name below the location.
        size: bytes.
        modified: seconds since the epoch, by the store's clock.
    """

    name: str
    size: int
    modified: float


@runtime_checkable
class FileSystem(Protocol):
    """Named objects below one location. Thread-safe; names are relative, with `/` between folders.

    Methods raise `TransientError` if the store fails, `SettingError` if access is refused, and `MissingFileError` if
    the name does not exist. Each error names the full URL.
    """

    url: str
    """The location, for messages."""

    def put(self, name: str, data: Sequence[Buffer], *, create: bool = False, sync: bool = True) -> None:
        """Write the pieces of `data`, in order, as one object. Readers see the whole object or nothing.

        Args:
            name: name of the object.
            data: the pieces.
            create: put-if-absent; raises `AlreadyExistsError` if the name is taken. Atomic between processes.
            sync: return only once the object would survive a power cut (objects in object stores always do).
        """

    def upload(self, name: str) -> AbstractContextManager[Write]:
        """Stream an object: `with files.upload(name) as write: write(data)`.

        At the end of the block the object is complete and durable. If the store fails, the block or its end raises
        `TransientError`. After any error, readers see nothing, and the whole object must be written again. Object
        stores receive large objects as multipart uploads, with a few parts in memory at a time. The store's client
        repeats failed requests of parts.
        """

    def get(self, name: str) -> bytes:
        """Read a whole object."""

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """Read `length` bytes from `offset`; raise `StateDamagedError` if the object is shorter."""

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Read several `(offset, length)` ranges of one object; near ranges are fetched in one request."""

    def size(self, name: str) -> int:
        """Return the size of an object in bytes."""

    def exists(self, name: str) -> bool:
        """Return whether an object exists."""

    def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        """List the objects whose names start with `prefix` (any string) and sort after `after`, sorted by name."""

    def delete(self, name: str) -> None:
        """Delete an object. Idempotent: a missing object is not an error."""

    def locate(self, name: str) -> str:
        """Return the full URL of a name, for messages."""


def views(data: Sequence[Buffer]) -> list[memoryview]:
    """Return the pieces as flat views of bytes, without empty pieces."""
    pieces = (memoryview(piece) for piece in data)
    return [piece.cast("B") for piece in pieces if piece.nbytes]  # an empty array cannot be cast


def missing_error(url: str) -> MissingFileError:
    """Return the error for a missing object."""
    return MissingFileError("A state file is missing.", action="Restore it from a backup of the location.", file=url)


def exists_error(url: str) -> AlreadyExistsError:
    """Return the error for put-if-absent on a name that is taken."""
    return AlreadyExistsError("An object with this name exists.", file=url)


def truncated_error(url: str, end: int | None = None) -> StateDamagedError:
    """Return the error for an object that ends before the requested bytes (`end`: the end of these)."""
    until = f" before byte {end}" if end is not None else ""
    return StateDamagedError(
        f"A state file ends{until} too early.", action="Restore it from a backup of the location.", file=url
    )
