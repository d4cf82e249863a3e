"""Reads of a query's state at a version without a slot, for people, tools and checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec
import pyarrow as pa

from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.formats.commit import commit_prefix, only_commits, parse_commit_name, read_checked_header
from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.checkpoint.generation import (
    BaseVersion,
    BegunGeneration,
    Generation,
    check_newest_base,
    generations_with_base,
    read_begun,
)
from millpond.checkpoint.newest_first import NewestFirst
from millpond.checkpoint.rescale import inherited
from millpond.checkpoint.resolution import latest_attempts, uncertain_places
from millpond.checkpoint.retention.needs import needs_of
from millpond.checkpoint.state_schema import QUERY_FILE, read_schemas
from millpond.errors import MillpondError, StateDamagedError, TransientError, UsageError
from millpond.files.backends.filesystem import FileSystem, MissingFileError
from millpond.layout import HashRange, Rows, TableSchema
from millpond.operators.protocol import MAIN
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import Field
from millpond.time_slices import base_name

LOCATION_ADVICE = "Give the query's checkpointLocation, or its folder in spark.millpond.state.location."
"""Advice for errors where no state is found."""


def format_versions(versions: Sequence[int]) -> str:
    """Format ascending versions as text, with ranges: `versions 1 to 3, 5`."""
    return _format_numbers("version", versions)


def _format_numbers(noun: str, numbers: Sequence[int]) -> str:
    known = set(numbers)
    first = [number for number in numbers if number - 1 not in known]
    last = [number for number in numbers if number + 1 not in known]
    parts = [f"{begin} to {end}" if begin < end else str(begin) for begin, end in zip(first, last, strict=True)]
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"


@dataclass(frozen=True)
class StateOperator:
    """One operator of the query.

    Attributes:
        index: its number.
        title: its title.
        spec: what it computes.
        tables: names of its tables.
        columns: names of `spec.state_fields` in the query's output; empty if they are the spec's own.
    """

    index: int
    title: str
    spec: OperatorSpec
    tables: tuple[str, ...]
    columns: tuple[str, ...] = ()

    @property
    def state_fields(self) -> tuple[Field, ...]:
        """Columns of the state, named as in the query's output."""
        fields = self.spec.state_fields
        return tuple(map(_renamed, fields, self.columns)) if self.columns else fields

    def part(self, variable: str | None) -> tuple[str, tuple[Field, ...]]:
        """Return the table, with its columns, to read for the operator's state or for one state variable.

        Raises:
            UsageError: there is no such variable, or none is named although there are several.
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
        return parts[variable], self.spec.table_columns(parts[variable])


def _renamed(field: Field, name: str) -> Field:
    return Field(name, field.type)


@dataclass(frozen=True)
class _Commits:
    """Readable manifests of one version's commits, and an error for each commit that cannot be read."""

    manifests: dict[tuple[int, int], PartitionManifest]
    damage: list[StateDamagedError]


