"""The encoding of blocks: some rows and the slice of the heap that they refer to, self-contained, with a checksum.

    0   u32   length of the payload as stored
    4   u32   rows
    8   u32   bytes of heap
    12  u16   words per row
    14  u8    kind: rows, a filter, or the end of a segment
    15  u8    encoding: raw, or byte-shuffled words then LZ4
    16  u64   XXH3 (64 bits) of bytes 0–15 and the payload
    24        payload: words, then heap; then zeroes up to a multiple of 8

All numbers are little-endian. Heap offsets in the words count from the block's own heap. Raw blocks that start at a
multiple of 8 can be used in place.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from millpond.errors import StateDamagedError
from millpond.files.backends.filesystem import Buffer
from millpond.files.formats.blocks import Cut, kernel_layout
from millpond.kernels.pointers import address
from millpond.kernels.runs.byte_shuffle import pack, shuffle, unpack, unshuffle
from millpond.kernels.runs.gather import stray
from millpond.layout import RowLayout, Rows

HEADER = 24
ROWS, FILTER, END = 1, 2, 3
RAW, SHUFFLED_LZ4 = 16, 17

_FIELDS = struct.Struct("<IIIHBB")
_CHECK = struct.Struct("<Q")
_PAD = bytes(8)
_ACTION = "Restore the file from a copy, or restart from an older checkpoint."
_codec = pa.Codec("lz4_raw")
_MAX_LZ4_BYTES = 0x7E000000
"""Bytes that LZ4 can compress at once; larger blocks stay raw."""
_GROUP = 1 << 16
"""Bytes of blocks that are packed together. Larger temporary buffers would fragment the heap."""
_NOWHERE = np.empty(0, np.uint64)

_Size = TypeVar("_Size", int, NDArray[np.int64])


class BlockHeader(NamedTuple):
    """The header of a block; the module documents the fields. `checksum` is last, as in the file."""

    stored: int
    rows: int
    heap: int
    width: int
    kind: int
    encoding: int
    checksum: int

    @property
    def size(self) -> int:
        """Bytes from this block to the next, with padding."""
        return padded(HEADER + self.stored)


def padded(size: _Size) -> _Size:
    """Round sizes in bytes up to whole words of 8 bytes."""
    return (size + 7) & ~7


def damaged_error(name: str, what: str) -> StateDamagedError:
    """Return the error for a file that differs from what was written; `what` describes the damage."""
    return StateDamagedError(f"A state file is damaged: {what}.", action=_ACTION, file=name)


def encode_block(rows: Rows, *, compress: bool, kind: int = ROWS) -> list[Buffer]:
    """Encode a block.

    Args:
        rows: contiguous words, with heap offsets that count from `rows.heap`; the buffers may refer to both.
        compress: shuffle and compress, if that makes the block smaller.
        kind: kind of the block.

    Returns:
        The buffers of the block, in order.
    """
    words, heap = rows
    size = words.nbytes + heap.nbytes
    if compress and size <= _MAX_LZ4_BYTES:
        plain = np.empty(size, np.uint8)
        shuffle(address(words), len(words), words.shape[1], address(plain))
        plain[words.nbytes :] = heap
        packed = _codec.compress(plain, asbytes=False)
        if packed.size < size:
            return _framed(len(words), heap.nbytes, words.shape[1], kind, SHUFFLED_LZ4, [packed])
    return _framed(
        len(words), heap.nbytes, words.shape[1], kind, RAW, [words.data, heap.data] if heap.nbytes else [words.data]
    )


def encode_blocks(rows: Rows, layout: RowLayout, cut: Cut, forms: Sequence[bool]) -> Iterator[list[list[Buffer]]]:
    """Encode rows as blocks.

    Blocks are packed in groups; only checksums and compression are computed block by block.

    Args:
        rows: the rows, with contiguous words.
        layout: layout of the rows.
        cut: division into blocks.
        forms: the encodings to produce: for each, whether to compress. Uncompressed rows of a layout without `bytes`
            columns are referenced, not copied, so they must not change later.

    Yields:
        For each block, a list of its buffers for each form.
    """
    shape = kernel_layout(layout)
    stride, blobs = 8 * shape.width, shape.blobs
    counts = cut.stops - cut.starts
    sizes = counts * stride + cut.heaps
    before = np.cumsum(sizes) - sizes
    groups = np.flatnonzero(np.diff(before // _GROUP, prepend=-1)).tolist()
    for low, high in pairwise([*groups, len(sizes)]):
        block_sizes, first = sizes[low:high], address(rows.words) + int(cut.starts[low]) * stride
        room = padded(block_sizes)
        offsets = np.cumsum(room) - room
        total = int(offsets[-1] + block_sizes[-1])
        raw = np.empty(total if len(blobs) else 0, np.uint8)
        shuffled = np.empty(total if any(forms) else 0, np.uint8)
        raw_at, shuffled_at = (
            np.uint64(address(copies)) + offsets.astype(np.uint64) if len(copies) else _NOWHERE
            for copies in (raw, shuffled)
        )
        numbers = counts[low:high], cut.heaps[low:high]
        pack(first, address(rows.heap), *numbers, shape.width, blobs, raw_at, shuffled_at)
        if not len(blobs):
            begin, end = int(cut.starts[low]), int(cut.stops[high - 1])
            raw = rows.words[begin:end].reshape(-1).view(np.uint8)
        plain, packed = raw.data, shuffled.data
        for begin, size, count, heap in zip(
            *(column.tolist() for column in (offsets, block_sizes, *numbers)), strict=True
        ):
            encoded = []
            for compress in forms:
                encoding, payload = RAW, plain[begin : begin + size]
                if compress and size <= _MAX_LZ4_BYTES:
                    smaller = _codec.compress(packed[begin : begin + size], asbytes=False)
                    if smaller.size < size:
                        encoding, payload = SHUFFLED_LZ4, smaller
                encoded.append(_framed(count, heap, shape.width, ROWS, encoding, [payload]))
            yield encoded


def encode_end(rows: int) -> list[Buffer]:
    """Encode the block that ends a segment, which holds the segment's number of rows."""
    return _framed(0, 0, 0, END, RAW, [_CHECK.pack(rows)])


