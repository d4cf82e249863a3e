"""A processor's variables as a user reads them: a row for each key, with all that it has."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millpond.layout import HASH, LENGTH, HashRange, Ints, Rows
from millpond.operators.columns.decode import OversizeError, ints, key_columns, nested_column
from millpond.operators.columns.encode import ALL
from millpond.operators.columns.nested import pack
from millpond.operators.hash_ranges import by_range, key_groups
from millpond.operators.processors.tables import Variable, parts, variables
from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.types import DataType

_MOST = 1 << 30  # bytes of a row, about: what a key has beyond that is in further rows
_LAST = (1 << 63) - 1
_LENGTH = int(LENGTH)


def read(spec: ProcessorSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    """Rows of a table: the key's columns, and what is in the row itself."""
    one = (variables(spec) | parts(spec))[table]
    names = [field.name for field in one.keyed.fields]
    for columns in read_columns(one, rows):
        yield pa.RecordBatch.from_arrays(columns, names=[*names, spec.shown(table)[-1].name])


def read_columns(one: Variable, rows: Rows) -> Iterator[list[pa.Array]]:
    """The columns of the key, and what keys have, of rows of a variable's table: in pieces where that is much."""
    try:
        columns = key_columns(rows, one.keyed.keys, one.keyed.types)
        columns.append(nested_column(rows, one.keyed.values[0].offset, ALL, one.type))
    except OversizeError:
        middle = rows.count // 2
        yield from read_columns(one, Rows(rows.words[:middle], rows.heap))
        yield from read_columns(one, Rows(rows.words[middle:], rows.heap))
        return
    yield columns


def read_whole(
    spec: ProcessorSpec, table: str, pieces: Iterator[Rows], others: Iterator[Rows]
) -> Iterator[pa.RecordBatch]:
    """Rows of a variable's table, each with what its key has in parts.

    Args:
        spec: of the processor. table: the variable's.
        pieces: the table's rows. others: those of the table of parts. Both in the order of hashes.

    Yields:
        A row for each key; a key that has more than a gigabyte has several, one after the other. Memory holds what the
        keys of one group have.
    """
    one = variables(spec)[table]
    beside = _Beside(others, parts(spec)[next(v.parts for v in spec.variables if v.table == table)])
    names = [field.name for field in spec.shown(table)]
    for rows in pieces:
        headed = (rows.words[:, one.keyed.values[-1].offset] & LENGTH) != 0
        yield from read(spec, table, Rows(rows.words[~headed], rows.heap))
        left = rows.words[headed]
        while len(left):
            group = key_groups(Rows(left[:1], rows.heap))
            count = int(np.count_nonzero(group.covers(left[:, HASH])))
            for columns in _whole(one, Rows(left[:count], rows.heap), beside.of(group)):
                yield pa.RecordBatch.from_arrays(columns, names=names)
            left = left[count:]


class _Some(NamedTuple):
    """Parts of some keys: the keys' columns, the parts' numbers, what they have, and how many bytes that is."""

    keys: list[pa.Array]
    numbers: Ints
    values: pa.ListArray
    sizes: Ints


def _some(rows: Rows, variable: Variable, fields: int) -> Iterator[_Some]:
    """What some rows have, the last part of each key if they are not of a table of parts."""
    at = variable.keyed.values[0].offset
    try:
        columns = key_columns(rows, variable.keyed.keys, variable.keyed.types)
        values = nested_column(rows, at, ALL, variable.type)
    except OversizeError:
        middle = rows.count // 2
        yield from _some(Rows(rows.words[:middle], rows.heap), variable, fields)
        yield from _some(Rows(rows.words[middle:], rows.heap), variable, fields)
        return
    numbers = np.full(rows.count, _LAST) if len(columns) == fields else columns[-1].to_numpy()
    yield _Some(columns[:fields], numbers, values, ints(rows, at) & _LENGTH)


class _Beside:
    """Rows of a table of parts, key group by key group.

    Args:
        pieces: all rows, in the order of hashes. variable: of the table.
    """

    def __init__(self, pieces: Iterator[Rows], variable: Variable) -> None:
        self._variable = variable
        self._bounds: deque[int] = deque()
        self._groups = by_range(pieces, iter(self._bounds.popleft, None))
        self._range = HashRange(0, 0)
        self._found: list[_Some] = []

    def of(self, group: HashRange) -> list[_Some]:
        """The parts of a key group; groups come in order, one perhaps more than once."""
        if group != self._range:
            self._bounds.extend(group)
            next(self._groups)  # of keys that nobody asks for
            fields = len(self._variable.keyed.fields) - 1
            self._found = [one for rows in next(self._groups) for one in _some(rows, self._variable, fields)]
            self._range = group
        return self._found


def _whole(variable: Variable, rows: Rows, beside: list[_Some]) -> Iterator[list[pa.Array]]:
    """The keys of some rows, and what they have in all; `beside`: parts of these keys, and of others."""
    fields = len(variable.keyed.fields)
    heads = list(_some(rows, variable, fields))
    everything = [*heads, *beside]
    owners = _numbered([one.keys for one in everything], variable.keyed.types)
    numbers, sizes = (np.concatenate([one[at] for one in everything]) for at in (1, 3))
    order = np.lexsort((numbers, owners))
    order = order[owners[order] < rows.count]
    owners, sizes = owners[order], sizes[order]
    before = np.cumsum(sizes) - sizes
    before -= before[np.searchsorted(owners, owners, "left")]
    starts = np.flatnonzero(np.diff(owners, prepend=-1) | np.diff(before // _MOST, prepend=0))
    keys = [pa.concat_arrays(columns) for columns in zip(*(one.keys for one in heads), strict=True)]
    chunks = np.cumsum([0, *(len(one.values) for one in everything)])
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        some = order[start:stop]
        pieces = np.searchsorted(chunks, some, "right") - 1
        within = [some[pieces == at] - low for at, low in enumerate(chunks[:-1])]
        taken = [one.values.take(pa.array(at)) for one, at in zip(everything, within, strict=True) if len(at)]
        places = np.empty(len(some), np.int64)
        places[np.argsort(pieces, kind="stable")] = np.arange(len(some))
        values = pa.concat_arrays(taken).take(pa.array(places)).flatten()
        if len(values):
            ends = pa.array([0, len(values)], pa.int32())
            yield [
                *(key.slice(int(owners[start]), 1) for key in keys),
                pa.ListArray.from_arrays(ends, values, type=variable.type.arrow),
            ]


def _numbered(keys: list[list[pa.Array]], types: tuple[DataType, ...]) -> Ints:
    """A number for each key, the same for equal ones, in the order in which they come first."""
    dtype = DataType("struct", fields=tuple((str(at), one) for at, one in enumerate(types)))
    packed = []
    for columns in keys:
        ends, data = pack(pa.StructArray.from_arrays(columns, fields=list(dtype.arrow)), dtype)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
        packed.append(pa.Array.from_buffers(pa.large_binary(), len(ends) - 1, buffers))
    numbers: Ints = pa.concat_arrays(packed).dictionary_encode().indices.to_numpy().astype(np.int64)
    return numbers
