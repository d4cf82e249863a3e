"""Segments of the unaligned append store's log: data and index, in one file each.

The data are rows in the order in which their windows were expected to be triggered when the segment was written, so
that those needed together lie together. The index has an entry for each window: id, place on the axis of time, and
where its rows are. What of the index may concern windows that trigger until some time is a prefix of it. A third
section names the windows that were taken since the segment before: what older segments hold of them is outdated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.append_file import AppendFile, AppendFileWriter
from millpond.files.refs import RunRef
from millpond.layout import HASH, META, NULLS, RowLayout, Rows, TableSchema, Words
from millpond.stores.append_files import AppendFiles, Part

ENTRY = RowLayout(TableSchema((), ()))
"""The three words of an index entry: id, axis, first row << 32 | rows."""

TIME_BITS = 16
"""On the axis, so many bits below the milliseconds are of the window's id, to tell windows of equal time apart."""

_GROUP = 16
"""Blocks of an index that are read together."""
_NO_HEAP = np.empty(0, np.uint8)


class Covered(NamedTuple):
    """What of the deltas some segments cover: versions up to `version`, and `rows` rows of those behind."""

    version: int
    rows: int


class Entries(NamedTuple):
    """Some blocks of an index.

    Attributes:
        blocks: their numbers. words: the entries. bounds: entries before each block, and the number of entries.
    """

    blocks: NDArray[np.int64]
    words: Words
    bounds: NDArray[np.int64]


class Segment:
    """One segment.

    Args:
        file: where it is. seq: its number; a segment that takes the place of others has the last one's.
        ref: its name in manifests, once it is durable; until then `written` tells.
        covered: what it covers together with the segments before.
    """

    def __init__(
        self,
        file: AppendFile,
        seq: int,
        *,
        ref: RunRef | None = None,
        covered: Covered = Covered(0, 0),  # noqa: B008
        written: Future[tuple[RunRef, AppendFile]] | None = None,
    ) -> None:
        self.file = file
        self.seq = seq
        self.ref = ref
        self.covered = covered
        self.written = written
        self.data, self.index, self.dead = file.sections
        self.outdated = np.zeros(self.index.count, np.bool_)  # blocks of the index without a row of an open window

    @property
    def rows(self) -> int:
        """How many rows it has, outdated ones included."""
        return self.data.rows

    def adopt(self) -> None:
        """Take over the file that has become durable."""
        assert self.written is not None
        self.ref, file = self.written.result()
        self.written = None
        self.file = file
        self.data, self.index, self.dead = file.sections

    def parts(self, until: int | None) -> Iterator[Part]:
        """The parts of the index that may name open windows which are triggered until some place on the axis."""
        end = self.index.count
        if until is not None:
            end = int(np.searchsorted(self.index.first, np.uint64(until), "right"))
        blocks = np.flatnonzero(~self.outdated[:end])
        for begin in range(0, len(blocks), _GROUP):
            yield Part(self.file, self.index, blocks[begin : begin + _GROUP])


def entries_of(part: Part, rows: list[Rows]) -> Entries:
    """The entries of a part of an index."""
    bounds = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([piece.count for piece in rows], out=bounds[1:])
    words = np.concatenate([piece.words for piece in rows]) if rows else np.empty((0, 3), np.uint64)
    if not part.file.window.whole:
        words[~part.file.window.covers(words[:, HASH]), HASH] = 0  # of no window of this partition
    return Entries(part.blocks, words, bounds)


def entries_in(store: AppendFiles, segments: Iterable[Segment], until: int | None) -> Iterator[tuple[Part, Entries]]:
    """The indexes of segments, part by part (see `Segment.parts`)."""
    parts = [part for segment in segments for part in segment.parts(until)]
    for part, rows in zip(parts, store.read_ahead(parts), strict=True):
        yield part, entries_of(part, rows)


def ids_in(store: AppendFiles, segment: Segment) -> Iterator[NDArray[np.uint64]]:
    """The windows that a segment says were taken."""
    section = segment.dead
    for begin in range(0, section.count, _GROUP):
        part = Part(segment.file, section, np.arange(begin, min(begin + _GROUP, section.count)))
        for rows in store.read_ahead([part]):
            ids = np.concatenate([piece.words[:, HASH] for piece in rows])
            yield np.ascontiguousarray(ids[segment.file.window.covers(ids)])


def fill_index(writer: AppendFileWriter, entries: Words, dead: NDArray[np.uint64]) -> None:
    """Write the last two sections of a segment."""
    writer.begin(ENTRY)
    if len(entries):
        writer.add(Rows(entries, _NO_HEAP), np.ascontiguousarray(entries[:, META]))
    writer.begin(ENTRY)
    if len(dead):
        words = np.zeros((len(dead), ENTRY.width), np.uint64)
        words[:, HASH] = dead
        writer.add(Rows(words, _NO_HEAP), np.zeros(len(dead), np.uint64))


def places(entries: Words) -> NDArray[np.uint64]:
    """Where the rows of entries are: first row << 32 | rows."""
    return np.ascontiguousarray(entries[:, NULLS])