def _framed(rows: int, heap: int, width: int, kind: int, encoding: int, payload: list[Buffer]) -> list[Buffer]:
    stored = sum(memoryview(piece).nbytes for piece in payload)
    fields = _FIELDS.pack(stored, rows, heap, width, kind, encoding)
    digest = xxhash.xxh3_64(fields)
    for piece in payload:
        digest.update(piece)
    padding = -stored % 8
    return [fields + _CHECK.pack(digest.intdigest()), *payload, *([_PAD[:padding]] if padding else [])]


def read_header(data: memoryview, offset: int, name: str) -> BlockHeader:
    """Read the header of the block at an offset; only its length is checked."""
    if offset < 0 or offset + HEADER > len(data):
        raise damaged_error(name, f"it ends within the block at byte {offset}")
    return BlockHeader(*_FIELDS.unpack_from(data, offset), *_CHECK.unpack_from(data, offset + _FIELDS.size))


def check_block(data: memoryview, offset: int, name: str, *, kind: int, width: int | None = None) -> BlockHeader:
    """Check lengths and checksum of the block at an offset, and return its header.

    Raises:
        StateDamagedError: the block is damaged, or has another kind or width.
    """
    header = read_header(data, offset, name)
    if offset + HEADER + header.stored > len(data):
        raise damaged_error(name, f"it ends within the block at byte {offset}")
    digest = xxhash.xxh3_64(data[offset : offset + _FIELDS.size])
    digest.update(data[offset + HEADER : offset + HEADER + header.stored])
    if digest.intdigest() != header.checksum:
        raise damaged_error(name, f"the block at byte {offset} does not have its checksum")
    fits = header.encoding == SHUFFLED_LZ4 or header.stored == header.rows * header.width * 8 + header.heap
    if header.kind != kind or (width is not None and header.width != width) or not (fits or kind == END):
        raise damaged_error(name, f"the block at byte {offset} is not of the kind or size expected")
    return header


def check_references(rows_at: int, header: BlockHeader, layout: RowLayout, offset: int, name: str) -> None:
    """Check that the long values of a block lie within its heap; `rows_at` is the address of its words."""
    blobs = kernel_layout(layout).blobs
    if len(blobs) and stray(rows_at, header.rows, header.width, blobs, header.heap) >= 0:
        raise damaged_error(name, f"a row of the block at byte {offset} refers to bytes outside of it")


def decode_into(
    data: memoryview,
    offset: int,
    header: BlockHeader,
    layout: RowLayout,
    name: str,
    words: NDArray[np.uint64],
    heap: NDArray[np.uint8],
) -> None:
    """Decode a checked block of rows into arrays of exactly its size.

    Raises:
        StateDamagedError: the contents do not match the header.
    """
    payload = data[offset + HEADER : offset + HEADER + header.stored]
    size = words.nbytes + heap.nbytes
    if header.encoding == SHUFFLED_LZ4:
        plain = np.frombuffer(_decompressed(payload, size, offset, name), np.uint8)
        unshuffle(address(plain), header.rows, header.width, address(words))
    elif header.encoding == RAW:
        plain = np.frombuffer(payload, np.uint8)
        words.reshape(-1).view(np.uint8)[:] = plain[: words.nbytes]
    else:
        raise damaged_error(name, f"the block at byte {offset} is encoded in an unknown way")
    heap[:] = plain[words.nbytes :]
    check_references(address(words), header, layout, offset, name)


