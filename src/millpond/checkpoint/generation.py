"""Generations: each run of a query claims the next number and thereby fences the runs before it.

`generations/<n>.json` is the claim, written put-if-absent before anything is listed. From then on no older run
acknowledges a commit. The claim writes `<m>.fenced` for every older generation, so an older run checks its fence by
name, without a listing.

`generations/<n>.base.json` follows once recovery has chosen the state to start from. It names, version by version, the
exact manifests that this generation builds on. So a late commit of an older run is never read. A claim without a base
belongs to a run that died before it began; recovery skips it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec

from millpond.checkpoint.formats.commit import only_commits, parse_commit_name
from millpond.checkpoint.formats.documents import (
    DIGITS,
    FORMAT,
    damaged_error,
    digits,
    read_document,
    write_document,
    write_document_once,
)
from millpond.checkpoint.newest_first import NewestFirst
from millpond.errors import FencedError, SettingError, StateDamagedError, TransientError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem
from millpond.files.backends.retry import with_retries
from millpond.key_groups import KEY_GROUPS, hash_range_of, split_key_groups
from millpond.layout import HashRange

FOLDER = "generations/"
INITIAL = "initial/"
"""Folder of initial state, which the first batch reads; by the generation of the run that wrote it."""
RESCALE_RUN = "millpond state rescale"
"""Run of the claims by which the command sets the number of partitions of a query's next start."""
_BASE_SUFFIX = ".base.json"
_FENCED_SUFFIX = ".fenced"


KeyGroups = tuple[tuple[int, int], ...]
"""The key groups [first, stop) of each partition, in order."""


RestartReason = Literal["state_lost", "run_failed", "batch_stuck"]


class Restart(msgspec.Struct, frozen=True):
    """A start of a query by its own application, after hosts were lost.

    Attributes:
        number: 1 for the first one in the application.
        reason: `state_lost`: the hosts had state that was not durable; `run_failed`: the run failed after the loss;
            `batch_stuck`: they hung, and the batch did not end.
        hosts: the lost hosts.
    """

    number: int
    reason: RestartReason
    hosts: tuple[str, ...]

    def __str__(self) -> str:
        hosts = ", ".join(self.hosts)
        if self.reason == "state_lost":
            return f"hosts were lost ({hosts}) with state that was not durable"
        if self.reason == "run_failed":
            return f"the run failed after hosts were lost ({hosts})"
        return f"hosts hang ({hosts}), and the batch does not end without them"


class Generation(msgspec.Struct, frozen=True):
    """A run's claim of a generation.

    Attributes:
        number: greater than the numbers of all earlier runs.
        run: name of the run that claimed it, for messages.
        key_groups: number of key groups of the query.
        ranges: key groups [first, stop) of each of its partitions.
        created: seconds since the epoch.
        format: format version of the checkpoint.
        restart: why the application has started the query again; None for a start by the user.
    """

    number: int
    run: str
    key_groups: int
    ranges: KeyGroups
    created: float
    format: int = FORMAT
    restart: Restart | None = None

    @property
    def partitions(self) -> int:
        """Number of partitions."""
        return len(self.ranges)

    def hash_range(self, partition: int) -> HashRange:
        """Return the range of hashes that a partition of this run holds."""
        return hash_range_of(self.ranges[partition], self.key_groups)


class Tip(msgspec.Struct, frozen=True):
    """A durable manifest: its place, `id`, `lineage` and `schema_number`, and the commit object's name and length."""

    operator: int
    partition: int
    id: str
    lineage: int
    commit: str
    size: int
    schema_number: int = 0


class BaseVersion(msgspec.Struct, frozen=True):
    """A version that is durable in every partition; a partition without a tip is empty at it.

    Attributes:
        ranges: key groups of the partitions of the tips; the run that builds on them may have other partitions.
    """

    version: int
    tips: tuple[Tip, ...]
    ranges: KeyGroups

    def tip(self, operator: int, partition: int) -> Tip | None:
        """Return the tip of one of these partitions; None if its state is empty."""
        place = operator, partition
        return next((tip for tip in self.tips if (tip.operator, tip.partition) == place), None)


class Base(msgspec.Struct, frozen=True):
    """The base of a generation: the durable versions, ascending, that it builds on.

    Attributes:
        plan: digest of the plan up to the run's operators; a run with another plan must not repeat its batches.
        schema_number: number of the state schema of the query that runs (see `checkpoint.state_schema`).
        retain: number of versions kept for readers, if that is more than Spark's offset log retains.
    """

    generation: int
    operators: int
    versions: tuple[BaseVersion, ...]
    plan: str = ""
    schema_number: int = 0
    retain: int = 0
    format: int = FORMAT

    def find_version(self, version: int) -> BaseVersion | None:
        """Return the base's tips of a version; None if the base lacks it."""
        return next((base for base in self.versions if base.version == version), None)


