"""Generations: each run of a query claims the next number and thereby fences the runs before it.

`generations/<n>.json` is the claim, put-if-absent before anything is listed; from then on no older run acknowledges a
commit: the claim leaves `<m>.fenced` for every older one, so that a run that goes on looks for one name, and lists
nothing. `generations/<n>.base.json` follows once recovery has chosen what to start from: it names, version by version,
the exact manifests that this generation builds on, so a commit of an older run that arrives late is never looked at.
A claim without a base belongs to a run that died before it began; recovery skips it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import pairwise

import msgspec

from millpond.checkpoint.formats.documents import (
    DIGITS,
    FORMAT,
    digits,
    read_document,
    write_document,
    write_own_document,
)
from millpond.errors import FencedError, SettingError, StateDamagedError, TransientError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem
from millpond.files.backends.patience import patiently
from millpond.layout import HashRange

FOLDER = "generations/"
INITIAL = "initial/"
"""Where what the first batch of a query begins with lies, by the generation of the run that has written it."""
_BASE = ".base.json"
_FENCED = ".fenced"


KeyGroups = tuple[tuple[int, int], ...]
"""The key groups [first, stop) of each partition, in order."""


class Generation(msgspec.Struct, frozen=True):
    """A claim.

    Attributes:
        number: greater than those of all runs before.
        run: names the run that claimed it, for messages.
        key_groups: number of key groups of the query.
        ranges: of its partitions.
        created: seconds since the epoch.
        format: of the checkpoint.
    """

    number: int
    run: str
    key_groups: int
    ranges: KeyGroups
    created: float
    format: int = FORMAT

    @property
    def partitions(self) -> int:
        """Number of partitions."""
        return len(self.ranges)

    def hash_range(self, partition: int) -> HashRange:
        """The hashes that a partition of this run holds."""
        return self.hashes(self.ranges[partition])

    def hashes(self, groups: tuple[int, int]) -> HashRange:
        """The hashes of key groups [first, stop)."""
        shift = 64 - (self.key_groups - 1).bit_length()
        return HashRange(groups[0] << shift, groups[1] << shift)


class Tip(msgspec.Struct, frozen=True):
    """A durable manifest: its place, `id`, `lineage` and `shape`, and the commit object's name and length."""

    operator: int
    partition: int
    id: str
    lineage: int
    commit: str
    size: int
    shape: int = 0


class BaseVersion(msgspec.Struct, frozen=True):
    """A version that is durable in every partition; a partition without a tip is empty at it.

    Attributes:
        ranges: of the partitions that the tips are of; they may be others than those of the run that builds on them.
    """

    version: int
    tips: tuple[Tip, ...]
    ranges: KeyGroups

    def tip(self, operator: int, partition: int) -> Tip | None:
        """The tip of one of these partitions, or None when there is none."""
        place = operator, partition
        return next((tip for tip in self.tips if (tip.operator, tip.partition) == place), None)


class Base(msgspec.Struct, frozen=True):
    """What a generation builds on: one or several durable versions, ascending.

    Attributes:
        plan: a digest of what the run computes up to its operators: another must not repeat a batch that it ran.
        shape: of the query that runs (see `checkpoint.pinned`).
        retain: how many versions are kept to be read, where that is more than Spark's ledger goes back.
    """

    generation: int
    operators: int
    versions: tuple[BaseVersion, ...]
    plan: str = ""
    shape: int = 0
    retain: int = 0
    format: int = FORMAT

    def at(self, version: int) -> BaseVersion | None:
        """What the base has of a version, if it has it."""
        return next((base for base in self.versions if base.version == version), None)


