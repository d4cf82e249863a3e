"""Choice of the manifests that count, of those that one run has committed of a version.

A run may commit several manifests of one place and version: Spark repeats tasks, and a partition may move to another
slot. The rules are the same for a slot that opens a partition, for recovery, and for reads from outside:

- The latest attempt counts (`latest_attempts`).
- Manifests with one lineage have the same input, back to the beginning, and are interchangeable. With two lineages it
  is not known which input counts, so the version is uncertain in this place (`uncertain_places`).

The use of the run's base differs:

- A slot opens one place while the run goes on. The run's own manifest replaces that of the base, also if its input is
  another one: the run has repeated the batch. Without an own manifest, the slot begins with the base
  (`Checkpoint.open_partition`).
- Recovery and reads from outside need whole versions of a run that may have died halfway (`Recovery`, `StateReader`).
  A version with own manifests in all places, each of them certain, is whole without the base. Else the tips of the
  base fill the gaps, and a place whose own manifest has another lineage than its tip is uncertain. If the base has
  partitions with other ranges, the two cannot be combined: the base counts in all places, unless a place is uncertain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.checkpoint.generation import BaseVersion

Place = tuple[int, int]
"""Operator and partition."""


def latest_attempts(manifests: Iterable[PartitionManifest]) -> dict[Place, list[PartitionManifest]]:
    """Group manifests by place, without those that a later attempt has replaced.

    Args:
        manifests: manifests of one version by one run; attempts of different runs are not comparable.

    Returns:
        For each place that has a manifest, those with its highest `attempt`, in the given order.
    """
    latest: dict[Place, list[PartitionManifest]] = {}
    for manifest in manifests:
        of_place = latest.setdefault(manifest.place, [])
        if of_place and manifest.attempt < of_place[0].attempt:
            continue
        if of_place and manifest.attempt > of_place[0].attempt:
            of_place.clear()
        of_place.append(manifest)
    return latest


def uncertain_places(
    latest: Mapping[Place, Sequence[PartitionManifest]], inherited: BaseVersion | None = None
) -> set[Place]:
    """Return the places with own manifests for which two lineages are found.

    Args:
        latest: the run's own manifests by place (see `latest_attempts`).
        inherited: the version in the run's base, if the base counts and its partitions have the ranges of the run's.
            Places without an own manifest have the lineage of their tip alone, and are certain.
    """
    tips = inherited.tips if inherited is not None else ()
    inherited_lineages = {(tip.operator, tip.partition): tip.lineage for tip in tips}
    uncertain = set()
    for place, manifests in latest.items():
        lineages = {manifest.lineage for manifest in manifests}
        if place in inherited_lineages:
            lineages.add(inherited_lineages[place])
        if len(lineages) > 1:
            uncertain.add(place)
    return uncertain
