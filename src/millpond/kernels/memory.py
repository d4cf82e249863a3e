"""Loads, stores and copies in arrays, for kernels (`kernels.pointers` has them for addresses).

Argument types of kernels, and the bits of doubles, are here, too.
"""

# mypy: disable-error-code="untyped-decorator,import-untyped,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from millpond.kernels.compiled import inlined, kernel
from millpond.kernels.pointers import advance, copy_bytes, put_word_at, word_at

# Argument types of kernels: arrays that are written to, and with the suffix `_IN` read-only ones.
WORDS = types.Array(types.uint64, 2, "C")
WORDS_IN = types.Array(types.uint64, 2, "C", readonly=True)
BYTES = types.Array(types.uint8, 1, "C")
BYTES_IN = types.Array(types.uint8, 1, "C", readonly=True)
SHORTS = types.Array(types.int32, 1, "C")
SHORTS_IN = types.Array(types.int32, 1, "C", readonly=True)
UINTS = types.Array(types.uint64, 1, "C")
INTS = types.Array(types.int64, 1, "C")
INTS_IN = types.Array(types.int64, 1, "C", readonly=True)
FLOATS = types.Array(types.float64, 1, "C")
FLOATS_IN = types.Array(types.float64, 1, "C", readonly=True)
I64 = types.int64
U64 = types.uint64

HALF = np.uint64(32)
LOW_HALF = np.uint64(0xFFFFFFFF)
"""For words that hold two numbers: bits of each, and mask of the lower one."""


@intrinsic
def data_at(typingctx: Any, array: Any) -> Any:
    """`data_at(array)`: the address of the array's first byte; counts no references, unlike `array.ctypes.data`.

    The array must live while the address is used; those that are arguments of a kernel do.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.uint64(array), codegen


@inlined
def load64(data: Any, index: int) -> int:
    """Load eight bytes from `index` on as a little-endian word; no bounds check."""
    return word_at(data_at(data), index)


@inlined
def store64(data: Any, index: int, word: int) -> None:
    """Store a word as eight little-endian bytes from `index` on; no bounds check."""
    put_word_at(data_at(data), index, word)


@inlined
def copy_between(target: Any, at: int, source: Any, start: int, length: int) -> None:
    """Copy bytes between arrays that do not overlap."""
    copy_bytes(advance(data_at(target), at), advance(data_at(source), start), length)


@intrinsic
def float_bits(typingctx: Any, value: Any) -> Any:
    """`float_bits(x)`: the 64 bits of a double."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.uint64(types.float64), codegen


@intrinsic
def bits_float(typingctx: Any, value: Any) -> Any:
    """`bits_float(word)`: the double with these bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.uint64), codegen


@kernel(U64(BYTES_IN, I64, I64))
def load_up_to_8(data: Any, start: int, length: int) -> int:
    """Load `length` ≤ 8 bytes from `start` on as a little-endian word, zero-padded; does not read beyond `data`."""
    if start + 8 <= data.size:
        word = load64(data, start)
        if length < 8:
            word &= (types.uint64(1) << types.uint64(8 * length)) - types.uint64(1)
        return word
    word = types.uint64(0)
    for k in range(length):
        word |= types.uint64(data[start + k]) << types.uint64(8 * k)
    return word
