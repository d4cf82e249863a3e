"""Another number of partitions: a partition takes its part of those that an earlier run has left. No data moves.

What the old manifests name is named by the new ones too, each file and delta with the *window* of hashes that counts:
what of the old partition's range lies in the new one's. So a file that was written before may belong to several
partitions, until each has compacted it away. (Flink 2.0 §5.1: files are shared by reference.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from millpond.checkpoint.formats.manifest import DeltaRef, PartitionManifest, TableState
from millpond.checkpoint.generation import BaseVersion, Generation, Tip, split_key_groups
from millpond.errors import StateDamagedError
from millpond.files.refs import RunRef, TableManifest, range_of, window_of
from millpond.layout import HashRange
from millpond.time_slices import disjoint

Parent = tuple[PartitionManifest, HashRange]
"""A partition as it was, with the range of hashes that it held."""


def inherited(
    claim: Generation,
    base: BaseVersion | None,
    operator: int,
    partition: int,
    version: int,
    read: Callable[[Tip], PartitionManifest],
) -> PartitionManifest:
    """What a run's partition begins with: the same one of the run before, or its part of several.

    Args:
        claim: the run's. base: what it builds on; None for empty state.
        operator, partition, version: what is wanted.
        read: the manifest of a tip.

    Raises:
        StateDamagedError: the partitions of the base are not of one state.
    """
    range_ = claim.hash_range(partition)
    parents = []
    for number, groups in enumerate(base.ranges if base is not None else ()):
        held = claim.hashes(groups)
        tip = base.tip(operator, number) if base is not None and held.meets(range_) else None
        if tip is not None:
            parents.append((read(tip), held))
    return _joined(parents, operator, partition, version, range_)


class Rescaled(NamedTuple):
    """What a partition will be made of when there are others: partitions of the last run, and what it has of them."""

    partition: int
    parents: tuple[int, ...]
    manifest: PartitionManifest


def rescaled(
    claim: Generation, partitions: int, operator: int, version: int, manifest: Callable[[int], PartitionManifest]
) -> Iterator[Rescaled]:
    """What each partition of an operator would begin with if there were so many.

    Args:
        claim: of the run that made the version. partitions: how many there shall be.
        operator, version: whose state. manifest: of each partition as it is.
    """
    for number, groups in enumerate(split_key_groups(claim.key_groups, partitions)):
        range_ = claim.hashes(groups)
        parents = [at for at in range(claim.partitions) if claim.hash_range(at).meets(range_)]
        parts = [(manifest(at), claim.hash_range(at)) for at in parents]
        yield Rescaled(number, tuple(parents), _joined(parts, operator, number, version, range_))


def _joined(
    parents: Sequence[Parent], operator: int, partition: int, version: int, range_: HashRange
) -> PartitionManifest:
    """The state of a partition, made of those parts of others that lie in its range."""
    if not parents:
        return PartitionManifest(operator, partition, version)
    if len(parents) == 1 and parents[0][1] == range_:
        return msgspec.structs.replace(parents[0][0], partition=partition)
    if len({manifest.shape for manifest, _ in parents}) > 1:
        raise StateDamagedError(
            "The partitions of one version are of queries of different shapes.",
            action="Start with as many partitions as the last run had.",
            operator=str(operator),
            version=version,
        )
    # Each partition cuts event time as its rows ask for it: slices that overlap become one.
    belongs = disjoint({name: None for manifest, _ in parents for name in manifest.tables})
    tables: dict[str, list[tuple[TableState, HashRange]]] = {}
    for manifest, held in parents:
        for name, table in manifest.tables.items():
            tables.setdefault(belongs[name], []).append((table, held))
    words = [str(part) for manifest, _ in parents for part in (manifest.id, manifest.lineage)]
    digest = xxhash.xxh3_128(",".join([*words, *map(str, range_)]).encode())
    return PartitionManifest(
        operator=operator,
        partition=partition,
        version=version,
        shape=parents[0][0].shape,
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
        keys += _share(state.runs.keys, held, part.hi) - _share(state.runs.keys, held, part.lo)
        rest = part.meet(HashRange(state.runs.lowest))
        if rest.lo >= rest.hi:
            continue
        window = HashRange() if state.runs.axis == "none" else rest
        runs += _runs(state.runs, window)
        deltas += _deltas(state, window)
    flushed = min(state.runs.flushed for state, _ in parts)
    first = parts[0][0].runs
    manifest = TableManifest(tuple(dict.fromkeys(runs)), flushed, keys, first.expired, axis=first.axis)
    return TableState(manifest, tuple(dict.fromkeys(deltas)))


def _share(keys: int, held: HashRange, until: int) -> int:
    """About how many keys of a range are below a hash: such that the parts of a range have all of them together."""
    return keys * (until - held.lo) // (held.hi - held.lo)


def _runs(table: TableManifest, window: HashRange) -> Iterator[RunRef]:
    for run in table.runs:
        if run.pending:
            continue  # its rows are found elsewhere, and who had begun it is gone
        seen = range_of(run.window).meet(window)
        if run.last and table.axis == "hash":
            if run.last < seen.lo or run.first >= seen.hi:
                continue
            if seen.has(HashRange(run.first, run.last + 1)):
                yield msgspec.structs.replace(run, window=None)
                continue
        if seen.lo < seen.hi:
            yield msgspec.structs.replace(run, window=window_of(seen))


def _deltas(state: TableState, window: HashRange) -> Iterator[DeltaRef]:
    covered = state.runs.skip
    for delta in state.deltas:
        left = delta.rows - delta.skip
        if covered and covered >= left:
            covered -= left
            continue
        seen = range_of(delta.window).meet(window)
        if seen.lo < seen.hi:
            yield msgspec.structs.replace(delta, skip=delta.skip + covered, window=window_of(seen))
        covered = 0
