"""Parcels: where the rows lie that the map side of the local exchange has written for one partition."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa

from millpond.errors import TransientError
from millpond.slot.task import PipeTask


class Parcel(msgspec.Struct, array_like=True):
    """Rows of one partition in one file.

    Attributes:
        file: an Arrow stream.
        places: byte offsets of the record batches.
        rows: how many rows these have.
    """

    file: str
    places: list[int]
    rows: int


def open_parcel(data: bytes) -> Iterator[pa.RecordBatch]:
    """The rows of a parcel, in the file's mapped pages.

    Raises:
        TransientError: the file is gone.
    """
    parcel = msgspec.msgpack.decode(data, type=Parcel)
    try:
        with pa.memory_map(parcel.file) as file:
            schema = pa.ipc.read_schema(file)
            rows = 0
            for place in parcel.places:
                file.seek(place)
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
                rows += batch.num_rows
                yield batch
    except (OSError, pa.ArrowInvalid, EOFError) as error:
        raise _gone(parcel, str(error)) from error
    if rows != parcel.rows:
        raise _gone(parcel, f"{rows} rows instead of {parcel.rows}")


def _gone(parcel: Parcel, what: str) -> TransientError:
    return TransientError(
        f"Rows of the batch can no longer be read ({what}).",
        action="The batch has to run again; its DataFrame may be used only until foreachBatch returns.",
        file=parcel.file,
    )


def exchange_folder(directory: Path, task: PipeTask) -> Path:
    """Where the files of one generation of a query lie, in a folder per batch."""
    return directory / "exchange" / f"{task.query}-{task.generation}"


def forget_batches(folder: Path, below: int) -> None:
    """Remove the files of earlier batches."""
    try:
        earlier = [entry.name for entry in os.scandir(folder) if int(entry.name) < below]
    except OSError:
        return
    for name in earlier:
        shutil.rmtree(folder / name, ignore_errors=True)
