"""The memory of this process: how much it has, and how the C library is made to give back what is freed."""

from __future__ import annotations

import ctypes
import mmap

import pyarrow as pa

_libc = ctypes.CDLL(None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def anonymous() -> int:
    """Bytes of anonymous memory that this process has."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def share_one_heap() -> None:
    """Let all threads, and Arrow, allocate from one heap. To be called before there are threads.

    With a heap for each thread, what one has freed is of no use to the others, and the process grows by all of them.
    """
    _libc.mallopt(_ARENA_MAX, 1)
    pa.set_memory_pool(pa.system_memory_pool())


def give_back_above(size: int) -> None:
    """From now on, give larger allocations back when they are freed, and so the heap's end when it is free."""
    _libc.mallopt(_MMAP_THRESHOLD, size)
    _libc.mallopt(_TRIM_THRESHOLD, size)


def trim() -> None:
    """Give back every free page of the heap."""
    _libc.malloc_trim(0)
