"""Parcels: where the rows lie that the map side of the local exchange has written for one partition."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from millpond.conf import KEY_GROUP_BITS
from millpond.errors import TransientError
from millpond.layout import HashRange
from millpond.slot.batch.rows import key_groups
from millpond.slot.batch.task import PipeTask

PARCEL = "__parcel"
"""The column of parcels; no column of an operator's begins with two underscores."""

_PIECE = 1 << 20
"""Bytes of rows that come together where passes are large, about."""
_MOST_PIECES = 16


class Parcel(msgspec.Struct, array_like=True):
    """Rows of one partition in one file.

    Attributes:
        file: an Arrow stream.
        places: byte offsets of the record batches, each in order of its rows' key groups.
        rows: how many rows these have.
    """

    file: str
    places: list[int]
    rows: int


def open_parcels(data: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
    """The rows of parcels, in the files' mapped pages.

    Raises:
        TransientError: a file is gone.
    """
    for parcel in data:
        yield from _open(msgspec.msgpack.decode(parcel, type=Parcel))


def in_passes(
    batches: Iterable[pa.RecordBatch], passes: Callable[[int], int]
) -> Iterator[tuple[HashRange | None, pa.RecordBatch]]:
    """Rows in passes over ranges of the key groups, each with about equally many; a key's rows keep their order.

    A pass comes in several pieces if it is large, each of a range of its own: what is worked on together lies together
    in the state, and no two pieces read the same of it.

    Args:
        batches: each in order of its rows' key groups.
        passes: says, for a number of rows, in how many passes they are wanted.

    Yields:
        With the first rows of a pass its range of hashes, with others None; or None and a batch as it came.
    """
    held = list(batches)
    count = passes(sum(batch.num_rows for batch in held))
    if count == 1:
        yield from ((None, batch) for batch in held)
        return
    steps = max(1, min(_MOST_PIECES, sum(batch.nbytes for batch in held) // count // _PIECE))
    ends = [key_groups(end) for batch in held for end in (batch.slice(0, 1), batch.slice(batch.num_rows - 1))]
    lowest, highest = int(min(ends)[0]), int(max(ends)[0])
    bounds = np.linspace(lowest, highest + 1, count * steps + 1).astype(np.uint32)
    cuts = [np.searchsorted(key_groups(batch), bounds).tolist() for batch in held]
    hashes = [group << (64 - KEY_GROUP_BITS) for group in bounds[::steps].tolist()]
    for number, range_ in enumerate(map(HashRange, hashes, hashes[1:])):
        begun = False
        for at in range(number * steps, (number + 1) * steps):
            parts = [batch.slice(cut[at], cut[at + 1] - cut[at]) for batch, cut in zip(held, cuts, strict=True)]
            if any(part.num_rows for part in parts):
                yield None if begun else range_, pa.concat_batches(parts)
                begun = True


def _open(parcel: Parcel) -> Iterator[pa.RecordBatch]:
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
    return directory / "exchange" / f"{task.key}-{task.generation}"


def forget_batches(folder: Path, below: int) -> None:
    """Remove the files of earlier batches."""
    try:
        earlier = [entry.name for entry in os.scandir(folder) if int(entry.name) < below]
    except OSError:
        return
    for name in earlier:
        shutil.rmtree(folder / name, ignore_errors=True)
