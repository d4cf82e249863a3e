"""What goes in and comes out of a function over groups with state: as Spark's own worker makes and takes it.

Unlike those of a processor, its frames have the types that Arrow's columns have in pandas. All rows of a call become
one frame, of which each key has a slice. Numbers and truth values have another type in pandas where some are null, so
where a column has nulls there is a frame for the keys that have some, and one for those that have none.
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

from millpond.slot.batch.limits import rows_together
from millpond.slot.pipe.processors.frames import Cut, FrameResults, Frames
from millpond.slot.pipe.processors.rows import Pieces
from millpond.slot.pipe.processors.state.columns import nulls

_VARIANTS = 16
"""Frames that are made of a call's rows, at most, for keys that have nulls in different columns."""


class GroupFrames(Frames):
    """The input as pandas frames; arguments as of `Frames`."""

    def __init__(self, columns: StructType, keys: Sequence[int], values: Sequence[int], conf: Any) -> None:
        super().__init__(columns, keys, values, conf)
        names = [columns.names[at] for at in self._values]
        self._empty = pd.DataFrame(columns=pd.Index(names))

    def groups(self, keys: Sequence[pa.Array], counts: list[int], pieces: Pieces) -> Iterator[tuple[Any, Any]]:
        """Each key and its frames; arguments as of `Frames.groups`."""
        ends = list(accumulate(counts, initial=0))
        typed = self._typed(next(pieces).columns)
        most = rows_together(typed, self._conf)
        if ends[-1] > typed.num_rows:
            yield next(self._told(keys, 1)), self._streamed(typed, pieces, most)
            return
        cut = self._cutting(typed)
        for key, (start, stop) in zip(self._told(keys, len(counts)), pairwise(ends), strict=True):
            yield key, (cut(at, min(at + most, stop)) for at in range(start, stop, most))

    def timed_out(self, keys: Sequence[pa.Array], count: int) -> Iterator[tuple[Any, Any]]:
        """Each key, and the one empty frame that it has."""
        return ((key, [self._empty.copy()]) for key in self._told(keys, count))

    def _told(self, keys: Sequence[pa.Array], count: int) -> Iterator[tuple[Any, ...]]:
        """Keys as the first rows of frames have them: of NumPy's types."""
        typed = self._typed(keys, self._keys)
        columns = [self._scalars(typed.select([at])) for at in range(typed.num_columns)]
        return zip(*columns, strict=True) if columns else iter([()] * count)

    def _scalars(self, column: pa.RecordBatch) -> list[Any]:
        (array,) = column.columns
        varies = array.null_count > 0 and self._varies(array.type)
        (series,) = self._series(_filled(column, [0]) if varies else column)
        if not isinstance(series.dtype, np.dtype) or series.dtype.kind not in "iufbO":
            return list(series.array)
        values = list(series.to_numpy())
        missing = None if pa.types.is_boolean(array.type) else np.float64("nan")
        for at in nulls(array) if varies else ():
            values[at] = missing
        return values

    def _varies(self, kind: pa.DataType) -> bool:
        """Whether a column has another type in pandas where some of it is null."""
        return pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and not self._conf.prefer_int_ext_dtype)

    def _cutting(self, batch: pa.RecordBatch) -> Cut:
        """What gives the frame of some rows."""
        batch = batch.select(self._values)
        columns = [at for at, one in enumerate(batch.columns) if one.null_count and self._varies(one.type)]
        if not columns:
            return self._sliced(self._made(batch))
        counts = [np.cumsum(batch.column(at).is_null().to_numpy(zero_copy_only=False)) for at in columns]
        before = [[0, *count.tolist()] for count in counts]
        cuts: dict[tuple[bool, ...], Cut] = {}

        def cut(start: int, stop: int) -> pd.DataFrame:
            whole = tuple([count[start] == count[stop] for count in before])
            if whole not in cuts:
                if len(cuts) == _VARIANTS:
                    return self._made(batch.slice(start, stop - start))
                filled = [at for at, is_whole in zip(columns, whole, strict=True) if is_whole]
                cuts[whole] = self._sliced(self._made(_filled(batch, filled)))
            return cuts[whole](start, stop)

        return cut

    def _made(self, batch: pa.RecordBatch) -> pd.DataFrame:
        """Rows as a frame of their own, which the user may change."""
        return pd.concat(self._series(batch), axis=1)


def _filled(batch: pa.RecordBatch, columns: list[int]) -> pa.RecordBatch:
    """Rows with something in place of nulls in some columns."""
    arrays = batch.columns
    for at in columns:
        arrays[at] = arrays[at].fill_null(False if pa.types.is_boolean(arrays[at].type) else 0)
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


class GroupResults(FrameResults):
    """Frames that a function over groups gives out, until there are enough rows; arguments as of `FrameResults`."""

    def __init__(self, shown: StructType, conf: Any) -> None:
        super().__init__(shown, conf)
        self._names = shown.names
        self._by_name = conf.assign_cols_by_name

    def take(self, results: Iterator[Any], key: Any) -> bool:
        """Take frames of a key; returns whether there are enough for now, and maybe more."""
        return super().take(filter(len, map(self._verified, results)), key)

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
        """As Spark takes a frame: by name, a column that is not there is null."""
        if self._by_name and frame.shape[1] and not frame.columns.equals(pd.Index(self._names)):
            missing = dict.fromkeys(name for name in self._names if name not in frame.columns)
            frame = frame.reindex(columns=self._names).assign(**missing)  # of objects, not of floats
        return super()._batch(frame, cast)


def given(results: Any) -> Iterator[Any]:
    """What a call of the user's function has given, to be gone through.

    Raises:
        PySparkTypeError: it cannot be.
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
