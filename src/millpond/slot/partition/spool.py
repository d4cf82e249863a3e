"""Keeps an attempt's input until it is known whether it is needed: in memory, then in a file without a name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa


class Spool:
    """Record batches of one schema, to be read once.

    Args:
        directory: where the file goes.
        memory: bytes kept in memory before there is a file.
    """

    def __init__(self, directory: Path, memory: int) -> None:
        self._directory = directory
        self._memory = memory
        self._held: list[pa.RecordBatch] = []
        self._bytes = 0
        self._file: Any = None
        self._writer: Any = None

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
        """All batches, in order."""
        yield from self._held
        if self._writer is not None:
            self._writer.close()
            self._file.seek(0)
            with pa.ipc.open_stream(self._file) as reader:
                yield from reader

    def close(self) -> None:
        """Let go of everything."""
        self._held.clear()
        if self._file is not None:
            self._file.close()
