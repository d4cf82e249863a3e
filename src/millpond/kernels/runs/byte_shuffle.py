"""Byte shuffling: groups the bytes of equal position in all rows, which makes rows more compressible."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.memory import HALF
from millpond.kernels.pointers import advance, byte_at, copy_bytes, put_byte_at, put_word_at, word, word_at
from millpond.kernels.runs.gather import copy_row, stray

_Eight = tuple[int, int, int, int, int, int, int, int]
_LOW32 = np.uint64(0x00000000FFFFFFFF)
_LOW16 = np.uint64(0x0000FFFF0000FFFF)
_LOW8 = np.uint64(0x00FF00FF00FF00FF)
_16 = np.uint64(16)
_8 = np.uint64(8)


@kernel()
def _transpose(a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int) -> _Eight:
    # Transpose an 8 × 8 matrix of bytes in eight words by swapping ever smaller halves (Hacker's Delight, 7-3).
    a, e = (a & _LOW32) | (e << HALF), (a >> HALF) | (e & ~_LOW32)
    b, f = (b & _LOW32) | (f << HALF), (b >> HALF) | (f & ~_LOW32)
    c, g = (c & _LOW32) | (g << HALF), (c >> HALF) | (g & ~_LOW32)
    d, h = (d & _LOW32) | (h << HALF), (d >> HALF) | (h & ~_LOW32)
    a, c = (a & _LOW16) | ((c & _LOW16) << _16), ((a >> _16) & _LOW16) | (c & ~_LOW16)
    b, d = (b & _LOW16) | ((d & _LOW16) << _16), ((b >> _16) & _LOW16) | (d & ~_LOW16)
    e, g = (e & _LOW16) | ((g & _LOW16) << _16), ((e >> _16) & _LOW16) | (g & ~_LOW16)
    f, h = (f & _LOW16) | ((h & _LOW16) << _16), ((f >> _16) & _LOW16) | (h & ~_LOW16)
    a, b = (a & _LOW8) | ((b & _LOW8) << _8), ((a >> _8) & _LOW8) | (b & ~_LOW8)
    c, d = (c & _LOW8) | ((d & _LOW8) << _8), ((c >> _8) & _LOW8) | (d & ~_LOW8)
    e, f = (e & _LOW8) | ((f & _LOW8) << _8), ((e >> _8) & _LOW8) | (f & ~_LOW8)
    g, h = (g & _LOW8) | ((h & _LOW8) << _8), ((g >> _8) & _LOW8) | (h & ~_LOW8)
    return a, b, c, d, e, f, g, h


@kernel("void(uint64, int64, int64, uint64)")
def shuffle(rows: int, count: int, width: int, planes: int) -> None:
    """Write `count` rows of `width` words as `8 × width` planes of `count` bytes, from one address to another."""
    whole = count & ~7
    for w in range(width):
        p = w * 8 * count
        for i in range(0, whole, 8):
            first = i * width + w
            a, b, c, d, e, f, g, h = _transpose(
                word(rows, first),
                word(rows, first + width),
                word(rows, first + 2 * width),
                word(rows, first + 3 * width),
                word(rows, first + 4 * width),
                word(rows, first + 5 * width),
                word(rows, first + 6 * width),
                word(rows, first + 7 * width),
            )
            put_word_at(planes, p + i, a)
            put_word_at(planes, p + count + i, b)
            put_word_at(planes, p + 2 * count + i, c)
            put_word_at(planes, p + 3 * count + i, d)
            put_word_at(planes, p + 4 * count + i, e)
            put_word_at(planes, p + 5 * count + i, f)
            put_word_at(planes, p + 6 * count + i, g)
            put_word_at(planes, p + 7 * count + i, h)
        for i in range(whole, count):
            for k in range(8):
                put_byte_at(planes, p + k * count + i, byte_at(rows, (i * width + w) * 8 + k))


@kernel("void(uint64, int64, int64, uint64)")
def unshuffle(planes: int, count: int, width: int, rows: int) -> None:
    """Undo `shuffle`, from one address to another."""
    whole = count & ~7
    for w in range(width):
        p = w * 8 * count
        for i in range(0, whole, 8):
            a, b, c, d, e, f, g, h = _transpose(
                word_at(planes, p + i),
                word_at(planes, p + count + i),
                word_at(planes, p + 2 * count + i),
                word_at(planes, p + 3 * count + i),
                word_at(planes, p + 4 * count + i),
                word_at(planes, p + 5 * count + i),
                word_at(planes, p + 6 * count + i),
                word_at(planes, p + 7 * count + i),
            )
            target = (i * width + w) * 8
            stride = width * 8
            put_word_at(rows, target, a)
            put_word_at(rows, target + stride, b)
            put_word_at(rows, target + 2 * stride, c)
            put_word_at(rows, target + 3 * stride, d)
            put_word_at(rows, target + 4 * stride, e)
            put_word_at(rows, target + 5 * stride, f)
            put_word_at(rows, target + 6 * stride, g)
            put_word_at(rows, target + 7 * stride, h)
        for i in range(whole, count):
            for k in range(8):
                put_byte_at(rows, (i * width + w) * 8 + k, byte_at(planes, p + k * count + i))


@kernel("void(uint64, uint64, int64[::1], int64[::1], int64, int64[::1], uint64[::1], uint64[::1])")
def pack(
    rows: int,
    heap: int,
    counts: NDArray[np.int64],
    heaps: NDArray[np.int64],
    width: int,
    blobs: NDArray[np.int64],
    raw_at: NDArray[np.uint64],
    shuffled_at: NDArray[np.uint64],
) -> None:
    """Copy contiguous rows into blocks, each with its own heap behind its words.

    Args:
        rows, heap: addresses of the first row, and of the rows' heap.
        counts: rows of each block.
        heaps: bytes of long values of each block.
        width: words of a row.
        blobs: first words of byte columns.
        raw_at: target addresses of the blocks; empty if rows without long values need not be copied.
        shuffled_at: target addresses of the blocks with shuffled words (see `shuffle`); empty if not needed.
    """
    stride = width * 8
    source = rows
    for b in range(len(counts)):
        words, behind = source, counts[b] * stride
        if len(raw_at):
            words = raw_at[b]
            used = 0
            for i in range(counts[b]):
                target = advance(words, i * stride)
                used = copy_row(advance(source, i * stride), heap, target, width, blobs, advance(words, behind), used)
        if len(shuffled_at):
            shuffle(words, counts[b], width, shuffled_at[b])
            copy_bytes(advance(shuffled_at[b], behind), advance(words, behind), heaps[b])
        source = advance(source, behind)


@kernel("int64(uint64[::1], boolean[::1], int64[::1], int64[::1], int64, int64[::1], uint64[::1], uint64[::1])")
def unpack(
    plain_at: NDArray[np.uint64],
    shuffled: NDArray[np.bool_],
    counts: NDArray[np.int64],
    heaps: NDArray[np.int64],
    width: int,
    blobs: NDArray[np.int64],
    words_at: NDArray[np.uint64],
    heap_at: NDArray[np.uint64],
) -> int:
    """Copy decompressed blocks to the addresses of their words and heaps.

    Args:
        plain_at: address of each block, words then heap.
        shuffled: whether the block's words are shuffled (see `shuffle`).
        counts: rows of each block.
        heaps: bytes of each block's heap.
        width: words of a row.
        blobs: first words of byte columns.
        words_at, heap_at: target addresses of each block's words and heap.

    Returns:
        The first block with a long value outside of its heap, or −1.
    """
    for b in range(len(plain_at)):
        size = counts[b] * width * 8
        if shuffled[b]:
            unshuffle(plain_at[b], counts[b], width, words_at[b])
        else:
            copy_bytes(words_at[b], plain_at[b], size)
        copy_bytes(heap_at[b], advance(plain_at[b], size), heaps[b])
        if stray(words_at[b], counts[b], width, blobs, np.uint64(heaps[b])) >= 0:
            return b
    return -1
