"""Recovery: determine the durable versions, and choose the base of a new run.

The driver claims a generation first, which fences older runs, then lists `commits/` once. A version is durable under
two conditions: every partition of every operator has it, and all attempts at it have one lineage. One lineage means the
same input, back to the beginning. Only the previous run counts: its own commits, and the exact manifests that its base
names. Commits of earlier runs are not read, however late they arrived.

    generation = claim(files, run=…, partitions=P)
    recovery = Recovery(files, generation, operators=n)
    if recovery.durable(c + 1):
        recovery.write_base([c + 1])        # slots can open the generation now; add c + 2 if it is durable and planned
    else:                              # replay batch c, then claim again
        recovery.write_base([c])

Each run of the plan, including replays, should claim its own generation. Otherwise the results of a replay and of the
sink's run could be mistaken for two attempts of one run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from millpond.checkpoint.formats.commit import (
    CommitHeader,
    check_commit_name,
    only_commits,
    parse_commit_name,
    read_checked_header,
    read_header,
)
from millpond.checkpoint.formats.documents import damaged_error
from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.checkpoint.generation import (
    Base,
    BaseVersion,
    BegunGeneration,
    Generation,
    KeyGroups,
    Tip,
    check_newest_base,
    claim_name,
    generations_with_base,
    read_begun,
    write_base,
)
from millpond.checkpoint.newest_first import NewestFirst
from millpond.checkpoint.resolution import Place, latest_attempts, uncertain_places
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import FileInfo, FileSystem, MissingFileError


class Recovery:
    """The durable versions of a checkpoint at the time of construction.

    Args:
        files: the location's `millpond/` folder.
        generation: the run's new claim; None is read-only (`read_state`): `write_base` raises.
        operators: number of operators that run on Millpond; None takes it from the previous run.
        from_scratch: whether to begin with empty state and ignore the state of earlier runs.

    Raises:
        StateIncompatibleError: the previous run had another number of key groups.
        StateDamagedError: a generation file that was in use is altered, missing, or that of another generation.
    """

    def __init__(
        self,
        files: FileSystem,
        generation: Generation | None = None,
        operators: int | None = None,
        *,
        from_scratch: bool = False,
    ) -> None:
        self.files = files
        self.generation = generation
        self.damaged: set[str] = set()
        """URLs of commit objects that were skipped because they are cut short or altered."""
        self._commits: dict[tuple[int, int], list[FileInfo]] = defaultdict(list)
        # One listing, after the claim: a commit that arrives later is of a fenced run, which does not acknowledge it.
        for info in only_commits(files.list("commits/")):
            self._commits[parse_commit_name(info.name)].append(info)
        claimed = math.inf if generation is None else generation.number
        committed = {number for _, number in self._commits if number < claimed}
        begun = [number for number in generations_with_base(files) if number < claimed]
        # A run with commits had a claim and a base, so both have to be readable, and a missing one is damage, too.
        self._runs = NewestFirst(begun, partial(read_begun, files), lambda number, error: number in committed)
        if not from_scratch:
            check_newest_base(files, committed, begun)
        newest = None if from_scratch else self._newest_run()
        self._from_scratch = from_scratch
        if newest and generation:
            self._check_key_groups(newest.claim, generation)
        layout = generation or (newest.claim if newest else None)
        self._ranges: KeyGroups = layout.ranges if layout else ()
        self.operators = operators if operators is not None else newest.base.operators if newest else 0
        self._tips: dict[int, _VersionTips] = {}

    def durable(self, version: int) -> bool:
        """Return whether every partition has this version."""
        return not self.missing(version)

    def missing(self, version: int) -> list[Place]:
        """List the (operator, partition) pairs that lack a version, or whose attempts at it saw different input."""
        return [place for place, tip in self._tips_of(version).tips.items() if tip is None and version > 0]

    @property
    def partitions(self) -> int:
        """Number of partitions of the new generation, else of the last run."""
        return len(self._ranges)

    def ranges(self, version: int) -> KeyGroups:
        """Return the key groups of a version's partitions, as the run that wrote the version had them."""
        return self._tips_of(version).ranges

    def newest(self) -> int:
        """Return the newest durable version; 0 if there is none."""
        run = self._newest_run()
        if run is None:
            return 0
        known = {version for version, number in self._commits if number == run.claim.number}
        known |= {base.version for base in run.base.versions}
        return next((version for version in sorted(known, reverse=True) if self.durable(version)), 0)

    @property
    def plan(self) -> str | None:
        """Digest of the previous run's plan up to its operators (see `Base`); None if there was no run."""
        run = self._newest_run()
        return run.base.plan if run else None

    def schema_number(self, version: int) -> int:
        """Return the number of the state schema of a durable version; 0 for empty state.

        Raises:
            StateDamagedError: its partitions have different state schemas.
        """
        schema_numbers = {tip.schema_number for tip in self._tips_of(version).tips.values() if tip is not None}
        if len(schema_numbers) > 1:
            raise damaged_error(self.files.locate("commits/"), "has another state schema than others of its version")
        return schema_numbers.pop() if schema_numbers else 0

    def write_base(self, versions: Iterable[int], plan: str = "", *, schema_number: int = 0, retain: int = 0) -> Base:
        """Write the base of the new generation; from then on, slots can open it.

        Args:
            versions: the versions to build on; each must be durable.
            plan, schema_number, retain: see `Base`.

        Raises:
            ValueError: no generation was claimed, or a version is not durable.
        """
        if self.generation is None:
            raise ValueError("Only a run that has claimed a generation can begin.")
        chosen = []
        for version in sorted(set(versions)):
            if not self.durable(version):
                raise ValueError(f"Version {version} is not durable.")
            state = self._tips_of(version)
            chosen.append(BaseVersion(version, tuple(tip for tip in state.tips.values() if tip), state.ranges))
        base = Base(self.generation.number, self.operators, tuple(chosen), plan, schema_number, retain)
        write_base(self.files, base)
        return base

    def manifest(self, operator: int, partition: int, version: int) -> PartitionManifest:
        """Read the manifest of a partition at a durable version; partitions are numbered as in `ranges(version)`."""
        tip = self._tips_of(version).tips.get((operator, partition))
        if tip is None:
            if version == 0:
                return PartitionManifest(operator, partition, 0)
            raise ValueError(f"Version {version} is not durable.")
        (manifest,) = self._read_tips([tip])
        return manifest

    def manifests(self, version: int) -> list[PartitionManifest]:
        """Read the manifests of all partitions at a durable version (above 0)."""
        return self._read_tips([tip for tip in self._tips_of(version).tips.values() if tip is not None])

    def _read_tips(self, tips: Sequence[Tip]) -> list[PartitionManifest]:
        """Read the manifests of tips, in their order."""
        # The partitions of a slot share a commit object: each header is read once.
        sizes = {tip.commit: tip.size for tip in tips}
        headers = [read_checked_header(self.files, name, size) for name, size in sizes.items()]
        held = {manifest.id: manifest for header in headers for manifest in header.manifests}
        for tip in tips:
            if tip.id not in held:
                raise damaged_error(
                    self.files.locate(tip.commit), f"does not hold partition {tip.partition} of operator {tip.operator}"
                )
        return [held[tip.id] for tip in tips]

    def _newest_run(self) -> BegunGeneration | None:
        """Return the previous run, or None."""
        return next(iter(self._runs), None)

    def _tips_of(self, version: int) -> _VersionTips:
        if version not in self._tips:
            self._tips[version] = self._find_tips(version)
        return self._tips[version]

    def _places(self, ranges: KeyGroups) -> list[Place]:
        return [(operator, partition) for operator in range(self.operators) for partition in range(len(ranges))]

    def _find_tips(self, version: int) -> _VersionTips:
        run = next((begun for begun in self._runs if begun.began_by(version)), None)
        if run is None or version == 0 or self._from_scratch:
            return _VersionTips(self._ranges, dict.fromkeys(self._places(self._ranges)))
        ranges, base = run.claim.ranges, run.base.find_version(version)
        own = self._own_tips(version, run.claim.number)
        if all(place in own.tips and place not in own.uncertain for place in self._places(ranges)):
            return self._tips_of_commits(own, ranges)
        if base is not None and base.ranges != ranges and not own.uncertain:
            return self._tips_of_base(base)
        return self._tips_of_both(own, ranges, base if base is not None and base.ranges == ranges else None)

    def _tips_of_commits(self, own: _OwnTips, ranges: KeyGroups) -> _VersionTips:
        """Return the tips of a version that the run committed in every partition: the base cannot add any."""
        return _VersionTips(ranges, {place: own.tips[place] for place in self._places(ranges)})

    def _tips_of_base(self, base: BaseVersion) -> _VersionTips:
        """Return the tips of a version that the run began with and did not repeat in every partition.

        Its partitions have other ranges than the run's, so the run's own commits cannot be combined with them. The base
        is complete without these.
        """
        return _VersionTips(base.ranges, {place: base.tip(*place) for place in self._places(base.ranges)})

    def _tips_of_both(self, own: _OwnTips, ranges: KeyGroups, base: BaseVersion | None) -> _VersionTips:
        """Return the tips of a version that the run did not commit in every partition: from its base, else its commits.

        A place with two lineages, in attempts or between base and commits, gets no tip, and the batch is repeated.

        Args:
            own: the run's own commits.
            ranges: the key groups of its partitions.
            base: the version in the run's base; None if there is none for these partitions.
        """
        uncertain = uncertain_places(own.latest, base)
        # Other places have one lineage, so the tip of the base and that of a commit are interchangeable.
        chosen: dict[Place, Tip | None] = {}
        for place in self._places(ranges):
            tip = base.tip(*place) if base is not None else None
            chosen[place] = None if place in uncertain else tip or own.tips.get(place)
        return _VersionTips(ranges, chosen)

    def _own_tips(self, version: int, number: int) -> _OwnTips:
        """Read the tips of a version in the commits of one generation."""
        headers = list(self._headers(version, number))
        tips = {
            manifest.id: Tip(
                *manifest.place, manifest.id, manifest.lineage, info.name, info.size, manifest.schema_number
            )
            for info, header in headers
            for manifest in header.manifests
        }
        latest = latest_attempts(manifest for _, header in headers for manifest in header.manifests)
        # Where these have one lineage, they are interchangeable: any of their tips will do.
        chosen = {place: tips[manifests[-1].id] for place, manifests in latest.items()}
        return _OwnTips(latest, chosen, uncertain_places(latest))

    def _headers(self, version: int, number: int) -> Iterator[tuple[FileInfo, CommitHeader]]:
        for info in self._commits.get((version, number), ()):
            try:
                header = read_header(self.files, info.name, info.size)
            except MissingFileError:
                continue  # removed by garbage collection meanwhile
            except StateDamagedError:
                self.damaged.add(self.files.locate(info.name))
                continue  # may be a torn put, which was never acknowledged
            # An intact object under a wrong name is no torn put. It may have replaced an acknowledged commit, so raise.
            check_commit_name(self.files, info.name, header)
            yield info, header

    def _check_key_groups(self, before: Generation, now: Generation) -> None:
        if before.key_groups != now.key_groups:
            raise StateIncompatibleError(
                f"The state has {before.key_groups} key groups; this version of Millpond has {now.key_groups}.",
                action="Start with a new checkpointLocation, or with the version that wrote the state.",
                file=self.files.locate(claim_name(before.number)),
            )


@dataclass(frozen=True)
class _VersionTips:
    """The tips found for one version, by operator and partition, and the key groups of these partitions."""

    ranges: KeyGroups
    tips: dict[Place, Tip | None]


@dataclass(frozen=True)
class _OwnTips:
    """One version in the commits of the run that it belongs to.

    Attributes:
        latest: the manifests of the latest attempt at each place (see `latest_attempts`).
        tips: the tip of one of these, by place.
        uncertain: the places whose manifests saw different input.
    """

    latest: dict[Place, list[PartitionManifest]]
    tips: dict[Place, Tip]
    uncertain: set[Place]
