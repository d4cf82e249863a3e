"""Segments: the format of deltas, with rows in any order as one sequence of bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from millpond.files.backends.filesystem import Buffer
from millpond.files.formats.blocks import cut_blocks, kernel_layout
from millpond.files.formats.codec import (
    END,
    HEADER,
    ROWS,
    BlockHeader,
    check_block,
    damaged_error,
    decode_into,
    encode_blocks,
    encode_end,
    read_header,
)
from millpond.kernels.pointers import address
from millpond.kernels.runs.gather import rebase
from millpond.layout import RowLayout, Rows

_PIECE = 4 << 20
"""Approximate bytes of decoded rows and heap in one chunk."""


def encode_rows(rows: Rows, layout: RowLayout, compress: bool) -> list[Buffer]:
    """Encode rows as a segment; return its buffers, in order.

    Uncompressed rows of a layout without `bytes` columns are referenced, not copied, so they must not change later.
    """
    rows = rows.packed()
    blocks = encode_blocks(rows, layout, cut_blocks(rows.words, layout), [compress])
    return [*(buffer for (block,) in blocks for buffer in block), *encode_end(rows.count)]


def decode_rows(buffer: Buffer, layout: RowLayout, name: str, piece: int = _PIECE) -> Iterator[Rows]:
    """Decode concatenated segments; yield the rows in their order, in chunks.

    Args:
        buffer: the bytes of the segments.
        layout: layout of the rows.
        name: name of the file, for messages.
        piece: smallest size of a chunk in bytes, except for the last one.

    Raises:
        StateDamagedError: the bytes are damaged; chunks yielded before are correct.
    """
    data = memoryview(buffer).cast("B")
    offset, row_count = 0, 0
    if not len(data):
        raise damaged_error(name, "it is empty")
    group: list[tuple[int, BlockHeader]] = []
    size = 0
    while offset < len(data):
        header = read_header(data, offset, name)
        if header.kind == END:
            header = check_block(data, offset, name, kind=END)
            if header.stored != 8 or struct.unpack_from("<Q", data, offset + HEADER)[0] != row_count:
                raise damaged_error(name, "rows are missing from it")
            row_count = 0
        else:
            header = check_block(data, offset, name, kind=ROWS, width=layout.width)
            group.append((offset, header))
            size += header.rows * header.width * 8 + header.heap
            row_count += header.rows
            if size >= piece:
                yield _decode_group(data, group, layout, name)
                group, size = [], 0
        offset += header.size
    if row_count:
        raise damaged_error(name, "it ends before its last block")
    if group:
        yield _decode_group(data, group, layout, name)


def _decode_group(data: memoryview, group: list[tuple[int, BlockHeader]], layout: RowLayout, name: str) -> Rows:
    words = np.empty((sum(header.rows for _, header in group), layout.width), np.uint64)
    heap = np.empty(sum(header.heap for _, header in group), np.uint8)
    blobs = kernel_layout(layout).blobs
    row, used = 0, 0
    for offset, header in group:
        part = words[row : row + header.rows]
        decode_into(data, offset, header, layout, name, part, heap[used : used + header.heap])
        if len(blobs) and used:
            rebase(address(part), header.rows, layout.width, blobs, used)
        row += header.rows
        used += header.heap
    return Rows(words, heap)
