"""The backend for local and mounted disks.

Reads, listings and writes use plain system calls, because obstore's local store neither syncs nor takes an object in
pieces without joining them. An object is written to a staging file, synced, then linked (put-if-absent) or renamed into
place. So readers never see a partial object, even after a power cut.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar

from millpond.errors import SettingError, TransientError
from millpond.files.backends.filesystem import (
    AlreadyExistsError,
    Buffer,
    FileInfo,
    MissingFileError,
    Write,
    exists_error,
    missing_error,
    truncated_error,
    views,
)
from millpond.files.disk import PERMANENT, remedy

STAGING = "staging"
"""Folder of staging files below the location; files that stay there were left by dead processes."""

_STAGING_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_MAX_BUFFERS_PER_WRITE = 512  # buffers per writev call; the kernel takes at most 1,024
T = TypeVar("T")
Listing = list[FileInfo]
_MAX_BYTES_PER_WRITE = 1 << 30  # bytes per write call; the kernel takes at most 2 GiB


class LocalFiles:
    """Objects as files below the directory `path`, which is created on the first write."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.url = f"file:{self.path}"

    def put(self, name: str, data: Sequence[Buffer], *, create: bool = False, sync: bool = True) -> None:
        """See `FileSystem.put`; with `sync`, file and folder are fsynced before it returns."""
        target = self._path(name)
        with self._errors(name):
            if create and os.path.exists(target):  # saves the write; only the link below is atomic
                raise self._exists_error(target, sync)
            staged = self._stage(data, sync)
            try:
                self._publish(staged, target, create, sync)
            except BaseException:
                _unlink(staged)
                raise

    def upload(self, name: str) -> AbstractContextManager[Write]:
        """See `FileSystem.upload`; the bytes go to a staging file."""
        return self._upload(name)

    @contextmanager
    def _upload(self, name: str) -> Iterator[Write]:
        with self._errors(name):
            staged = self.new_staging_path()
            handle = os.open(staged, _STAGING_FLAGS, 0o666)

        def write(data: Buffer) -> None:
            with self._errors(name):
                _write(handle, [data])

        try:
            try:
                yield write
            finally:
                os.close(handle)
            self.publish(staged, name)
        except BaseException:
            _unlink(staged)
            raise

    def get(self, name: str) -> bytes:
        """See `FileSystem.get`."""
        with self._errors(name), open(self._path(name), "rb", buffering=0) as file:
            return file.read()

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """See `FileSystem.get_range`."""
        return self.get_ranges(name, [(offset, length)])[0]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `FileSystem.get_ranges`."""
        with self._errors(name):
            handle = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                pieces = [_read(handle, offset, length) for offset, length in ranges]
            finally:
                os.close(handle)
        for piece, (offset, length) in zip(pieces, ranges, strict=True):
            if len(piece) != length:
                raise truncated_error(self.locate(name), offset + length)
        return list(pieces)

    def size(self, name: str) -> int:
        """See `FileSystem.size`."""
        with self._errors(name):
            return os.stat(self._path(name)).st_size

    def exists(self, name: str) -> bool:
        """See `FileSystem.exists`."""
        try:
            self.size(name)
        except MissingFileError:
            return False
        return True

    def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        """See `FileSystem.list`."""
        infos: Listing = []
        folder, name_prefix = os.path.split(prefix)
        with self._errors(prefix):
            self._walk(folder, name_prefix, after, infos)
        return sorted(infos)

    def delete(self, name: str) -> None:
        """See `FileSystem.delete`."""
        with self._errors(name):
            _unlink(self._path(name))

    def locate(self, name: str) -> str:
        """See `FileSystem.locate`."""
        return f"{self.url}/{name}"

    def path_of(self, name: str) -> str:
        """Return the path of an object, for mapping it into memory."""
        return self._path(name)

    def new_staging_path(self) -> str:
        """Return a new path of a staging file, on the same disk, for a file to be written and then published."""
        staged = os.path.join(self.path, STAGING, uuid.uuid4().hex)
        _make_folder(os.path.dirname(staged))
        return staged

    @contextmanager
    def staged(self, name: str) -> Iterator[str]:
        """Yield a new path of a staging file for an object, to be written by the block; remove it if the block fails.

        An `OSError` in the block, whatever file it is about, becomes the error that `put` raises, which names the
        object.
        """
        with self._errors(name):
            staged = self.new_staging_path()
            try:
                yield staged
            except BaseException:
                _unlink(staged)
                raise

    def remove_empty_staging(self) -> None:
        """Remove the staging folder if it is empty, once no process writes here any more."""
        with suppress(OSError):
            os.rmdir(os.path.join(self.path, STAGING))

    def publish(self, staged: str, name: str) -> None:
        """Sync a staging file and rename it to the object `name`; its modification time becomes now."""
        with self._errors(name):
            handle = os.open(staged, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.utime(handle)  # garbage collection goes by how long an object has had its name
                os.fsync(handle)
            finally:
                os.close(handle)
            self._publish(staged, self._path(name), create=False, sync=True)

    def _path(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _stage(self, data: Sequence[Buffer], sync: bool) -> str:
        staged = os.path.join(self.path, STAGING, uuid.uuid4().hex)
        handle = _with_folders(lambda: os.open(staged, _STAGING_FLAGS, 0o666), staged)
        try:
            _write(handle, data)
            if sync:
                os.fsync(handle)
        except BaseException:
            _unlink(staged)
            raise
        finally:
            os.close(handle)
        return staged

    def _publish(self, staged: str, target: str, create: bool, sync: bool) -> None:
        if create:
            try:
                _with_folders(lambda: os.link(staged, target), target)
            except FileExistsError:
                raise self._exists_error(target, sync) from None
            os.unlink(staged)
        else:
            _with_folders(lambda: os.replace(staged, target), target)
        if sync:
            _sync_folder(os.path.dirname(target))

    def _exists_error(self, target: str, sync: bool) -> AlreadyExistsError:
        """Return the error for a name that is taken."""
        # The caller may count an object with the same bytes as its own put, whose folder may not have been synced.
        if sync:
            _sync_folder(os.path.dirname(target))
        return exists_error(self.locate(os.path.relpath(target, self.path)))

    def _walk(self, folder: str, prefix: str, after: str, infos: Listing) -> None:
        try:
            entries = os.scandir(os.path.join(self.path, folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        with entries:
            for entry in entries:
                if not entry.name.startswith(prefix):
                    continue
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir():
                    if name + "/" < after and not after.startswith(name + "/"):
                        continue  # all names in the folder sort before `after`
                    self._walk(name, "", after, infos)
                elif name > after:
                    try:
                        status = entry.stat()
                    except FileNotFoundError:  # deleted meanwhile
                        continue
                    infos.append(FileInfo(name, status.st_size, status.st_mtime))

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise missing_error(self.locate(name)) from error
        except PermissionError as error:
            raise SettingError(
                f"Access is refused: {error.strerror}.",
                action=remedy(error, self.path),
                file=self.locate(name),
            ) from error
        except FileExistsError:
            raise
        except OSError as error:
            place, action = self.locate(name), remedy(error, self.path)
            if error.errno in PERMANENT:
                raise SettingError(f"Nothing can be kept here: {error.strerror}.", action=action, file=place) from error
            raise TransientError(f"The disk failed: {error.strerror}.", action=action, file=place) from error


def _write(handle: int, data: Sequence[Buffer]) -> None:
    pieces = [
        piece[i : i + _MAX_BYTES_PER_WRITE] for piece in views(data) for i in range(0, len(piece), _MAX_BYTES_PER_WRITE)
    ]
    first = 0
    while first < len(pieces):
        batch, room = [], _MAX_BYTES_PER_WRITE
        for piece in pieces[first : first + _MAX_BUFFERS_PER_WRITE]:
            batch.append(piece)
            room -= len(piece)
            if room <= 0:
                break
        written = os.writev(handle, batch)
        for piece in batch:  # after a short write, continue in the middle of a piece
            if written < len(piece):
                pieces[first] = piece[written:]
                break
            written -= len(piece)
            first += 1


def _read(handle: int, offset: int, length: int) -> bytes:
    piece = os.pread(handle, length, offset)
    if len(piece) == length or not piece:
        return piece
    pieces = [piece]
    length_read = len(piece)
    while length_read < length:
        piece = os.pread(handle, length - length_read, offset + length_read)
        if not piece:
            break
        pieces.append(piece)
        length_read += len(piece)
    return b"".join(pieces)


def _with_folders(action: Callable[[], T], target: str) -> T:
    try:
        return action()
    except FileNotFoundError:
        _make_folder(os.path.dirname(target))
        return action()


def _make_folder(folder: str) -> None:
    parent = os.path.dirname(folder)
    if not os.path.isdir(parent):
        _make_folder(parent)
    try:
        os.mkdir(folder)
    except FileExistsError:
        return
    except FileNotFoundError:  # the parent exists, but cannot hold folders
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} cannot be made") from None
    _sync_folder(parent)


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support syncing folders
            raise
    finally:
        os.close(handle)


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
