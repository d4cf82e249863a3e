"""Forks: checkpoints that go on from the state of another one, as independent queries, without a copy of the state.

`millpond.checkpoint.forks` describes the shared files and why they cannot be lost. This module orders the steps and
adds Spark's files. A fork has Spark's offset log and commit log up to the batch before its version, the notes of
Spark's sources, and its own id. Files are written in this order:

1. `parents.json`, if the location is empty: from then on it is state.
2. A pin in each parent; then a check that the version is still retained.
3. `query.json`, a commit, a generation: the state.
4. `sources/`, `offsets/`, `commits/`, and last `metadata`. No query starts on a fork without `metadata`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from millpond.checkpoint.forks.fork import ForkState, begin_fork, fork_state
from millpond.checkpoint.forks.parents import PARENTS_FILE, Parents, open_parent, read_parents
from millpond.checkpoint.forks.pins import Pin, write_pin
from millpond.checkpoint.formats.documents import write_document_once
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.state_schema import read_schemas, schema_name
from millpond.errors import MillpondError, StateDamagedError, StateIncompatibleError, UsageError
from millpond.files.backends.filesystem import FileSystem, MissingFileError
from millpond.files.backends.local import LocalFiles
from millpond.files.backends.retry import put_once
from millpond.files.locations.forked import with_parents
from millpond.files.locations.opening import join_url, open_filesystem
from millpond.query.checkpoints.copied_checkpoint import is_copy
from millpond.query.checkpoints.ownership import state_of_last_run
from millpond.query.logs.copying import (
    check_finished,
    check_free,
    copy_folders,
    copy_logs,
    list_objects,
    not_retained_error,
)
from millpond.query.logs.query_logs import METADATA, QueryLogs, is_rolled_back
from millpond.state_reader.reader import StateReader, format_versions


@dataclass(frozen=True)
class Fork:
    """A new fork.

    Attributes:
        checkpoint: its URL.
        query: its query id.
        version: the version of the state.
        partitions: the number of partitions of the state.
        objects: the number of objects that it shares with its parents.
    """

    checkpoint: str
    query: str
    version: int
    partitions: int
    objects: int


def fork(checkpoint: str, new: str, version: int | None = None) -> Fork:
    """Make a checkpoint that goes on from the state of another one and shares its files.

    Args:
        checkpoint: path or URL of a query's checkpoint; the query may run.
        new: path or URL of the new checkpoint, which must be empty.
        version: the state after batch `version - 1`; by default the newest that is durable and committed by Spark.

    Raises:
        UsageError: the checkpoint or version does not exist, the new location is not empty, or part of the state lies
            outside of the checkpoint.
        SettingError: only one of the two locations is on a local disk.
        TransientError: the original has gone on meanwhile, or a store failed.
        StateDamagedError: part of the version is missing or altered.
    """
    for location in (checkpoint, new):
        if not location.strip():
            raise UsageError("The location of a checkpoint is empty.", action="Give a checkpointLocation.")
    original, target = open_filesystem(checkpoint), open_filesystem(new)
    query_logs = QueryLogs(original)
    _check_original(original, query_logs)
    check_free(target)
    # Read the logs before the state: the reader sees all state that they imply.
    retained, committed = query_logs.retained(), query_logs.last_committed
    reader = StateReader(checkpoint)
    recovery = Recovery(reader.files)
    chosen = _choose(reader, recovery, retained, committed, version)
    files = open_filesystem(join_url(new, "millpond"))
    parent_location = original.url if isinstance(original, LocalFiles) else checkpoint
    shared = fork_state(recovery.manifests(chosen), parent_location, read_parents(reader.files), files.url)
    parents = [open_parent(parent) for parent in shared.parents.parents]
    with_parents(files, parents)  # raises an error if the stores do not fit together
    _check_there(shared, parents, chosen)
    write_document_once(files, PARENTS_FILE, shared.parents)
    try:
        _pin(shared, parents, files, chosen)
        # Check after the pin: a garbage collection that read the offset log before this retains the version, and a
        # later one sees the pin (see `millpond.checkpoint.forks`).
        if chosen - 1 not in query_logs.retained() or is_rolled_back(original):
            raise not_retained_error(chosen)
        _check_there(shared, parents, chosen)
        for number, schema in read_schemas(reader.files, recovery.schema_number(chosen)).items():
            write_document_once(files, schema_name(number), schema)
        begin_fork(files, shared, chosen, recovery)
        copy_folders(original, target, ["sources/", "state/"])
        copy_logs(original, target, query_logs, chosen)
    except BaseException:
        with suppress(MillpondError):  # pins that stay are listed by `millpond state gc`
            for parent, parent_files in zip(shared.parents.parents, parents, strict=True):
                parent_files.delete(parent.pin)
        raise
    # If this fails, its outcome is not known: the pins stay.
    identity = str(uuid.uuid4())
    put_once(target, METADATA, [json.dumps({"id": identity}).encode()])
    return Fork(target.url, identity, chosen, len(recovery.ranges(chosen)), sum(map(len, shared.objects)))


def check_fork(checkpoint: str, checkpoint_files: FileSystem) -> None:
    """Refuse to start a query on an unfinished fork, or on a copy of a fork. Call this before the query gets an id.

    Args:
        checkpoint: URL of the checkpoint.
        checkpoint_files: its files.

    Raises:
        StateIncompatibleError: the fork is unfinished or a copy.
        TransientError: the fork was moved or copied, and its original location does not answer.
    """
    files = open_filesystem(join_url(checkpoint, "millpond"))
    known = read_parents(files)
    if known is None:
        return
    check_finished(checkpoint_files)
    if known.parents and not known.was_created_at(files.url) and _is_copy(files, known):
        raise StateIncompatibleError(
            f"This checkpoint is a copy of {known.fork}, a fork that shares files with {known.parents[0].location}: "
            "only the fork itself keeps them from being removed.",
            action="Delete it, and fork that instead (millpond state fork).",
            file=files.url,
        )


def _is_copy(files: FileSystem, known: Parents) -> bool:
    """Return whether the fork also exists at its original location."""
    advice = "If that place is gone for good, fork this checkpoint (millpond state fork) and go on with the fork."
    return is_copy(files, "claims/", known.fork, lambda there: read_parents(there) == known, advice=advice)


def _check_original(original: FileSystem, query_logs: QueryLogs) -> None:
    if query_logs.query_id() is None:
        check_finished(original)
        query_logs.check_id()
        raise UsageError(
            "There are no offset log and commit log of Spark here, so there is no query to fork.",
            action="Give the checkpointLocation of a query that has run.",
            file=original.url,
        )
    elsewhere = state_of_last_run(original)
    if elsewhere is not None:
        raise UsageError(
            f"The state of this query lies at {elsewhere} (spark.millpond.state.location): only state that lies in the "
            "checkpoint can be forked.",
            action="Copy both folders instead (`millpond docs restarts-and-changes`).",
            file=original.url,
        )
    if is_rolled_back(original):
        raise UsageError(
            "A start of this query was interrupted, or is going on, while a batch of it ran again.",
            action="Start the query, and fork it once it runs.",
            file=original.url,
        )
    theirs = [info.name for info in list_objects(original, "state/") if "/_metadata/" not in info.name]
    if theirs:
        raise UsageError(
            "Part of this query's state lies in Spark's own state store, which is not shared.",
            action="Stop the query, and copy the whole checkpoint instead.",
            file=original.locate(theirs[0]),
        )


def _choose(reader: StateReader, recovery: Recovery, retained: range, committed: int, version: int | None) -> int:
    """Choose the version to fork: its batch is committed, and Spark's logs have all entries for a start after it.

    Args:
        retained: the batches in Spark's offset log.
        committed: the last committed batch.
        version: the version that the user has chosen.
    """

    def fits(number: int) -> bool:
        committed_and_retained = (
            0 < number <= committed + 1 and number - 1 in retained and max(number - 2, 0) in retained
        )
        return committed_and_retained and recovery.durable(number)

    choices = [number for number in reader.known() if fits(number)]
    if version is None and choices and choices[-1] >= committed:
        return choices[-1]
    if version is not None and version in choices:
        return version
    choice = (
        f"There {'are' if len(choices) > 1 else 'is'} {format_versions(choices)}."
        if choices
        else "Try again after a batch."
    )
    if version is not None:
        reader.choose(version)  # raises an error if the version does not exist or is damaged
        message = "Spark has not committed this version's batch, or its logs no longer have it."
    elif choices:
        raise StateDamagedError(
            f"Spark has committed batch {committed}, and the state as of then is not whole.",
            action=f"`millpond state verify` names what is damaged; or give an older --version. {choice}",
            version=committed + 1,
            file=reader.files.url,
        )
    else:
        message = "There is no durable version yet of a batch that Spark has committed."
    raise UsageError(message, action=choice, version=version, file=reader.files.url)


def _pin(state: ForkState, parents: Sequence[FileSystem], files: FileSystem, version: int) -> None:
    for parent, parent_files, objects in zip(state.parents.parents, parents, state.objects, strict=True):
        write_pin(parent_files, parent.pin, Pin(files.url, version, objects, time.time()))


def _check_there(state: ForkState, parents: Sequence[FileSystem], version: int) -> None:
    """Check that all shared objects exist.

    Raises:
        MissingFileError: an object is missing.
    """
    for parent_files, objects in zip(parents, state.objects, strict=True):
        names = {info.name for folder in ("files/", "commits/") for info in parent_files.list(folder)}
        for name in objects:
            if name not in names:
                raise MissingFileError(
                    "A state file is missing.",
                    action="Restore it from a backup of the location.",
                    version=version,
                    file=parent_files.locate(name),
                )
