"""What goes in and comes out of a processor that sees rows: as Spark's own worker makes and takes them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import Row, StructType

from millpond.slot.pipe.processors.state.columns import listed

TOGETHER = 10_000
"""Rows of results that travel together."""

_BLOCK = 10_000  # rows that become Python's objects at a time

Pieces = Generator[pa.RecordBatch, None, None]
"""The rows of a call: of all its keys, or some rows at a time of the only one."""


class Typed:
    """Columns of the input with the types that Spark gives to Python: times have the session's time zone."""

    def __init__(self, columns: StructType, zone: str | None) -> None:
        self._schema = to_arrow_schema(columns, timezone=zone)

    def __call__(self, arrays: Sequence[pa.Array], places: Sequence[int] | None = None) -> pa.RecordBatch:
        """All columns, or those at some places."""
        fields = list(self._schema) if places is None else [self._schema.field(at) for at in places]
        cast = [
            array if array.type == field.type else array.cast(field.type)
            for array, field in zip(arrays, fields, strict=True)
        ]
        return pa.RecordBatch.from_arrays(cast, schema=pa.schema(fields))


def unequal(value: Any) -> bool:
    """Whether a value, or a part of it, is NaN, so that Python takes it for another than one like it."""
    if isinstance(value, dict):
        return any(map(unequal, value.values()))
    if isinstance(value, list | tuple):
        return any(map(unequal, value))
    return isinstance(value, float) and value != value


