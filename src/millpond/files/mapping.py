"""Read-only mappings of local files that keep no descriptor open."""

from __future__ import annotations

import ctypes
import errno

import numpy as np
import pyarrow as pa

from millpond.kernels.pointers import address

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(path: str) -> memoryview:
    """Map a whole file. The mapping ends with its last view.

    Arrow maps the file, because Python's `mmap` keeps a descriptor for each mapping, and a slot maps many files.

    Raises:
        OSError: the file cannot be opened or mapped. It has an errno.
    """
    try:
        with pa.memory_map(path) as file:
            size = file.size()
            if not size:
                return memoryview(b"")
            # Arrow asks the kernel to read ahead what it returns. One byte is enough to keep the whole mapping.
            first = file.read_buffer(1)
            return memoryview(pa.foreign_buffer(first.address, size, first)).cast("B")
    except OSError as error:
        # Arrow gives no errno if the mapping fails, which is for lack of memory or because of too many mappings.
        raise OSError(error.errno or errno.ENOMEM, str(error), path) from error


def advise(mapped: memoryview, advice: int) -> None:
    """Give the kernel a hint for a whole mapping, such as `mmap.MADV_RANDOM`. A refusal only costs speed."""
    _madvise(address(np.frombuffer(mapped, np.uint8)), len(mapped), advice)
