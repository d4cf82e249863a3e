"""Run files: hash-ordered rows in checksummed blocks, and a footer with the directory of the blocks.

    0      8 bytes  magic `MILLRUN1`
    8      blocks of rows; after every `FILTER_GROUP` of them (and after the last) a block with their bloom filters
    …      footer (`Footer`, msgpack)
    -24    u64 length of the footer, u64 its XXH3, magic again

Bloom filters are stored beside their rows, so that a writer need not keep them in memory and readers fetch only the
ones they need. The same run may exist twice: compressed in the state location and raw on a local disk, with the same
blocks of rows.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from millpond.errors import StateIncompatibleError
from millpond.files.backends.filesystem import Buffer
from millpond.files.formats.blocks import RUN_BLOCK, BlockIndex, cut_run
from millpond.files.formats.codec import FILTER, HEADER, damaged_error, encode_block, encode_blocks
from millpond.files.refs import RunRef
from millpond.kernels.pointers import address
from millpond.kernels.runs.bloom import LINE, build_filters, lines_for
from millpond.layout import HASH, META, RowLayout, Rows, TableSchema

MAGIC = b"MILLRUN1"
FORMAT = 1
FILTER_GROUP = 128
"""Number of blocks whose filters are stored together."""

_TAIL = struct.Struct("<QQ8s")
_DIRECTORY_BYTES_PER_BLOCK = 26  # bytes of the directory per block
_NO_HEAP = np.empty(0, np.uint8)
_MAX_META = np.iinfo(np.uint64).max


class Footer(msgspec.Struct, frozen=True):
    """The footer of a run file. The directory is in little-endian arrays, one element per block (or filter group).

    Attributes:
        format: version of the format.
        schema: schema of the rows.
        rows: number of rows, tombstones included.
        first, last: lowest and highest hash.
        oldest, newest: lowest and highest access time.
        fence: u64 per block, first hash.
        counts: u32 per block, number of rows.
        offsets: u64 per block, position in the file in bytes.
        sizes: u32 per block, length in bytes.
        raw: whether blocks are uncompressed and can be used in place.
        group: number of blocks whose filters are stored together.
        filters: u64 per filter group, position in the file in bytes.
    """

    format: int
    schema: TableSchema
    rows: int
    first: int
    last: int
    oldest: int
    newest: int
    fence: bytes
    counts: bytes
    offsets: bytes
    sizes: bytes
    raw: bool
    group: int
    filters: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Footer)


@dataclass(frozen=True, eq=False)
class Directory:
    """The decoded directory of a run file.

    Attributes:
        index: the block index, for searches.
        access_times: lowest access time (tombstones excluded) and highest of its rows.
        raw: whether blocks are uncompressed and can be used in place.
        group: number of blocks whose filters are stored together.
        offsets, sizes: int64[blocks], position and length of each block in bytes.
        filter_offsets: int64[groups], position of each filter group in bytes.
        filter_lines: int64[blocks], number of filter lines in the group before each block.
    """

    index: BlockIndex
    access_times: tuple[int, int]
    raw: bool
    group: int
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    filter_offsets: NDArray[np.int64]
    filter_lines: NDArray[np.int64]

    def filter_size(self, group: int) -> int:
        """Return the size of a filter group in the file, in bytes."""
        blocks = slice(group * self.group, (group + 1) * self.group)
        return HEADER + LINE * int(self.index.lines[blocks].sum())


class Target:
    """One output file of a `RunWriter`.

    Args:
        write: writes the next bytes.
        compress: shuffle and compress blocks.
    """

    def __init__(self, write: Callable[[Buffer], object], *, compress: bool) -> None:
        self._write = write
        self.compress = compress
        self.bytes = 0
        self.checksum = 0
        self.offsets, self.sizes, self.filters = array("Q"), array("I"), array("Q")
        self.put([MAGIC])

    def put(self, pieces: Sequence[Buffer]) -> int:
        """Write some pieces and return their size in bytes."""
        before = self.bytes
        for piece in pieces:
            self._write(piece)
            self.bytes += memoryview(piece).nbytes
        return self.bytes - before


class RunWriter:
    """Streaming writer of one run to one or several files, block by block.

    Args:
        layout: the layout of the rows.
        targets: the files.
    """

    def __init__(self, layout: RowLayout, targets: Sequence[Target]) -> None:
        self._layout = layout
        self._targets = targets
        self._fence, self._counts = array("Q"), array("I")  # for a large run, lists would take megabytes
        self._filters: list[NDArray[np.uint64]] = []
        self._last = 0
        self._access_times = (1 << 48, 0)

    def add(self, rows: Rows) -> None:
        """Write rows in hash order; they must not sort before rows written earlier.

        Raises:
            ValueError: the rows are out of order.
        """
        if rows.count:
            meta = rows.words[:, META]
            removed = (meta & np.uint64(1)) != 0
            # Tombstones never expire, so they do not count as the oldest rows.
            oldest = int(meta.min(initial=_MAX_META, where=~removed)) >> 16
            self._access_times = min(self._access_times[0], oldest), max(self._access_times[1], int(meta.max()) >> 16)
        rows = rows.packed()
        words = rows.words
        cut = cut_run(words, self._layout)
        fence, counts = words[cut.starts, HASH], cut.stops - cut.starts
        if rows.count:
            before = np.append(np.uint64(self._last), words[cut.stops[:-1] - 1, HASH])
            if (fence < before).any():
                raise ValueError("the rows of a run must come in hash order")
            self._last = int(words[-1, HASH])
        self._fence.frombytes(fence.tobytes())
        self._counts.frombytes(counts.astype(np.uint32).tobytes())
        lines = lines_for(counts)
        filters = np.zeros((int(lines.sum()), LINE // 8), np.uint64)
        build_filters(address(words), words.shape[1], counts, lines, filters.reshape(-1))
        ranges = pairwise([0, *np.cumsum(lines).tolist()])
        encoded = encode_blocks(rows, self._layout, cut, [target.compress for target in self._targets])
        for forms, (begin, end) in zip(encoded, ranges, strict=True):
            for target, pieces in zip(self._targets, forms, strict=True):
                target.offsets.append(target.bytes)
                target.sizes.append(target.put(pieces))
            self._filters.append(filters[begin:end])
            if len(self._filters) == FILTER_GROUP:
                self._put_filters()

    def _put_filters(self) -> None:
        pieces = encode_block(Rows(np.concatenate(self._filters), _NO_HEAP), compress=False, kind=FILTER)
        for target in self._targets:
            target.filters.append(target.bytes)
            target.put(pieces)
        self._filters = []

    def finish(self) -> None:
        """Write the last filters and the footer of each file."""
        if self._filters:
            self._put_filters()
        for target in self._targets:
            footer = Footer(
                format=FORMAT,
                schema=self._layout.schema,
                rows=sum(self._counts),
                first=self._fence[0] if self._fence else 0,
                last=self._last,
                oldest=min(self._access_times),
                newest=self._access_times[1],
                fence=np.asarray(self._fence, "<u8").tobytes(),
                counts=np.asarray(self._counts, "<u4").tobytes(),
                offsets=np.asarray(target.offsets, "<u8").tobytes(),
                sizes=np.asarray(target.sizes, "<u4").tobytes(),
                raw=not target.compress,
                group=FILTER_GROUP,
                filters=np.asarray(target.filters, "<u8").tobytes(),
            )
            encoded = _encoder.encode(footer)
            target.checksum = xxhash.xxh3_64_intdigest(encoded)
            target.put([encoded, _TAIL.pack(len(encoded), target.checksum, MAGIC)])

    def ref(self, name: str, target: Target) -> RunRef:
        """Return the reference to a finished file."""
        first = self._fence[0] if self._fence else 0
        return RunRef(
            name,
            rows=sum(self._counts),
            bytes=target.bytes,
            first=first,
            last=self._last,
            oldest=min(self._access_times),
            newest=self._access_times[1],
            checksum=target.checksum,
        )


class OtherColumnsError(StateIncompatibleError):
    """A run file whose rows have other columns than its table.

    Attributes:
        schema: schema of the file; None in processes other than the one that read it.
    """

    schema: TableSchema | None = None


def estimate_footer_size(ref: RunRef, layout: RowLayout) -> int:
    """Estimate the bytes at the end of a run file that hold its footer; blocks seldom shrink to less than half."""
    return 4096 + _DIRECTORY_BYTES_PER_BLOCK * max(ref.rows * layout.width * 8, 2 * ref.bytes) // RUN_BLOCK


def read_directory(
    read: Callable[[int, int], Buffer], size: int, name: str, layout: RowLayout, *, guess: int = 65536
) -> Directory:
    """Read the footer of a run file, in one read if it is no longer than `guess`, else in two.

    Args:
        read: reads the bytes at (offset, length).
        size: length of the file in bytes.
        name: name of the file, for messages.
        layout: the layout that its rows must have.
        guess: bytes at the end of the file that are read first.

    Raises:
        StateDamagedError: the file is not a complete run file.
        StateIncompatibleError: the file has a newer format.
        OtherColumnsError: its rows have other columns.
    """
    if size < len(MAGIC) + _TAIL.size:
        raise damaged_error(name, "it is too short for a run")
    length = min(size, guess)
    end = memoryview(read(size - length, length)).cast("B")
    if len(end) != length:
        raise damaged_error(name, "it is shorter than it was written")
    footer_length, checksum, magic = _TAIL.unpack(end[-_TAIL.size :])
    if magic != MAGIC or footer_length > size - _TAIL.size - len(MAGIC):
        raise damaged_error(name, "it does not end as a run does")
    encoded = end[-_TAIL.size - footer_length : -_TAIL.size]
    if footer_length + _TAIL.size > length:
        encoded = memoryview(read(size - _TAIL.size - footer_length, footer_length)).cast("B")
    if xxhash.xxh3_64_intdigest(encoded) != checksum:
        raise damaged_error(name, "its footer does not have its checksum")
    try:
        footer = _decoder.decode(encoded)
    except msgspec.MsgspecError as error:
        raise damaged_error(name, "its footer cannot be read") from error
    if footer.format > FORMAT:
        raise StateIncompatibleError(
            f"A run file has format {footer.format}.", action="Read it with a newer Millpond.", file=name
        )
    if footer.schema != layout.schema:
        other = OtherColumnsError(
            "A run file holds other columns than its table.",
            action="Start the query with the aggregates that the state was written by.",
            file=name,
        )
        other.schema = footer.schema
        raise other
    return _directory(footer, size, name)


def _directory(footer: Footer, size: int, name: str) -> Directory:
    fence = np.frombuffer(footer.fence, "<u8").astype(np.uint64)
    counts = np.frombuffer(footer.counts, "<u4").astype(np.int64)
    offsets = np.frombuffer(footer.offsets, "<u8").astype(np.int64)
    sizes = np.frombuffer(footer.sizes, "<u4").astype(np.int64)
    filters = np.frombuffer(footer.filters, "<u8").astype(np.int64)
    starts = np.append(0, np.cumsum(counts))
    groups = -(-len(fence) // max(1, footer.group))
    fits = len(fence) == len(counts) == len(offsets) == len(sizes) and len(filters) == groups
    if not fits or starts[-1] != footer.rows or (len(offsets) and int((offsets + sizes).max()) > size):
        raise damaged_error(name, "its footer contradicts itself")
    lines = lines_for(counts)
    before = np.cumsum(lines, dtype=np.int64) - lines
    group_start = before[np.arange(len(lines)) // footer.group * footer.group]
    index = BlockIndex(fence, starts, lines, footer.last)
    access_times = footer.oldest, footer.newest
    return Directory(index, access_times, footer.raw, footer.group, offsets, sizes, filters, before - group_start)
