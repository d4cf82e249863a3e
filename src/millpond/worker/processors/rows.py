"""Input and output of a processor that receives rows, converted as in Spark's own worker."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import Row, StructType

from millpond.worker.processors.casts import Typed
from millpond.worker.processors.state.columns import to_list

ROWS_PER_BATCH = 10_000
"""Number of rows of an output batch."""

_BLOCK_ROWS = 10_000  # rows that are converted to Python objects at a time

Pieces = Generator[pa.RecordBatch, None, None]
"""The rows of a call: of all its keys, or of its only key in several pieces."""


def has_nan(value: Any) -> bool:
    """Return whether a value contains NaN, so that Python finds it unequal to an identical one."""
    if isinstance(value, dict):
        return any(map(has_nan, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_nan, value))
    return isinstance(value, float) and value != value


def row_iterators(key: Any, parts: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """Return the row iterators with which a processor is called for a key: one, or one per row if the key has a NaN.

    As in Spark, whose worker compares the keys of consecutive rows in Python.

    Args:
        key: the key.
        parts: its rows, or its frames, which have one row each if the key has a NaN.
    """
    if not has_nan(key):
        return iter((iter(parts),))
    return (iter((part,)) for part in parts)


class Rows:
    """Input as rows.

    Args:
        columns: columns of the input.
        keys: positions of the key columns.
        zone: the session's time zone.

    Attributes:
        may_have_nan: whether keys may contain NaN.
    """

    def __init__(self, columns: StructType, keys: Sequence[int], zone: str | None) -> None:
        self._typed = Typed(columns, zone)
        self._keys = keys
        self.may_have_nan = any(
            kind in columns[position].dataType.json() for position in keys for kind in ("float", "double")
        )
        self._row = _row_maker(Row(*columns.names))

    def groups(self, keys: Sequence[pa.Array], counts: list[int], pieces: Pieces) -> Iterator[tuple[Any, Any]]:
        """Yield each key and its rows, which can be read only until the next key is requested.

        Args:
            keys: columns of the keys.
            counts: number of rows of each key.
            pieces: the rows; several pieces only if there is one key.
        """
        key_values = self._key_values(keys, counts)
        stream = self._stream(pieces)
        row = self._row
        rows: Iterator[Any] = iter(())
        for key, count in zip(key_values, counts, strict=True):
            for _ in rows:  # skip rows that the user has not read
                pass
            rows = islice(stream, count)
            yield key, map(row, rows)
        pieces.close()  # a user that has kept the last rows gets no more pieces
        for _ in rows:
            pass

    def retained_groups(self, keys: Sequence[pa.Array], counts: list[int], pieces: Pieces) -> Iterator[tuple[Any, Any]]:
        """Yield each key and its rows, which stay readable when later keys are requested; arguments as for `groups`."""
        key_values = self._key_values(keys, counts)
        row = self._row
        if len(counts) == 1:
            yield next(key_values), map(row, self._stream(pieces))
            return
        typed = self._typed(next(pieces).columns)
        block: list[Any] = []
        first = start = 0  # positions of the first rows of the block and of the key
        for key, count in zip(key_values, counts, strict=True):
            if count > _BLOCK_ROWS:
                yield key, map(row, _tuples(typed.slice(start, count)))
            else:
                if start + count > first + len(block):
                    first, block = start, list(_block(typed, start))
                yield key, map(row, block[start - first : start - first + count])
            start += count

    def _stream(self, pieces: Pieces) -> Iterator[tuple[Any, ...]]:
        return chain.from_iterable(_tuples(self._typed(piece.columns)) for piece in pieces)

    def _key_values(self, keys: Sequence[pa.Array], counts: list[int]) -> Iterator[tuple[Any, ...]]:
        if not keys:
            return iter([()] * len(counts))
        return zip(*map(to_list, self._typed(keys, self._keys).columns), strict=True)


def _tuples(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    for start in range(0, batch.num_rows, _BLOCK_ROWS):
        yield from _block(batch, start)


def _block(batch: pa.RecordBatch, start: int) -> Iterator[tuple[Any, ...]]:
    return zip(*map(to_list, batch.slice(start, _BLOCK_ROWS).columns), strict=True)


def _row_maker(names: Row) -> Callable[[tuple[Any, ...]], Row]:
    # Bypass `Row.__new__` and `Row.__setattr__`, which are slow Python code.
    new, assign = tuple.__new__, object.__setattr__

    def made(values: tuple[Any, ...]) -> Row:
        row: Row = new(Row, values)
        assign(row, "__fields__", names)
        return row

    return made


def _copied_row(row: Any) -> dict[str, Any]:
    """Return a row as a dict, copied: the user may change a value in it before the next row."""
    return {name: _copied(value) for name, value in row.asDict().items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Row):
        return _copied_row(value)
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, tuple):  # stays a tuple: Arrow reads one as the fields of a struct, or as an entry of a map
        return tuple(_copied(item) for item in value)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value.copy() if isinstance(value, bytearray | np.ndarray) else value


class RowResults:
    """Output rows of a processor, collected until there are enough of them.

    Args:
        shown: schema of the output.

    Attributes:
        items: the rows.
        ends_by_key: for each key, the number of rows up to its last one, and the key.
        check_every: number of rows between two checks of `enough`.
    """

    check_every = ROWS_PER_BATCH

    def __init__(self, shown: StructType) -> None:
        self._schema = to_arrow_schema(shown, timezone="UTC")
        self._mutable = any(pa.types.is_nested(kind) or pa.types.is_binary(kind) for kind in self._schema.types)
        self.items: list[Any] = []
        self.ends_by_key: list[tuple[int, Any]] = []

    @property
    def append(self) -> Callable[[Any], None]:
        """Function that takes a row."""
        if not self._mutable:
            return self.items.append
        return lambda row: self.items.append(_copied_row(row))

    def empty(self) -> RowResults:
        """Create an empty collection for the same output."""
        results = object.__new__(RowResults)  # skips `__init__`, as there are many of them
        results._schema, results._mutable, results.items, results.ends_by_key = self._schema, self._mutable, [], []
        return results

    def join(self, others: RowResults) -> None:
        """Append other results and empty them."""
        if not others.items:
            return
        before = len(self.items)
        self.items += others.items
        self.ends_by_key += [(before + after, key) for after, key in others.ends_by_key]
        others.items.clear()
        others.ends_by_key.clear()

    def collect(self, results: Iterator[Any], key: Any) -> bool:
        """Take rows of a key; return whether the output has enough rows for now and the key may have more."""
        before = len(self.items)
        if self._mutable:
            results = map(_copied_row, results)
        self.items.extend(islice(results, ROWS_PER_BATCH))
        after = len(self.items)
        if after > before:
            self.ends_by_key.append((after, key))
        return after - before >= ROWS_PER_BATCH

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.items)

    @property
    def enough(self) -> bool:
        """Whether there are enough rows for a batch."""
        return len(self.items) >= ROWS_PER_BATCH

    def drain(self, attach_context: Callable[[Any], None]) -> Iterator[pa.RecordBatch]:
        """Yield all rows so far; call `attach_context` with the key before an error of its rows is raised."""
        rows, ends_by_key = self.items, self.ends_by_key
        self.items, self.ends_by_key = [], []
        if not rows:
            return
        try:
            batches = [self._batch(rows)]
        except Exception:
            batches = []
            start = 0
            for stop, key in ends_by_key:
                attach_context(key)
                batches.append(self._batch(rows[start:stop]))
                start = stop
        yield from batches

    def _batch(self, rows: list[Any]) -> pa.RecordBatch:
        if self._mutable:
            return pa.RecordBatch.from_pylist(rows, schema=self._schema)
        # Rows of one function nearly always have the same fields, which allows a conversion by column.
        names = [getattr(row, "__fields__", None) for row in rows]
        first = names[0]
        if first is None or {len(first)} != set(map(len, rows)) or names.count(first) < len(names):
            return pa.RecordBatch.from_pylist([row.asDict(True) for row in rows], schema=self._schema)
        columns = dict(zip(first, zip(*rows, strict=True), strict=True))
        missing = (None,) * len(rows)
        arrays = [pa.array(columns.get(field.name, missing), field.type) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)
