"""Forks: a checkpoint that goes on from the state of another, as a query of its own, without a copy of the state.

What is shared, and why nothing of it is lost, says the description of `millpond.checkpoint.forks`. Here is the order
of it all, and Spark's part. A fork has Spark's ledger up to the batch before its version, what Spark's sources noted,
and an id of its own, in this order:

1. `parents.json`, if nothing is there: from then on the place is taken.
2. A pin with each parent; then a look whether the version is still retained.
3. `query.json`, a commit, a generation: the state.
4. `sources/`, `offsets/`, `commits/`, and last `metadata`. No query is started on a fork without that.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from millpond.checkpoint.forks.fork import Share, begin_fork, share
from millpond.checkpoint.forks.parents import NAME, Parents, open_parent, read_parents
from millpond.checkpoint.forks.pins import Pin, write_pin
from millpond.checkpoint.formats.documents import write_own_document
from millpond.checkpoint.pinned import read_shapes, shape_name
from millpond.checkpoint.recovery import Recovery
from millpond.errors import MillpondError, StateDamagedError, StateIncompatibleError, UsageError
from millpond.files.backends.filesystem import FileSystem, MissingFileError, join_url, open_filesystem
from millpond.files.backends.forked import with_parents
from millpond.files.backends.local import LocalFiles
from millpond.files.backends.patience import put_own
from millpond.query.ledger.copies import is_copy
from millpond.query.ledger.copying import (
    check_finished,
    check_free,
    copy_folders,
    copy_ledger,
    objects_of,
    out_of_reach,
)
from millpond.query.ledger.ledger import METADATA, Ledger, is_rolled_back
from millpond.query.ledger.ownership import state_of_last_run
from millpond.slot.reading.reader import StateReader, span


@dataclass(frozen=True)
class Fork:
    """What was made.

    Attributes:
        checkpoint: where. query: its id. version: of the state.
        partitions: of it. objects: how many it shares.
    """

    checkpoint: str
    query: str
    version: int
    partitions: int
    objects: int


def fork(checkpoint: str, new: str, version: int | None = None) -> Fork:
    """Make a checkpoint that goes on from the state of another.

    Args:
        checkpoint: path or URL of a query's checkpoint; the query may run.
        new: where there is nothing yet.
        version: the state after batch `version - 1`; by default the newest that is durable and committed by Spark.

    Raises:
        UsageError: there is no such checkpoint or version, something is at the new place, or part of the state lies
            elsewhere.
        SettingError: one lies on a local disk, the other does not.
        TransientError: the original has gone on meanwhile, or a store failed.
        StateDamagedError: something of the version is missing or altered.
    """
    for location in (checkpoint, new):
        if not location.strip():
            raise UsageError("The location of a checkpoint is empty.", action="Give a checkpointLocation.")
    original, place = open_filesystem(checkpoint), open_filesystem(new)
    ledger = Ledger(original)
    _check_original(original, ledger)
    check_free(place)
    retained, committed = ledger.retained(), ledger.last("commits")  # first: what it says is durable is there then
    reader = StateReader(checkpoint)
    recovery = Recovery(reader.files)
    chosen = _choose(reader, recovery, retained, committed, version)
    files = open_filesystem(join_url(new, "millpond"))
    where = original.url if isinstance(original, LocalFiles) else checkpoint
    taken = share(recovery.manifests(chosen), where, read_parents(reader.files), files.url)
    parents = [open_parent(parent) for parent in taken.parents.parents]
    with_parents(files, parents)  # says so if they do not fit together
    _check_there(taken, parents, chosen)
    write_own_document(files, NAME, taken.parents)
    try:
        _pin(taken, parents, files, chosen)
        if chosen - 1 not in ledger.retained() or is_rolled_back(original):
            raise out_of_reach(chosen)
        _check_there(taken, parents, chosen)
        for number, shape in read_shapes(reader.files, recovery.shape(chosen)).items():
            write_own_document(files, shape_name(number), shape)
        begin_fork(files, taken, chosen, recovery)
        copy_folders(original, place, ["sources/", "state/"])
        copy_ledger(original, place, ledger, chosen)
    except BaseException:
        with suppress(MillpondError):  # else there are pins too many, which `millpond state gc` tells of
            for parent, its in zip(taken.parents.parents, parents, strict=True):
                its.delete(parent.pin)
        raise
    # Whether this took effect is not known if it fails: the pins stay then.
    identity = str(uuid.uuid4())
    put_own(place, METADATA, [json.dumps({"id": identity}).encode()])
    return Fork(place.url, identity, chosen, len(recovery.ranges(chosen)), sum(map(len, taken.objects)))


def check_fork(checkpoint: str, ledger_files: FileSystem) -> None:
    """Refuse to start a query on a fork that was not finished, or on a copy of one. Call it before there is an id.

    Args:
        checkpoint: URL of the checkpoint. ledger_files: what lies there.

    Raises:
        StateIncompatibleError: so it is.
        TransientError: of a fork that was moved or copied, the place where it was made does not answer.
    """
    files = open_filesystem(join_url(checkpoint, "millpond"))
    known = read_parents(files)
    if known is None:
        return
    check_finished(ledger_files)
    if known.parents and not known.made_at(files.url) and _is_copy(files, known):
        raise StateIncompatibleError(
            f"This checkpoint is a copy of {known.fork}, a fork that shares files with {known.parents[0].location}: "
            "only the fork itself keeps them from being removed.",
            action="Delete it, and fork that instead (millpond state fork).",
            file=files.url,
        )


def _is_copy(files: FileSystem, known: Parents) -> bool:
    """Whether the same fork is at the place where it was made, too."""
    gone = "If that place is gone for good, fork this checkpoint (millpond state fork) and go on with the fork."
    return is_copy(files, "claims/", known.fork, lambda there: read_parents(there) == known, gone=gone)


def _check_original(original: FileSystem, ledger: Ledger) -> None:
    if ledger.query_id() is None:
        check_finished(original)
        ledger.check_id()
        raise UsageError(
            "There is no ledger of Spark's here, so nothing to go on from.",
            action="Give the checkpointLocation of a query that has run.",
            file=original.url,
        )
    elsewhere = state_of_last_run(original)
    if elsewhere is not None:
        raise UsageError(
            f"The state of this query lies at {elsewhere} (spark.millpond.state.location): only state that lies in the "
            "checkpoint can be forked.",
            action="Copy both folders instead (`millpond docs operations`).",
            file=original.url,
        )
    if is_rolled_back(original):
        raise UsageError(
            "A start of this query was interrupted, or is going on, while a batch of it ran again.",
            action="Start the query, and fork it once it runs.",
            file=original.url,
        )
    theirs = [info.name for info in objects_of(original, "state/") if "/_metadata/" not in info.name]
    if theirs:
        raise UsageError(
            "Part of this query's state lies in Spark's own state store, which is not shared.",
            action="Stop the query, and copy the whole checkpoint instead.",
            file=original.locate(theirs[0]),
        )


def _choose(reader: StateReader, recovery: Recovery, retained: range, committed: int, version: int | None) -> int:
    """The version to fork: its batch is committed, and the ledger has what Spark reads at a start after it.

    Args:
        retained, committed: batches in the ledger; the last of those that are committed. version: what was asked for.
    """

    def fits(one: int) -> bool:
        done = 0 < one <= committed + 1 and one - 1 in retained and max(one - 2, 0) in retained
        return done and recovery.durable(one)

    there = [one for one in reader.known() if fits(one)]
    if version is None and there and there[-1] >= committed:
        return there[-1]
    if version is not None and version in there:
        return version
    choice = f"There {'are' if len(there) > 1 else 'is'} {span(there)}." if there else "Try again after a batch."
    if version is not None:
        reader.choose(version)  # says so if it is not there at all, or damaged
        what = "Spark has not committed this version's batch, or its ledger does not go back to it any more."
    elif there:
        raise StateDamagedError(
            f"Spark has committed batch {committed}, and the state as of then is not whole.",
            action=f"`millpond state verify` names what is damaged; or give an older --version. {choice}",
            version=committed + 1,
            file=reader.files.url,
        )
    else:
        what = "There is no durable version yet of a batch that Spark has committed."
    raise UsageError(what, action=choice, version=version, file=reader.files.url)


def _pin(taken: Share, parents: Sequence[FileSystem], files: FileSystem, version: int) -> None:
    for parent, its, objects in zip(taken.parents.parents, parents, taken.objects, strict=True):
        write_pin(its, parent.pin, Pin(files.url, version, objects, time.time()))


def _check_there(taken: Share, parents: Sequence[FileSystem], version: int) -> None:
    """See that all which is to be shared is there."""
    for its, objects in zip(parents, taken.objects, strict=True):
        there = {info.name for folder in ("files/", "commits/") for info in its.list(folder)}
        for name in objects:
            if name not in there:
                raise MissingFileError(
                    "A state file is missing.",
                    action="Restore it from a backup of the location.",
                    version=version,
                    file=its.locate(name),
                )
