"""Record batches that are kept until they are read: in memory, then in a file without a name."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa


class Spool:
    """Record batches of one schema, to be read once all are there.

    Args:
        directory: where the file goes; None for the system's directory of temporary files.
        memory: bytes kept in memory before there is a file.
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
        """Keep one batch."""
        if self._writer is None and self._bytes + batch.nbytes <= self._memory:
            self._held.append(batch)
            self._bytes += batch.nbytes
            return
        if self._writer is None:
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
            self._writer = pa.ipc.new_stream(self._file, batch.schema)
        self._writer.write_batch(batch)

    def read(self) -> Iterator[pa.RecordBatch]:
        """All batches, in order, any number of times; none is added any more."""
        yield from self._held
        if self._file is None:
            return
        if self._written is None:
            self._writer.close()
            self._file.flush()
            self._written = pa.py_buffer(mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ))
        with pa.ipc.open_stream(self._written) as reader:
            yield from reader

    def close(self) -> None:
        """Let go of everything."""
        self._held.clear()
        self._written = None
        if self._file is not None:
            self._file.close()
