"""Sealed deltas on the local disk, from the seal until they are durable.

Written, not synced: they outlive the slot's process, not the host. Each slot has a folder and holds a lock on it while
it lives; a new slot on the host takes over the folders whose lock is free and uploads what their slots left behind.
A file has the format of a commit object (`checkpoint/commit.py`), so one that is only half there is recognised.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from millpond.checkpoint.commit import CommitHeader, encode_commit, header_end, read_header, resolve
from millpond.checkpoint.manifest import PartitionManifest, Sealed, TableState, checksum
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.filesystem import Buffer, FileSystem
from millpond.files.local import LocalFiles

_LOCK = "lock"
_SUFFIX = ".sealed"


class SealedFiles:
    """The sealed files of one slot, in `<directory>/<slot>/`. Thread-safe as far as `remove` goes.

    Args:
        directory: private to the query on this host; all its slots share it.
        slot: uuid of the slot.
        open_folder: makes the file system of one slot's folder; tests inject faults here.
    """

    def __init__(self, directory: str, slot: str, open_folder: Callable[[str], FileSystem] = LocalFiles) -> None:
        self.directory = directory
        self.slot = slot
        self._open_folder = open_folder
        self._lock = threading.Lock()
        self._folders: dict[str, _Folder] = {}
        self._own = self._take(slot)
        if self._own is None:
            raise RuntimeError(f"Slot {slot} lives twice.")

    def write(self, sealed: Sealed, generation: int) -> Sealed:
        """Write a sealed delta, so that it survives the death of this process; not synced.

        Returns:
            The same, its pieces now views of the file's pages: what was passed in may be freed.
        """
        assert self._own is not None
        manifest = sealed.manifest
        empty = PartitionManifest(manifest.operator, manifest.partition, manifest.version - 1)
        pieces, header = encode_commit(generation, self.slot, [(sealed, empty)])
        name = _file_name(manifest)
        self._own.files.put(name, pieces, sync=False)
        header = resolve(header, name, header_end(pieces))
        return _sealed(header, self._own.map(name))

    def remove(self, sealed: Sealed) -> None:
        """Forget a sealed delta that is durable, or that nobody will ask for."""
        with self._lock:
            for folder in tuple(self._folders.values()):
                folder.files.delete(_file_name(sealed.manifest))
                if folder is not self._own and not folder.names():
                    self._drop(folder)

    def adopt(self, generation: int) -> list[Sealed]:
        """What dead slots of this generation on this host sealed and may not have uploaded, oldest version first.

        To be called before the first `write`: what lies in this slot's own folder then is of an earlier use.
        Files of other generations and broken ones are deleted. The folders are this slot's until it has removed
        every one of the returned deltas, or ends.
        """
        found: list[Sealed] = []
        for slot in sorted(entry.name for entry in os.scandir(self.directory) if entry.is_dir()):
            folder = self._own if slot == self.slot else None if slot in self._folders else self._take(slot)
            if folder is not None:
                found += folder.read_all(generation)
                if folder is not self._own and not folder.names():
                    self._drop(folder)
        return sorted(found, key=lambda sealed: (sealed.manifest.version, sealed.key))

    def close(self) -> None:
        """Give the locks back; what is still there can be adopted by another slot."""
        with self._lock:
            for folder in tuple(self._folders.values()):
                if folder.names():
                    os.close(self._folders.pop(folder.slot).lock)
                else:
                    self._drop(folder)

    def _take(self, slot: str) -> _Folder | None:
        path = os.path.join(self.directory, slot)
        os.makedirs(path, exist_ok=True)
        try:
            lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another slot has just emptied and removed it
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(os.path.join(path, _LOCK))):
                return self._folders.setdefault(slot, _Folder(slot, path, lock, self._open_folder(path)))
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(lock)
        return None

    def _drop(self, folder: _Folder) -> None:
        shutil.rmtree(folder.path, ignore_errors=True)
        os.close(self._folders.pop(folder.slot).lock)


@dataclass
class _Folder:
    """A slot's folder whose lock this process holds."""

    slot: str
    path: str
    lock: int
    files: FileSystem

    def names(self) -> list[str]:
        return [info.name for info in self.files.list("") if info.name.endswith(_SUFFIX)]

    def map(self, name: str) -> memoryview:
        with open(os.path.join(self.path, name), "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def read_all(self, generation: int) -> list[Sealed]:
        found = []
        for name in self.names():
            try:
                header = read_header(self.files, name)
                sealed = _sealed(header, self.map(name), check=True)
            except (StateDamagedError, StateIncompatibleError):
                self.files.delete(name)
                continue
            if header.generation == generation:
                found.append(sealed)
            else:
                self.files.delete(name)
        return found


def _sealed(header: CommitHeader, data: memoryview, *, check: bool = False) -> Sealed:
    (manifest,) = header.manifests
    pieces: dict[str, list[Buffer]] = {}
    tables = {}
    for table, state in manifest.tables.items():
        own: list[Buffer] = [data[delta.offset : delta.offset + delta.length] for delta in state.deltas]
        if check and any(checksum([piece]) != delta.checksum for piece, delta in zip(own, state.deltas, strict=True)):
            raise StateDamagedError("A sealed delta is altered.")
        pieces[table] = own
        tables[table] = TableState(state.runs)
    return Sealed(msgspec.structs.replace(manifest, tables=tables), pieces)


def _file_name(manifest: PartitionManifest) -> str:
    return f"{manifest.version:012d}-{manifest.operator}-{manifest.partition}-{manifest.id}{_SUFFIX}"
