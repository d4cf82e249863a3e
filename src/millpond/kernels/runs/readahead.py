"""Readahead for mapped files: request pages before they are accessed, so that a batch's reads overlap."""

# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.pointers import advance

PAGE = mmap.PAGESIZE
_PAGE_MASK = np.uint64(PAGE - 1)
_WILL_NEED = 3  # MADV_WILLNEED
_SAMPLE = 8
_REQUEST = 128 << 10
"""Bytes per request: of a longer one, Linux reads only the device's preferred size."""

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


@intrinsic
def _will_need(typing_context: Any, start: Any, size: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64), ir.IntType(64), ir.IntType(32)])
        function = builder.module.globals.get("madvise") or ir.Function(builder.module, kind, "madvise")
        builder.call(function, [*args, ir.Constant(ir.IntType(32), _WILL_NEED)])
        return context.get_dummy_value()

    return types.void(types.uint64, types.int64), generate


@kernel("void(uint64, int64)")
def request_range(start: int, size: int) -> None:
    """Request all pages of an address range in mapped files, without waiting."""
    page = np.uint64(start) & ~_PAGE_MASK
    end = advance(np.uint64(start), size)
    while page < end:
        _will_need(page, min(np.int64(end - page), _REQUEST))
        page = advance(page, _REQUEST)


@kernel("int64(uint64[::1], int64, int64, int64)")
def request_pages(at: NDArray[np.uint64], before: int, after: int, gap: int) -> int:
    """Request the pages around addresses, without waiting.

    Args:
        at: addresses in mapped files, roughly ascending.
        before, after: bytes before and after each address that may be accessed.
        gap: largest gap, in bytes, between two requested pages that is requested as well.

    Returns:
        Number of requested ranges.
    """
    ranges = 0
    count = len(at)
    i = 0
    while i < count:
        start = advance(at[i], -before) & ~_PAGE_MASK
        end = advance(at[i], after) | _PAGE_MASK
        i += 1
        while i < count and at[i] >= start and advance(at[i], -before) & ~_PAGE_MASK <= advance(end, gap + 1):
            end = max(end, advance(at[i], after) | _PAGE_MASK)
            i += 1
        request_range(start, np.int64(end - start) + 1)
        ranges += 1
    return ranges


def probably_cached(at: NDArray[np.uint64]) -> bool:
    """Return whether the pages of a sample of addresses in mapped files are all in memory."""
    residency = ctypes.create_string_buffer(1)
    for address in at[:: max(1, len(at) // _SAMPLE)].tolist():
        if _mincore(address & ~(PAGE - 1), PAGE, residency) == 0 and not residency.raw[0] & 1:
            return False
    return True
