"""Memory primitives for kernels: unaligned 8-byte loads, stores and copies, and the bits of doubles.

Numba provides no such primitives, and byte loops cost several times as much per row.
"""


# mypy: disable-error-code="untyped-decorator,import-untyped,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from millpond.kernels.compiled import kernel

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


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.IntType(64).as_pointer())


@intrinsic
def load64(typingctx: Any, array: Any, index: Any) -> Any:
    """`load64(bytes, i)`: load eight bytes from `i` on as a little-endian word; no bounds check."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load(pointer, align=1)

    return types.uint64(array, types.int64), codegen


@intrinsic
def store64(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """`store64(bytes, i, word)`: store a word as eight little-endian bytes from `i` on; no bounds check."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), codegen


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


@kernel(types.void(BYTES, I64, BYTES_IN, I64, I64))
def copy_bytes(target: Any, at: int, source: Any, start: int, length: int) -> None:
    """Copy bytes between arrays that do not overlap."""
    k = 0
    while k + 8 <= length:
        store64(target, at + k, load64(source, start + k))
        k += 8
    while k < length:
        target[at + k] = source[start + k]
        k += 1
