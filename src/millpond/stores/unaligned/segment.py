"""Segments of the unaligned append store's log: data and index, in one file each.

The data are rows in the expected trigger order of their windows at the time of writing, so that rows needed together
are stored together. The index has an entry for each window: id, place on the time axis, and place of its rows. The
entries of windows that trigger until some time are a prefix of the index. A third section names the windows that were
taken since the previous segment: their rows in older segments are outdated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.append_file import AppendFile, AppendFileWriter
from millpond.files.refs import RunRef
from millpond.layout import HASH, META, RowLayout, Rows, TableSchema, Words
from millpond.stores.append_files import AppendFiles, SectionBlocks

ENTRY = RowLayout(TableSchema((), ()))
"""The three words of an index entry: id, axis, first row << 32 | rows."""

TIME_BITS = 16
"""Number of low bits of the axis that come from the window's id, to distinguish windows of equal time."""

_BLOCKS_PER_READ = 16
"""Blocks of an index read together."""
_NO_HEAP = np.empty(0, np.uint8)


class Covered(NamedTuple):
    """The part of the deltas that segments cover: versions up to `version`, and the next `rows` rows."""

    version: int
    rows: int


class Entries(NamedTuple):
    """Blocks of an index.

    Attributes:
        blocks: their numbers. words: the entries. bounds: entries before each block, and the number of entries.
    """

    blocks: NDArray[np.int64]
    words: Words
    bounds: NDArray[np.int64]


class Segment:
    """One segment.

    Args:
        file: the file. seq: its number; a segment that replaces others has the number of the last of them.
        ref: its reference in manifests, once it is durable; until then, `written` is its future.
        covered: the part of the deltas that it covers, together with the segments before.
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
        self.data, self.index, self.taken = file.sections
        self.outdated = np.zeros(self.index.count, np.bool_)  # index blocks without rows of an open window
        self.foreign_rows = 0  # rows of other partitions, which share the file

    @property
    def rows(self) -> int:
        """Number of rows, outdated ones included."""
        return self.data.rows

    @property
    def bytes(self) -> int:
        """Bytes of the file; of a file that partitions share, those of its own rows, roughly."""
        size = self.file.data.size
        return size - size * self.foreign_rows // max(1, self.rows)

    def adopt(self) -> None:
        """Take over the file that became durable."""
        assert self.written is not None
        self.ref, file = self.written.result()
        self.written = None
        self.file = file
        self.data, self.index, self.taken = file.sections

    def index_blocks(self, until: int | None) -> Iterator[SectionBlocks]:
        """Yield the parts of the index that may name open windows triggered until a place on the axis (None: all)."""
        end = self.index.count
        if until is not None:
            end = int(np.searchsorted(self.index.first, np.uint64(until), "right"))
        blocks = np.flatnonzero(~self.outdated[:end])
        for begin in range(0, len(blocks), _BLOCKS_PER_READ):
            yield SectionBlocks(self.file, self.index, blocks[begin : begin + _BLOCKS_PER_READ])


def entries_of(part: SectionBlocks, rows: list[Rows]) -> Entries:
    """Return the entries of a part of an index."""
    bounds = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([piece.count for piece in rows], out=bounds[1:])
    words = np.concatenate([piece.words for piece in rows]) if rows else np.empty((0, 3), np.uint64)
    if not part.file.visible.whole:
        words[~part.file.visible.covers(words[:, HASH]), HASH] = 0  # marks an entry of another partition
    return Entries(part.blocks, words, bounds)


def read_entries(
    store: AppendFiles, segments: Iterable[Segment], until: int | None
) -> Iterator[tuple[SectionBlocks, Entries]]:
    """Read the indexes of segments, part by part (see `Segment.index_blocks`)."""
    parts = [part for segment in segments for part in segment.index_blocks(until)]
    for part, rows in zip(parts, store.read_ahead(parts), strict=True):
        yield part, entries_of(part, rows)


def read_taken_ids(store: AppendFiles, segment: Segment) -> Iterator[NDArray[np.uint64]]:
    """Yield the ids of the windows that a segment records as taken."""
    section = segment.taken
    for begin in range(0, section.count, _BLOCKS_PER_READ):
        part = SectionBlocks(segment.file, section, np.arange(begin, min(begin + _BLOCKS_PER_READ, section.count)))
        for rows in store.read_ahead([part]):
            ids = np.concatenate([piece.words[:, HASH] for piece in rows])
            yield ids[segment.file.visible.covers(ids)]


def fill_index(writer: AppendFileWriter, entries: Words, taken: NDArray[np.uint64]) -> None:
    """Write the index and the taken windows: the last two sections of a segment."""
    writer.begin(ENTRY)
    if len(entries):
        writer.add(Rows(entries, _NO_HEAP), entries[:, META])
    writer.begin(ENTRY)
    if len(taken):
        words = np.zeros((len(taken), ENTRY.width), np.uint64)
        words[:, HASH] = taken
        writer.add(Rows(words, _NO_HEAP), np.zeros(len(taken), np.uint64))