class StateReader:
    """The state at one location, as its newest run left it, and older versions that still exist.

    A version belongs to the newest run that began with it or with an older version. Versions that an earlier run made
    beyond the base of that run were rolled back.

    Args:
        location: URL or path of the checkpoint (or, with `spark.millpond.state.location`, of its folder there).
        generation: generation of the run to read by, even if a newer one begins; the newest by default.
        action: advice in the error if there is no state.

    Raises:
        UsageError: there is no Millpond state.
        StateDamagedError: the claim or base of the newest run with commits is missing or altered.
    """

    def __init__(self, location: str, generation: int | None = None, *, action: str = LOCATION_ADVICE) -> None:
        if not location.strip():
            raise UsageError("The location of the state is empty.", action=action)
        self.location = location
        self.files: FileSystem = open_state(location)
        begun = [generation] if generation is not None else self._begun_generations()
        self._runs = NewestFirst(begun, partial(read_begun, self.files), self._is_damage)
        newest = next(iter(self._runs), None)
        if newest is None or not self.files.exists(QUERY_FILE):
            raise UsageError(
                "There is no Millpond state here.",
                action=action,
                file=self.files.url,
            )
        self._newest_run = newest
        self.claim, self.base = newest.claim, newest.base
        self._state_schemas = read_schemas(self.files, self.base.schema_number)
        self.operators = self._operators(self.base.schema_number)
        self._commits: dict[int, _Commits] = {}

    @cached_property
    def _committed(self) -> list[tuple[int, int]]:
        """Version and generation of each commit, as first listed."""
        return [parse_commit_name(info.name) for info in only_commits(self.files.list("commits/"))]

    def _begun_generations(self) -> list[int]:
        committed = {number for _, number in self._committed}  # listed before the bases, see `check_newest_base`
        begun = generations_with_base(self.files)
        check_newest_base(self.files, committed, begun)
        return begun

    def _is_damage(self, number: int, error: StateDamagedError) -> bool:
        """Return whether an unreadable claim or base is damaged, and not left by a run that died before it began."""
        # Unlike in `Recovery`, a run may collect garbage meanwhile: old claims and bases go, and commits of their runs
        # may stay. Those of the newest run with a base never go.
        if isinstance(error, MissingFileError) and number < max(generations_with_base(self.files), default=0):
            return False
        return any(generation == number for _, generation in self._committed)

    def operators_at(self, version: int) -> list[StateOperator]:
        """Return the query's operators as they were when a version was made; the query may have changed since."""
        schema_numbers = {manifest.schema_number for manifest in self.manifests(version).values()}
        return self._operators(max(schema_numbers)) if schema_numbers else self.operators

    def choose_operator(self, version: int, number: int | None = None) -> StateOperator:
        """Return an operator that has state, as it was when a version was made.

        Args:
            version: version of the state.
            number: index of the operator; the first with state by default.

        Raises:
            UsageError: there is no such operator, or it has no state; the message lists those that have state.
        """
        operators = self.operators_at(version)
        stateful = [operator for operator in operators if operator.spec.facts.stateful]
        for operator in stateful:
            if number in (None, operator.index):
                return operator
        if number is None:
            reason = "No operator of the query has state."
        elif 0 <= number < len(operators):
            reason = f"Operator {number} ({operators[number].title}) has no state."
        else:
            reason = f"The query has no operator {number}."
        choices = ", ".join(f"{operator.index} ({operator.title})" for operator in stateful)
        raise UsageError(
            reason,
            action=f"Those that have state: {choices}."
            if choices
            else "There is nothing to read: lookups keep nothing.",
            file=self.files.url,
        )

    def _operators(self, schema_number: int) -> list[StateOperator]:
        return [
            StateOperator(
                index,
                operator.name,
                msgspec.convert(operator.spec, OperatorSpec),
                tuple(operator.tables),
                operator.columns,
            )
            for index, operator in enumerate(self._state_schemas[schema_number].operators)
        ]

    def _schemas(self, operator: int, table: str, schema_number: int) -> dict[int, TableSchema]:
        """Return the schemas of a table by number of the state schema, up to the state schema `schema_number`."""
        schemas, number = {}, schema_number
        while True:
            tables = self._state_schemas[number].operators[operator].tables
            if table in tables:
                schemas[number] = msgspec.convert(tables[table], TableSchema)
            if not number:
                return schemas
            number = self._state_schemas[number].parent

    @property
    def partitions(self) -> int:
        """Number of partitions of the newest run."""
        return self.claim.partitions

    def partitions_at(self, version: int) -> int:
        """Return the number of partitions of a version."""
        return self._run_of(version).claim.partitions

    def generation_of(self, version: int) -> int:
        """Return the generation of the run by which a version is read."""
        return self._run_of(version).claim.number

    def known(self) -> list[int]:
        """Return, in ascending order, the versions that the newest run committed or began with."""
        return self._versions_of([self._newest_run])

    def versions(self) -> list[int]:
        """Return the readable versions in ascending order: every partition has them, and all their files exist.

        Versions of older runs are included. A commit may outlive its version, because later versions refer to its
        contents.
        """
        known = self._versions_of(list(self._runs))
        stored = self._stored_objects()
        return [version for version in known if self.is_complete(version) and self._has(version, stored)]

    def _stored_objects(self) -> dict[str, bool]:
        """List the objects in the folders of files and commits."""
        return {info.name: True for folder in ("files/", "commits/") for info in self.files.list(folder)}

    def _has(self, version: int, stored: dict[str, bool]) -> bool:
        """Return whether all objects of a version exist; results of checks are added to `stored`."""
        needs = needs_of(self.manifests(version).values())
        for name in needs - stored.keys():
            # Not in the lists: missing, or shared with a fork's parent and stored in its folder.
            stored[name] = self.files.exists(name)
        return all(stored[name] for name in needs)

    def _versions_of(self, runs: Sequence[BegunGeneration]) -> list[int]:
        """Return the versions for which the commits or bases of `runs` count, in ascending order."""
        known = {base.version for run in runs for base in run.base.versions}
        claimed = {run.claim.number for run in runs}
        known |= {version for version, number in self._committed if number in claimed}
        return sorted(version for version in known if version > 0 and self._run_of(version).claim.number in claimed)

    def newest(self) -> int:
        """Return the newest version of the newest run that every partition has; 0 if there is none."""
        return next((version for version in reversed(self.known()) if self.is_complete(version)), 0)

    def is_complete(self, version: int) -> bool:
        """Return whether every partition has a version; `versions` also checks that its files exist."""
        return len(self.manifests(version)) == len(self.operators) * self.partitions_at(version)

    def choose(self, version: int | None = None) -> int:
        """Return a version that every partition has: the requested one, or the newest of the newest run.

        Raises:
            UsageError: there is no such version.
            StateDamagedError: the version is incomplete, and some of its commits are damaged.
        """
        if version is None and (newest := self.newest()):
            return newest
        versions: list[int] = []
        if version is not None and version > 0 and self.is_complete(version):
            if self._has(version, self._stored_objects()) or version > min(versions := self.versions(), default=0):
                return version
        elif damage := self.damage(version):
            raise damage[0]
        versions = versions or self.versions()
        if not versions and not self.newest() and (known := self.known()):
            raise self._incomplete_error(version if version is not None and version in known else known[-1])
        raise UsageError(
            "There is no durable version yet." if version is None else "This version of the state is not stored.",
            version=version,
            file=self.files.locate("commits/"),
            action=f"There {'are' if len(versions) > 1 else 'is'} {format_versions(versions)}."
            if versions
            else "Look again when a batch has ended.",
        )

    def _incomplete_error(self, version: int) -> UsageError:
        """Return the error for state without a whole version; it names the commits and what they lack."""
        manifests, partitions = self.manifests(version), range(self.partitions_at(version))
        places = []
        for operator in range(len(self.operators)):
            missing = [partition for partition in partitions if (operator, partition) not in manifests]
            if missing:
                places.append(f"{_format_numbers('partition', missing)} of operator {operator}")
        return UsageError(
            f"There is no durable version yet: the commits of version {version} lack {', '.join(places)}.",
            action="Look again when a batch has ended. If the query has ended, restore these commits from a backup.",
            version=version,
            file=f"{self.files.locate(commit_prefix(version, self.generation_of(version)))}*",
        )

    def manifests(self, version: int) -> dict[tuple[int, int], PartitionManifest]:
        """Return a version's durable and readable manifests by (operator, partition)."""
        return self._read_checked_headers(version).manifests

    def damage(self, version: int | None = None) -> list[StateDamagedError]:
        """Return one error for each damaged commit of the newest run and of the versions it builds on.

        Args:
            version: only commits of this version; all by default.
        """
        newest = self.newest()
        return [
            error
            for number in (self.known() if version is None else [version])
            for error in self._read_checked_headers(number).damage
            # Commits of a run's base may be missing: they are garbage-collected some time after newer versions exist.
            if number > newest or not isinstance(error, MissingFileError)
        ]

    def manifest(self, operator: int, partition: int, version: int) -> PartitionManifest:
        """Return one manifest.

        Raises:
            UsageError: there is no such operator or partition, or it has no such version.
            StateDamagedError: the version is incomplete, and some of its commits are damaged.
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
        """Yield the rows of a table as Arrow batches: the main table's keys and results, or the keys of another table.

        Raises:
            StateDamagedError: a file is missing, truncated or altered.
            TransientError: the query, which runs, has removed the version meanwhile.
        """
        # Imported late: decoding rows needs Numba, which takes longer to import than reading metadata takes.
        from millpond.operators.kinds.registry import read_rows, read_whole, state_tables
        from millpond.state_reader.tables import rows_of_table

        manifest = self.manifest(operator, partition, version)
        shown = self._operators(manifest.schema_number)[operator]
        spec, tables = shown.spec, state_tables(shown.spec)
        names = [name for name, state_table in tables.items() if state_table.shown] if table == MAIN else [table]

        def rows_of(name: str) -> Iterator[Rows]:
            state_table = tables[base_name(name)]
            range_ = HashRange() if state_table.axis != "hash" else self._run_of(version).claim.hash_range(partition)
            earlier = self._schemas(operator, base_name(name), manifest.schema_number)
            return rows_of_table(self.files, state_table, manifest.tables[name], range_, earlier)

        for name in manifest.tables:
            base = base_name(name)
            if base not in names:
                continue
            try:
                pieces = rows_of(name)
                if (parts_table := tables[base].parts) in manifest.tables:
                    yield from read_whole(spec, base, pieces, rows_of(parts_table))
                    continue
                for rows in pieces:
                    for batch in read_rows(spec, base, rows):
                        yield batch.rename_columns(list(shown.columns)) if shown.columns and table == MAIN else batch
            except MissingFileError as error:
                raise self._explain_missing_file(error, version).at(variable=spec.part_of(base)) from None
            except MillpondError as error:
                raise error.at(variable=spec.part_of(base)) from None

    def _explain_missing_file(self, error: MissingFileError, version: int) -> MillpondError:
        """Return the error for a file of a version: it is damage, unless a query has gone on and does not need it."""
        reread = StateReader(self.location)
        newest = reread.newest()
        needed = {reread.files.locate(name) for name in needs_of(reread.manifests(newest).values())}
        if newest <= self.newest() or error.file in needed:
            return error
        return TransientError(
            "The version was removed while it was read: the query, which runs, keeps the last versions only.",
            action="Read a newer version, or have the query keep more (spark.millpond.state.retain).",
            version=version,
            file=error.file,
        )

    def _read_checked_headers(self, version: int) -> _Commits:
        if version not in self._commits:
            commits, run = _Commits({}, []), self._run_of(version)
            latest = latest_attempts(
                manifest
                for info in only_commits(self.files.list(commit_prefix(version, run.claim.number)))
                for manifest in self._manifests_in(info.name, version, commits.damage)
            )
            commits.manifests.update({place: own[0] for place, own in latest.items()})
            uncertain = uncertain_places(latest)
            base = run.base.find_version(version)
            # With a manifest in each place, the base cannot add any. An uncertain place stays uncertain.
            if base is not None and not self._has_all_partitions(run.claim, commits):
                if base.ranges == run.claim.ranges:
                    uncertain = uncertain_places(latest, base)
                elif not uncertain:
                    # The base has other hash ranges: its partitions cannot be combined with the run's own.
                    commits.manifests.clear()
                self._inherit(run.claim, base, commits)
            for place in uncertain:  # two attempts saw different input, and it is unknown which one counts
                del commits.manifests[place]
            self._commits[version] = commits
        return self._commits[version]

    def _manifests_in(self, name: str, version: int, damage: list[StateDamagedError]) -> list[PartitionManifest]:
        try:
            return list(read_checked_header(self.files, name).manifests)
        except StateDamagedError as error:
            error.at(version=version)
            damage.append(error)
            return []

    def _has_all_partitions(self, claim: Generation, found: _Commits) -> bool:
        return len(found.manifests) == len(self.operators) * claim.partitions

    def _inherit(self, claim: Generation, base: BaseVersion, found: _Commits) -> None:
        """Fill places that have no newer manifest of the version with those of the run's base."""
        manifests = {
            manifest.id: manifest
            for name in dict.fromkeys(tip.commit for tip in base.tips)
            for manifest in self._manifests_in(name, base.version, found.damage)
        }
        for operator in range(len(self.operators)):
            for partition in range(claim.partitions):
                if (operator, partition) in found.manifests:
                    continue
                with suppress(KeyError):  # the commit cannot be read
                    place = operator, partition, base.version
                    manifest = inherited(claim, base, *place, lambda tip: manifests[tip.id])
                    if manifest.id:
                        found.manifests[operator, partition] = manifest

    def _run_of(self, version: int) -> BegunGeneration:
        """Return the run to which a version belongs; the oldest run if all began later."""
        run = self._newest_run
        for run in self._runs:
            if run.began_by(version):
                break
        return run
