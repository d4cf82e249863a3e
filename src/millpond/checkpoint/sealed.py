"""Sealed deltas on the local disk, from the seal until they are durable.

The files are written but not synced: they survive the slot's process, but not the host. Each `SealedFiles` has its own
folder under a name that is never used again. It holds the folder's lock from before the folder is visible until it
closes, so folder creation is race-free. The next `SealedFiles` on the host that finds the lock free adopts leftover
files and uploads them. A file has the format of a commit object (`checkpoint/formats/commit.py`), so an incomplete one
is recognised.
"""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from millpond.checkpoint.formats.commit import CommitHeader, encode_commit, header_end, read_header, resolve
from millpond.checkpoint.formats.manifest import PartitionManifest, Sealed, TableState, checksum
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import Buffer, FileSystem
from millpond.files.backends.local import LocalFiles
from millpond.files.folder_lock import lock_folder
from millpond.files.mapping import map_file

_SUFFIX = ".sealed"
_HIDDEN = "."
"""Name prefix of folders under construction, which no other process touches."""


class SealedFiles:
    """The sealed files of one generation of a query in one slot. Thread-safe as far as `remove` goes.

    Args:
        directory: directory of the query on this host; all its slots share it.
        slot: uuid of the slot.
        open_folder: opens the file system of one folder; tests inject faults here.

    Attributes:
        path: path of the folder that is written to.
    """

    def __init__(self, directory: str, slot: str, open_folder: Callable[[str], FileSystem] = LocalFiles) -> None:
        self.directory = directory
        self.slot = slot
        self._open_folder = open_folder
        self._lock = threading.Lock()
        self._folders: dict[str, _Folder] = {}
        self._own = self._create_folder(f"{slot}-{uuid.uuid4().hex[:12]}")
        self.path = self._own.path

    def write(self, sealed: Sealed, generation: int) -> Sealed:
        """Write a sealed delta, so that it survives the death of this process; not synced.

        Returns:
            The same delta, with pieces that are views of the mapped file; the memory of the argument may be freed.
        """
        manifest = sealed.manifest
        # The committer looks up the deltas of the parent, so the local file does without them.
        empty = PartitionManifest(manifest.operator, manifest.partition, manifest.version - 1)
        pieces, header = encode_commit(generation, self.slot, [(sealed, empty)])
        name = _file_name(manifest)
        self._own.files.put(name, pieces, sync=False)
        header = resolve(header, name, header_end(pieces))
        return _read_sealed(header, self._own.map(name))

    def remove(self, sealed: Sealed) -> None:
        """Delete the file of a sealed delta that is durable, or that is not needed any more."""
        with self._lock:
            for folder in tuple(self._folders.values()):
                folder.files.delete(_file_name(sealed.manifest))
                # An adopted folder goes with its last file. The own folder is still written to.
                if folder is not self._own and not folder.names():
                    self._remove_folder(folder)

    def adopt(self, generation: int) -> list[Sealed]:
        """Take over sealed deltas of this generation that dead slots on this host left, oldest version first.

        They may have been uploaded already. Damaged files and files of older generations are deleted. This object holds
        the folders until all returned deltas are removed, or until it closes.
        """
        adopted: list[Sealed] = []
        names = sorted(entry.name for entry in os.scandir(self.directory) if entry.is_dir())
        for name in names:
            if name in self._folders or name.startswith(_HIDDEN):
                continue
            folder = self._lock_abandoned(name)
            if folder is None:
                continue
            sealed = folder.read_all(generation)
            adopted += sealed
            if not folder.names():
                self._remove_folder(folder)
            elif not sealed:
                self._unlock(folder)  # its files are of a newer generation: this run has been fenced
        return sorted(adopted, key=lambda sealed: (sealed.manifest.version, sealed.key))

    def close(self) -> None:
        """Release the locks; the remaining files can be adopted by another slot."""
        with self._lock:
            for folder in tuple(self._folders.values()):
                if folder.names():
                    self._unlock(folder)
                else:
                    self._remove_folder(folder)

    def _create_folder(self, name: str) -> _Folder:
        """Create a folder. It is locked under a hidden name first and renamed then, so no other process can lock it."""
        os.makedirs(self.directory, exist_ok=True)
        path, hidden = (os.path.join(self.directory, mark + name) for mark in ("", _HIDDEN))
        os.mkdir(hidden)
        lock = lock_folder(hidden, wait=False)
        assert lock is not None  # no other process touches hidden folders
        try:
            os.rename(hidden, path)
        except BaseException:
            os.close(lock)
            raise
        return self._folders.setdefault(name, _Folder(name, path, lock, self._open_folder(path)))

    def _lock_abandoned(self, name: str) -> _Folder | None:
        """Lock an abandoned folder; return None if it is in use, or was just removed."""
        path = os.path.join(self.directory, name)
        try:
            # The kernel releases the lock of a process that dies, so a free lock means an abandoned folder.
            lock = lock_folder(path, wait=False, create=False)
        except FileNotFoundError:
            return None
        if lock is None:
            return None
        return self._folders.setdefault(name, _Folder(name, path, lock, self._open_folder(path)))

    def _unlock(self, folder: _Folder) -> None:
        os.close(self._folders.pop(folder.name).lock)

    def _remove_folder(self, folder: _Folder) -> None:
        shutil.rmtree(folder.path, ignore_errors=True)
        self._unlock(folder)


@dataclass
class _Folder:
    """A folder whose lock this process holds."""

    name: str
    path: str
    lock: int
    files: FileSystem

    def names(self) -> list[str]:
        return [info.name for info in self.files.list("") if info.name.endswith(_SUFFIX)]

    def map(self, name: str) -> memoryview:
        # The mapping stays valid after the file is deleted, so a put in flight keeps its bytes.
        return map_file(os.path.join(self.path, name))

    def read_all(self, generation: int) -> list[Sealed]:
        deltas = []
        for name in self.names():
            try:
                header = read_header(self.files, name)
                # The file was not synced: after a crash of the host, it may be incomplete.
                sealed = _read_sealed(header, self.map(name), check=True)
            except (StateDamagedError, StateIncompatibleError):
                self.files.delete(name)
                continue
            if header.generation == generation:
                deltas.append(sealed)
            elif header.generation < generation:
                self.files.delete(name)
        return deltas


def _read_sealed(header: CommitHeader, data: memoryview, *, check: bool = False) -> Sealed:
    (manifest,) = header.manifests
    pieces: dict[str, list[Buffer]] = {}
    tables, rows = {}, {}
    for table, state in manifest.tables.items():
        own: list[Buffer] = [data[delta.offset : delta.offset + delta.length] for delta in state.deltas]
        if check and any(checksum([piece]) != delta.checksum for piece, delta in zip(own, state.deltas, strict=True)):
            raise StateDamagedError("A sealed delta is altered.")
        pieces[table] = own
        rows[table] = sum(delta.rows for delta in state.deltas)
        tables[table] = TableState(state.runs)
    return Sealed(msgspec.structs.replace(manifest, tables=tables), pieces, rows)


def _file_name(manifest: PartitionManifest) -> str:
    return f"{manifest.version:012d}-{manifest.operator}-{manifest.partition}-{manifest.id}{_SUFFIX}"
