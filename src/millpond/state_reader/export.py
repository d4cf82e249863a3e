"""Export of state to Parquet files, for readers without Millpond; runs without Spark and with bounded memory.

    TARGET/operator-0/part-00000.parquet    one file for each partition
    TARGET/operator-1/count/part-00000.parquet    of a processor, for each of its variables
    TARGET/_SUCCESS                         written last; without it, the export was interrupted

Memory holds one row group. Each file is built on the local disk and then uploaded as a whole.
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
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem
from millpond.files.backends.local import LocalFiles
from millpond.files.backends.retry import put_once
from millpond.files.disk import reason, remedy
from millpond.files.locations.opening import open_filesystem
from millpond.spec.operators import Field
from millpond.spec.types import parse_type
from millpond.state_reader.reader import StateOperator, StateReader

SUCCESS = "_SUCCESS"
"""Name of the file that marks a complete export, as after Spark's batch writes."""

STARTED = "_EXPORTING"
"""Name of the file that marks a running or interrupted export; Parquet readers skip names like it."""

_GROUP_ROWS = 1 << 20
_GROUP_BYTES = 64 << 20
_PIECE = 4 << 20


@dataclass(frozen=True)
class Export:
    """Result of an export: the target's URL, the version, and the number of files and rows."""

    target: str
    version: int
    files: int
    rows: int


def export_state(location: str, target: str, version: int | None = None, operator: int | None = None) -> Export:
    """Write the state of a version to Parquet files, with the columns of `read_state`.

    Args:
        location: location of the state, as for `StateReader`.
        target: path or URL of a folder without any file.
        version: the state after batch `version - 1`; the newest durable one by default.
        operator: index of the only operator to export; all by default.

    Raises:
        UsageError: the target is not empty, there is no such version or operator, or Parquet lacks a column's type.
        StateDamagedError: a file of the version is missing or altered.
        SettingError, TransientError: the target cannot be written to.
    """
    if not target.strip():
        raise UsageError("The target of the export is empty.", action="Name a folder.")
    reader = StateReader(location)
    chosen = reader.choose(version)
    if operator is None:
        operators = [operator_ for operator_ in reader.operators_at(chosen) if operator_.spec.facts.stateful]
    else:
        operators = [reader.choose_operator(chosen, operator)]
    partitions = reader.partitions_at(chosen)
    parts = [
        (operator_, name, *operator_.part(name))
        for operator_ in operators
        for name in (operator_.spec.parts or (None,))
    ]
    schemas = [_schema(operator_, fields) for operator_, _, _, fields in parts]
    files = open_filesystem(target)
    if files.list(""):
        raise _target_not_empty_error(files)
    try:
        # Put-if-absent: of two exports to one target, one is refused before it writes anything.
        put_once(files, STARTED, [uuid.uuid4().hex.encode()])
    except AlreadyExistsError:
        raise _target_not_empty_error(files) from None
    rows = 0
    for (operator_, name, table, _), schema in zip(parts, schemas, strict=True):
        folder = f"operator-{operator_.index}" + (f"/{quote(name, safe='')}" if name else "")
        for partition in range(partitions):
            with _temporary_file() as file:
                rows += _write(reader.read(operator_.index, partition, chosen, table), schema, file)
                _upload(file, files, f"{folder}/part-{partition:05d}.parquet")
    files.put(SUCCESS, [b""])
    files.delete(STARTED)
    if isinstance(files, LocalFiles):
        files.remove_empty_staging()
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


def _temporary_file() -> BinaryIO:
    try:
        return tempfile.TemporaryFile(prefix="millpond-export-")
    except OSError as error:
        raise SettingError(
            f"A file cannot be made on the local disk: {reason(error)}.",
            action=_remedy(error),
            file=tempfile.gettempdir(),
        ) from error


def _write(batches: Iterator[pa.RecordBatch], schema: pa.Schema, file: BinaryIO) -> int:
    """Write batches to a local file as row groups; return the number of rows.

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
    """Combine batches to row groups that are large enough for fast reads and fit in memory."""
    group: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


def _upload(file: BinaryIO, files: FileSystem, name: str) -> None:
    """Upload a local file; its pages are mapped, so they are in memory only while they are sent."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        pieces: Sequence[memoryview] = [view[start : start + _PIECE] for start in range(0, len(view), _PIECE)]
        try:
            files.put(name, pieces)
        finally:
            for piece in pieces:
                piece.release()


def _target_not_empty_error(files: FileSystem) -> UsageError:
    return UsageError(
        "There is something here already.",
        action="Name another folder. What an export that was interrupted has left can be deleted: it has no _SUCCESS.",
        file=files.url,
    )
