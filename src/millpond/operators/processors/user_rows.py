"""A processor's variables as a user reads them: a row for each key with all its state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millpond.layout import HASH, LENGTH, HashRange, Ints, Rows
from millpond.operators.columns.decode import OversizeError, key_columns, nested_column
from millpond.operators.columns.encode import ALL
from millpond.operators.columns.nested import pack
from millpond.operators.hash_ranges import by_range, key_groups
from millpond.operators.processors.tables import Variable, parts, variables
from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.types import DataType

_MAX_ROW_BYTES = 1 << 30  # approximate bytes of a row; the rest of a key's state is in further rows
_LAST_PART = (1 << 63) - 1
_LENGTH = int(LENGTH)


def read(spec: ProcessorSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    """Decode rows of a table: the key's columns, and the state in the row itself."""
    variable = (variables(spec) | parts(spec))[table]
    names = [field.name for field in variable.keyed.fields]
    for columns in read_columns(variable, rows):
        yield pa.RecordBatch.from_arrays(columns, names=[*names, spec.table_columns(table)[-1].name])


def read_columns(variable: Variable, rows: Rows) -> Iterator[list[pa.Array]]:
    """Yield the key columns and the state of rows of a variable's table, in pieces if they are large."""
    try:
        columns = key_columns(rows, variable.keyed.keys, variable.keyed.types)
        columns.append(nested_column(rows, variable.keyed.values[0].offset, ALL, variable.type))
    except OversizeError:
        for half in rows.halves():
            yield from read_columns(variable, half)
        return
    yield columns


def read_whole(
    spec: ProcessorSpec, table: str, pieces: Iterator[Rows], others: Iterator[Rows]
) -> Iterator[pa.RecordBatch]:
    """Decode rows of a variable's table, each with the parts of its key.

    Args:
        spec: the processor.
        table: the variable's table.
        pieces: the table's rows, in hash order.
        others: the rows of the table of parts, in hash order.

    Yields:
        A row for each key; a key with more than a gigabyte has several in turn. Memory holds the state of one key
        group.
    """
    variable = variables(spec)[table]
    parts_by_group = _PartsByKeyGroup(others, parts(spec)[next(v.parts for v in spec.variables if v.table == table)])
    names = [field.name for field in spec.table_columns(table)]
    for rows in pieces:
        headed = (rows.words[:, variable.keyed.values[-1].offset] & LENGTH) != 0
        yield from read(spec, table, rows.take(~headed))
        remaining = rows.words[headed]
        while len(remaining):
            group = key_groups(Rows(remaining[:1], rows.heap))
            count = int(np.count_nonzero(group.covers(remaining[:, HASH])))
            for columns in _with_parts(variable, Rows(remaining[:count], rows.heap), parts_by_group.of(group)):
                yield pa.RecordBatch.from_arrays(columns, names=names)
            remaining = remaining[count:]


class _DecodedParts(NamedTuple):
    """Parts of keys: the keys' columns, the parts' numbers, their content, and its size in bytes."""

    keys: list[pa.Array]
    numbers: Ints
    values: pa.ListArray
    sizes: Ints


def _decode_parts(rows: Rows, variable: Variable, fields: int) -> Iterator[_DecodedParts]:
    """Decode rows; rows that are not of a table of parts count as the last part of their key."""
    offset = variable.keyed.values[0].offset
    try:
        columns = key_columns(rows, variable.keyed.keys, variable.keyed.types)
        values = nested_column(rows, offset, ALL, variable.type)
    except OversizeError:
        for half in rows.halves():
            yield from _decode_parts(half, variable, fields)
        return
    numbers = np.full(rows.count, _LAST_PART) if len(columns) == fields else columns[-1].to_numpy()
    yield _DecodedParts(columns[:fields], numbers, values, rows.ints(offset) & _LENGTH)


class _PartsByKeyGroup:
    """The rows of a table of parts, key group by key group.

    Args:
        pieces: all rows, in hash order.
        variable: the table's variable.
    """

    def __init__(self, pieces: Iterator[Rows], variable: Variable) -> None:
        self._variable = variable
        self._bounds: deque[int] = deque()
        self._groups = by_range(pieces, iter(self._bounds.popleft, None))
        self._range = HashRange(0, 0)
        self._parts: list[_DecodedParts] = []

    def of(self, group: HashRange) -> list[_DecodedParts]:
        """Return the parts of a key group; groups must come in order, and one may be repeated."""
        if group != self._range:
            self._bounds.extend(group)
            next(self._groups)  # skip the parts of keys between the groups
            fields = len(self._variable.keyed.fields) - 1
            self._parts = [part for rows in next(self._groups) for part in _decode_parts(rows, self._variable, fields)]
            self._range = group
        return self._parts


def _with_parts(variable: Variable, rows: Rows, group_parts: list[_DecodedParts]) -> Iterator[list[pa.Array]]:
    """Yield the keys of rows with all their state; `group_parts` has parts of these keys, and of others."""
    fields = len(variable.keyed.fields)
    heads = list(_decode_parts(rows, variable, fields))
    everything = [*heads, *group_parts]
    owners = _number_keys([part.keys for part in everything], variable.keyed.types)
    numbers, sizes = (np.concatenate([part[field] for part in everything]) for field in (1, 3))
    order = np.lexsort((numbers, owners))
    order = order[owners[order] < rows.count]
    owners, sizes = owners[order], sizes[order]
    before = np.cumsum(sizes) - sizes
    before -= before[np.searchsorted(owners, owners, "left")]
    starts = np.flatnonzero(np.diff(owners, prepend=-1) | np.diff(before // _MAX_ROW_BYTES, prepend=0))
    keys = [pa.concat_arrays(columns) for columns in zip(*(part.keys for part in heads), strict=True)]
    chunks = np.cumsum([0, *(len(part.values) for part in everything)])
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        positions = order[start:stop]
        pieces = np.searchsorted(chunks, positions, "right") - 1
        within = [positions[pieces == index] - low for index, low in enumerate(chunks[:-1])]
        taken = [
            part.values.take(pa.array(chosen)) for part, chosen in zip(everything, within, strict=True) if len(chosen)
        ]
        places = np.empty(len(positions), np.int64)
        places[np.argsort(pieces, kind="stable")] = np.arange(len(positions))
        values = pa.concat_arrays(taken).take(pa.array(places)).flatten()
        if len(values):
            ends = pa.array([0, len(values)], pa.int32())
            yield [
                *(key.slice(int(owners[start]), 1) for key in keys),
                pa.ListArray.from_arrays(ends, values, type=variable.type.arrow),
            ]


def _number_keys(keys: list[list[pa.Array]], types: tuple[DataType, ...]) -> Ints:
    """Number the keys in order of first occurrence; equal keys have the same number."""
    dtype = DataType("struct", fields=tuple((str(position), dtype_) for position, dtype_ in enumerate(types)))
    packed = []
    for columns in keys:
        ends, data = pack(pa.StructArray.from_arrays(columns, fields=list(dtype.arrow)), dtype)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
        packed.append(pa.Array.from_buffers(pa.large_binary(), len(ends) - 1, buffers))
    numbers: Ints = pa.concat_arrays(packed).dictionary_encode().indices.to_numpy().astype(np.int64)
    return numbers
