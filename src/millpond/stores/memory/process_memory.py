"""Memory of this process: its size, and settings that make the C library return freed memory."""

from __future__ import annotations

import ctypes
import mmap

import pyarrow as pa

_libc = ctypes.CDLL(None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def anonymous_bytes() -> int:
    """Return the bytes of anonymous memory of this process."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def share_one_heap() -> None:
    """Let all threads, and Arrow, allocate from one heap. Call it before any thread starts.

    With a heap for each thread, memory freed by one thread is unusable by the others, and the process grows by their
    sum.
    """
    _libc.mallopt(_ARENA_MAX, 1)
    pa.set_memory_pool(pa.system_memory_pool())


def set_trim_threshold(size: int) -> None:
    """Return allocations of at least `size` bytes when they are freed, and the heap's end when it is free."""
    _libc.mallopt(_MMAP_THRESHOLD, size)
    _libc.mallopt(_TRIM_THRESHOLD, size)


def trim() -> None:
    """Return every free page of the heap to the system."""
    _libc.malloc_trim(0)
