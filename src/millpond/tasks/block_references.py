"""Block references: locations of the rows that the map side of the local exchange wrote for one partition."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from millpond.errors import TransientError
from millpond.key_groups import IN_GROUP_BITS
from millpond.layout import MAX_BATCH_BYTES, HashRange
from millpond.tasks.operator_task import OperatorTask
from millpond.tasks.rows import key_groups

BLOCK_REFERENCE = "__block_reference"
"""Name of the column of references. No column of an operator begins with two underscores."""

_FOLDER = "exchange"
_PIECE_BYTES = 1 << 20
"""Approximate bytes of rows per piece of a large pass."""
_MAX_PIECES = 16


class BlockReference(msgspec.Struct, array_like=True):
    """Rows of one partition in one file.

    Attributes:
        file: an Arrow stream.
        places: byte offsets of the record batches, each sorted by key group.
        rows: total number of rows.
    """

    file: str
    places: list[int]
    rows: int


def open_references(data: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of block references as record batches over the mapped files.

    Raises:
        TransientError: a file is gone.
    """
    for reference in data:
        yield from _open(msgspec.msgpack.decode(reference, type=BlockReference))


def split_into_passes(
    batches: Iterable[pa.RecordBatch], passes: Callable[[int], int]
) -> Iterator[tuple[HashRange | None, pa.RecordBatch]]:
    """Divide rows into passes over ranges of key groups of about equal size; a key's rows keep their order.

    A large pass is divided into pieces, each of its own range of key groups. Rows processed together then lie together
    in the state, and no two pieces read the same block. A piece is one batch, or several batches above 1 GiB, because a
    key group cannot be divided.

    Args:
        batches: batches, each sorted by key group.
        passes: returns the number of passes for a number of rows.

    Yields:
        The pass's hash range with its first rows, None with later ones. With a single pass, None and each batch
        unchanged.
    """
    all_batches = list(batches)
    count = passes(sum(batch.num_rows for batch in all_batches))
    if count == 1:
        yield from ((None, batch) for batch in all_batches)
        return
    size = sum(batch.nbytes for batch in all_batches)
    steps = max(1, min(_MAX_PIECES, size // count // _PIECE_BYTES))
    ends = [key_groups(end) for batch in all_batches for end in (batch.slice(0, 1), batch.slice(batch.num_rows - 1))]
    lowest, highest = int(min(ends)[0]), int(max(ends)[0])
    bounds = np.linspace(lowest, highest + 1, count * steps + 1).astype(np.uint32)
    # For each batch, the position of the first row of each range.
    cuts = [np.searchsorted(key_groups(batch), bounds).tolist() for batch in all_batches]
    hashes = [group << IN_GROUP_BITS for group in bounds[::steps].tolist()]
    for number, range_ in enumerate(map(HashRange, hashes, hashes[1:])):
        begun = False
        for piece in range(number * steps, (number + 1) * steps):
            parts = [
                batch.slice(cut[piece], cut[piece + 1] - cut[piece])
                for batch, cut in zip(all_batches, cuts, strict=True)
            ]
            parts = [part for part in parts if part.num_rows]
            # Measuring a slice takes longer than copying it, so slices are measured only if all rows exceed the limit.
            for slices in _divide_by_size(parts) if size > MAX_BATCH_BYTES else [parts]:
                if slices:
                    rows = slices[0] if len(slices) == 1 else pa.concat_batches(slices)  # a single one is not copied
                    yield (None if begun else range_), rows
                    begun = True


def _divide_by_size(batches: Iterable[pa.RecordBatch]) -> list[list[pa.RecordBatch]]:
    """Divide batches into lists of at most `MAX_BATCH_BYTES` each; a larger batch stands alone."""
    lists: list[list[pa.RecordBatch]] = []
    size = 0
    for batch in batches:
        if not lists or size + batch.nbytes > MAX_BATCH_BYTES:
            lists.append([])
            size = 0
        lists[-1].append(batch)
        size += batch.nbytes
    return lists


def _open(reference: BlockReference) -> Iterator[pa.RecordBatch]:
    try:
        with pa.memory_map(reference.file) as file:
            schema = pa.ipc.read_schema(file)
            rows = 0
            for place in reference.places:
                file.seek(place)
                batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
                rows += batch.num_rows
                yield batch
    except (OSError, pa.ArrowInvalid, EOFError) as error:
        raise _gone(reference, str(error)) from error
    if rows != reference.rows:
        raise _gone(reference, f"{rows} rows instead of {reference.rows}")


def _gone(reference: BlockReference, what: str) -> TransientError:
    return TransientError(
        f"Rows of the batch can no longer be read ({what}).",
        action="The batch has to run again; its DataFrame may be used only until foreachBatch returns.",
        file=reference.file,
    )


def exchange_folder(directory: Path, task: OperatorTask) -> Path:
    """Return the folder of one generation of a query, which has one subfolder per batch."""
    return directory / _FOLDER / f"{task.key}-{task.generation}"


def delete_batches_before(folder: Path, below: int) -> None:
    """Remove the files of batches before `below`."""
    try:
        earlier = [entry.name for entry in os.scandir(folder) if int(entry.name) < below]
    except OSError:
        return
    for name in earlier:
        shutil.rmtree(folder / name, ignore_errors=True)


def delete_generations(directory: Path, task: OperatorTask, *, up_to: int) -> None:
    """Remove the files of a query's generations up to `up_to`: their runs have ended, or were overtaken."""
    folder = directory / _FOLDER
    with suppress(OSError):
        for name in os.listdir(folder):
            generation = name.removeprefix(f"{task.key}-")
            if generation.isdecimal() and int(generation) <= up_to:
                shutil.rmtree(folder / name, ignore_errors=True)
