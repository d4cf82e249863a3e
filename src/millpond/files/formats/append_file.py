"""Append files: sections of rows in some order, in checked blocks, and a directory that tells where each block is.

    0      8 bytes  magic `MILLAPND`
    8      blocks (`files/formats/codec.py`), section after section
    …      directory (`_Directory`, msgpack)
    -24    u64 length of the directory, u64 its XXH3, magic again

Unlike in a run, a key may occur any number of times and nothing is ever searched by key, so there are no filters. Of
each block the directory holds the position of its first row on the axis by which its section is ordered (the hash, or
a time), so that a part of the axis is read without the rest. A file may lie within another one, as a delta does in a
commit.
"""

from __future__ import annotations

import mmap
import os
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
from millpond.files.backends.patience import patiently
from millpond.files.formats.blocks import cut_blocks
from millpond.files.formats.codec import damaged, decode_block, encode_blocks
from millpond.files.refs import Window
from millpond.kernels.pointers import address
from millpond.kernels.runs.readahead import ask_for_range
from millpond.layout import HashRange, RowLayout, Rows, TableSchema

MAGIC = b"MILLAPND"
FORMAT = 1

_TAIL = struct.Struct("<QQ8s")
_GUESS = 65536
_REQUEST = 1 << 20
"""Bytes that one request to a remote store reads, roughly."""


class ByteRange(msgspec.Struct, frozen=True):
    """`length` bytes from `offset` of an object of the state location; `window`: which of their rows count."""

    name: str
    offset: int
    length: int
    window: Window | None = None


class _Section(msgspec.Struct, frozen=True):
    schema: TableSchema
    rows: int
    first: bytes
    counts: bytes
    offsets: bytes
    sizes: bytes


class _Directory(msgspec.Struct, frozen=True):
    format: int
    length: int  # of the magic and the blocks before it
    sections: list[_Section]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Directory)


@dataclass(frozen=True, eq=False)
class Section:
    """Where the blocks of one section are.

    Attributes:
        layout: of the rows.
        first: u64[n], where on the section's axis each block begins; ascending.
        starts: rows before each block, and the number of rows at the end.
        offsets, sizes: of each block, in bytes.
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
        """Bytes that this takes in memory."""
        return sum(array.nbytes for array in (self.first, self.starts, self.offsets, self.sizes))


class Bytes(Protocol):
    """The bytes of one append file, wherever they are. Safe to use from several threads."""

    place: str
    size: int

    @property
    def remote(self) -> bool:
        """Whether reading is waiting for a store."""

    def get(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """The bytes of some (offset, length) ranges, in ascending order."""

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """These ranges will be read soon."""

    def part(self, offset: int, length: int) -> Bytes:
        """The bytes of a range as bytes of their own."""

    def distrust(self) -> bool:
        """What was read is damaged: whether it may be read again, from elsewhere."""


class MappedBytes:
    """Bytes in memory, or in a file that is mapped into it."""

    remote = False

    def __init__(self, data: Buffer, place: str) -> None:
        self.view = memoryview(data).cast("B")
        self._base = address(np.frombuffer(self.view, np.uint8)) if len(self.view) else 0
        self.place = place
        self.size = len(self.view)

    @classmethod
    def of_file(cls, path: str) -> MappedBytes:
        """Map a whole file."""
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise damaged(path, "it is empty")
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        data.madvise(mmap.MADV_RANDOM)  # whoever needs more than a page says so
        return cls(data, path)

    def get(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `Bytes.get`."""
        self.expect(ranges)
        return [self.view[offset : offset + length] for offset, length in ranges]

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """See `Bytes.expect`."""
        for offset, length in joined(ranges):
            ask_for_range(self._base + offset, length)

    def part(self, offset: int, length: int) -> MappedBytes:
        """See `Bytes.part`."""
        return MappedBytes(self.view[offset : offset + length], self.place)

    def distrust(self) -> bool:
        """See `Bytes.distrust`: this is all there is."""
        return False


