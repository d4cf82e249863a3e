"""The first commit of a fork: the manifests of another checkpoint, with names that refer to its objects."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from millpond.checkpoint.forks.parents import Parent, Parents
from millpond.checkpoint.forks.pins import pin_name
from millpond.checkpoint.formats.commit import CommitHeader, commit_name, encode_header
from millpond.checkpoint.formats.manifest import PartitionManifest, TableState
from millpond.checkpoint.generation import Base, BaseVersion, Tip, claim, write_base
from millpond.checkpoint.recovery import Recovery
from millpond.files.backends.filesystem import FileSystem
from millpond.files.backends.retry import put_once
from millpond.files.locations.forked import parse_shared, shared_name


class ForkState(NamedTuple):
    """The state that a fork takes over.

    Attributes:
        parents: the locations that own the objects.
        objects: names of the shared objects in each parent, in the order of `parents`.
        manifests: manifests with the fork's names of these objects.
    """

    parents: Parents
    objects: tuple[tuple[str, ...], ...]
    manifests: tuple[PartitionManifest, ...]


def fork_state(
    manifests: Iterable[PartitionManifest], location: str, source_parents: Parents | None, fork: str
) -> ForkState:
    """Compute the manifests, parents and shared objects of a fork of a version.

    Args:
        manifests: all manifests of the version.
        location: URL of the checkpoint that holds them.
        source_parents: that checkpoint's own parents, if it is a fork. The new fork shares their objects directly.
        fork: URL of the new `millpond/` folder.
    """
    numbers: dict[str, int] = {}
    objects: list[set[str]] = []

    def fork_name(name: str) -> str:
        shared = parse_shared(name)
        owner, owner_name = location, name
        if shared is not None:
            assert source_parents is not None
            owner, owner_name = source_parents.parents[shared.parent].location, shared.name
        number = numbers.setdefault(owner, len(numbers))
        if number == len(objects):
            objects.append(set())
        objects[number].add(owner_name)
        return shared_name(number, owner_name)

    def fork_table(table: TableState) -> TableState:
        runs = tuple(msgspec.structs.replace(run, name=fork_name(run.name)) for run in table.runs.runs)
        deltas = tuple(msgspec.structs.replace(delta, commit=fork_name(delta.commit)) for delta in table.deltas)
        return TableState(msgspec.structs.replace(table.runs, runs=runs), deltas)

    renamed = tuple(
        msgspec.structs.replace(manifest, tables={name: fork_table(table) for name, table in manifest.tables.items()})
        for manifest in manifests
    )
    parents = tuple(Parent(owner, pin_name(uuid.uuid4().hex)) for owner in numbers)
    return ForkState(Parents(fork, parents), tuple(tuple(sorted(names)) for names in objects), renamed)


def begin_fork(files: FileSystem, state: ForkState, version: int, source: Recovery) -> None:
    """Commit the shared state as the first version of a fork, and write a base so that a run can build on it.

    Args:
        files: the fork's `millpond/` folder.
        state: the state that the fork takes over.
        version: version of that state.
        source: recovery of the checkpoint that is forked.
    """
    ranges = source.ranges(version)
    generation = claim(
        files,
        run="millpond state fork",
        partitions=len(ranges),
        key_groups=ranges[-1][1],
        # The time exceeds the numbers of a deleted checkpoint at this location, whose runs may still write.
        minimum=time.time_ns() // 1_000_000,
    )
    slot = uuid.uuid4().hex
    name = commit_name(version, generation.number, slot, 0)
    header = encode_header(CommitHeader(generation.number, slot, version, 0, state.manifests))
    put_once(files, name, [header])
    tips = tuple(
        Tip(*manifest.place, manifest.id, manifest.lineage, name, len(header), manifest.schema_number)
        for manifest in state.manifests
    )
    versions = (BaseVersion(version, tips, generation.ranges),)
    schema_number = source.schema_number(version)
    write_base(files, Base(generation.number, source.operators, versions, source.plan or "", schema_number))
