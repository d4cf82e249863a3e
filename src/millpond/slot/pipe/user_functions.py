"""The user's pandas and Arrow functions over whole groups: called beside the pipe, in Spark's Python worker.

A slot gives each group as one row, whose last column is the list of the group's rows (`rows`). Spark's own code calls
the functions and converts what goes in and comes out, so that they see and give what they do in batch. They run where
Spark runs Python functions, not in the slot: with the application's files and broadcast variables, and a function that
fails, or takes its process down, takes no state with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from millpond.slot.batch.limits import rows_together


class Kind(IntEnum):
    """Kinds of functions, as `pyspark.util.PythonEvalType` numbers them (older versions of Spark do not have all)."""

    MAP_PANDAS = 201
    AGGREGATE_PANDAS = 202
    MAP_ARROW = 209
    MAP_ARROW_PIECES = 215
    MAP_PANDAS_PIECES = 216
    AGGREGATE_PANDAS_PIECES = 217
    AGGREGATE_ARROW = 252
    AGGREGATE_ARROW_PIECES = 254

    @property
    def maps(self) -> bool:
        """Whether it gives any number of rows a group, instead of one value."""
        return self.name.startswith("MAP_")

    @property
    def piecewise(self) -> bool:
        """Whether it is given a group in pieces; then Spark calls it by itself."""
        return self.name.endswith("_PIECES")


_TOGETHER = 10_000  # rows of results that travel together

Grouped = Callable[[int, Iterator[Iterator[pa.RecordBatch]]], Iterator[pa.RecordBatch]]


class UserFunction(NamedTuple):
    """A function of the user.

    Attributes:
        name, kind: what it is.
        command: the function and its result type, as Spark pickles them.
        arguments, keywords: positions of its arguments among the columns of a group's rows.
        identity: Spark's number of this use of it, by which its profiler tells them apart.
    """

    name: str
    kind: Kind
    command: bytes
    arguments: tuple[int, ...]
    keywords: tuple[tuple[str, int], ...] = ()
    identity: int = 0


@dataclass(frozen=True)
class UserFunctions:
    """What becomes of the groups that a slot gives.

    Attributes:
        title: the operator's, for messages.
        functions: the user's; several aggregates, or one that maps groups to rows.
        columns: of a group's rows; where groups are mapped, the keys first.
        shown: the output. Aggregates: the first columns of the slot, then those that `order` says.
        order: for each result, a column of the slot if it is ≥ 0, else that of function −1 − n.
        conf: the settings that Spark's Python worker obeys, and the rows of a group that are given at a time to
            functions that take pieces.
    """

    title: str
    functions: tuple[UserFunction, ...]
    columns: StructType
    shown: StructType
    order: tuple[int, ...] = ()
    conf: dict[str, str] = field(default_factory=dict)

    @cached_property
    def schema(self) -> pa.Schema:
        """Of the output."""
        return to_arrow_schema(self.shown, timezone="UTC")

    @property
    def maps(self) -> bool:
        """Whether the function gives rows, instead of values beside the groups' keys."""
        return self.functions[0].kind.maps

    def __call__(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The results of the groups of a batch. Raises what the user's functions raise."""
        if not batch.num_rows:
            return
        if self.maps:
            yield from self._mapped(batch)
        else:
            yield self._aggregated(batch)

    def _aggregated(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        groups = _Groups(batch.columns[-1])
        rows = self._typed(groups.columns)
        made: list[pa.Array] = []
        for _, uses in groupby(enumerate(self.functions), key=_run):
            functions = [function for _, function in uses]
            given = groups.pieces(rows, self._most(functions[0], rows))
            results = pa.Table.from_batches(self._grouped(functions)(0, given)).combine_chunks()
            made += [column.chunk(0) for column in results.columns]
        columns = batch.columns[: len(self.shown) - len(self.order)]
        columns += [batch.column(one) if one >= 0 else made[-1 - one] for one in self.order]
        return self._fitted(columns)

    def _mapped(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        (function,) = self.functions
        groups = _Groups(batch.columns[-1])
        keys = [key.take(groups.parents) for key in batch.columns[:-1]]
        rows = self._typed(keys + groups.columns)
        if function.kind in (Kind.MAP_ARROW, Kind.MAP_ARROW_PIECES):
            struct = pa.StructArray.from_arrays(rows.columns, fields=list(rows.schema))
            rows = pa.RecordBatch.from_arrays([struct], ["_0"])
        waiting: list[pa.RecordBatch] = []
        count = 0
        for result in self._grouped([function])(0, groups.pieces(rows, self._most(function, rows))):
            waiting.append(self._fitted(result.column(0).flatten()))
            count += result.num_rows
            if count >= _TOGETHER:
                yield from _together(waiting)
                waiting, count = [], 0
        yield from _together(waiting)

    def _typed(self, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        """The columns of rows as Spark gives them to Python."""
        schema = to_arrow_schema(self.columns, timezone=self.conf.get("spark.sql.session.timeZone"))
        return pa.RecordBatch.from_arrays(
            [_cast(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
        )

    def _fitted(self, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        fitted = [_cast(column, field.type) for column, field in zip(columns, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(fitted, schema=self.schema)

    def _most(self, function: UserFunction, rows: pa.RecordBatch) -> int:
        """Rows of a group that the function is given at a time; 0 for all."""
        return rows_together(rows, self.conf) if function.kind.piecewise else 0

    def _grouped(self, functions: Sequence[UserFunction]) -> Grouped:
        """Spark's own function that calls these functions for each group."""
        from pyspark import worker
        from pyspark.worker_message import UDFInfo
        from pyspark.worker_util import pickleSer

        infos = [
            UDFInfo([memoryview(one.command)], list(one.arguments), dict(one.keywords), one.identity)
            for one in functions
        ]
        conf, nothing = worker.RunnerConf(self.conf), worker.EvalConf({})
        grouped: Grouped = worker.read_udfs(pickleSer, infos, functions[0].kind, conf, nothing)[0]
        return grouped


class _Groups:
    """The rows of groups, which lie one after the other.

    Attributes:
        columns: of all rows.
    """

    def __init__(self, lists: pa.ListArray) -> None:
        offsets = np.asarray(lists.offsets)
        self._starts = offsets - offsets[0]
        rows = lists.flatten()
        self.columns: list[pa.Array] = [rows.field(number) for number in range(rows.type.num_fields)]

    @property
    def parents(self) -> pa.Array:
        """The group of each row."""
        lengths = np.diff(self._starts)
        return pa.array(np.repeat(np.arange(len(lengths)), lengths))

    def pieces(self, rows: pa.RecordBatch, most: int) -> Iterator[Iterator[pa.RecordBatch]]:
        """Each group's rows, at most so many together, 0 for any number; nothing is copied."""
        for start, stop in zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True):
            step = most or stop - start
            yield (rows.slice(at, min(step, stop - at)) for at in range(start, stop, step))


def _run(use: tuple[int, UserFunction]) -> tuple[int, int]:
    """Equal for functions that Spark calls together."""
    number, function = use
    return function.kind, number if function.kind.piecewise else -1


def _cast(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    return array if array.type == wanted else array.cast(wanted)


def _together(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    waiting = list(batches)
    if waiting:
        yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()
