"""Segments: rows in any order as one sequence of bytes, the form of deltas."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from millpond.files.backends.filesystem import Buffer
from millpond.files.formats.blocks import cut_blocks, shape_of
from millpond.files.formats.codec import (
    END,
    HEADER,
    ROWS,
    BlockHeader,
    check_block,
    damaged,
    decode_into,
    encode_blocks,
    encode_end,
    read_header,
)
from millpond.kernels.pointers import address
from millpond.kernels.runs.gather import rebase
from millpond.layout import RowLayout, Rows

_PIECE = 4 << 20
"""Bytes of decoded rows and heap that come as one piece, roughly."""


def encode_rows(rows: Rows, layout: RowLayout, compress: bool) -> list[Buffer]:
    """Rows as buffers to write one after another; together they are a segment.

    Uncompressed rows of a layout without `bytes` columns are referred to, not copied: they must not change any more.
    """
    rows = Rows(np.ascontiguousarray(rows.words), rows.heap)
    blocks = encode_blocks(rows, layout, cut_blocks(rows.words, layout), [compress])
    return [*(buffer for (block,) in blocks for buffer in block), *encode_end(rows.count)]


def decode_rows(buffer: Buffer, layout: RowLayout, name: str, piece: int = _PIECE) -> Iterator[Rows]:
    """The rows of some segments that lie one after another, in the order they were written, in pieces of bounded size.

    Args:
        buffer: the bytes of the segments; name: the file they come from, for messages.
        piece: bytes of a piece, at least.

    Raises:
        StateDamagedError: the bytes are not those that were written; pieces given out before are right.
    """
    data = memoryview(buffer).cast("B")
    offset, seen = 0, 0
    if not len(data):
        raise damaged(name, "it is empty")
    group: list[tuple[int, BlockHeader]] = []
    size = 0
    while offset < len(data):
        header = read_header(data, offset, name)
        if header.kind == END:
            header = check_block(data, offset, name, kind=END)
            if header.stored != 8 or struct.unpack_from("<Q", data, offset + HEADER)[0] != seen:
                raise damaged(name, "rows are missing from it")
            seen = 0
        else:
            header = check_block(data, offset, name, kind=ROWS, width=layout.width)
            group.append((offset, header))
            size += header.rows * header.width * 8 + header.heap
            seen += header.rows
            if size >= piece:
                yield _decode_group(data, group, layout, name)
                group, size = [], 0
        offset += header.size
    if seen:
        raise damaged(name, "it ends before its last block")
    if group:
        yield _decode_group(data, group, layout, name)


def _decode_group(data: memoryview, group: list[tuple[int, BlockHeader]], layout: RowLayout, name: str) -> Rows:
    words = np.empty((sum(header.rows for _, header in group), layout.width), np.uint64)
    heap = np.empty(sum(header.heap for _, header in group), np.uint8)
    blobs = shape_of(layout).blobs
    row, used = 0, 0
    for offset, header in group:
        part = words[row : row + header.rows]
        decode_into(data, offset, header, layout, name, part, heap[used : used + header.heap])
        if len(blobs) and used:
            rebase(address(part), header.rows, layout.width, blobs, used)
        row += header.rows
        used += header.heap
    return Rows(words, heap)
