"""Rescaling: derive the manifests of another number of partitions. No data moves.

A new manifest names the same files and deltas as the old ones. Each reference has the interval of hashes
that counts (`visible`): the intersection of the old partition's range with the new one's. So one file may belong to
several partitions, until each has compacted it away. (Flink 2.0 §5.1: files are shared by reference.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from millpond.checkpoint.formats.manifest import DeltaRef, PartitionManifest, TableState
from millpond.checkpoint.generation import BaseVersion, Generation, Tip
from millpond.errors import StateDamagedError
from millpond.files.refs import RunRef, TableManifest, interval_of, range_of
from millpond.key_groups import hash_range_of, split_key_groups
from millpond.layout import HashRange
from millpond.time_slices import disjoint

Parent = tuple[PartitionManifest, HashRange]
"""The manifest of a partition before rescaling, and the range of hashes that it held."""


def inherited(
    claim: Generation,
    base: BaseVersion | None,
    operator: int,
    partition: int,
    version: int,
    read: Callable[[Tip], PartitionManifest],
) -> PartitionManifest:
    """Derive the manifest with which a run's partition begins, from one or several partitions of its base.

    Args:
        claim: the run's claim.
        base: the version that the run builds on; None for empty state.
        operator, partition, version: the state to derive.
        read: reads the manifest of a tip.

    Returns:
        The manifest; if the partition's range has not changed, the one of the base.

    Raises:
        StateDamagedError: the partitions of the base contradict each other.
    """
    range_ = claim.hash_range(partition)
    parents = []
    for number, groups in enumerate(base.ranges if base is not None else ()):
        held = hash_range_of(groups, claim.key_groups)
        tip = base.tip(operator, number) if base is not None and held.meets(range_) else None
        if tip is not None:
            parents.append((read(tip), held))
    return _combine(parents, operator, partition, version, range_)


class Rescaled(NamedTuple):
    """A partition after rescaling: the last run's partitions that it takes state from, and its manifest."""

    partition: int
    parents: tuple[int, ...]
    manifest: PartitionManifest


def rescaled(
    claim: Generation, partitions: int, operator: int, version: int, manifest: Callable[[int], PartitionManifest]
) -> Iterator[Rescaled]:
    """Yield the manifests with which the partitions of an operator would begin after rescaling.

    Args:
        claim: claim of the run that wrote the version.
        partitions: the new number of partitions.
        operator, version: the state to rescale.
        manifest: returns the current manifest of a partition.
    """
    for number, groups in enumerate(split_key_groups(partitions, claim.key_groups)):
        range_ = hash_range_of(groups, claim.key_groups)
        parents = [old for old in range(claim.partitions) if claim.hash_range(old).meets(range_)]
        parts = [(manifest(old), claim.hash_range(old)) for old in parents]
        yield Rescaled(number, tuple(parents), _combine(parts, operator, number, version, range_))


def _combine(
    parents: Sequence[Parent], operator: int, partition: int, version: int, range_: HashRange
) -> PartitionManifest:
    """Combine the parts of the parents that lie in a partition's range into one manifest."""
    if not parents:
        return PartitionManifest(operator, partition, version)
    if len(parents) == 1 and parents[0][1] == range_:
        return msgspec.structs.replace(parents[0][0], partition=partition)
    if len({manifest.schema_number for manifest, _ in parents}) > 1:
        raise StateDamagedError(
            "The partitions of one version have different state schemas.",
            action="Start with as many partitions as the last run had.",
            operator=str(operator),
            version=version,
        )
    # Each partition cuts event time into slices of its own, according to its rows. Overlapping slices become one.
    belongs = disjoint({name: None for manifest, _ in parents for name in manifest.tables})
    tables: dict[str, list[tuple[TableState, HashRange]]] = {}
    for manifest, held in parents:
        for name, table in manifest.tables.items():
            tables.setdefault(belongs[name], []).append((table, held))
    # `id` and `lineage` are derived from the parents, so that all slots compute the same manifest.
    words = [str(part) for manifest, _ in parents for part in (manifest.id, manifest.lineage)]
    digest = xxhash.xxh3_128(",".join([*words, *map(str, range_)]).encode())
    return PartitionManifest(
        operator=operator,
        partition=partition,
        version=version,
        schema_number=parents[0][0].schema_number,
        id=digest.hexdigest(),
        lineage=digest.intdigest() & (1 << 64) - 1,
        tables={name: _table(name, version, parts, range_) for name, parts in tables.items()},
    )


def _table(name: str, version: int, parts: Sequence[tuple[TableState, HashRange]], range_: HashRange) -> TableState:
    if len({state.runs.expired for state, _ in parts}) > 1:
        raise StateDamagedError(
            f"The partitions of one version do not agree on what of table {name} has expired.",
            action="Start with as many partitions as the last run had.",
            version=version,
        )
    runs: list[RunRef] = []
    deltas: list[DeltaRef] = []
    keys = 0
    for state, held in parts:
        part = held.meet(range_)
        keys += _keys_below(state.runs.keys, held, part.hi) - _keys_below(state.runs.keys, held, part.lo)
        live = part.meet(HashRange(state.runs.lowest))
        if live.lo >= live.hi:
            continue
        live = HashRange() if state.runs.axis == "none" else live
        runs += _runs(state.runs, live)
        deltas += _deltas(state, live)
    # The minimum: with a higher value, the next commit would drop deltas that the runs of a parent do not cover.
    flushed = min(state.runs.flushed for state, _ in parts)
    first = parts[0][0].runs
    # With axis `none`, all parents name the same files and deltas, all of whose rows count.
    manifest = TableManifest(tuple(dict.fromkeys(runs)), flushed, keys, first.expired, axis=first.axis)
    return TableState(manifest, tuple(dict.fromkeys(deltas)))


def _keys_below(keys: int, held: HashRange, until: int) -> int:
    """Estimate the number of keys of a range below a hash.

    The estimates of adjoining parts of a range add up to all of its keys.
    """
    return keys * (until - held.lo) // (held.hi - held.lo)


def _runs(table: TableManifest, live: HashRange) -> Iterator[RunRef]:
    for run in table.runs:
        if run.pending:
            continue  # its rows are also in deltas or other runs, and the slot that was writing it is gone
        visible = range_of(run.visible).meet(live)
        if run.last and table.axis == "hash":
            if run.last < visible.lo or run.first >= visible.hi:
                continue
            if visible.has(HashRange(run.first, run.last + 1)):
                yield msgspec.structs.replace(run, visible=None)
                continue
        if visible.lo < visible.hi:
            yield msgspec.structs.replace(run, visible=interval_of(visible))


def _deltas(state: TableState, live: HashRange) -> Iterator[DeltaRef]:
    covered = state.runs.skip
    for delta in state.deltas:
        remaining = delta.rows - delta.skip
        if covered and covered >= remaining:
            covered -= remaining
            continue
        visible = range_of(delta.visible).meet(live)
        if visible.lo < visible.hi:
            yield msgspec.structs.replace(delta, skip=delta.skip + covered, visible=interval_of(visible))
        covered = 0