def calls(key: Any, parts: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """What a processor is called with for a key: once with all its rows, or once for each, if the key has NaN.

    As in Spark, whose worker compares the keys of rows that follow each other in Python.

    Args:
        parts: the rows of the key, or frames, of one row each if the key has NaN.
    """
    if not unequal(key):
        return iter((iter(parts),))
    return (iter((part,)) for part in parts)


class Rows:
    """The input as rows.

    Args:
        columns: of the input. keys: positions of those that make up the key. zone: the session's time zone.

    Attributes:
        odd: whether keys may have NaN.
    """

    def __init__(self, columns: StructType, keys: Sequence[int], zone: str | None) -> None:
        self._typed = Typed(columns, zone)
        self._keys = keys
        self.odd = any(kind in columns[at].dataType.json() for at in keys for kind in ("float", "double"))
        self._row = _maker(Row(*columns.names))

    def groups(self, keys: Sequence[pa.Array], counts: list[int], pieces: Pieces) -> Iterator[tuple[Any, Any]]:
        """Each key and its rows, which have to be used, if at all, before the next one is asked for.

        Args:
            keys, counts: columns of the keys, and how many rows each has. pieces: the rows, several only of one key.
        """
        told = self._told(keys, counts)
        stream = self._stream(pieces)
        row = self._row
        rows: Iterator[Any] = iter(())
        for key, count in zip(told, counts, strict=True):
            for _ in rows:  # what the user has not used
                pass
            rows = islice(stream, count)
            yield key, map(row, rows)
        pieces.close()  # no more are fetched for whoever has kept the last rows
        for _ in rows:
            pass

    def lasting(self, keys: Sequence[pa.Array], counts: list[int], pieces: Pieces) -> Iterator[tuple[Any, Any]]:
        """Each key and its rows, which may be used when others are asked for already; arguments as of `groups`."""
        told = self._told(keys, counts)
        row = self._row
        if len(counts) == 1:
            yield next(told), map(row, self._stream(pieces))
            return
        typed = self._typed(next(pieces).columns)
        block: list[Any] = []
        first = start = 0  # of the block, and of the key
        for key, count in zip(told, counts, strict=True):
            if count > _BLOCK:
                yield key, map(row, _tuples(typed.slice(start, count)))
            else:
                if start + count > first + len(block):
                    first, block = start, list(_block(typed, start))
                yield key, map(row, block[start - first : start - first + count])
            start += count

    def _stream(self, pieces: Pieces) -> Iterator[tuple[Any, ...]]:
        return chain.from_iterable(_tuples(self._typed(piece.columns)) for piece in pieces)

    def _told(self, keys: Sequence[pa.Array], counts: list[int]) -> Iterator[tuple[Any, ...]]:
        if not keys:
            return iter([()] * len(counts))
        return zip(*map(listed, self._typed(keys, self._keys).columns), strict=True)


def _tuples(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    for start in range(0, batch.num_rows, _BLOCK):
        yield from _block(batch, start)


def _block(batch: pa.RecordBatch, start: int) -> Iterator[tuple[Any, ...]]:
    return zip(*map(listed, batch.slice(start, _BLOCK).columns), strict=True)


def _maker(names: Row) -> Callable[[tuple[Any, ...]], Row]:
    new, assign = tuple.__new__, object.__setattr__  # Spark's own are written in Python

    def made(values: tuple[Any, ...]) -> Row:
        row: Row = new(Row, values)
        assign(row, "__fields__", names)
        return row

    return made


class RowResults:
    """Rows that a processor gives out, until there are enough of them.

    Args:
        shown: the output.

    Attributes:
        given: the rows. owners: how many there are after each key, and the key.
        look: after how many rows there may be enough.
    """

    look = TOGETHER

    def __init__(self, shown: StructType) -> None:
        self._schema = to_arrow_schema(shown, timezone="UTC")
        self._nested = any(pa.types.is_nested(kind) for kind in self._schema.types)
        self.given: list[Any] = []
        self.owners: list[tuple[int, Any]] = []

    @property
    def append(self) -> Callable[[Any], None]:
        """Takes a row."""
        if not self._nested:
            return self.given.append
        return lambda row: self.given.append(row.asDict(True))  # the user may change a list in it before the next row

    def empty(self) -> RowResults:
        """Others of the same output, none yet."""
        made = object.__new__(RowResults)  # many are made
        made._schema, made._nested, made.given, made.owners = self._schema, self._nested, [], []
        return made

    def join(self, others: RowResults) -> None:
        """Put others behind these, which are none then."""
        if not others.given:
            return
        before = len(self.given)
        self.given += others.given
        self.owners += [(before + after, key) for after, key in others.owners]
        others.given.clear()
        others.owners.clear()

    def take(self, results: Iterator[Any], key: Any) -> bool:
        """Take rows of a key; returns whether there are enough for now, and maybe more."""
        before = len(self.given)
        if self._nested:  # the user may change a list that is in a row before the next row
            results = (row.asDict(True) for row in results)
        self.given.extend(islice(results, TOGETHER))
        after = len(self.given)
        if after > before:
            self.owners.append((after, key))
        return after - before >= TOGETHER

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.given)

    @property
    def enough(self) -> bool:
        """Whether there are enough rows for now."""
        return len(self.given) >= TOGETHER

    def taken(self, blame: Callable[[Any], None]) -> Iterator[pa.RecordBatch]:
        """All rows so far. What is wrong with them is raised after `blame` was told the key."""
        rows, owners = self.given, self.owners
        self.given, self.owners = [], []
        if not rows:
            return
        try:
            made = [self._batch(rows)]
        except Exception:
            made = []
            start = 0
            for stop, key in owners:
                blame(key)
                made.append(self._batch(rows[start:stop]))
                start = stop
        yield from made

    def _batch(self, rows: list[Any]) -> pa.RecordBatch:
        if self._nested:
            return pa.RecordBatch.from_pylist(rows, schema=self._schema)
        names = [getattr(row, "__fields__", None) for row in rows]
        first = names[0]
        if first is None or {len(first)} != set(map(len, rows)) or names.count(first) < len(names):
            return pa.RecordBatch.from_pylist([row.asDict(True) for row in rows], schema=self._schema)
        columns = dict(zip(first, zip(*rows, strict=True), strict=True))
        missing = (None,) * len(rows)
        arrays = [pa.array(columns.get(one.name, missing), one.type) for one in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)
