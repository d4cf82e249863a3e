"""State as Parquet files, for whoever has no Millpond: read without Spark, written in pieces.

    TARGET/operator-0/part-00000.parquet    one file for each partition
    TARGET/operator-1/count/part-00000.parquet    of a processor, for each of its variables
    TARGET/_SUCCESS                         written last; without it, the export was interrupted

Memory holds one row group. A file is made on the local disk and goes to the target as a whole.
"""

from __future__ import annotations

import mmap
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from millpond.errors import SettingError, UsageError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem, open_filesystem
from millpond.files.backends.local import LocalFiles
from millpond.files.backends.patience import put_own
from millpond.files.disk import reason, remedy
from millpond.slot.reading.reader import StateOperator, StateReader
from millpond.spec.operators import Field
from millpond.spec.types import parse_type

SUCCESS = "_SUCCESS"
"""Says that the export is whole, as after a batch write of Spark's."""

STARTED = "_EXPORTING"
"""Says that somebody writes here, or was interrupted; readers of Parquet pass over such names."""

_GROUP_ROWS = 1 << 20
_GROUP_BYTES = 64 << 20
_PIECE = 4 << 20


@dataclass(frozen=True)
class Export:
    """What was written: the target's URL, the version, and the number of files and rows."""

    target: str
    version: int
    files: int
    rows: int


def export_state(location: str, target: str, version: int | None = None, operator: int | None = None) -> Export:
    """Write the state of a version to Parquet files, with the columns that `read_state` shows.

    Args:
        location: of the state, as for `StateReader`. target: path or URL of a folder without any file.
        version: the state after batch `version - 1`; the newest durable one by default.
        operator: only this one; all by default.

    Raises:
        UsageError: something is at the target; there is no such version or operator; Parquet lacks a column's type.
        StateDamagedError: a file of the version is missing or altered.
        SettingError, TransientError: the target cannot be written to.
    """
    if not target.strip():
        raise UsageError("The target of the export is empty.", action="Name a folder.")
    reader = StateReader(location)
    chosen = reader.choose(version)
    if operator is None:
        operators = [one for one in reader.operators_at(chosen) if one.spec.stateful]
    else:
        operators = [reader.choose_operator(chosen, operator)]
    partitions = reader.partitions_at(chosen)
    parts = [(one, name, *one.part(name)) for one in operators for name in (one.spec.parts or (None,))]
    schemas = [_schema(one, fields) for one, _, _, fields in parts]
    files = open_filesystem(target)
    if files.list(""):
        raise _taken(files)
    try:
        put_own(files, STARTED, [uuid.uuid4().hex.encode()])
    except AlreadyExistsError:
        raise _taken(files) from None
    rows = 0
    for (one, name, table, _), schema in zip(parts, schemas, strict=True):
        folder = f"operator-{one.index}" + (f"/{quote(name, safe='')}" if name else "")
        for partition in range(partitions):
            with _scratch() as file:
                rows += _write(reader.read(one.index, partition, chosen, table), schema, file)
                _send(file, files, f"{folder}/part-{partition:05d}.parquet")
    files.put(SUCCESS, [b""])
    files.delete(STARTED)
    if isinstance(files, LocalFiles):
        files.tidy()
    return Export(files.url, chosen, len(parts) * partitions, rows)


def _schema(operator: StateOperator, fields: Sequence[Field]) -> pa.Schema:
    schema = pa.schema([(field.name, parse_type(field.type).arrow) for field in fields])
    try:
        pq.ParquetWriter(pa.BufferOutputStream(), schema).close()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise UsageError(
            f"The state of '{operator.title}' has a column of a type that Parquet does not have ({error}).",
            action="Name other operators by --operator, or read it with millpond.read_state.",
            operator=str(operator.index),
        ) from error
    return schema


def _scratch() -> BinaryIO:
    try:
        return tempfile.TemporaryFile(prefix="millpond-export-")
    except OSError as error:
        raise SettingError(
            f"A file cannot be made on the local disk: {reason(error)}.",
            action=_remedy(error),
            file=tempfile.gettempdir(),
        ) from error


def _write(batches: Iterator[pa.RecordBatch], schema: pa.Schema, file: BinaryIO) -> int:
    """Write batches to a local file as row groups; returns how many rows they have.

    Raises:
        SettingError: the disk is full.
    """
    rows = 0
    try:
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for group in _groups(batches):
                writer.write_table(pa.Table.from_batches(group).cast(schema), row_group_size=_GROUP_ROWS)
                rows += sum(batch.num_rows for batch in group)
        file.flush()
    except OSError as error:
        raise SettingError(
            f"A file cannot be written to the local disk: {reason(error)}.",
            action=_remedy(error),
            file=tempfile.gettempdir(),
        ) from error
    return rows


def _remedy(error: OSError) -> str:
    return remedy(error, tempfile.gettempdir(), "point TMPDIR to a larger disk")


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Batches that make up a row group together: it is large enough to be read fast, and fits in memory."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield held
            held, rows, size = [], 0, 0
    if held:
        yield held


def _send(file: BinaryIO, files: FileSystem, name: str) -> None:
    """Put a local file; its pages are mapped, and in memory only as they go out."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        pieces: Sequence[memoryview] = [view[start : start + _PIECE] for start in range(0, len(view), _PIECE)]
        try:
            files.put(name, pieces)
        finally:
            for piece in pieces:
                piece.release()


def _taken(files: FileSystem) -> UsageError:
    return UsageError(
        "There is something here already.",
        action="Name another folder. What an export that was interrupted has left can be deleted: it has no _SUCCESS.",
        file=files.url,
    )
