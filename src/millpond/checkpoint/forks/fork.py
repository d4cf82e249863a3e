"""The state of a fork: manifests of another checkpoint with names that lead there, as the first commit of its own."""

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
from millpond.files.backends.forked import parse_shared, shared_name
from millpond.files.backends.patience import put_own


class Share(NamedTuple):
    """What a fork takes over.

    Attributes:
        parents: from where. objects: of each of them, what is named, by the names that it has there.
        manifests: with the names that it has here.
    """

    parents: Parents
    objects: tuple[tuple[str, ...], ...]
    manifests: tuple[PartitionManifest, ...]


def share(manifests: Iterable[PartitionManifest], location: str, above: Parents | None, fork: str) -> Share:
    """What a fork takes over of a version.

    Args:
        manifests: all of the version.
        location: URL of the checkpoint that has them.
        above: of that, if it is a fork itself: what it has from others, this one will have from them, too.
        fork: URL of the new `millpond/` folder.
    """
    numbers: dict[str, int] = {}
    objects: list[set[str]] = []

    def name_here(name: str) -> str:
        at = parse_shared(name)
        where, there = location, name
        if at is not None:
            assert above is not None
            where, there = above.parents[at.parent].location, at.name
        number = numbers.setdefault(where, len(numbers))
        if number == len(objects):
            objects.append(set())
        objects[number].add(there)
        return shared_name(number, there)

    def table_here(table: TableState) -> TableState:
        runs = tuple(msgspec.structs.replace(run, name=name_here(run.name)) for run in table.runs.runs)
        deltas = tuple(msgspec.structs.replace(delta, commit=name_here(delta.commit)) for delta in table.deltas)
        return TableState(msgspec.structs.replace(table.runs, runs=runs), deltas)

    renamed = tuple(
        msgspec.structs.replace(one, tables={name: table_here(table) for name, table in one.tables.items()})
        for one in manifests
    )
    parents = tuple(Parent(where, pin_name(uuid.uuid4().hex)) for where in numbers)
    return Share(Parents(fork, parents), tuple(tuple(sorted(names)) for names in objects), renamed)


def begin_fork(files: FileSystem, taken: Share, version: int, origin: Recovery) -> None:
    """Commit what was taken over as the first version of a fork, and let a run build on it.

    Args:
        files: the fork's `millpond/` folder. taken: what it takes over.
        version: of that. origin: what is durable where it comes from.
    """
    ranges = origin.ranges(version)
    generation = claim(
        files,
        run="millpond state fork",
        partitions=len(ranges),
        key_groups=ranges[-1][1],
        least=time.time_ns() // 1_000_000,
    )
    slot = uuid.uuid4().hex
    name = commit_name(version, generation.number, slot, 0)
    header = encode_header(CommitHeader(generation.number, slot, version, 0, taken.manifests))
    put_own(files, name, [header])
    tips = tuple(Tip(*one.place, one.id, one.lineage, name, len(header), one.shape) for one in taken.manifests)
    versions = (BaseVersion(version, tips, generation.ranges),)
    shape = origin.shape(version)
    write_base(files, Base(generation.number, origin.operators, versions, origin.plan or "", shape))
