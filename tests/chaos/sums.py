"""The state of a world without operators: sums by key, in files of JSON that the real manifests name."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from millpond.checkpoint.formats.deltas import read_delta
from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.files.backends.filesystem import FileSystem
from millpond.files.refs import RunRef, range_of
from millpond.layout import HashRange

KEYS = 12
GROUPS = 64
HASHES = {str(key): random.Random(key).getrandbits(64) for key in range(KEYS)}
State = dict[str, int]


class Merge(msgspec.Struct, frozen=True):
    """A compaction: runs, newest first, and the hashes that count, both included."""

    inputs: tuple[RunRef, ...]
    lowest: int
    highest: int


def partition_of(key: str, partitions: int) -> int:
    """Where a key belongs."""
    return (HASHES[key] >> 58) * partitions // GROUPS


def inside(rows: State, range_: HashRange) -> State:
    """The rows whose hashes count."""
    return {key: value for key, value in rows.items() if range_.lo <= HASHES[key] < range_.hi}


def write_run(files: FileSystem, rows: State, prefix: str = "") -> RunRef:
    """Write rows as a file."""
    with sending(files, rows, prefix) as made:
        return made


@contextmanager
def sending(files: FileSystem, rows: State, prefix: str = "") -> Iterator[RunRef]:
    """The same, with a file that is there once the block has ended."""
    content = json.dumps(rows).encode()
    name = f"files/{prefix}{uuid.uuid4().hex}.run"
    hashes = [HASHES[key] for key in rows]
    with files.upload(name) as write:
        write(content)
        yield RunRef(name, len(rows), len(content), min(hashes), max(hashes))


def read_run(files: FileSystem, ref: RunRef) -> State:
    """The rows of a file that count."""
    rows: State = json.loads(files.get(ref.name))
    return inside(rows, range_of(ref.visible))


def merge(files: FileSystem, job: Merge, prefix: str = "") -> RunRef | None:
    """One run of several; None if no row of them counts."""
    with merging(files, job, prefix) as made:
        return made


@contextmanager
def merging(files: FileSystem, job: Merge, prefix: str = "") -> Iterator[RunRef | None]:
    """The same, with a file that is there once the block has ended."""
    rows: State = {}
    for ref in reversed(job.inputs):
        rows |= inside(read_run(files, ref), HashRange(job.lowest, job.highest + 1))
    if not rows:
        yield None
        return
    with sending(files, rows, prefix) as made:
        yield made


def runs_of(files: FileSystem, manifest: PartitionManifest) -> State:
    """The rows in the runs of a partition."""
    found: State = {}
    for table in manifest.tables.values():
        for ref in reversed(table.runs.runs):
            found |= read_run(files, ref)
    return found


def deltas_of(files: FileSystem, manifest: PartitionManifest) -> State:
    """The rows in the deltas of a partition."""
    found: State = {}
    for table in manifest.tables.values():
        for ref in table.deltas:
            found |= inside(json.loads(bytes(memoryview(read_delta(files, ref)))), range_of(ref.visible))
    return found
