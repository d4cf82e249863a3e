"""Input and output of a user function over groups with state, converted as in Spark's own worker.

Unlike a processor's frames, these have the types that pandas gives to Arrow columns. All rows of a call become one
frame, and each key gets a slice of it. In pandas, integers and booleans have another type if some are null. So for a
column with nulls there is one frame for keys with nulls, and one for keys without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql.types import StructType

from millpond.tasks.limits import rows_per_batch
from millpond.worker.processors.frames import Cut, FrameResults, Frames
from millpond.worker.processors.rows import Pieces
from millpond.worker.processors.state.columns import nulls

_MAX_VARIANTS = 16
"""Maximum number of frames built from a call's rows for keys with nulls in different columns."""


class GroupFrames(Frames):
    """Input as pandas frames; arguments as for `Frames`."""

    def __init__(self, columns: StructType, keys: Sequence[int], values: Sequence[int], conf: Any) -> None:
        super().__init__(columns, keys, values, conf)
        names = [columns.names[position] for position in self._values]
        self._empty = pd.DataFrame(columns=pd.Index(names))

    def groups(self, keys: Sequence[pa.Array], counts: list[int], pieces: Pieces) -> Iterator[tuple[Any, Any]]:
        """Yield each key and its frames; arguments as for `Frames.groups`."""
        ends = list(accumulate(counts, initial=0))
        typed = self._typed(next(pieces).columns)
        most = rows_per_batch(typed, self._conf)
        if ends[-1] > typed.num_rows:
            yield next(self._key_values(keys, 1)), self._streamed(typed, pieces, most)
            return
        cut = self._cutting(typed)
        for key, (start, stop) in zip(self._key_values(keys, len(counts)), pairwise(ends), strict=True):
            yield key, (cut(begin, min(begin + most, stop)) for begin in range(start, stop, most))

    def timed_out(self, keys: Sequence[pa.Array], count: int) -> Iterator[tuple[Any, Any]]:
        """Yield each key with one empty frame."""
        return ((key, [self._empty.copy()]) for key in self._key_values(keys, count))

    def _key_values(self, keys: Sequence[pa.Array], count: int) -> Iterator[tuple[Any, ...]]:
        """Yield keys with the NumPy types that the first rows of frames have."""
        typed = self._typed(keys, self._keys)
        columns = [self._scalars(typed.select([position])) for position in range(typed.num_columns)]
        return zip(*columns, strict=True) if columns else iter([()] * count)

    def _scalars(self, column: pa.RecordBatch) -> list[Any]:
        (array,) = column.columns
        varies = array.null_count > 0 and self._varies(array.type)
        (series,) = self._series(_filled(column, [0]) if varies else column)
        if not isinstance(series.dtype, np.dtype) or series.dtype.kind not in "iufbO":
            return list(series.array)
        values = list(series.to_numpy())
        missing = None if pa.types.is_boolean(array.type) else np.float64("nan")
        for position in nulls(array) if varies else ():
            values[position] = missing
        return values

    def _varies(self, kind: pa.DataType) -> bool:
        """Return whether a column has another type in pandas if some of it is null."""
        return pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and not self._conf.prefer_int_ext_dtype)

    def _cutting(self, batch: pa.RecordBatch) -> Cut:
        """Return a function that cuts frames out of a batch."""
        batch = batch.select(self._values)
        columns = [
            position for position, column in enumerate(batch.columns) if column.null_count and self._varies(column.type)
        ]
        if not columns:
            return self._sliced(self._to_frame(batch))
        counts = [np.cumsum(batch.column(position).is_null().to_numpy(zero_copy_only=False)) for position in columns]
        before = [[0, *count.tolist()] for count in counts]
        cuts: dict[tuple[bool, ...], Cut] = {}

        def cut(start: int, stop: int) -> pd.DataFrame:
            whole = tuple([count[start] == count[stop] for count in before])
            if whole not in cuts:
                if len(cuts) == _MAX_VARIANTS:
                    return self._to_frame(batch.slice(start, stop - start))
                filled = [position for position, is_whole in zip(columns, whole, strict=True) if is_whole]
                cuts[whole] = self._sliced(self._to_frame(_filled(batch, filled)))
            return cuts[whole](start, stop)

        return cut

    def _to_frame(self, batch: pa.RecordBatch) -> pd.DataFrame:
        """Copy rows to a frame, which the user may change."""
        return pd.concat(self._series(batch), axis=1)


def _filled(batch: pa.RecordBatch, columns: list[int]) -> pa.RecordBatch:
    """Replace nulls in some columns by zero or false."""
    arrays = batch.columns
    for position in columns:
        arrays[position] = arrays[position].fill_null(False if pa.types.is_boolean(arrays[position].type) else 0)
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


class GroupResults(FrameResults):
    """Output frames of a user function over groups, collected up to a batch; arguments as for `FrameResults`."""

    def __init__(self, shown: StructType, conf: Any) -> None:
        super().__init__(shown, conf)
        self._names = shown.names
        self._by_name = conf.assign_cols_by_name

    def collect(self, results: Iterator[Any], key: Any) -> bool:
        """Take frames of a key; return whether the output has enough rows for now and the key may have more."""
        return super().collect(filter(len, map(self._verified, results)), key)

    def _verified(self, result: Any) -> pd.DataFrame:
        if not isinstance(result, pd.DataFrame):
            raise PySparkTypeError(
                errorClass="UDF_RETURN_TYPE",
                messageParameters={
                    "expected": "iterator of pandas.DataFrame",
                    "actual": f"iterator of {type(result).__name__}",
                },
            )
        if len(result.columns) != len(self._names) and not (len(result.columns) == 0 and result.empty):
            raise PySparkRuntimeError(
                errorClass="RESULT_COLUMN_SCHEMA_MISMATCH",
                messageParameters={"expected": str(len(self._names)), "actual": str(len(result.columns))},
            )
        return result

    def _batch(self, frame: pd.DataFrame, cast: bool) -> pa.RecordBatch:
        """Convert a frame as Spark does; by name, a missing column is null."""
        if self._by_name and frame.shape[1] and not frame.columns.equals(pd.Index(self._names)):
            missing = dict.fromkeys(name for name in self._names if name not in frame.columns)
            # `assign` makes the missing columns objects; `reindex` alone makes them floats.
            frame = frame.reindex(columns=self._names).assign(**missing)
        return super()._batch(frame, cast)


def result_frames(results: Any) -> Iterator[Any]:
    """Return an iterator over the result of a call of the user's function.

    Raises:
        PySparkTypeError: the result is not an iterable of frames.
    """
    expected = "iterable of pandas.DataFrame" if isinstance(results, pd.DataFrame) else "iterable"
    try:
        if not isinstance(results, pd.DataFrame):
            return iter(results)
    except TypeError:
        pass
    raise PySparkTypeError(
        errorClass="UDF_RETURN_TYPE", messageParameters={"expected": expected, "actual": type(results).__name__}
    )
