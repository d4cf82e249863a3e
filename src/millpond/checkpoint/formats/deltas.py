"""Reading deltas back: checked, in order, a few ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from millpond.checkpoint.formats.documents import damaged
from millpond.checkpoint.formats.manifest import DeltaRef, checksum
from millpond.files.backends.filesystem import Buffer, FileSystem
from millpond.files.formats.conversion import Conversion
from millpond.files.formats.segment import decode_rows
from millpond.layout import RowLayout, Rows, TableSchema

_AHEAD = 8


def read_delta(files: FileSystem, ref: DeltaRef) -> Buffer:
    """The bytes of a delta, as sealed.

    Raises:
        StateDamagedError: missing, cut short or altered.
    """
    data = files.get_range(ref.commit, ref.offset, ref.length)
    if checksum([data]) != ref.checksum:
        raise damaged(files.locate(ref.commit), "is altered")
    return data


def rows_of(ref: DeltaRef, data: Buffer, layout: RowLayout, name: str) -> Iterator[Rows]:
    """The rows of a delta, from the first that counts, in pieces (see `decode_rows`)."""
    skip = ref.skip
    for rows in decode_rows(data, layout, name):
        if skip < rows.count:
            yield Rows(rows.words[skip:], rows.heap) if skip else rows
        skip = max(0, skip - rows.count)


def converted(ref: DeltaRef, data: Buffer, before: TableSchema, now: RowLayout, name: str) -> Iterator[Rows]:
    """The rows of a delta (see `rows_of`) that was made when its table had the schema `before`, as they are now."""
    if before == now.schema:
        yield from rows_of(ref, data, now, name)
        return
    convert = Conversion(RowLayout(before), now)
    yield from map(convert, rows_of(ref, data, convert.before, name))


def read_deltas(files: FileSystem, refs: Sequence[DeltaRef]) -> Iterator[Buffer]:
    """The bytes of several deltas, in order; threads fetch a few ahead of the consumer."""
    if len(refs) < 2:
        yield from (read_delta(files, ref) for ref in refs)
        return
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="millpond-deltas") as pool:
        ahead: deque[Future[Buffer]] = deque()
        for ref in refs:
            ahead.append(pool.submit(read_delta, files, ref))
            if len(ahead) == _AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
