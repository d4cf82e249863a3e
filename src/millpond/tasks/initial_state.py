"""Initial state of a query: rows by partition, in files beside the state, for the first batch.

A separate Spark job writes the files before the first batch; slots read them. A **list** names the files that count:
those of the task attempts that Spark has accepted. All files belong to one run of the query. A restart before the first
batch is committed writes them again. After that commit they are not needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator

import msgspec
import pyarrow as pa
import xxhash

from millpond.checkpoint.formats.documents import FORMAT, digits, read_document, write_document
from millpond.checkpoint.generation import INITIAL
from millpond.errors import StateDamagedError, TransientError
from millpond.files.backends.filesystem import FileSystem
from millpond.tasks.operator_task import OperatorTask

_FILE_BYTES = 16 << 20
"""Approximate bytes of rows per file."""


class Portion(msgspec.Struct, array_like=True):
    """One file with rows of one partition.

    Attributes:
        partition: the partition's number.
        file: name of the Arrow stream.
        checksum: XXH3 of the file, in hexadecimal digits.
    """

    partition: int
    file: str
    checksum: str


class _List(msgspec.Struct):
    """The files of an operator's initial state."""

    portions: list[Portion]
    format: int = FORMAT


def write_list(files: FileSystem, task: OperatorTask, portions: list[Portion]) -> None:
    """Write the list of the files with an operator's initial state.

    Args:
        files: the location's `millpond/` folder.
        task: the operator.
        portions: all files.
    """
    write_document(files, f"{_prefix(task.initial)}{task.operator}.json", _List(portions))


def write_rows(
    files: FileSystem, task: OperatorTask, partition: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[Portion]:
    """Write rows of one partition to files, holding at most one file's rows in memory.

    Args:
        files: the location's `millpond/` folder.
        task: the operator.
        partition: the partition's number.
        batches: its rows: the column `__hash`, then the columns of the spec.

    Yields:
        The files written.
    """

    def put(name: str) -> Portion:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, waiting[0].schema) as stream:
            for batch in waiting:
                stream.write_batch(batch)
        content = sink.getvalue()
        files.put(name, [content])
        return Portion(partition, name, xxhash.xxh3_64_hexdigest(content))

    # Each attempt has names of its own; the list later names the files of the attempt that Spark accepted.
    attempt = f"{_prefix(task.initial)}{task.operator}-{uuid.uuid4().hex}"
    waiting: list[pa.RecordBatch] = []
    number = size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= _FILE_BYTES:
            yield put(f"{attempt}-{number}.arrow")
            waiting, size, number = [], 0, number + 1
    if waiting:
        yield put(f"{attempt}-{number}.arrow")


def read_rows(files: FileSystem, task: OperatorTask, partition: int) -> Iterator[pa.RecordBatch]:
    """Read the initial rows of a partition: the column `__hash`, then the columns of the spec.

    Raises:
        TransientError: the files are gone or damaged.
    """
    name = f"{_prefix(task.initial)}{task.operator}.json"
    try:
        portions = read_document(files, name, _List).portions
        for portion in (part for part in portions if part.partition == partition):
            name = portion.file
            content = files.get(name)
            if xxhash.xxh3_64_hexdigest(content) != portion.checksum:
                raise StateDamagedError("the file's checksum does not match")
            with pa.ipc.open_stream(pa.py_buffer(content)) as stream:
                yield from stream
    except StateDamagedError as error:
        raise TransientError(
            f"The initial state cannot be read ({error}).",
            action="Start the query again: as long as the first batch is not committed, the files are written again.",
            file=files.locate(name),
        ) from error


def delete_initial_state(files: FileSystem, run: int) -> None:
    """Remove the initial state of one run.

    Args:
        files: the location's `millpond/` folder.
        run: the run's generation.
    """
    for info in files.list(_prefix(run)):
        files.delete(info.name)


def delete_earlier_initial_state(files: FileSystem, run: int) -> None:
    """Remove the initial state of all runs before one; those after it may have taken over.

    Args:
        files: the location's `millpond/` folder.
        run: the run's generation.
    """
    for info in files.list(INITIAL):
        if info.name < _prefix(run):
            files.delete(info.name)


def _prefix(run: int) -> str:
    return f"{INITIAL}{digits(run)}-"