@dataclass(frozen=True)
class BegunGeneration:
    """A generation that has a base: its run has begun, and slots can open it."""

    claim: Generation
    base: Base

    def began_by(self, version: int) -> bool:
        """Return whether the run began with a version or an older one.

        A version belongs to the newest run that began by it.
        """
        return any(base.version <= version for base in self.base.versions)


def claim(
    files: FileSystem,
    *,
    run: str,
    partitions: int,
    key_groups: int = KEY_GROUPS,
    minimum: int = 1,
    restart: Restart | None = None,
) -> Generation:
    """Claim the next generation. Once it returns, every older run is fenced: it cannot finish a commit.

    Args:
        files: the location's `millpond/` folder.
        run: name of the run.
        partitions, key_groups: their numbers for the query.
        minimum: smallest number to claim. The time in milliseconds also fences runs whose checkpoint was deleted.
        restart: why the application starts the query again, if it does.

    Raises:
        SettingError: the store does not honour put-if-absent.
        FencedError: a newer run has begun meanwhile.
    """
    number = max(minimum, max(claimed_generations(files), default=0) + 1)
    failures = 5
    while True:
        ranges = split_key_groups(partitions, key_groups)
        generation = Generation(number, run, key_groups, ranges, time.time(), restart=restart)
        try:
            write_document_once(files, claim_name(number), generation)
        except AlreadyExistsError:
            number += 1  # another run was faster
        except TransientError:
            if failures == 0:
                raise
            failures -= 1
            number += 1  # the outcome of the put is unknown; a claim without a base is harmless
        else:
            with_retries(partial(_claim_again, files, generation))
            with_retries(lambda: _fence_older(files))
            return generation


def _claim_again(files: FileSystem, generation: Generation) -> None:
    """Check that the store refuses a second put of the claim; if it accepts the put, the bytes are the same.

    Some S3-compatible stores ignore `If-None-Match`. On these, two runs would both believe that they hold the claim.
    """
    try:
        write_document(files, claim_name(generation.number), generation, create=True)
    except AlreadyExistsError:
        return
    check_fence(files, generation.number)  # a newer run may have removed the claim, and this put has created it again
    raise SettingError(
        "The store overwrites what a put-if-absent (If-None-Match: *) finds: two runs could claim one query.",
        action="Use a store that keeps to conditional puts, or a version of it that does (`millpond docs state-on-s3` "
        "names what was tested).",
        file=files.locate(claim_name(generation.number)),
    )


def _fence_older(files: FileSystem) -> None:
    """Write a fence mark for every claim but the newest.

    If two claims race, the later one's listing has both. A mark stays at least as long as its claim, so a late put of a
    mark is harmless.
    """
    names = {info.name for info in files.list(FOLDER)}
    claimed = generations_in(names)
    for older in claimed[:-1]:
        if fenced_name(older) not in names:
            files.put(fenced_name(older), [b"%d\n" % claimed[-1]])


def write_base(files: FileSystem, base: Base) -> None:
    """Write the base of a generation; from then on, slots can open it."""
    check_fence(files, base.generation)
    write_document(files, base_name(base.generation), base)


def read_claim(files: FileSystem, number: int) -> Generation:
    """Read the claim of a generation."""
    claimed = read_document(files, claim_name(number), Generation)
    _check_number(files, claim_name(number), number, claimed.number)
    return claimed


def read_base(files: FileSystem, number: int) -> Base:
    """Read the base of a generation."""
    base = read_document(files, base_name(number), Base)
    _check_number(files, base_name(number), number, base.generation)
    return base


def _check_number(files: FileSystem, name: str, number: int, written: int) -> None:
    """Check that a document was written for the generation that its name has."""
    # A file that was copied to a wrong name would otherwise give the state of another run.
    if written != number:
        raise damaged_error(files.locate(name), f"has a wrong name: it was written for generation {written}")


def read_begun(files: FileSystem, number: int) -> BegunGeneration:
    """Read the claim and the base of a generation."""
    return BegunGeneration(read_claim(files, number), read_base(files, number))


def newest_base(files: FileSystem) -> Base | None:
    """Return the newest readable base, or None.

    An unreadable base is skipped even if its run has commits. Callers take settings of the last run from the base, not
    state: recovery raises the error.
    """
    return next(iter(NewestFirst(generations_with_base(files), partial(read_base, files))), None)