class RemoteBytes:
    """Bytes of (a part of) an object in the state location.

    Args:
        files: the state location. at: which bytes of which object.
        pool: runs requests side by side; its threads must not wait for this object.

    Attributes:
        fetched: bytes read so far; requests: how many.
    """

    remote = True

    def __init__(self, files: FileSystem, at: ByteRange, pool: Executor) -> None:
        self._files = files
        self._at = at
        self._pool = pool
        self.place = files.locate(at.name)
        self.size = at.length
        self.fetched = 0
        self.requests = 0

    def get(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `Bytes.get`."""
        parts: list[list[tuple[int, int]]] = [[]]
        size = 0
        for offset, length in ranges:
            if size >= _REQUEST:
                parts.append([])
                size = 0
            parts[-1].append((self._at.offset + offset, length))
            size += length
        self.fetched += sum(length for _, length in ranges)
        self.requests += len(parts)
        if len(parts) == 1:
            return self._request(parts[0])
        return [data for part in self._pool.map(self._request, parts) for data in part]

    def _request(self, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        return patiently(lambda: self._files.get_ranges(self._at.name, ranges)) if ranges else []

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Nothing: `get` asks side by side."""

    def part(self, offset: int, length: int) -> RemoteBytes:
        """See `Bytes.part`."""
        return RemoteBytes(self._files, ByteRange(self._at.name, self._at.offset + offset, length), self._pool)

    def distrust(self) -> bool:
        """See `Bytes.distrust`: this is all there is."""
        return False


def joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending (offset, length) ranges, neighbours made one."""
    out: list[tuple[int, int]] = []
    for offset, length in ranges:
        if out and out[-1][0] + out[-1][1] + 8 >= offset:
            out[-1] = out[-1][0], offset + length - out[-1][0]
        else:
            out.append((offset, length))
    return out


class AppendFileWriter:
    """Writes an append file as its rows come.

    Args:
        write: takes the next bytes; keeps them only if `rows` given to `add` do not change any more.
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
        """Write rows of the section; `axis` is where each stands, ascending from call to call."""
        layout, first, counts, offsets, sizes = self._sections[-1]
        rows = Rows(np.ascontiguousarray(rows.words), rows.heap)
        cut = cut_blocks(rows.words, layout)
        places = axis[cut.starts].astype(np.uint64)
        if (places < np.append(np.uint64(self._last), places)[:-1]).any():
            raise ValueError("the rows of a section must come in order")
        first += places.tolist()
        counts += (cut.stops - cut.starts).tolist()
        self._last = first[-1] if first else self._last
        for (block,) in encode_blocks(rows, layout, cut, [self._compress]):
            offsets.append(self.bytes)
            for piece in block:
                self._put(piece)
            sizes.append(self.bytes - offsets[-1])

    def finish(self) -> None:
        """Write what ends the file."""
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
    """An append file that is open: its directory is read, its blocks are read as they are asked for.

    Args:
        data: the bytes of the file; of several files one after another, the last one is opened.
        layouts: of the sections that it should have: one for each, the last one for all further ones.
        window: the hashes of the rows that count (see `RunRef`).

    Attributes:
        begin: where in `data` the file begins.
        memory: bytes that the directory takes in memory.

    Raises:
        StateDamagedError: it is not a whole append file.
        StateIncompatibleError: it is of a newer format, or its rows have other columns.
    """

    def __init__(self, data: Bytes, layouts: Sequence[RowLayout], window: HashRange = HashRange()) -> None:  # noqa: B008
        self.data = data
        self.window = window
        self.begin, self.sections = _read_directory(data, layouts)
        self.memory = sum(section.memory for section in self.sections)

    @property
    def rows(self) -> int:
        """Rows of the first section that count, if hashes order it; those of whole blocks where the window ends."""
        section = self.sections[0]
        if self.window.whole or not section.count:
            return section.rows
        begin = max(0, int(np.searchsorted(section.first, np.uint64(self.window.lo), "left")) - 1)
        end = max(begin, int(np.searchsorted(section.first, np.uint64(self.window.hi - 1), "right")))
        return int(section.starts[end] - section.starts[begin])

    def ranges(self, section: Section, blocks: Sequence[int] | NDArray[np.int64]) -> list[tuple[int, int]]:
        """Where some blocks are in the file."""
        at = np.asarray(blocks, np.int64)
        return list(zip(section.offsets[at].tolist(), section.sizes[at].tolist(), strict=True))

    def read(self, section: Section, blocks: Sequence[int] | NDArray[np.int64]) -> list[Rows]:
        """The rows of some blocks (ascending numbers), each with its own heap, checked.

        Raises:
            StateDamagedError: they are not as they were written.
        """
        try:
            return self._read(section, blocks)
        except StateDamagedError:
            if not self.data.distrust():
                raise
            return self._read(section, blocks)

    def _read(self, section: Section, blocks: Sequence[int] | NDArray[np.int64]) -> list[Rows]:
        ranges = self.ranges(section, blocks)
        counts = np.diff(section.starts)[np.asarray(blocks, np.int64)].tolist()
        out = []
        for (offset, _), count, piece in zip(ranges, counts, self.data.get(ranges), strict=True):
            rows, _ = decode_block(memoryview(piece).cast("B"), 0, section.layout, self.data.place)
            if rows.count != count:
                raise damaged(self.data.place, f"the block at byte {offset} does not fit the directory")
            out.append(rows)
        return out


def open_files(data: Bytes, layouts: Sequence[RowLayout], window: HashRange = HashRange()) -> list[AppendFile]:  # noqa: B008
    """All of some append files that lie one after another, in order (see `AppendFile`)."""
    files: list[AppendFile] = []
    end = data.size
    while end:
        files.append(AppendFile(data.part(0, end), layouts, window))
        end = files[-1].begin
    return files[::-1]


def _read_directory(data: Bytes, layouts: Sequence[RowLayout]) -> tuple[int, tuple[Section, ...]]:
    place = data.place
    if data.size < len(MAGIC) + _TAIL.size:
        raise damaged(place, "it is too short for an append file")
    length = min(data.size, _GUESS)
    end = memoryview(data.get([(data.size - length, length)])[0]).cast("B")
    if len(end) != length:
        raise damaged(place, "it is shorter than it was written")
    wanted, checksum, magic = _TAIL.unpack(end[-_TAIL.size :])
    if magic != MAGIC or wanted > data.size - _TAIL.size - len(MAGIC):
        raise damaged(place, "it does not end as an append file does")
    encoded = end[-_TAIL.size - wanted : -_TAIL.size]
    if wanted + _TAIL.size > length:
        encoded = memoryview(data.get([(data.size - _TAIL.size - wanted, wanted)])[0]).cast("B")
    if xxhash.xxh3_64_intdigest(encoded) != checksum:
        raise damaged(place, "its directory does not have its checksum")
    try:
        directory = _decoder.decode(encoded)
    except msgspec.MsgspecError as error:
        raise damaged(place, "its directory cannot be read") from error
    if directory.format > FORMAT:
        raise StateIncompatibleError(
            f"An append file has format {directory.format}.", action="Read it with a newer Millpond.", file=place
        )
    begin = data.size - _TAIL.size - wanted - directory.length
    if begin < 0:
        raise damaged(place, "it is shorter than it was written")
    out = []
    for number, section in enumerate(directory.sections):
        layout = layouts[min(number, len(layouts) - 1)]
        if section.schema != layout.schema:
            raise StateIncompatibleError("An append file holds other columns than its table.", file=place)
        out.append(_section(section, layout, begin, directory.length, place))
    return begin, tuple(out)


def _section(section: _Section, layout: RowLayout, begin: int, length: int, place: str) -> Section:
    first = np.frombuffer(section.first, "<u8").astype(np.uint64)
    counts = np.frombuffer(section.counts, "<u4").astype(np.int64)
    offsets = np.frombuffer(section.offsets, "<u8").astype(np.int64)
    sizes = np.frombuffer(section.sizes, "<u4").astype(np.int64)
    starts = np.append(0, np.cumsum(counts))
    fits = len(first) == len(counts) == len(offsets) == len(sizes) and starts[-1] == section.rows
    if not fits or (len(offsets) and int((offsets + sizes).max()) > length) or (first[1:] < first[:-1]).any():
        raise damaged(place, "its directory contradicts itself")
    return Section(layout, first, starts, begin + offsets, sizes)
