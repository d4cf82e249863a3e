"""A checkpoint in memory, with slots that seal small deltas: a running sum per partition."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from millpond.checkpoint.checkpoint import Checkpoint
from millpond.checkpoint.committer import Committer
from millpond.checkpoint.formats.manifest import PartitionManifest, Sealed, seal
from millpond.checkpoint.generation import Generation, claim
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.sealed import SealedFiles
from millpond.files.backends.filesystem import FileSystem
from millpond.files.locations.opening import open_filesystem
from millpond.files.refs import TableManifest

_names = itertools.count()
slots: list[Slot] = []
"""All that were made."""


def memory() -> FileSystem:
    """A fresh location in memory."""
    return open_filesystem(f"memory:rig{next(_names)}")


def begin(
    files: FileSystem, version: int | None = None, *, partitions: int = 2, operators: int = 1
) -> tuple[Generation, Recovery]:
    """Claim a generation and let it begin at `version` (the newest durable one)."""
    generation = claim(files, run="test", partitions=partitions, key_groups=64)
    recovery = Recovery(files, generation, operators)
    recovery.write_base([recovery.newest() if version is None else version])
    return generation, recovery


def litter(files: FileSystem) -> list[str]:
    """Put files beside the commits as other programs leave them: checksums, backups, copies under way."""
    commit = files.list("commits/")[-1].name.removeprefix("commits/")
    names = (f".{commit}.crc", f".{commit}.Xa3b2C", f"{commit}.crc", f"{commit}~", ".nfs00000000000a", "notes.txt")
    for name in names:
        files.put(f"commits/{name}", [b"foreign"])
    return [f"commits/{name}" for name in names]


@dataclass
class Slot:
    """A slot without a process: opens partitions, seals, commits when asked to, until the test ends (`conftest.py`)."""

    files: FileSystem
    generation: int
    directory: Path
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    threaded: bool = False
    options: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checkpoint = Checkpoint(self.files, self.generation, poll=0.001)
        self.sealed = SealedFiles(str(self.directory), self.name)
        self.committer = Committer(
            self.checkpoint, self.name, self.sealed, threaded=self.threaded, backoff=(0.0, 0.0), **self.options
        )
        slots.append(self)

    def seal(
        self,
        parent: PartitionManifest,
        data: bytes,
        *,
        seen: int | None = None,
        flushed: int = 0,
        submit: bool = True,
        attempt: int = 0,
    ) -> Sealed:
        """Seal `data` as the delta that follows `parent`; `seen` is the input's checksum."""
        tables = {"main": (TableManifest((), flushed), [data[:1], data[1:]])}
        checksum = sum(data) if seen is None else seen
        sealed = seal(parent, tables, input_checksum=checksum, input_rows=len(data), attempt=attempt)
        sealed = self.sealed.write(sealed, self.generation)
        if submit:
            self.committer.submit(sealed)
        return sealed

    def open(self, partition: int, version: int, wait: float = 0.0) -> PartitionManifest:
        """Open a partition of operator 0."""
        manifest = self.checkpoint.open_partition(0, partition, version, wait=wait)
        self.committer.mark_durable(manifest)
        return manifest

    def read(self, manifest: PartitionManifest) -> list[bytes]:
        """The deltas of a manifest."""
        if not manifest.tables:
            return []
        return [bytes(memoryview(data)) for data in self.checkpoint.read_deltas(manifest.tables["main"].deltas)]

    def settle(self) -> None:
        """Commit until nothing is left."""
        while self.committer.step():
            pass

    def die(self) -> None:
        """Die as of SIGKILL: locks are released, nothing else happens."""
        import os

        self.committer.close()
        for folder in self.sealed._folders.values():
            os.close(folder.lock)
        self.sealed._folders.clear()
