"""The file layer: named immutable objects below one location, wherever that location is.

`open_filesystem` picks a backend by URL; everything above works with names relative to the location and never learns
where the bytes live (Flink 2.0 §5.1, the unified file system). The one primitive that commits stand on is
`put(..., create=True)`: of all writers in all processes, exactly one succeeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from millpond.errors import MillpondError, SettingError, StateDamagedError

if TYPE_CHECKING:
    from typing_extensions import Buffer as Buffer
else:
    Buffer = object  # anything with the buffer protocol: bytes, memoryview, a contiguous array


Write = Callable[[Buffer], object]
"""Takes the next bytes of an object; the memory that they lie in may be used again."""

_HADOOP = ("viewfs", "ofs", "o3fs")


class AlreadyExistsError(MillpondError, FileExistsError):
    """`put(create=True)` found an object under the name; `file` is its full URL."""

    code = "ALREADY_EXISTS"


class MissingFileError(StateDamagedError):
    """No object has this name; `file` is its full URL."""

    code = "STATE_FILE_MISSING"


class FileInfo(NamedTuple):
    """One object of a listing: name below the location, bytes, seconds since the epoch by the store's clock."""

    name: str
    size: int
    modified: float


@runtime_checkable
class FileSystem(Protocol):
    """Named objects below one location. Thread-safe; names are relative, with `/` between folders.

    Failures of the store are `TransientError`, refused access is `SettingError`, a name that is not there is
    `MissingFileError`; each names the full URL.
    """

    url: str
    """The location, for messages."""

    def put(self, name: str, data: Sequence[Buffer], *, create: bool = False, sync: bool = True) -> None:
        """Write the pieces of `data`, in order, as one object; readers see all of it or nothing.

        Args:
            create: put-if-absent; raises `AlreadyExistsError` when the name is taken. Atomic between processes.
            sync: return only when the object survives a power cut (object stores always do).
        """

    def upload(self, name: str) -> AbstractContextManager[Write]:
        """Write an object as its bytes come: `with files.upload(name) as write: write(data)`.

        At the end of the block the object is there, whole and durable. If the block raises, or the store fails on the
        way (`TransientError`, in the block or at its end), no reader sees any of it, and all of it has to be written
        again. In object stores what is long goes in parts, of which a few are in memory at a time; a part whose request
        fails is sent again by the store's client.
        """

    def get(self, name: str) -> bytes:
        """The whole object."""

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """`length` bytes from `offset`; `StateDamagedError` if the object ends before that."""

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Several `(offset, length)` ranges of one object, near ones fetched together."""

    def size(self, name: str) -> int:
        """Bytes of the object."""

    def exists(self, name: str) -> bool:
        """Whether the object is there."""

    def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        """All objects whose name starts with `prefix` (any string) and sorts behind `after`, sorted by name."""

    def rename(self, src: str, dst: str) -> None:
        """Move an object, replacing `dst`. Atomic on `file:`; elsewhere a copy and a delete."""

    def delete(self, name: str) -> None:
        """Delete an object; one that is not there is deleted already."""

    def locate(self, name: str) -> str:
        """The full URL of a name, for messages."""


def open_filesystem(url: str, **options: Any) -> FileSystem:
    """Open the location `url`.

    Args:
        url: a plain path or `file:` URL; `memory:name` (shared by all who open the same name in one process); `s3://`,
            `gs://`, `az://` and what else obstore knows, with a path that is taken to the letter; `webhdfs://`,
            `swebhdfs://`, `hdfs://` (see `backends/hdfs.py`); or `faults+<any of these>?latency_ms=…` (see
            `backends/faults.py`).
        options: passed to obstore's `from_url` for remote stores (`config`, `client_options`, `retry_config`); of
            them, HDFS takes `retry_config`.

    Raises:
        SettingError: the scheme is unknown or the URL malformed.
    """
    from millpond.files.backends.hadoop_conf import SCHEMES
    from millpond.files.backends.local import LocalFiles
    from millpond.files.backends.objects import ObjectFiles, memory_files

    if url.startswith("faults+"):
        from millpond.files.backends.faults import open_faults

        return open_faults(url, **options)
    scheme, _, rest = url.partition(":")
    if on_disk(url):
        return LocalFiles(_local_path(url, rest) if scheme == "file" else url)
    if scheme == "memory":
        return memory_files(rest.strip("/"))
    if scheme in _HADOOP:
        raise SettingError(
            f"{url!r} lies in a file system that only Hadoop reads, and Millpond keeps state without it.",
            action="Give a checkpointLocation on file: (also of a mount that all hosts share), s3:, gs:, az: or hdfs:.",
        )
    if scheme in SCHEMES:
        return _hdfs(url, options.get("retry_config"))
    return ObjectFiles.from_url(url, **options)


def _hdfs(url: str, retry_config: dict[str, Any] | None) -> FileSystem:
    try:
        from millpond.files.backends.hdfs import HdfsFiles
    except ModuleNotFoundError as error:
        raise SettingError(
            f"{url!r} lies on HDFS, and Millpond needs the package urllib3 for that.",
            action="Install it on every host: pip install urllib3 (or Millpond with its extra `hdfs`).",
        ) from error
    return HdfsFiles(url, retry_config)


def on_disk(url: str) -> bool:
    """Whether a location is on a local or mounted disk; if not, each request to it may cost something."""
    scheme, colon, _ = url.partition(":")
    return not url.startswith("faults+") and (not colon or "/" in scheme or scheme == "file")


def join_url(url: str, name: str) -> str:
    """The location `name` below `url`, whatever its scheme (the query of a `faults+` URL stays at the end)."""
    path, mark, query = url.partition("?") if url.startswith("faults+") else (url, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


def same_place(url: str, other: str) -> bool:
    """Whether two URLs mean one location, however Hadoop and others write it."""
    return _place(url) == _place(other)


def _place(url: str) -> str:
    scheme, colon, rest = url.partition(":")
    if on_disk(url):
        return f"file:{os.path.abspath(_local_path(url, rest) if scheme == 'file' else url)}"
    if scheme == "memory":
        return f"memory:{rest.strip('/')}"
    return ("s3" if scheme in ("s3a", "s3n") else scheme) + colon + rest.rstrip("/")


def views(data: Sequence[Buffer]) -> list[memoryview]:
    """The pieces as flat views of bytes, empty ones left out."""
    pieces = (memoryview(piece) for piece in data)
    return [piece.cast("B") for piece in pieces if piece.nbytes]  # an empty array cannot be cast


def _local_path(url: str, rest: str) -> str:
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost") or not slash:
            raise SettingError(f"{url!r} names another host.", action="Write file:///path or a plain path.")
        return slash + path
    return rest