def split_key_groups(key_groups: int, partitions: int) -> tuple[tuple[int, int], ...]:
    """The contiguous ranges with `partition = key_group * partitions // key_groups`."""
    bounds = [-(-p * key_groups // partitions) for p in range(partitions + 1)]
    return tuple(pairwise(bounds))


def claim(files: FileSystem, *, run: str, partitions: int, key_groups: int = 1 << 15, least: int = 1) -> Generation:
    """Claim the next generation. From its return on, every older run is fenced (it finishes no commit any more).

    Args:
        files: the location's `millpond/` folder.
        run: names the run.
        partitions, key_groups: of the query.
        least: the number is at least this. The time, in milliseconds, fences runs whose checkpoint was deleted, too.

    Raises:
        SettingError: the store does not keep to put-if-absent.
        FencedError: a newer run has begun meanwhile.
    """
    number = max(least, max(numbers(files), default=0) + 1)
    failures = 5
    while True:
        generation = Generation(number, run, key_groups, split_key_groups(key_groups, partitions), time.time())
        try:
            write_own_document(files, claim_name(number), generation)
        except AlreadyExistsError:
            number += 1  # another run was faster
        except TransientError:
            if failures == 0:
                raise
            failures -= 1
            number += 1  # whether it took effect is not known; a claim without a base does no harm
        else:
            patiently(partial(_claim_again, files, generation))
            patiently(lambda: _fence_older(files))
            return generation


def _claim_again(files: FileSystem, generation: Generation) -> None:
    """Put the claim that is there once more, which has to be refused; where it is not, it is the same again.

    Some S3-compatible stores ignore `If-None-Match`: there, two runs would each believe to be the only one.
    """
    try:
        write_document(files, claim_name(generation.number), generation, create=True)
    except AlreadyExistsError:
        return
    check_fence(files, generation.number)  # a newer run may have removed the claim, of which there is one again now
    raise SettingError(
        "The store overwrites what a put-if-absent (If-None-Match: *) finds: two runs could not be told apart.",
        action="Use a store that keeps to conditional puts, or a version of it that does (`millpond docs state-on-s3` "
        "names what was tested).",
        file=files.locate(claim_name(generation.number)),
    )


def _fence_older(files: FileSystem) -> None:
    """Leave a mark for every claim but the newest. Of two that race, the later one's listing has both.

    Marks are never taken back, so a put of one that arrives late does no harm.
    """
    names = {info.name for info in files.list(FOLDER)}
    claimed = _numbers_of(names)
    for older in claimed[:-1]:
        if fenced_name(older) not in names:
            files.put(fenced_name(older), [b"%d\n" % claimed[-1]])


def write_base(files: FileSystem, base: Base) -> None:
    """Write what the generation builds on; slots can open it from then on."""
    check_fence(files, base.generation)
    write_document(files, base_name(base.generation), base)


def read_claim(files: FileSystem, number: int) -> Generation:
    """Read a claim."""
    return read_document(files, claim_name(number), Generation)


def read_base(files: FileSystem, number: int) -> Base:
    """Read what a generation builds on."""
    return read_document(files, base_name(number), Base)


def newest_retain(files: FileSystem) -> int:
    """How many versions the newest run that has begun keeps to be read; 0 if it does not say."""
    for number in reversed(begun(files)):
        with suppress(StateDamagedError):
            return read_base(files, number).retain
    return 0


def newest_claim(files: FileSystem) -> Generation | None:
    """The newest claim that can be read (a torn one was never returned to its run), or None."""
    for number in reversed(numbers(files)):
        with suppress(StateDamagedError):
            return read_claim(files, number)
    return None


def numbers(files: FileSystem, after: int = 0) -> list[int]:
    """The claimed generations behind `after`, ascending."""
    start = claim_name(after) if after else ""
    claimed = _numbers_of(info.name for info in files.list(FOLDER, after=start))
    return [number for number in claimed if number > after]


def _numbers_of(names: Iterable[str]) -> list[int]:
    found = (name.removeprefix(FOLDER)[:DIGITS] for name in names)
    return sorted({int(name) for name in found if name.isdigit()})


def begun(files: FileSystem) -> list[int]:
    """The generations that have a base, ascending."""
    found = (info.name.removeprefix(FOLDER) for info in files.list(FOLDER))
    return sorted(int(name[:DIGITS]) for name in found if name[:DIGITS].isdigit() and name[DIGITS:] == _BASE)


def check_fence(files: FileSystem, number: int) -> None:
    """Raise `FencedError` if a newer generation exists.

    Two requests for objects by name, cheaper than a list: the claim is still there (whoever begins anew where a
    checkpoint was deleted does not know whom to fence), and the mark is not.
    """
    if files.exists(claim_name(number)) and not files.exists(fenced_name(number)):
        return
    later = numbers(files, after=number)
    if later:
        raise FencedError(
            f"Generation {later[-1]} of the query has taken over from generation {number}.",
            action="Stop this run; only the newest run of a query may write its checkpoint.",
            file=files.locate(claim_name(later[-1])),
        )


def claim_name(number: int) -> str:
    """The object of a claim."""
    return f"{FOLDER}{digits(number)}.json"


def fenced_name(number: int) -> str:
    """The object that says that a newer run than this has claimed its generation."""
    return f"{FOLDER}{digits(number)}{_FENCED}"


def base_name(number: int) -> str:
    """The object that says what a generation builds on."""
    return f"{FOLDER}{digits(number)}{_BASE}"