def deciding_claim(files: FileSystem) -> Generation | None:
    """Return the claim that sets the next start's number of partitions.

    It is that of a run that has committed, or of `millpond state rescale`. A start that is refused, or fails before its
    first commit, leaves a claim, and maybe a base: these decide nothing, unless no run has committed yet. A torn claim
    is skipped: it was never returned to its run.

    Returns:
        The newest such claim, or None.
    """
    committed = {parse_commit_name(info.name)[1] for info in only_commits(files.list("commits/"))}
    deciding = committed or set(generations_with_base(files))
    claims = NewestFirst(claimed_generations(files), partial(read_claim, files))
    return next((claimed for claimed in claims if claimed.run == RESCALE_RUN or claimed.number in deciding), None)


def claimed_generations(files: FileSystem, after: int = 0) -> list[int]:
    """List the claimed generations greater than `after`, ascending."""
    start = claim_name(after) if after else ""
    claimed = generations_in(info.name for info in files.list(FOLDER, after=start))
    return [number for number in claimed if number > after]


def generations_in(names: Iterable[str]) -> list[int]:
    """Return the generations that files in `generations/` belong to, ascending."""
    prefixes = (name.removeprefix(FOLDER)[:DIGITS] for name in names)
    return sorted({int(prefix) for prefix in prefixes if prefix.isdigit()})


def generations_with_base(files: FileSystem) -> list[int]:
    """List the generations that have a base, ascending."""
    return sorted(base_times(files))


def base_times(files: FileSystem) -> dict[int, float]:
    """Return when each base was written, by generation: seconds since the epoch, by the store's clock."""
    infos = ((info.name.removeprefix(FOLDER), info.modified) for info in files.list(FOLDER))
    return {
        int(name[:DIGITS]): modified
        for name, modified in infos
        if name[:DIGITS].isdigit() and name[DIGITS:] == _BASE_SUFFIX
    }


def check_newest_base(files: FileSystem, committed: Iterable[int], begun: Iterable[int]) -> None:
    """Check that the run of the newest commits has its base file.

    Without it, recovery and readers would silently go back to the commits of an earlier run.

    Args:
        files: the location's `millpond/` folder.
        committed: the generations of all commits, listed before `begun`.
        begun: the generations with a base.

    Raises:
        StateDamagedError: the base file is missing.
    """
    # The order of the listings is an invariant. A run has its base before its first commit, and garbage collection
    # removes a base only after a newer one exists. So each listed commit has its base or a newer one in the second
    # listing, whatever begins or is collected meanwhile.
    newest = max(committed, default=0)
    if newest > max(begun, default=0):
        name = base_name(newest)
        raise StateDamagedError(
            f"The file {name}, which says what state the newest commits build on, is gone.",
            action="Put it back from a backup of the checkpoint, with all that is in generations/; or start with a "
            "new checkpointLocation, which reads the source from its beginning.",
            file=files.locate(name),
        )


def check_fence(files: FileSystem, number: int) -> None:
    """Raise `FencedError` if a newer generation exists.

    Two requests by name are cheaper than a listing. The run is not fenced if its claim exists and its mark does not.
    The claim is checked because a run that starts after its checkpoint was deleted finds no claims to mark.
    """
    if files.exists(claim_name(number)) and not files.exists(fenced_name(number)):
        return
    later = claimed_generations(files, after=number)
    if later:
        raise fenced_error(later[-1], number, files.locate(claim_name(later[-1])))


def check_overtaken(files: FileSystem, replaced: int, restart: Restart, query: str) -> None:
    """Check that only tries of this restart have claimed the query since the run that it replaces.

    Args:
        files: the location's `millpond/` folder.
        replaced: generation of that run.
        restart: the restart; its failed tries have claimed generations, too.
        query: the query's id.

    Raises:
        FencedError: the user, or another application, has started the query.
    """
    for number in claimed_generations(files, after=replaced):
        with suppress(StateDamagedError):  # a torn claim was never returned to its run
            if read_claim(files, number).restart != restart:
                raise FencedError(
                    "A newer run of the query has taken over while hosts were lost.",
                    action="None is needed: the newer run goes on.",
                    query=query,
                )


def fenced_error(newer: int, number: int, file: str | None = None) -> FencedError:
    """Return the error for a run whose generation `number` is fenced by the generation `newer`."""
    return FencedError(
        f"Generation {newer} of the query has taken over from generation {number}.",
        action="Stop this run; only the newest run of a query may write its checkpoint.",
        file=file,
    )


def claim_name(number: int) -> str:
    """Return the name of a claim object."""
    return f"{FOLDER}{digits(number)}.json"


def fenced_name(number: int) -> str:
    """Return the name of a generation's fence mark: a newer run has claimed."""
    return f"{FOLDER}{digits(number)}{_FENCED_SUFFIX}"


def base_name(number: int) -> str:
    """Return the name of a generation's base object."""
    return f"{FOLDER}{digits(number)}{_BASE_SUFFIX}"
