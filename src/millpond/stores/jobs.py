"""Compaction jobs as plain data, so that another process can run them.

A job's result depends on its inputs alone, and the same code makes it in a slot or remotely. The slot that submitted
the job decides whether the result still fits when it arrives. A job with unknown fields, as from a later version, is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

import msgspec

from millpond.files.refs import RunRef
from millpond.layout import TableSchema

T = TypeVar("T")


class MergeRuns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="runs"):
    """A merge of runs into one (see `stores.runs.merge`).

    Attributes:
        schema: of the rows. inputs: newest first, each with the hash range that counts in it.
        axis: index of the word that the hash ranges refer to.
        lowest, highest: the hash range to merge, both ends included.
        drop_tombstones: whether deleted keys are left out; allowed if no older run lies below.
        size: rows in a piece, roughly.
        earlier: earlier schemas of the table, which inputs may still have (see `RunStore.open`).
    """

    schema: TableSchema
    inputs: tuple[RunRef, ...]
    axis: int
    lowest: int
    highest: int
    drop_tombstones: bool
    size: int
    earlier: tuple[TableSchema, ...] = ()


class MergeParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="parts"):
    """A merge of the parts of an ordered table into one for each time interval that has rows (see `stores.ordered`).

    Attributes:
        schema: of the rows. inputs: the parts.
        marks: for each part, a bit for every row that was matched after the part was written; empty if there are none.
        lowest, highest: the hash range to merge, both ends included.
        intervals: time intervals, each without its first and with its second bound.
        drop_matched: whether matched rows are left out.
        size: rows in a piece, roughly.
    """

    schema: TableSchema
    inputs: tuple[RunRef, ...]
    marks: tuple[bytes, ...]
    lowest: int
    highest: int
    intervals: tuple[tuple[int, int], ...]
    drop_matched: bool
    size: int


class CompactSegments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="segments"):
    """A compaction of segments of the unaligned append store into one (see `stores.unaligned.compaction`).

    Attributes:
        schema: of the rows. inputs: oldest first.
        alive: for each segment, a bit for every index entry that stays. rows: for each segment, the rows that stay.
        piece: bytes copied at once, roughly.
    """

    schema: TableSchema
    inputs: tuple[RunRef, ...]
    alive: tuple[bytes, ...]
    rows: tuple[int, ...]
    piece: int


Job = MergeRuns | MergeParts | CompactSegments


class RemoteCompactor(Protocol):
    """Submits compaction jobs to remote workers."""

    def submit(
        self,
        job: Callable[[], Job],
        local: Callable[[], Future[T]],
        opened: Callable[[Sequence[RunRef]], T],
    ) -> Future[T]:
        """Submit a compaction job; run it locally if no remote worker claims it.

        Returns at once; the callbacks are called later, on another thread.

        Args:
            job: describes the work.
            local: starts the same work in this process.
            opened: opens the files that a remote worker wrote; if that fails, the job is run locally. Runs that it
                returns are closed if the future was cancelled meanwhile.
        """
