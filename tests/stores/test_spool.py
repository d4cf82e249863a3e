"""Spools: batches in memory and in a file, and a disk that is full."""

from __future__ import annotations

import errno
import io
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest

from millpond.stores.memory.spool import Spool

ROWS = pa.RecordBatch.from_pydict({"k": pa.array([1, 2, 3], pa.int64())})


class FullDisk(io.RawIOBase):
    """A file on a disk without space."""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_does_not_keep_a_spool_from_being_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", lambda **_: io.BufferedWriter(FullDisk()))
        spool.add(ROWS)
        spool.clear()  # closes the file, which flushes what it has buffered
    assert list(spool.read()) == []
    spool.add(ROWS)
    assert list(spool.read()) == [ROWS]
    spool.clear()
