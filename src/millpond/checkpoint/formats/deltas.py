"""Reader of deltas: verifies checksums, keeps the order, prefetches a few."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from millpond.checkpoint.formats.documents import damaged_error
from millpond.checkpoint.formats.manifest import DeltaRef, checksum
from millpond.files.backends.filesystem import Buffer, FileSystem
from millpond.files.formats.conversion import Conversion
from millpond.files.formats.segment import decode_rows
from millpond.layout import RowLayout, Rows, TableSchema

_DELTAS_IN_FLIGHT = 8
"""Deltas that are fetched concurrently, at most."""

_BYTES_IN_FLIGHT = 64 << 20
"""Bytes of deltas that are fetched concurrently; a larger delta is fetched by itself."""


def read_delta(files: FileSystem, ref: DeltaRef) -> Buffer:
    """Read the bytes of a delta, as sealed.

    Raises:
        StateDamagedError: the delta is missing, cut short or altered.
    """
    data = files.get_range(ref.commit, ref.offset, ref.length)
    if checksum([data]) != ref.checksum:
        raise damaged_error(files.locate(ref.commit), "is altered")
    return data


def rows_of(ref: DeltaRef, data: Buffer, layout: RowLayout, name: str) -> Iterator[Rows]:
    """Decode the rows of a delta without the first `ref.skip`, in chunks (see `decode_rows`)."""
    skip = ref.skip
    for rows in decode_rows(data, layout, name):
        if skip < rows.count:
            yield rows.take(slice(skip, None))
        skip = max(0, skip - rows.count)


def converted_rows(ref: DeltaRef, data: Buffer, before: TableSchema, now: RowLayout, name: str) -> Iterator[Rows]:
    """Decode the rows of a delta (see `rows_of`), and convert them from the schema it was written in.

    Args:
        ref, data: the delta and its bytes.
        before: schema of the table when the delta was written.
        now: layout of the table now.
        name: name of the object, for messages.
    """
    if before == now.schema:
        yield from rows_of(ref, data, now, name)
        return
    convert = Conversion(RowLayout(before), now)
    yield from map(convert, rows_of(ref, data, convert.before, name))


def read_deltas(files: FileSystem, refs: Sequence[DeltaRef]) -> Iterator[Buffer]:
    """Yield the bytes of several deltas, in order; threads prefetch a few of them, within `_BYTES_IN_FLIGHT`."""
    if len(refs) < 2:
        yield from (read_delta(files, ref) for ref in refs)
        return
    with ThreadPoolExecutor(_DELTAS_IN_FLIGHT, thread_name_prefix="millpond-deltas") as pool:
        in_flight: deque[tuple[Future[Buffer], int]] = deque()
        free = _BYTES_IN_FLIGHT
        for ref in refs:
            while in_flight and (len(in_flight) == _DELTAS_IN_FLIGHT or ref.length > free):
                read, length = in_flight.popleft()
                yield read.result()
                free += length
            in_flight.append((pool.submit(read_delta, files, ref), ref.length))
            free -= ref.length
        while in_flight:
            yield in_flight.popleft()[0].result()
