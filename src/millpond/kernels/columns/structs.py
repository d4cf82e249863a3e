"""Structs as byte strings: the words of a row, null bits first, then its long values, found by their offset."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.memory import BYTES, BYTES_IN, INTS, INTS_IN, WORDS, copy_bytes, load64, store64
from millpond.layout import INLINE, LENGTH, NULLS

Array = NDArray[Any]


@kernel(types.void(WORDS, INTS_IN, INTS))
def packed_ends(words: Array, blobs: Array, ends: Array) -> None:
    """Where the byte strings of rows end (`ends[i + 1]`), one after the other; `blobs`: first words of byte columns."""
    fixed = 8 * (words.shape[1] - NULLS)
    ends[0] = 0
    for i in range(words.shape[0]):
        size = fixed
        for c in range(blobs.size):
            length = np.int64(words[i, blobs[c]] & LENGTH)
            if length > INLINE:
                size += length
        ends[i + 1] = ends[i] + size


@kernel(types.void(WORDS, BYTES_IN, INTS_IN, INTS_IN, BYTES))
def pack(words: Array, heap: Array, blobs: Array, ends: Array, out: Array) -> None:
    """Write the byte strings of rows, whose long values lie in `heap`; `out` has 8 bytes to spare."""
    fixed = 8 * (words.shape[1] - NULLS)
    for i in range(words.shape[0]):
        start = ends[i]
        for w in range(NULLS, words.shape[1]):
            store64(out, start + 8 * (w - NULLS), words[i, w])
        at = fixed
        for c in range(blobs.size):
            length = np.int64(words[i, blobs[c]] & LENGTH)
            if length > INLINE:
                copy_bytes(out, start + at, heap, np.int64(words[i, blobs[c] + 1]), length)
                store64(out, start + 8 * (blobs[c] + 1 - NULLS), np.uint64(at))
                at += length


@kernel(types.void(BYTES_IN, INTS_IN, INTS_IN, WORDS))
def unpack(data: Array, ends: Array, blobs: Array, words: Array) -> None:
    """The rows of byte strings; their long values stay in `data`, which has 8 bytes to spare."""
    for i in range(words.shape[0]):
        start = ends[i]
        words[i, 0] = 0
        words[i, 1] = 0
        for w in range(NULLS, words.shape[1]):
            words[i, w] = load64(data, start + 8 * (w - NULLS))
        for c in range(blobs.size):
            if np.int64(words[i, blobs[c]] & LENGTH) > INLINE:
                words[i, blobs[c] + 1] += np.uint64(start)
