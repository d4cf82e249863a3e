"""Append files: ordered sections of rows in checksummed blocks, and a directory of the blocks.

    0      8 bytes  magic `MILLAPND`
    8      blocks (`files/formats/codec.py`), section after section
    …      directory (`_Directory`, msgpack)
    -24    u64 length of the directory, u64 its XXH3, magic again

Unlike in a run, a key may occur any number of times and files are never searched by key, so there are no filters. A
section is ordered by an axis (the hash, or a time). The directory holds the axis value of each block's first row, so
that a part of the axis can be read alone. An append file may be embedded in another file, as a delta is in a commit.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from millpond.errors import StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import Buffer, FileSystem
from millpond.files.backends.retry import with_retries
from millpond.files.formats.blocks import cut_blocks
from millpond.files.formats.codec import damaged_error, decode_block, encode_blocks
from millpond.files.mapping import advise, map_file
from millpond.files.refs import HashInterval
from millpond.kernels.pointers import address
from millpond.kernels.runs.readahead import request_range
from millpond.layout import HashRange, RowLayout, Rows, TableSchema

MAGIC = b"MILLAPND"
FORMAT = 1

_TAIL = struct.Struct("<QQ8s")
_FIRST_READ_BYTES = 65536  # bytes of the first read at the end of a file, which contains most directories
_REQUEST_BYTES = 1 << 20
"""Approximate bytes of one request to a remote store."""


class ByteRange(msgspec.Struct, frozen=True):
    """`length` bytes from `offset` of an object of the state location; `visible`: hashes of the rows that count."""

    name: str
    offset: int
    length: int
    visible: HashInterval | None = None


class _Section(msgspec.Struct, frozen=True):
    schema: TableSchema
    rows: int
    first: bytes
    counts: bytes
    offsets: bytes
    sizes: bytes


class _Directory(msgspec.Struct, frozen=True):
    format: int
    length: int  # bytes of the magic and the blocks before it
    sections: list[_Section]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Directory)


@dataclass(frozen=True, eq=False)
class Section:
    """The block directory of one section.

    Attributes:
        layout: layout of the rows.
        first: u64[blocks], axis value of each block's first row; ascending.
        starts: int64[blocks + 1], number of rows before each block, and the total at the end.
        offsets, sizes: int64[blocks], position and size of each block in bytes.
    """

    layout: RowLayout
    first: NDArray[np.uint64]
    starts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.first)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.starts[-1])

    @property
    def memory(self) -> int:
        """Bytes of memory that the arrays take."""
        return sum(array.nbytes for array in (self.first, self.starts, self.offsets, self.sizes))


class Bytes(Protocol):
    """The bytes of one append file: in memory, mapped, or in a remote store. Thread-safe."""

    place: str
    size: int

    @property
    def remote(self) -> bool:
        """Whether reads go to a remote store."""

    def get(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Read some (offset, length) ranges, which are in ascending order."""

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Prefetch hint: these ranges will be read soon."""

    def part(self, offset: int, length: int) -> Bytes:
        """Return the bytes of a range as an independent object."""

    def report_damage(self) -> bool:
        """Report that bytes are damaged; return whether another copy can be read instead."""


class MappedBytes:
    """Bytes in memory, or in a memory-mapped file."""

    remote = False

    def __init__(self, data: Buffer, place: str) -> None:
        self.view = memoryview(data).cast("B")
        self._base = address(np.frombuffer(self.view, np.uint8)) if len(self.view) else 0
        self.place = place
        self.size = len(self.view)

    @classmethod
    def of_file(cls, path: str) -> MappedBytes:
        """Map a whole file."""
        mapped = cls(map_file(path), path)
        if not mapped.size:
            raise damaged_error(path, "it is empty")
        # No readahead by the kernel: `prefetch` requests the pages that are needed.
        advise(mapped.view, mmap.MADV_RANDOM)
        return mapped

    def get(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `Bytes.get`."""
        self.prefetch(ranges)
        return [self.view[offset : offset + length] for offset, length in ranges]

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `Bytes.prefetch`."""
        for offset, length in merge_adjacent(ranges):
            request_range(self._base + offset, length)

    def part(self, offset: int, length: int) -> MappedBytes:
        """See `Bytes.part`."""
        return MappedBytes(self.view[offset : offset + length], self.place)

    def report_damage(self) -> bool:
        """See `Bytes.report_damage`: this is all there is."""
        return False


class RemoteBytes:
    """Bytes of (a part of) an object in the state location.

    Args:
        files: the state location.
        byte_range: range of the object.
        pool: runs requests concurrently; its threads must not wait for this object.
    """

    remote = True

    def __init__(self, files: FileSystem, byte_range: ByteRange, pool: Executor) -> None:
        self._files = files
        self._byte_range = byte_range
        self._pool = pool
        self.place = files.locate(byte_range.name)
        self.size = byte_range.length

    def get(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `Bytes.get`."""
        parts: list[list[tuple[int, int]]] = [[]]
        size = 0
        for offset, length in ranges:
            if size >= _REQUEST_BYTES:
                parts.append([])
                size = 0
            parts[-1].append((self._byte_range.offset + offset, length))
            size += length
        if len(parts) == 1:
            return self._request(parts[0])
        return [data for part in self._pool.map(self._request, parts) for data in part]

    def _request(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        return with_retries(lambda: self._files.get_ranges(self._byte_range.name, ranges)) if ranges else []

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: `get` sends its requests concurrently."""

    def part(self, offset: int, length: int) -> RemoteBytes:
        """See `Bytes.part`."""
        return RemoteBytes(
            self._files, ByteRange(self._byte_range.name, self._byte_range.offset + offset, length), self._pool
        )

    def report_damage(self) -> bool:
        """See `Bytes.report_damage`: this is all there is."""
        return False


def merge_adjacent(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent (offset, length) ranges, which are ascending; padding of up to 8 bytes counts as adjacent."""
    merged: list[tuple[int, int]] = []
    for offset, length in ranges:
        if merged and merged[-1][0] + merged[-1][1] + 8 >= offset:
            merged[-1] = merged[-1][0], offset + length - merged[-1][0]
        else:
            merged.append((offset, length))
    return merged


class AppendFileWriter:
    """Streaming writer of an append file.

    Args:
        write: takes the next bytes; it may keep references to them only if rows passed to `add` do not change later.
        compress: shuffle and compress blocks.
    """

    def __init__(self, write: Callable[[Buffer], object], *, compress: bool) -> None:
        self._write = write
        self._compress = compress
        self._sections: list[tuple[RowLayout, list[int], list[int], list[int], list[int]]] = []
        self._last = 0
        self.bytes = 0
        self._put(MAGIC)

    def _put(self, piece: Buffer) -> None:
        self._write(piece)
        self.bytes += memoryview(piece).nbytes

    def begin(self, layout: RowLayout) -> None:
        """Begin the next section."""
        self._sections.append((layout, [], [], [], []))
        self._last = 0

    def add(self, rows: Rows, axis: NDArray[np.uint64]) -> None:
        """Write rows of the section.

        Args:
            rows: the rows.
            axis: u64[rows], axis value of each row; ascending, also from call to call.

        Raises:
            ValueError: the rows are out of order.
        """
        layout, first, counts, offsets, sizes = self._sections[-1]
        rows = rows.packed()
        cut = cut_blocks(rows.words, layout)
        block_starts = axis[cut.starts].astype(np.uint64)
        if (block_starts < np.append(np.uint64(self._last), block_starts)[:-1]).any():
            raise ValueError("the rows of a section must come in order")
        first += block_starts.tolist()
        counts += (cut.stops - cut.starts).tolist()
        self._last = first[-1] if first else self._last
        for (block,) in encode_blocks(rows, layout, cut, [self._compress]):
            offsets.append(self.bytes)
            for piece in block:
                self._put(piece)
            sizes.append(self.bytes - offsets[-1])

    def finish(self) -> None:
        """Write the directory and the end of the file."""
        sections = [
            _Section(
                schema=layout.schema,
                rows=sum(counts),
                first=np.array(first, "<u8").tobytes(),
                counts=np.array(counts, "<u4").tobytes(),
                offsets=np.array(offsets, "<u8").tobytes(),
                sizes=np.array(sizes, "<u4").tobytes(),
            )
            for layout, first, counts, offsets, sizes in self._sections
        ]
        encoded = _encoder.encode(_Directory(FORMAT, self.bytes, sections))
        self._put(encoded)
        self._put(_TAIL.pack(len(encoded), xxhash.xxh3_64_intdigest(encoded), MAGIC))


class AppendFile:
    """An open append file: its directory is in memory, its blocks are read on demand.

    Args:
        data: the bytes of the file. If several files are concatenated, the last one is opened.
        layouts: expected layouts of the sections; the last one applies to all further sections.
        visible: hashes of the rows that count (see `RunRef`).

    Attributes:
        begin: offset in `data` at which the file begins.
        memory: bytes of memory of the directory.

    Raises:
        StateDamagedError: the bytes are not a complete append file.
        StateIncompatibleError: the file has a newer format, or its rows have other columns.
    """

    def __init__(self, data: Bytes, layouts: Sequence[RowLayout], visible: HashRange = HashRange()) -> None:  # noqa: B008
        self.data = data
        self.visible = visible
        self.begin, self.sections = _read_directory(data, layouts)
        self.memory = sum(section.memory for section in self.sections)

    @property
    def rows(self) -> int:
        """Number of rows of the first section (ordered by hash) within `visible`, rounded up to whole blocks."""
        section = self.sections[0]
        if self.visible.whole or not section.count:
            return section.rows
        begin = max(0, int(np.searchsorted(section.first, np.uint64(self.visible.lo), "left")) - 1)
        end = max(begin, int(np.searchsorted(section.first, np.uint64(self.visible.hi - 1), "right")))
        return int(section.starts[end] - section.starts[begin])

    @property
    def bytes(self) -> int:
        """Bytes of the file; of a file that partitions share, those of `rows`, roughly."""
        size = self.data.size - self.begin
        return size if self.visible.whole else size * self.rows // max(1, self.sections[0].rows)

    def ranges(self, section: Section, blocks: Sequence[int] | NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the (offset, length) ranges of some blocks in `data`."""
        numbers = np.asarray(blocks, np.int64)
        return list(zip(section.offsets[numbers].tolist(), section.sizes[numbers].tolist(), strict=True))

    def read(self, section: Section, blocks: Sequence[int] | NDArray[np.int64]) -> list[Rows]:
        """Read and check some blocks.

        Args:
            section: a section of this file.
            blocks: ascending block numbers.

        Returns:
            The rows of each block, with their own heap.

        Raises:
            StateDamagedError: the blocks are damaged, and there is no other copy.
        """
        try:
            return self._read(section, blocks)
        except StateDamagedError:
            if not self.data.report_damage():
                raise
            return self._read(section, blocks)

    def _read(self, section: Section, blocks: Sequence[int] | NDArray[np.int64]) -> list[Rows]:
        ranges = self.ranges(section, blocks)
        counts = np.diff(section.starts)[np.asarray(blocks, np.int64)].tolist()
        decoded = []
        for (offset, _), count, piece in zip(ranges, counts, self.data.get(ranges), strict=True):
            rows, _ = decode_block(memoryview(piece).cast("B"), 0, section.layout, self.data.place)
            if rows.count != count:
                raise damaged_error(self.data.place, f"the block at byte {offset} does not fit the directory")
            decoded.append(rows)
        return decoded


def open_files(data: Bytes, layouts: Sequence[RowLayout], visible: HashRange = HashRange()) -> list[AppendFile]:  # noqa: B008
    """Open all of several concatenated append files, in order (see `AppendFile`)."""
    files: list[AppendFile] = []
    end = data.size
    while end:
        files.append(AppendFile(data.part(0, end), layouts, visible))
        end = files[-1].begin
    return files[::-1]


def _read_directory(data: Bytes, layouts: Sequence[RowLayout]) -> tuple[int, tuple[Section, ...]]:
    place = data.place
    if data.size < len(MAGIC) + _TAIL.size:
        raise damaged_error(place, "it is too short for an append file")
    length = min(data.size, _FIRST_READ_BYTES)
    end = memoryview(data.get([(data.size - length, length)])[0]).cast("B")
    if len(end) != length:
        raise damaged_error(place, "it is shorter than it was written")
    directory_length, checksum, magic = _TAIL.unpack(end[-_TAIL.size :])
    if magic != MAGIC or directory_length > data.size - _TAIL.size - len(MAGIC):
        raise damaged_error(place, "it does not end as an append file does")
    encoded = end[-_TAIL.size - directory_length : -_TAIL.size]
    if directory_length + _TAIL.size > length:
        encoded = memoryview(data.get([(data.size - _TAIL.size - directory_length, directory_length)])[0]).cast("B")
    if xxhash.xxh3_64_intdigest(encoded) != checksum:
        raise damaged_error(place, "its directory does not have its checksum")
    try:
        directory = _decoder.decode(encoded)
    except msgspec.MsgspecError as error:
        raise damaged_error(place, "its directory cannot be read") from error
    if directory.format > FORMAT:
        raise StateIncompatibleError(
            f"An append file has format {directory.format}.", action="Read it with a newer Millpond.", file=place
        )
    begin = data.size - _TAIL.size - directory_length - directory.length
    if begin < 0:
        raise damaged_error(place, "it is shorter than it was written")
    sections = []
    for number, section in enumerate(directory.sections):
        layout = layouts[min(number, len(layouts) - 1)]
        if section.schema != layout.schema:
            raise StateIncompatibleError("An append file holds other columns than its table.", file=place)
        sections.append(_section(section, layout, begin, directory.length, place))
    return begin, tuple(sections)


def _section(section: _Section, layout: RowLayout, begin: int, length: int, place: str) -> Section:
    first = np.frombuffer(section.first, "<u8").astype(np.uint64)
    counts = np.frombuffer(section.counts, "<u4").astype(np.int64)
    offsets = np.frombuffer(section.offsets, "<u8").astype(np.int64)
    sizes = np.frombuffer(section.sizes, "<u4").astype(np.int64)
    starts = np.append(0, np.cumsum(counts))
    fits = len(first) == len(counts) == len(offsets) == len(sizes) and starts[-1] == section.rows
    if not fits or (len(offsets) and int((offsets + sizes).max()) > length) or (first[1:] < first[:-1]).any():
        raise damaged_error(place, "its directory contradicts itself")
    return Section(layout, first, starts, begin + offsets, sizes)
