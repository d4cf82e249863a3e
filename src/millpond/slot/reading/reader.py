"""Reads the state of a query at a version, without serving it: for people, tools and checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.formats.commit import commit_prefix, parse_commit_name, read_header
from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.checkpoint.generation import Base, BaseVersion, Generation, numbers, read_base, read_claim
from millpond.checkpoint.pinned import NAME as PINNED
from millpond.checkpoint.pinned import read_shapes
from millpond.checkpoint.rescale import inherited
from millpond.checkpoint.retention.needs import needs_of
from millpond.errors import MillpondError, StateDamagedError, UsageError
from millpond.files.backends.filesystem import FileSystem, MissingFileError
from millpond.layout import HashRange, Rows, TableSchema
from millpond.operators.protocol import MAIN
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import Field
from millpond.time_slices import base_name

GIVE = "Give the query's checkpointLocation, or its folder in spark.millpond.state.location."
"""What to do where no state is found."""


def span(versions: Sequence[int]) -> str:
    """Which versions there are, ascending, in words."""
    first = [one for one in versions if one - 1 not in versions]
    last = [one for one in versions if one + 1 not in versions]
    parts = [f"{begin} to {end}" if begin < end else str(begin) for begin, end in zip(first, last, strict=True)]
    return f"version{'s' if len(versions) > 1 else ''} {', '.join(parts)}"


@dataclass(frozen=True)
class StateOperator:
    """One operator of the query.

    Attributes:
        index: its number. title: what it is. spec: what it computes. tables: the names of its tables.
        columns: the names of `spec.state_fields` in the query's output; empty if the spec's own are.
    """

    index: int
    title: str
    spec: OperatorSpec
    tables: tuple[str, ...]
    columns: tuple[str, ...] = ()

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """The columns of the state under the names of the query's output."""
        fields = self.spec.state_fields
        return tuple(map(_renamed, fields, self.columns)) if self.columns else fields

    def part(self, variable: str | None) -> tuple[str, tuple[Field, ...]]:
        """The table that is read for the operator's state, or for one variable of it, and its columns.

        Raises:
            UsageError: there is no such variable, or there are several.
        """
        parts = self.spec.parts
        if variable is None and not parts:
            return MAIN, self.state_fields
        if variable is None or variable not in parts:
            what = "has state variables" if variable is None else f"has no state variable {variable!r}"
            raise UsageError(
                f"The operator {self.title!r} {what}.",
                action=f"Name one: {', '.join(parts)}." if parts else "Name no variable: its state is read as one.",
                operator=str(self.index),
            )
        return parts[variable], self.spec.shown(parts[variable])


def _renamed(field: Field, name: str) -> Field:
    return Field(name, field.type)


@dataclass(frozen=True)
class _Commits:
    """What the commits of one version hold, and what is wrong with those that cannot be read."""

    manifests: dict[tuple[int, int], PartitionManifest]
    damage: list[StateDamagedError]


@dataclass(frozen=True)
class _Run:
    """A generation that began."""

    claim: Generation
    base: Base


