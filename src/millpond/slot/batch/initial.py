"""An initial state on its way to the first batch: rows by partition, in files beside the state.

They are written before the batch, by a job of their own, and read by the slots. A **list** says which files count:
those of the attempts that Spark has chosen. All belong to one run of the query: who starts it again before its first
batch is committed writes them anew, and once that is committed nobody needs them.
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
from millpond.slot.batch.task import PipeTask

_FILE = 16 << 20
"""Bytes of rows that go into one file, roughly."""


class Portion(msgspec.Struct, array_like=True):
    """Some rows of one partition.

    Attributes:
        partition: which. file: an Arrow stream. checksum: of the file, XXH3 in hexadecimal digits.
    """

    partition: int
    file: str
    checksum: str


class _List(msgspec.Struct):
    """Where the rows of an operator's initial state are."""

    portions: list[Portion]
    format: int = FORMAT


def write_list(files: FileSystem, task: PipeTask, portions: list[Portion]) -> None:
    """Say which files have the rows of an operator's initial state.

    Args:
        files: the location's `millpond/` folder. task: the operator. portions: all of them.
    """
    write_document(files, f"{_prefix(task.initial)}{task.operator}.json", _List(portions))


def write_rows(
    files: FileSystem, task: PipeTask, partition: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[Portion]:
    """Write rows of one partition, of which few are in memory at a time.

    Args:
        files: the location's `millpond/` folder. task: the operator.
        partition: which. batches: its rows: the column `__hash`, then those of the spec.
    """

    def put(name: str) -> Portion:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, waiting[0].schema) as stream:
            for each in waiting:
                stream.write_batch(each)
        content = sink.getvalue()
        files.put(name, [content])
        return Portion(partition, name, xxhash.xxh3_64_hexdigest(content))

    attempt = f"{_prefix(task.initial)}{task.operator}-{uuid.uuid4().hex}"
    waiting: list[pa.RecordBatch] = []
    number = size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= _FILE:
            yield put(f"{attempt}-{number}.arrow")
            waiting, size, number = [], 0, number + 1
    if waiting:
        yield put(f"{attempt}-{number}.arrow")


def read_rows(files: FileSystem, task: PipeTask, partition: int) -> Iterator[pa.RecordBatch]:
    """The rows of a partition: the column `__hash`, then those of the spec.

    Raises:
        TransientError: they are gone, or not what was written.
    """
    name = f"{_prefix(task.initial)}{task.operator}.json"
    try:
        portions = read_document(files, name, _List).portions
        for portion in (one for one in portions if one.partition == partition):
            name = portion.file
            content = files.get(name)
            if xxhash.xxh3_64_hexdigest(content) != portion.checksum:
                raise StateDamagedError("What is in the file is not what was written.")
            with pa.ipc.open_stream(pa.py_buffer(content)) as stream:
                yield from stream
    except StateDamagedError as error:
        raise TransientError(
            f"The initial state cannot be read ({error}).",
            action="Start the query again: it is written anew as long as the first batch is not committed.",
            file=files.locate(name),
        ) from error


def forget(files: FileSystem, run: int = 0) -> None:
    """Remove the files of a run, or of all.

    Args:
        files: the location's `millpond/` folder. run: its generation.
    """
    for info in files.list(_prefix(run) if run else INITIAL):
        files.delete(info.name)


def _prefix(run: int) -> str:
    return f"{INITIAL}{digits(run)}-"
