"""What goes in and comes out of a processor that sees pandas frames: as Spark's own worker makes and takes them.

Spark makes a frame of a key's rows from Python's values, one by one, so that pandas chooses the types anew. Here all
rows of a call become one frame, of which each key has a slice, where the types cannot depend on the slice.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkValueError
from pyspark.sql.types import ArrayType, BooleanType, MapType, NullType, StructField, StructType

from millpond.errors import UsageError
from millpond.slot.batch.limits import rows_together
from millpond.slot.pipe.processors.rows import TOGETHER, Pieces, Typed, unequal

_LARGEST = (1 << 31) - 1  # bytes of a column, as most kinds of them can have

Cut = Callable[[int, int], pd.DataFrame]
"""Gives the frame of the rows between two places."""


class Frames:
    """The input as pandas frames.

    Args:
        columns: of the input. keys: positions of those that make up the key.
        values: positions of those that are in a frame.
        conf: Spark's `RunnerConf`.

    Attributes:
        odd: whether keys may have NaN, which null is in numbers.
    """

    odd = True

    def __init__(self, columns: StructType, keys: Sequence[int], values: Sequence[int], conf: Any) -> None:
        self._typed = Typed(columns, conf.timezone)
        self._columns = columns
        self._keys = keys
        self._values = list(values)
        self._conf = conf
        self._names = pd.Index(_named(columns.names))
        self._indexes: dict[int, pd.RangeIndex] = {}

    def groups(self, keys: Sequence[pa.Array], counts: list[int], pieces: Pieces) -> Iterator[tuple[Any, Any]]:
        """Each key and its frames, which have a row each where a key has NaN (see `rows.calls`).

        Args:
            keys, counts: columns of the keys, and how many rows each has. pieces: the rows, several only of one key.
        """
        typed = self._typed(next(pieces).columns)
        series = self._series(typed)
        ends = list(accumulate(counts, initial=0))
        firsts = [series[at].iloc[ends[:-1]].tolist() for at in self._keys]
        told = zip(*firsts, strict=True) if firsts else iter([()] * len(counts))
        most = rows_together(typed, self._conf)
        if ends[-1] > typed.num_rows:
            key = next(told)
            yield key, self._streamed(typed, pieces, 1 if unequal(key) else most)
            return
        cut = self._cut(series)
        for key, (start, stop) in zip(told, pairwise(ends), strict=True):
            yield key, _cuts(cut, range(start, stop, 1 if unequal(key) else most))

    lasting = groups

    def _streamed(self, first: pa.RecordBatch, others: Iterator[pa.RecordBatch], most: int) -> Iterator[pd.DataFrame]:
        """The frames of one key, of some rows each but for the last.

        Args:
            first, others: pieces of its rows, the first one typed. most: how many rows a frame has.
        """
        for some in _whole_frames(chain([first], (self._typed(piece.columns) for piece in others)), most):
            yield from _cuts(self._cutting(some), range(0, some.num_rows, most))

    def _cutting(self, batch: pa.RecordBatch) -> Cut:
        """What gives the frame of some rows."""
        return self._cut(self._series(batch))

    def _cut(self, series: list[pd.Series]) -> Cut:
        frame = self._whole(series)
        return self._chosen(series) if frame is None else self._sliced(frame)

    def _series(self, batch: pa.RecordBatch) -> list[pd.Series]:
        from pyspark.sql.conversion import ArrowBatchTransformer

        made: list[pd.Series] = ArrowBatchTransformer.to_pandas(
            batch, timezone=self._conf.timezone, prefer_int_ext_dtype=self._conf.prefer_int_ext_dtype
        )
        return made

    def _whole(self, series: list[pd.Series]) -> pd.DataFrame | None:
        """All rows as one frame, of which slices have the types that they would have by themselves; else None."""
        made = {}
        for at in self._values:
            one = series[at]
            if one.dtype == object and not isinstance(self._columns[at].dataType, BooleanType | NullType):
                made[at] = one
            elif one.dtype.kind in "ifb" and isinstance(one.dtype, np.dtype):
                made[at] = one.astype({"i": np.int64, "f": np.float64, "b": np.bool_}[one.dtype.kind])
            elif one.dtype == "datetime64[ns]":
                made[at] = one
            else:
                return None
        frame = pd.DataFrame(made, copy=True)  # a copy: the user may change it in place
        frame.columns = self._names[self._values]
        return frame if made else None

    def _sliced(self, frame: pd.DataFrame) -> Cut:
        manager = frame._mgr

        def cut(start: int, stop: int) -> pd.DataFrame:
            part = manager.get_slice(slice(start, stop), axis=1)
            part.axes[1] = self._index(stop - start)
            return pd.DataFrame._from_mgr(part, part.axes)

        return cut

    def _chosen(self, series: list[pd.Series]) -> Cut:
        rows = pd.concat(series, axis=1)

        def cut(start: int, stop: int) -> pd.DataFrame:
            frame = pd.DataFrame(list(rows.iloc[start:stop].itertuples(index=False)))
            return frame.iloc[:, self._values]

        return cut

    def _index(self, length: int) -> pd.RangeIndex:
        if length not in self._indexes:
            self._indexes[length] = pd.RangeIndex(length)
        return self._indexes[length]


def _whole_frames(pieces: Iterator[pa.RecordBatch], most: int) -> Iterator[pa.RecordBatch]:
    """Rows, cut anew so that only the last ones are not as many as whole frames have.

    Raises:
        UsageError: the rows of a frame take more than 2 GB.
    """
    waiting: list[pa.RecordBatch] = []
    for piece in pieces:
        waiting.append(piece)
        if sum(one.num_rows for one in waiting) >= most:
            together = _concatenated(waiting)
            stop = together.num_rows - together.num_rows % most
            yield together.slice(0, stop)
            waiting = [together.slice(stop)]
        elif max(sum(one.column(at).nbytes for one in waiting) for at in range(piece.num_columns)) > _LARGEST:
            raise UsageError(
                "The rows of a key that make up one frame take more than 2 GB.",
                action="Set spark.sql.execution.arrow.maxRecordsPerBatch to fewer rows: so many has a frame.",
            )
    if waiting and waiting[0].num_rows:
        yield _concatenated(waiting)


def _concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    arrays = [pa.concat_arrays(columns) for columns in zip(*(one.columns for one in batches), strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=batches[0].schema)


def _cuts(cut: Cut, starts: range) -> Iterator[pd.DataFrame]:
    for at in starts:
        yield cut(at, min(at + starts.step, starts.stop))


def _named(columns: list[str]) -> tuple[str, ...]:
    """The names that columns have in the end: Spark makes named tuples of rows, where not every name can be."""
    made: Any = namedtuple  # under its own name, static checks ask for names that are known beforehand
    names: tuple[str, ...] = made("Pandas", columns, rename=True)._fields
    return names


class _Part(NamedTuple):
    """A frame as it was when it was given out."""

    names: pd.Index
    columns: list[Any]
    key: Any = None

    def same(self, other: _Part) -> bool:
        """Whether another one has the same columns, of the same types."""
        mine, others = ([column.dtype for column in part.columns] for part in (self, other))
        return mine == others and bool(self.names.equals(other.names))


class FrameResults:
    """Frames that a processor gives out, until there are enough rows.

    Args:
        shown: the output. conf: Spark's `RunnerConf`.

    Attributes:
        given: the frames. owners: how many there are after each key, and the key.
        look: after how many frames there may be enough.
    """

    look = 1

    def __init__(self, shown: StructType, conf: Any) -> None:
        self._schema = StructType([StructField("_0", shown)])
        self._nested = any(isinstance(one.dataType, ArrayType | MapType | StructType) for one in shown.fields)
        self._conf = conf
        self.given: list[_Part | pa.RecordBatch] = []
        self.owners: list[tuple[int, Any]] = []
        self._rows = 0

    def append(self, frame: Any) -> None:
        """Take a frame."""
        if not isinstance(frame, pd.DataFrame):
            raise PySparkValueError(
                "Invalid return type. Please make sure that the UDF returns a "
                "pandas.DataFrame when the specified return type is StructType."
            )
        if self._nested or not frame.shape[1]:
            self.given.append(self._batch(frame, cast=True))
        else:  # the user may change the frame before the next one
            columns = [frame._get_column_array(at).copy() for at in range(frame.shape[1])]
            self.given.append(_Part(frame.columns, columns))
        self._rows += len(frame)

    def empty(self) -> FrameResults:
        """Others of the same output, none yet."""
        made = object.__new__(FrameResults)  # many are made
        made._schema, made._nested, made._conf = self._schema, self._nested, self._conf
        made.given, made.owners, made._rows = [], [], 0
        return made

    def join(self, others: FrameResults) -> None:
        """Put others behind these, which are none then."""
        before = len(self.given)
        self.given += others.given
        self.owners += [(before + after, key) for after, key in others.owners]
        self._rows += others._rows
        others.given.clear()
        others.owners.clear()
        others._rows = 0

    def take(self, results: Iterator[Any], key: Any) -> bool:
        """Take frames of a key; returns whether there are enough for now, and maybe more."""
        for frame in results:
            self.append(frame)
            self.owners.append((len(self.given), key))
            if self.enough:
                return True
        return False

    @property
    def size(self) -> int:
        """How many rows there are, or frames, if these are more."""
        return max(self._rows, len(self.given))

    @property
    def enough(self) -> bool:
        """Whether there are enough rows, or frames, for now."""
        return self.size >= TOGETHER

    def taken(self, blame: Callable[[Any], None]) -> Iterator[pa.RecordBatch]:
        """All rows so far. What is wrong with them is raised after `blame` was told the key."""
        parts, start = self.given, 0
        for stop, key in self.owners:
            parts[start:stop] = [
                part._replace(key=key) if isinstance(part, _Part) else part for part in parts[start:stop]
            ]
            start = stop
        self.given, self.owners, self._rows = [], [], 0
        for some in _alike(parts):
            if isinstance(some[0], _Part):
                yield from self._together(some, blame)
            else:
                yield from some

    def _together(self, parts: list[Any], blame: Callable[[Any], None]) -> list[pa.RecordBatch]:
        if len(parts) > 1:
            with suppress(Exception):  # one by one, types may be found that do not fit them all
                return [self._batch(_frame(parts), cast=False)]
        made = []
        for part in parts:
            blame(part.key)
            made.append(self._batch(_frame([part]), cast=True))
        return made

    def _batch(self, frame: pd.DataFrame, cast: bool) -> pa.RecordBatch:
        """As Spark takes a frame; `cast`: where a column has another type, by a type found for all of it."""
        from pyspark.sql.conversion import PandasToArrowConversion

        conf = self._conf
        converted = PandasToArrowConversion.convert(
            [frame],
            self._schema,
            timezone=conf.timezone,
            safecheck=conf.safecheck,
            arrow_cast=cast,
            assign_cols_by_name=conf.assign_cols_by_name,
            int_to_decimal_coercion_enabled=conf.int_to_decimal_coercion_enabled,
        )
        return pa.RecordBatch.from_struct_array(converted.column(0))


def _alike(parts: list[_Part | pa.RecordBatch]) -> Iterator[list[Any]]:
    """Runs of frames that have the same columns, of the same types; other parts by themselves."""
    run: list[Any] = []
    for part in parts:
        if run and not (isinstance(part, _Part) and isinstance(run[-1], _Part) and part.same(run[-1])):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _frame(parts: list[_Part]) -> pd.DataFrame:
    """Frames of the same columns as one."""
    columns = {}
    for at, column in enumerate(zip(*(part.columns for part in parts), strict=True)):
        first = column[0]
        columns[at] = np.concatenate(column) if isinstance(first, np.ndarray) else type(first)._concat_same_type(column)
    whole = pd.DataFrame(columns, copy=False)
    whole.columns = parts[0].names
    return whole