class StateReader:
    """The state below one location, as its newest run left it, and older versions that are still there.

    A version is of the newest run that began with it or with an older one: what runs before that one had made beyond
    what it began with was taken back.

    Args:
        location: URL or path of the checkpoint (or, with `spark.millpond.state.location`, of its folder there).
        generation: of the run by which to read, whatever begins meanwhile; the newest by default.
        action: what to do if nothing is found.

    Raises:
        UsageError: there is no Millpond state.
    """

    def __init__(self, location: str, generation: int | None = None, *, action: str = GIVE) -> None:
        if not location.strip():
            raise UsageError("The location of the state is empty.", action=action)
        self.location = location
        self.files: FileSystem = open_state(location)
        claimed = numbers(self.files) if generation is None else [generation]
        self._left = claimed
        self._found: list[_Run] = []
        newest = next(self._runs(), None)
        if newest is None or not self.files.exists(PINNED):
            raise UsageError(
                "There is no Millpond state here.",
                action=action,
                file=self.files.url,
            )
        self.claim, self.base = newest.claim, newest.base
        self._shapes = read_shapes(self.files, self.base.shape)
        self.operators = self._operators(self.base.shape)
        self._commits: dict[int, _Commits] = {}

    def operators_at(self, version: int) -> list[StateOperator]:
        """The query's operators as they were when a version was made, which may have been another query."""
        shapes = {manifest.shape for manifest in self.manifests(version).values()}
        return self._operators(max(shapes)) if shapes else self.operators

    def choose_operator(self, version: int, number: int | None = None) -> StateOperator:
        """An operator that has state, as it was when a version was made.

        Args:
            version: of the state. number: of the operator; the first that has state by default.

        Raises:
            UsageError: there is no such operator, or it has no state; the message says which have.
        """
        operators = self.operators_at(version)
        stateful = [one for one in operators if one.spec.stateful]
        for one in stateful:
            if number in (None, one.index):
                return one
        if number is None:
            said = "No operator of the query has state."
        elif 0 <= number < len(operators):
            said = f"Operator {number} ({operators[number].title}) has no state."
        else:
            said = f"The query has no operator {number}."
        having = ", ".join(f"{one.index} ({one.title})" for one in stateful)
        raise UsageError(
            said,
            action=f"Those that have state: {having}." if having else "There is nothing to read: lookups keep nothing.",
            file=self.files.url,
        )

    def _operators(self, shape: int) -> list[StateOperator]:
        return [
            StateOperator(index, one.name, msgspec.convert(one.spec, OperatorSpec), tuple(one.tables), one.columns)
            for index, one in enumerate(self._shapes[shape].operators)
        ]

    def _schemas(self, operator: int, table: str, shape: int) -> dict[int, TableSchema]:
        """The schemas that a table had up to a shape of the query, by shape."""
        found, at = {}, shape
        while True:
            tables = self._shapes[at].operators[operator].tables
            if table in tables:
                found[at] = msgspec.convert(tables[table], TableSchema)
            if not at:
                return found
            at = self._shapes[at].parent

    @property
    def partitions(self) -> int:
        """Number of partitions of the newest run."""
        return self.claim.partitions

    def partitions_at(self, version: int) -> int:
        """Number of partitions that a version has."""
        return self._run_of(version).claim.partitions

    def generation_of(self, version: int) -> int:
        """The run that a version is read by."""
        return self._run_of(version).claim.number

    def known(self) -> list[int]:
        """The versions of which the newest run has a commit, or began with one, ascending."""
        return self._known(self._found[:1])

    def versions(self) -> list[int]:
        """The versions that can be read, ascending: every partition has them, and what they name is there.

        Those of older runs are among them. Commits may outlive their version, as later ones name what they hold.
        """
        known = self._known(list(self._runs()))
        there = self._there()
        return [version for version in known if self.is_whole(version) and self._has(version, there)]

    def _there(self) -> dict[str, bool]:
        """The objects that versions are made of, as far as they are in lists."""
        return {info.name: True for folder in ("files/", "commits/") for info in self.files.list(folder)}

    def _has(self, version: int, there: dict[str, bool]) -> bool:
        """Whether all that a version names is there; what is found out about objects is kept in `there`."""
        needs = needs_of(self.manifests(version).values())
        for name in needs - there.keys():
            there[name] = self.files.exists(name)  # a fork has some elsewhere
        return all(there[name] for name in needs)

    def _known(self, runs: Sequence[_Run]) -> list[int]:
        """The versions that some runs have a commit of, where they are what counts."""
        known = {base.version for run in runs for base in run.base.versions}
        claimed = {run.claim.number for run in runs}
        known |= {version for version, number in map(parse_commit_name, self._commit_names()) if number in claimed}
        return sorted(one for one in known if one > 0 and self._run_of(one).claim.number in claimed)

    def _commit_names(self) -> list[str]:
        return [info.name for info in self.files.list("commits/")]

    def newest(self) -> int:
        """The newest version that every partition has, by the newest run; 0 if there is none."""
        return next((version for version in reversed(self.known()) if self.is_whole(version)), 0)

    def is_whole(self, version: int) -> bool:
        """Whether every partition has a version; whether what it names is there, `versions` tells."""
        return len(self.manifests(version)) == len(self.operators) * self.partitions_at(version)

    def choose(self, version: int | None = None) -> int:
        """A version that every partition has: the one asked for, or the newest of the newest run.

        Raises:
            UsageError: there is no such version.
            StateDamagedError: it is not whole, and some of its commits are damaged.
        """
        if version is None and (newest := self.newest()):
            return newest
        versions: list[int] = []
        if version is not None and version > 0 and self.is_whole(version):
            if self._has(version, self._there()) or version > min(versions := self.versions(), default=0):
                return version
        elif damage := self.damage(version):
            raise damage[0]
        versions = versions or self.versions()
        raise UsageError(
            "There is no durable version yet." if version is None else "This version of the state is not there.",
            version=version,
            file=self.files.url,
            action=f"There {'are' if len(versions) > 1 else 'is'} {span(versions)}."
            if versions
            else "Look again when a batch has ended.",
        )

    def manifests(self, version: int) -> dict[tuple[int, int], PartitionManifest]:
        """The manifests of a version by (operator, partition), as far as they are durable and can be read."""
        return self._read_commits(version).manifests

    def damage(self, version: int | None = None) -> list[StateDamagedError]:
        """What is wrong with commits of the newest run and of what it builds on, one error for each.

        Args:
            version: only commits of this version; all by default.
        """
        newest = self.newest()
        return [
            error
            for one in (self.known() if version is None else [version])
            for error in self._read_commits(one).damage
            # What a run began from is collected some time after later versions have come.
            if one > newest or not isinstance(error, MissingFileError)
        ]

    def manifest(self, operator: int, partition: int, version: int) -> PartitionManifest:
        """One manifest.

        Raises:
            UsageError: there is no such operator or partition, or it has no such version.
            StateDamagedError: the version is not whole, and some of its commits are damaged.
        """
        manifest = self.manifests(version).get((operator, partition))
        if manifest is None:
            self.choose(version)
            raise UsageError(
                "There is no such operator or partition.",
                operator=str(operator),
                partition=partition,
                version=version,
                action=f"There are operators 0 to {len(self.operators) - 1} and "
                f"partitions 0 to {self.partitions_at(version) - 1}.",
            )
        return manifest

    def read(self, operator: int, partition: int, version: int, table: str = MAIN) -> Iterator[pa.RecordBatch]:
        """The rows of a table as Arrow: for the main table the keys and results, for others their keys.

        Raises:
            StateDamagedError: a file is missing, cut short or altered.
        """
        # Kernels decode rows, and Numba takes longer to import than metadata takes to read.
        from millpond.operators.kinds.registry import read_rows, read_whole, state_tables
        from millpond.slot.reading.tables import rows_of_table

        manifest = self.manifest(operator, partition, version)
        shown = self._operators(manifest.shape)[operator]
        spec, tables = shown.spec, state_tables(shown.spec)
        wanted = [name for name, one in tables.items() if one.shown] if table == MAIN else [table]

        def rows_of(name: str) -> Iterator[Rows]:
            found = tables[base_name(name)]
            range_ = HashRange() if found.axis != "hash" else self._run_of(version).claim.hash_range(partition)
            earlier = self._schemas(operator, base_name(name), manifest.shape)
            return rows_of_table(self.files, found, manifest.tables[name], range_, earlier)

        for name in manifest.tables:
            base = base_name(name)
            if base not in wanted:
                continue
            try:
                pieces = rows_of(name)
                if (beside := tables[base].parts) in manifest.tables:
                    yield from read_whole(spec, base, pieces, rows_of(beside))
                    continue
                for rows in pieces:
                    for batch in read_rows(spec, base, rows):
                        yield batch.rename_columns(list(shown.columns)) if shown.columns and table == MAIN else batch
            except MillpondError as error:
                raise error.at(variable=spec.part_of(base)) from None

    def _read_commits(self, version: int) -> _Commits:
        if version not in self._commits:
            found, run = _Commits({}, []), self._run_of(version)
            uncertain = set()
            for info in self.files.list(commit_prefix(version, run.claim.number)):
                for manifest in self._manifests_in(info.name, version, found.damage):
                    known = found.manifests.setdefault(manifest.place, manifest)
                    if known.lineage != manifest.lineage:
                        uncertain.add(manifest.place)
            base = run.base.at(version)
            if base is not None and not self._whole(run.claim, found):
                if base.ranges != run.claim.ranges and not uncertain:
                    found.manifests.clear()  # partitions of other ranges cannot be put together with its own
                if base.ranges == run.claim.ranges:
                    tips = ((own, base.tip(*own.place)) for own in found.manifests.values())
                    uncertain |= {own.place for own, tip in tips if tip is not None and tip.lineage != own.lineage}
                self._inherit(run.claim, base, found)
            for place in uncertain:  # two attempts of a batch saw other input: which one counts is not known
                del found.manifests[place]
            self._commits[version] = found
        return self._commits[version]

    def _manifests_in(self, name: str, version: int, damage: list[StateDamagedError]) -> list[PartitionManifest]:
        try:
            header = read_header(self.files, name)
        except StateDamagedError as error:
            error.at(version=version)
            damage.append(error)
            return []
        return [manifest for manifest in header.manifests if manifest.version == version]

    def _whole(self, claim: Generation, found: _Commits) -> bool:
        return len(found.manifests) == len(self.operators) * claim.partitions

    def _inherit(self, claim: Generation, base: BaseVersion, found: _Commits) -> None:
        """Take what a run began with for the places that have nothing newer of the version."""
        held = {
            manifest.id: manifest
            for name in dict.fromkeys(tip.commit for tip in base.tips)
            for manifest in self._manifests_in(name, base.version, found.damage)
        }
        for operator in range(len(self.operators)):
            for partition in range(claim.partitions):
                if (operator, partition) in found.manifests:
                    continue
                with suppress(KeyError):  # a commit that cannot be read
                    at = operator, partition, base.version
                    manifest = inherited(claim, base, *at, lambda tip: held[tip.id])
                    if manifest.id:
                        found.manifests[operator, partition] = manifest

    def _run_of(self, version: int) -> _Run:
        """The run that a version is of."""
        for run in self._runs():
            if any(base.version <= version for base in run.base.versions):
                return run
        return self._found[-1]

    def _runs(self) -> Iterator[_Run]:
        """The runs that began, newest first, read as far as needed."""
        yield from self._found
        while self._left:
            number = self._left.pop()
            try:
                run = _Run(read_claim(self.files, number), read_base(self.files, number))
            except MissingFileError:
                continue  # that run died before it began
            except StateDamagedError:
                if any(parse_commit_name(name)[1] == number for name in self._commit_names()):
                    raise
                continue  # a torn put of a run that died before it began
            self._found.append(run)
            yield run
