"""Input and output of a processor that receives pandas frames, converted as in Spark's own worker.

Spark builds each frame from Python values of a key's rows, so that pandas infers the types for each frame. Here all
rows of a call become one frame, and each key gets a slice of it, where types cannot depend on the slice.
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
from pandas.api.types import infer_dtype
from pyspark.errors import PySparkValueError
from pyspark.sql.types import ArrayType, BinaryType, BooleanType, MapType, NullType, StructField, StructType

from millpond.errors import UsageError
from millpond.tasks.limits import rows_per_batch
from millpond.worker.processors.casts import Typed
from millpond.worker.processors.rows import ROWS_PER_BATCH, Pieces, has_nan

_MAX_COLUMN_BYTES = (1 << 31) - 1  # bytes of a column: most Arrow types have 32-bit offsets

Cut = Callable[[int, int], pd.DataFrame]
"""Returns the frame of the rows between two positions."""


class Frames:
    """Input as pandas frames.

    Args:
        columns: columns of the input.
        keys: positions of the key columns.
        values: positions of the columns in a frame.
        conf: Spark's `RunnerConf`.

    Attributes:
        may_have_nan: whether keys may contain NaN, which pandas also uses for null numbers.
    """

    may_have_nan = True

    def __init__(self, columns: StructType, keys: Sequence[int], values: Sequence[int], conf: Any) -> None:
        self._typed = Typed(columns, conf.timezone)
        self._columns = columns
        self._keys = keys
        self._values = list(values)
        self._conf = conf
        self._names = pd.Index(_named(columns.names))
        self._indexes: dict[int, pd.RangeIndex] = {}

    def groups(self, keys: Sequence[pa.Array], counts: list[int], pieces: Pieces) -> Iterator[tuple[Any, Any]]:
        """Yield each key and its frames, of one row each if the key has a NaN (see `rows.row_iterators`).

        Args:
            keys: columns of the keys.
            counts: number of rows of each key.
            pieces: the rows; several pieces only if there is one key.
        """
        typed = self._typed(next(pieces).columns)
        series = self._series(typed)
        ends = list(accumulate(counts, initial=0))
        firsts = [series[position].iloc[ends[:-1]].tolist() for position in self._keys]
        key_values = zip(*firsts, strict=True) if firsts else iter([()] * len(counts))
        most = rows_per_batch(typed, self._conf)
        if ends[-1] > typed.num_rows:
            key = next(key_values)
            yield key, self._streamed(typed, pieces, 1 if has_nan(key) else most)
            return
        cut = self._cut(series)
        for key, (start, stop) in zip(key_values, pairwise(ends), strict=True):
            yield key, _cuts(cut, range(start, stop, 1 if has_nan(key) else most))

    retained_groups = groups

    def _streamed(self, first: pa.RecordBatch, others: Iterator[pa.RecordBatch], most: int) -> Iterator[pd.DataFrame]:
        """Yield the frames of one key, all of equal length except the last.

        Args:
            first: first piece of its rows, typed.
            others: the other pieces.
            most: number of rows per frame.
        """
        for batch in _whole_frames(chain([first], (self._typed(piece.columns) for piece in others)), most):
            yield from _cuts(self._cutting(batch), range(0, batch.num_rows, most))

    def _cutting(self, batch: pa.RecordBatch) -> Cut:
        """Return a function that cuts frames out of a batch."""
        return self._cut(self._series(batch))

    def _cut(self, series: list[pd.Series]) -> Cut:
        frame = self._sliceable(series)
        return self._built_per_key(series) if frame is None else self._sliced(frame)

    def _series(self, batch: pa.RecordBatch) -> list[pd.Series]:
        from pyspark.sql.conversion import ArrowBatchTransformer

        series: list[pd.Series] = ArrowBatchTransformer.to_pandas(
            batch, timezone=self._conf.timezone, prefer_int_ext_dtype=self._conf.prefer_int_ext_dtype
        )
        return series

    def _sliceable(self, series: list[pd.Series]) -> pd.DataFrame | None:
        """Return all rows as one frame if its slices have the types that separate frames would have; else None."""
        columns = {}
        for position in self._values:
            column = series[position]
            if column.dtype == object and not isinstance(self._columns[position].dataType, BooleanType | NullType):
                columns[position] = column
            elif column.dtype.kind in "ifb" and isinstance(column.dtype, np.dtype):
                columns[position] = column.astype({"i": np.int64, "f": np.float64, "b": np.bool_}[column.dtype.kind])
            elif column.dtype == "datetime64[ns]":
                columns[position] = column
            else:
                return None
        frame = pd.DataFrame(columns, copy=True)  # copied, as the user may change it in place
        frame.columns = self._names[self._values]
        return frame if columns else None

    def _sliced(self, frame: pd.DataFrame) -> Cut:
        manager = frame._mgr

        def cut(start: int, stop: int) -> pd.DataFrame:
            part = manager.get_slice(slice(start, stop), axis=1)
            part.axes[1] = self._index(stop - start)
            return pd.DataFrame._from_mgr(part, part.axes)

        return cut

    def _built_per_key(self, series: list[pd.Series]) -> Cut:
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
    """Regroup rows so that each batch but the last holds a multiple of a frame's `most` rows.

    Raises:
        UsageError: the rows of a frame take more than 2 GB.
    """
    waiting: list[pa.RecordBatch] = []
    for piece in pieces:
        waiting.append(piece)
        if sum(batch.num_rows for batch in waiting) >= most:
            together = _concatenated(waiting)
            stop = together.num_rows - together.num_rows % most
            yield together.slice(0, stop)
            waiting = [together.slice(stop)] if stop < together.num_rows else []
        elif (
            max(sum(batch.column(position).nbytes for batch in waiting) for position in range(piece.num_columns))
            > _MAX_COLUMN_BYTES
        ):
            raise UsageError(
                "The rows of a key that make up one frame take more than 2 GB.",
                action="Set spark.sql.execution.arrow.maxRecordsPerBatch, the rows of one frame, to a smaller number.",
            )
    if waiting:
        yield _concatenated(waiting)


def _concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    arrays = [pa.concat_arrays(columns) for columns in zip(*(batch.columns for batch in batches), strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=batches[0].schema)


def _cuts(cut: Cut, starts: range) -> Iterator[pd.DataFrame]:
    for start in starts:
        yield cut(start, min(start + starts.step, starts.stop))


def _named(columns: list[str]) -> tuple[str, ...]:
    """Return the final names of columns: Spark makes named tuples of rows, which rename invalid names."""
    make: Any = namedtuple  # aliased: type checkers require literal field names of `namedtuple`
    names: tuple[str, ...] = make("Pandas", columns, rename=True)._fields
    return names


class _Frame(NamedTuple):
    """A frame as it was when the processor yielded it."""

    names: pd.Index
    columns: list[Any]
    key: Any = None

    def same(self, other: _Frame) -> bool:
        """Return whether another frame has the same columns with the same types."""
        mine, others = ([column.dtype for column in part.columns] for part in (self, other))
        return mine == others and bool(self.names.equals(other.names))


class FrameResults:
    """Output frames of a processor, collected until there are enough rows.

    Args:
        shown: schema of the output.
        conf: Spark's `RunnerConf`.

    Attributes:
        items: the frames.
        ends_by_key: for each key, the number of frames up to its last one, and the key.
        check_every: number of frames between two checks of `enough`.
    """

    check_every = 1

    def __init__(self, shown: StructType, conf: Any) -> None:
        self._schema = StructType([StructField("_0", shown)])
        self._nested = any(isinstance(field.dataType, ArrayType | MapType | StructType) for field in shown.fields)
        self._binary = any(isinstance(field.dataType, BinaryType) for field in shown.fields)
        self._conf = conf
        self.items: list[_Frame | pa.RecordBatch] = []
        self.ends_by_key: list[tuple[int, Any]] = []
        self._rows = 0

    def append(self, frame: Any) -> None:
        """Take a frame."""
        if not isinstance(frame, pd.DataFrame):
            raise PySparkValueError(
                "Invalid return type. Please make sure that the UDF returns a "
                "pandas.DataFrame when the specified return type is StructType."
            )
        if self._nested or not frame.shape[1] or (self._binary and _holds_buffers(frame)):
            self.items.append(self._batch(frame, cast=True))
        else:  # copied, as the user may change the frame before the next one
            columns = [frame._get_column_array(position).copy() for position in range(frame.shape[1])]
            self.items.append(_Frame(frame.columns, columns))
        self._rows += len(frame)

    def empty(self) -> FrameResults:
        """Create an empty collection for the same output."""
        results = object.__new__(FrameResults)  # skips `__init__`, as there are many of them
        results._schema, results._conf = self._schema, self._conf
        results._nested, results._binary = self._nested, self._binary
        results.items, results.ends_by_key, results._rows = [], [], 0
        return results

    def join(self, others: FrameResults) -> None:
        """Append other results and empty them."""
        before = len(self.items)
        self.items += others.items
        self.ends_by_key += [(before + after, key) for after, key in others.ends_by_key]
        self._rows += others._rows
        others.items.clear()
        others.ends_by_key.clear()
        others._rows = 0

    def collect(self, results: Iterator[Any], key: Any) -> bool:
        """Take frames of a key; return whether the output has enough rows for now and the key may have more."""
        for frame in results:
            self.append(frame)
            self.ends_by_key.append((len(self.items), key))
            if self.enough:
                return True
        return False

    @property
    def size(self) -> int:
        """Number of rows, or of frames if there are more of these."""
        return max(self._rows, len(self.items))

    @property
    def enough(self) -> bool:
        """Whether there are enough rows or frames for a batch."""
        return self.size >= ROWS_PER_BATCH

    def drain(self, attach_context: Callable[[Any], None]) -> Iterator[pa.RecordBatch]:
        """Yield all rows so far; call `attach_context` with the key before an error of its rows is raised."""
        parts, start = self.items, 0
        for stop, key in self.ends_by_key:
            parts[start:stop] = [
                part._replace(key=key) if isinstance(part, _Frame) else part for part in parts[start:stop]
            ]
            start = stop
        self.items, self.ends_by_key, self._rows = [], [], 0
        for run in _runs_of_same_type(parts):
            if isinstance(run[0], _Frame):
                yield from self._together(run, attach_context)
            else:
                yield from run

    def _together(self, parts: list[Any], attach_context: Callable[[Any], None]) -> list[pa.RecordBatch]:
        if len(parts) > 1:
            with suppress(Exception):  # converted separately, frames may have types that differ
                return [self._batch(_frame(parts), cast=False)]
        batches = []
        for part in parts:
            attach_context(part.key)
            batches.append(self._batch(_frame([part]), cast=True))
        return batches

    def _batch(self, frame: pd.DataFrame, cast: bool) -> pa.RecordBatch:
        """Convert a frame as Spark does.

        Args:
            frame: the frame.
            cast: whether to cast a column of another type than the output's, by a type inferred for the whole column.
        """
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


def _holds_buffers(frame: pd.DataFrame) -> bool:
    """Return whether a frame may hold objects that the user fills again for the next one, such as `bytearray`."""
    columns = (frame.iloc[:, position] for position in range(frame.shape[1]))
    return any(column.dtype == object and infer_dtype(column, skipna=True).startswith("mixed") for column in columns)


def _runs_of_same_type(parts: list[_Frame | pa.RecordBatch]) -> Iterator[list[Any]]:
    """Yield runs of consecutive frames with the same columns and types; each other part on its own."""
    run: list[Any] = []
    for part in parts:
        if run and not (isinstance(part, _Frame) and isinstance(run[-1], _Frame) and part.same(run[-1])):
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _frame(parts: list[_Frame]) -> pd.DataFrame:
    """Concatenate frames with the same columns."""
    columns = {}
    for position, column in enumerate(zip(*(part.columns for part in parts), strict=True)):
        first = column[0]
        columns[position] = (
            np.concatenate(column) if isinstance(first, np.ndarray) else type(first)._concat_same_type(column)
        )
    whole = pd.DataFrame(columns, copy=False)
    whole.columns = parts[0].names
    return whole
