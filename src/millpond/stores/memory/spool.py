"""Record batches kept until they are read: in memory first, then in an unnamed file."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa


class Spool:
    """Record batches of one schema, read once all are added; then, after `clear`, the next ones.

    Args:
        directory: directory of the file; None for the system's directory of temporary files.
        memory: bytes kept in memory before a file is used.
    """

    def __init__(self, directory: Path | None, memory: int) -> None:
        self._directory = directory
        self._memory = memory
        self._held: list[pa.RecordBatch] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self._writer: Any = None
        self._written: pa.Buffer | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch."""
        # Once there is a file, all later batches go there, which keeps their order.
        if self._writer is None and self._bytes + batch.nbytes <= self._memory:
            self._held.append(batch)
            self._bytes += batch.nbytes
            return
        if self._writer is None:
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
            self._writer = pa.ipc.new_stream(self._file, batch.schema)
        self._writer.write_batch(batch)

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yield all batches in order; may be called several times, but no batch may be added afterwards."""
        yield from self._held
        if self._file is None:
            return
        if self._written is None:
            self._writer.close()
            self._file.flush()
            self._written = pa.py_buffer(mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ))
        with pa.ipc.open_stream(self._written) as reader:
            yield from reader

    def clear(self) -> None:
        """Release the batches and the file."""
        if self._file is not None:
            with suppress(OSError):  # e.g. a full disk: `close` flushes bytes that are dropped anyway
                self._file.close()
        self._held, self._bytes = [], 0
        self._file = self._writer = self._written = None
