"""What is durable when a query starts, and what the new run builds on.

The driver claims a generation first (older runs are fenced from then on), then lists `commits/` once. A version counts
as durable when every partition of every operator has it with one lineage; the run before this one decides, by its own
commits and by what its base names. Commits of runs before that, however late they arrive, are not looked at.

    generation = claim(files, run=…, partitions=P)
    recovery = Recovery(files, generation, operators=n)
    if not recovery.durable(c + 1): …                       # replay batch c from version c
    recovery.begin([c + 1])                                 # or [c] for the replay: slots may open it now
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from millpond.checkpoint.commit import CommitHeader, parse_commit_name, read_header
from millpond.checkpoint.generation import (
    Base,
    BaseVersion,
    Generation,
    Tip,
    claim_name,
    numbers,
    read_base,
    read_claim,
    write_base,
)
from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.filesystem import FileInfo, FileSystem, MissingFileError


class Recovery:
    """The state of a checkpoint at the moment of a claim.

    Args:
        files: the location's `millpond/` folder.
        generation: the claim that was just made.
        operators: number of operators that run on Millpond.

    Raises:
        StateIncompatibleError: the run before this one had other partitions.
        StateDamagedError: a generation file is altered, and it had been in use.
    """

    def __init__(self, files: FileSystem, generation: Generation, operators: int) -> None:
        self.files = files
        self.generation = generation
        self.operators = operators
        self.damaged: list[str] = []
        """Commit objects that were left out because they are cut short or altered."""
        self._commits: dict[tuple[int, int], list[FileInfo]] = defaultdict(list)
        for info in files.list("commits/"):
            self._commits[parse_commit_name(info.name)].append(info)
        self._previous = self._previous_base()
        self._tips: dict[int, dict[tuple[int, int], Tip | None]] = {}

    def durable(self, version: int) -> bool:
        """Whether every partition has this version."""
        return not self.missing(version)

    def missing(self, version: int) -> list[tuple[int, int]]:
        """The (operator, partition) pairs that lack a version, or have it with contradicting lineages."""
        return [place for place, tip in self._at(version).items() if tip is None and version > 0]

    def newest(self) -> int:
        """The newest durable version; 0 when there is none."""
        known = {version for version, number in self._commits if self._previous and number == self._previous.generation}
        known |= {base.version for base in self._previous.versions} if self._previous else set()
        return next((version for version in sorted(known, reverse=True) if self.durable(version)), 0)

    def begin(self, versions: Iterable[int]) -> Base:
        """Let the new generation build on these versions (each durable); slots can open it from then on."""
        chosen = []
        for version in sorted(set(versions)):
            tips = self._at(version)
            if version > 0 and not all(tips.values()):
                raise ValueError(f"Version {version} is not durable.")
            chosen.append(BaseVersion(version, tuple(tip for tip in tips.values() if tip is not None)))
        base = Base(self.generation.number, self.operators, tuple(chosen))
        write_base(self.files, base)
        return base

    def _at(self, version: int) -> dict[tuple[int, int], Tip | None]:
        if version not in self._tips:
            self._tips[version] = self._find(version)
        return self._tips[version]

    def _find(self, version: int) -> dict[tuple[int, int], Tip | None]:
        places = [(op, part) for op in range(self.operators) for part in range(self.generation.partitions)]
        previous = self._previous
        if previous is None or version == 0:
            return dict.fromkeys(places)
        own: dict[tuple[int, int], dict[int, Tip]] = defaultdict(dict)
        for name, header in self._headers(version, previous.generation):
            for manifest in header.manifests:
                own[manifest.place][manifest.lineage] = Tip(*manifest.place, manifest.id, manifest.lineage, name)
        if all(len(own[place]) == 1 for place in places):
            return {place: next(iter(own[place].values())) for place in places}
        # Not all partitions went on in that run: what it built on still counts where the two do not contradict.
        found: dict[tuple[int, int], Tip | None] = {}
        for place in places:
            tip = previous.tip(*place, version)
            lineages = set(own[place]) | ({tip.lineage} if tip else set())
            found[place] = (tip or next(iter(own[place].values()))) if len(lineages) == 1 else None
        return found

    def _headers(self, version: int, number: int) -> Iterable[tuple[str, CommitHeader]]:
        for info in self._commits.get((version, number), ()):
            try:
                yield info.name, read_header(self.files, info.name, info.size)
            except MissingFileError:
                continue
            except StateDamagedError:
                self.damaged.append(self.files.locate(info.name))

    def _previous_base(self) -> Base | None:
        for number in reversed([n for n in numbers(self.files) if n < self.generation.number]):
            try:
                base = read_base(self.files, number)
            except MissingFileError:
                continue  # that run died before it began
            except StateDamagedError:
                if any(generation == number for _, generation in self._commits):
                    raise
                continue  # a torn put of a run that died before it began
            self._check_partitions(read_claim(self.files, number))
            return base
        return None

    def _check_partitions(self, before: Generation) -> None:
        now = self.generation
        if (before.partitions, before.key_groups) != (now.partitions, now.key_groups):
            raise StateIncompatibleError(
                f"The state has {before.partitions} partitions of {before.key_groups} key groups; the query asks for "
                f"{now.partitions} of {now.key_groups}.",
                action=f"Set spark.millpond.partitions to {before.partitions} and keyGroups to {before.key_groups}.",
                file=self.files.locate(claim_name(before.number)),
            )
