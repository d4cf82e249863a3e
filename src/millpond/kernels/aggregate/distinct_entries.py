"""Entries of distinct-value tables: their hash over group and values, and the filters that they have passed."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import BYTES_IN, HALF, I64, INTS_IN, UINTS, WORDS, load64, load_up_to_8
from millpond.kernels.mix import mix64
from millpond.layout import INLINE, LENGTH

Array = NDArray[Any]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@helper
def _step(state: int, word: int) -> int:
    state = (state ^ word) * _FACTOR
    return state ^ (state >> HALF)


@kernel(types.void(WORDS, BYTES_IN, I64, I64, BYTES_IN))
def hash_entries(words: Array, heap: Array, start: int, stop: int, references: Array) -> None:
    """Replace each row's hash by its mix with the null bits and the columns in words `start` to `stop`.

    The result is stored with the state, so the formula is part of the format.

    Args:
        words, heap: the rows and the heap of their long values.
        start, stop: first word of the columns, and the word after the last.
        references: 1 for each word that is the second of a byte string.
    """
    for i in range(words.shape[0]):
        state = _step(words[i, 0], words[i, 2])
        for w in range(start, stop):
            if references[w] == 0:
                state = _step(state, words[i, w])
                continue
            length = np.int64(words[i, w - 1] & LENGTH)
            if length <= INLINE:
                state = _step(state, words[i, w])
                continue
            position = np.int64(words[i, w])
            k = 4
            while k + 8 <= length:
                state = _step(state, load64(heap, position + k))
                k += 8
            state = _step(state, load_up_to_8(heap, position + k, length - k))
        words[i, 0] = mix64(state)


@kernel(types.void(WORDS, INTS_IN, I64, UINTS))
def add_passed_filters(words: Array, rows: Array, offset: int, passed: Array) -> None:
    """Set bits in a word of rows.

    Args:
        words, rows: the table's rows, and the ids of those to update.
        offset: the word.
        passed: the bits to set; overwritten with those that were not set before.
    """
    for i in range(rows.size):
        before = words[rows[i], offset]
        new = passed[i] & ~before
        passed[i] = new
        words[rows[i], offset] = before | new
