"""Compactions as plain data, so that they can be done elsewhere: all that there is to know of one.

What a job makes is made of its inputs alone, by the same code that compacts in a slot. Who asked for it decides whether
the result still fits when it comes. A job that says more than is known here, as one of a later version may, is refused.
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
        schema: of the rows. inputs: newest first, with the windows that count in them.
        axis: the word of a row that the windows are of.
        lowest, highest: the hashes wanted, both included.
        drop_tombstones: whether deleted keys are left out: nothing older lies below.
        size: rows in a piece, roughly.
        earlier: schemas that the table has had before, which inputs may still be of (see `RunStore.open`).
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
    """A merge of the parts of an ordered table into one for each window of time that has rows (see `stores.ordered`).

    Attributes:
        schema: of the rows. inputs: the parts.
        marks: of each, a bit for every row that was matched and does not say so itself; empty if there are none.
        lowest, highest: the hashes that count, both included.
        windows: of time: later than the first, not later than the second.
        drop_matched: whether matched rows are left out.
        size: rows in a piece, roughly.
    """

    schema: TableSchema
    inputs: tuple[RunRef, ...]
    marks: tuple[bytes, ...]
    lowest: int
    highest: int
    windows: tuple[tuple[int, int], ...]
    drop_matched: bool
    size: int


class CompactSegments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="segments"):
    """A compaction of segments of the unaligned append store into one (see `stores.unaligned.compaction`).

    Attributes:
        schema: of the rows. inputs: oldest first.
        alive: of each, a bit for every entry of its index that stays. rows: of each, how many rows do.
        piece: bytes that are copied at once, roughly.
    """

    schema: TableSchema
    inputs: tuple[RunRef, ...]
    alive: tuple[bytes, ...]
    rows: tuple[int, ...]
    piece: int


Job = MergeRuns | MergeParts | CompactSegments


class Elsewhere(Protocol):
    """Has compactions done by others."""

    def submit(
        self,
        job: Callable[[], Job],
        local: Callable[[], Future[T]],
        opened: Callable[[Sequence[RunRef]], T],
    ) -> Future[T]:
        """Have a job done: elsewhere, or here if nobody there does it. Returns at once; nothing is called in it.

        Args:
            job: says what is to be done.
            local: begins to do it here.
            opened: makes the result of the files that were written elsewhere; what cannot be opened is done here.
        """