class Decoded(NamedTuple):
    """Some blocks that were decoded together.

    Attributes:
        rows: words and heaps of all blocks; heap offsets of a block count from its own heap.
        starts: int64[blocks + 1], number of rows before each block, and the total at the end.
        heap_starts: int64[blocks + 1], bytes of heap before each block, and the total at the end.
        words_at, heap_at: u64[blocks], addresses of each block's words and heap.
    """

    rows: Rows
    starts: NDArray[np.int64]
    heap_starts: NDArray[np.int64]
    words_at: NDArray[np.uint64]
    heap_at: NDArray[np.uint64]

    def block(self, number: int) -> Rows:
        """Return the rows of one block, as views."""
        words = self.rows.words[self.starts[number] : self.starts[number + 1]]
        return Rows(words, self.rows.heap[self.heap_starts[number] : self.heap_starts[number + 1]])


_HEAD = np.dtype(
    {
        "names": ["stored", "rows", "heap", "width", "kind", "encoding", "checksum"],
        "formats": ["<u4", "<u4", "<u4", "<u2", "u1", "u1", "<u8"],
    }
)


def decode_blocks(
    data: memoryview, offsets: NDArray[np.int64], counts: NDArray[np.int64], layout: RowLayout, name: str, base: int = 0
) -> Decoded:
    """Decode and check several blocks.

    Blocks are unpacked together; only checksums and decompression are computed block by block.

    Args:
        data: bytes of a file, or of a part of it.
        offsets: int64[blocks], offset of each block in `data`.
        counts: int64[blocks], expected number of rows of each block.
        layout: layout of the rows.
        name: name of the file, for messages.
        base: offset of `data` in the file, for messages.

    Raises:
        StateDamagedError: a block is damaged, or has another size; names the file.
    """
    end = len(data) - HEADER
    if len(offsets) and not 0 <= int(offsets.min()) <= int(offsets.max()) <= end:
        raise damaged_error(name, f"it ends within the block at byte {base + int(offsets.max())}")
    bytes_ = np.frombuffer(data, np.uint8)
    heads = bytes_[offsets[:, None] + np.arange(HEADER)].view(_HEAD).reshape(-1)
    stored, heaps = heads["stored"].astype(np.int64), heads["heap"].astype(np.int64)
    sizes = counts * (8 * layout.width) + heaps
    shuffled = heads["encoding"] == SHUFFLED_LZ4
    fits = (heads["kind"] == ROWS) & (heads["width"] == layout.width) & (heads["rows"] == counts)
    fits &= shuffled | ((heads["encoding"] == RAW) & (stored == sizes))
    starts, heap_starts = np.append(0, np.cumsum(counts)), np.append(0, np.cumsum(heaps))
    plain_at = np.uint64(address(bytes_)) + (offsets + HEADER).astype(np.uint64)
    held = []
    columns = (offsets, stored, heads["checksum"], fits, sizes, shuffled)
    for number, (offset, length, checksum, fit, size, packed) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        payload = data[offset + HEADER : offset + HEADER + length]
        digest = xxhash.xxh3_64(data[offset : offset + _FIELDS.size])
        digest.update(payload)
        if digest.intdigest() != checksum:
            raise damaged_error(name, f"the block at byte {base + offset} does not have its checksum")
        if not fit:
            raise damaged_error(name, f"the block at byte {base + offset} does not fit the footer")
        if packed:
            plain = _decompressed(payload, size, base + offset, name)
            plain_at[number] = plain.address
            held.append(plain)
    words = np.empty((int(starts[-1]), layout.width), np.uint64)
    heap = np.empty(int(heap_starts[-1]), np.uint8)
    words_at = np.uint64(address(words)) + (starts[:-1] * (8 * layout.width)).astype(np.uint64)
    heap_at = np.uint64(address(heap)) + heap_starts[:-1].astype(np.uint64)
    blobs = kernel_layout(layout).blobs
    wrong = unpack(plain_at, shuffled, counts, heaps, layout.width, blobs, words_at, heap_at)
    if wrong >= 0:
        raise damaged_error(
            name, f"a row of the block at byte {base + int(offsets[wrong])} refers to bytes outside of it"
        )
    return Decoded(Rows(words, heap), starts, heap_starts, words_at, heap_at)


def _decompressed(payload: memoryview, size: int, offset: int, name: str) -> pa.Buffer:
    try:
        plain = _codec.decompress(payload, size)
    except (OSError, pa.ArrowException) as error:
        raise damaged_error(name, f"the block at byte {offset} does not decompress") from error
    if plain.size != size:
        raise damaged_error(name, f"the block at byte {offset} decompresses to another length")
    return plain


def decode_block(data: memoryview, offset: int, layout: RowLayout, name: str) -> tuple[Rows, int]:
    """Decode and check the block at an offset; return its rows and the offset of the next block.

    Raises:
        StateDamagedError: the block is damaged; names the file.
    """
    header = check_block(data, offset, name, kind=ROWS, width=layout.width)
    words = np.empty((header.rows, header.width), np.uint64)
    heap = np.empty(header.heap, np.uint8)
    decode_into(data, offset, header, layout, name, words, heap)
    return Rows(words, heap), offset + header.size
