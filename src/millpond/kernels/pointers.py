"""Memory access by address, for kernels that process rows from several files and buffers.

Runs are in mapped files, cached blocks and plain arrays; kernels access all of them by address. An address is a
`uint64`. Functions take a base address and a signed offset, so that kernels never mix signed and unsigned arithmetic,
which Numba would convert to floating point.
"""

# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.layout import INLINE, LENGTH

_BYTE = ir.IntType(8)
_WORD = ir.IntType(64)


def _pointer(builder: Any, base: Any, offset: Any, scale: int, pointee: Any) -> Any:
    scaled = builder.mul(offset, ir.Constant(_WORD, scale)) if scale != 1 else offset
    return builder.inttoptr(builder.add(base, scaled), pointee.as_pointer())


@intrinsic
def word(typing_context: Any, base: Any, index: Any) -> Any:
    """Load the 8-byte word number `index` from address `base` on; no alignment needed."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], args[1], 8, _WORD), align=1)

    return types.uint64(types.uint64, types.int64), generate


@intrinsic
def word_at(typing_context: Any, base: Any, offset: Any) -> Any:
    """Load the 8-byte word at `offset` bytes after address `base`; no alignment needed."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], args[1], 1, _WORD), align=1)

    return types.uint64(types.uint64, types.int64), generate


@intrinsic
def put_word(typing_context: Any, base: Any, index: Any, value: Any) -> Any:
    """Store the 8-byte word number `index` from address `base` on; no alignment needed."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(builder, args[0], args[1], 8, _WORD), align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.int64, types.uint64), generate


@intrinsic
def put_word_at(typing_context: Any, base: Any, offset: Any, value: Any) -> Any:
    """Store the 8-byte word at `offset` bytes after address `base`; no alignment needed."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(builder, args[0], args[1], 1, _WORD), align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.int64, types.uint64), generate


@intrinsic
def byte_at(typing_context: Any, base: Any, offset: Any) -> Any:
    """Load the byte at `offset` bytes after address `base`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], args[1], 1, _BYTE))

    return types.uint8(types.uint64, types.int64), generate


@intrinsic
def put_byte_at(typing_context: Any, base: Any, offset: Any, value: Any) -> Any:
    """Store the byte at `offset` bytes after address `base`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(builder, args[0], args[1], 1, _BYTE))
        return context.get_dummy_value()

    return types.void(types.uint64, types.int64, types.uint8), generate


@intrinsic
def advance(typing_context: Any, base: Any, offset: Any) -> Any:
    """Add `offset` bytes to address `base`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.add(args[0], args[1])

    return types.uint64(types.uint64, types.int64), generate


@intrinsic
def prefetch(typing_context: Any, base: Any, offset: Any) -> Any:
    """Prefetch the cache line at `offset` bytes after address `base`; invalid addresses are harmless."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], args[1], 1, _BYTE)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE.as_pointer()], kind)
        builder.call(function, [pointer, *(ir.Constant(number, n) for n in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.uint64, types.int64), generate


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes from address `source` to address `target`; they must not overlap."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = [builder.inttoptr(a, _BYTE.as_pointer()) for a in args[:2]]
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _BYTE.as_pointer(), _WORD, ir.IntType(1)])
        function = builder.module.declare_intrinsic(
            "llvm.memcpy", [_BYTE.as_pointer(), _BYTE.as_pointer(), _WORD], kind
        )
        builder.call(function, [*pointers, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64), generate


@kernel()
def same_bytes(left: int, right: int, size: int) -> bool:
    """Return whether `size` > 8 bytes at two addresses are equal."""
    whole = size >> 3
    for i in range(whole):
        if word(left, i) != word(right, i):
            return False
    return bool(word_at(left, size - 8) == word_at(right, size - 8))


@kernel()
def same_key(
    left: int,
    left_heap: int,
    right: int,
    right_heap: int,
    null_mask: int,
    key_start: int,
    key_stop: int,
    references: int,
) -> bool:
    """Compare the keys of two rows; their hashes are not compared.

    Numba counts references to arrays in every call that it does not inline, so functions called per row take
    addresses.

    Args:
        left, left_heap, right, right_heap: addresses of the rows' words and heaps.
        null_mask: the key's null bits.
        key_start, key_stop: first word of the key, and the word after the last.
        references: address of a byte per word: whether the word is a heap offset.
    """
    if (word(left, 2) ^ word(right, 2)) & null_mask != 0:
        return False
    for w in range(key_start, key_stop):
        a = word(left, w)
        b = word(right, w)
        if byte_at(references, w) != 0:
            size = np.int64(word(left, w - 1) & LENGTH)
            if size > INLINE:
                if not same_bytes(advance(left_heap, np.int64(a)), advance(right_heap, np.int64(b)), size):
                    return False
                continue
        if a != b:
            return False
    return True


def address(array: NDArray[Any]) -> int:
    """Return the address of an array's first byte. The caller has to keep the array alive while a kernel uses it."""
    return int(array.__array_interface__["data"][0])


@kernel(
    types.uint64(types.Array(types.uint64, 2, "A", readonly=True)),
    types.uint64(types.Array(types.uint8, 1, "A", readonly=True)),
)
def data_of(array: Any) -> int:
    """Return the address of the words of rows or of a heap, several times faster than `address`."""
    return np.uint64(array.ctypes.data)  # type: ignore[return-value]
