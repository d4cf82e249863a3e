"""Calls of pandas and Arrow user functions over whole groups in Spark's Python worker.

A slot yields each group as one row whose last column is the list of the group's rows (`rows`). Spark's own code calls
the functions and converts inputs and outputs, so that they behave as in batch. They run where Spark runs Python
functions, not in the slot. So they have the application's files and broadcast variables, and a function that fails or
kills its process harms no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
import pyarrow as pa

from millpond.tasks.limits import rows_per_batch
from millpond.tasks.user_functions import Kind, UserFunction, UserFunctions
from millpond.worker.processors.casts import Typed

_ROWS_PER_BATCH = 10_000  # rows of an output batch

Grouped = Callable[[int, Iterator[Iterator[pa.RecordBatch]]], Iterator[pa.RecordBatch]]


class GroupCaller:
    """Calls user functions for the groups that a slot yields.

    Args:
        calls: the functions and their columns.

    Attributes:
        schema: Arrow schema of the output.
    """

    def __init__(self, calls: UserFunctions) -> None:
        self._calls = calls
        self._typed = Typed(calls.columns, calls.conf.get("spark.sql.session.timeZone"))
        self._fitted = Typed(calls.output_schema, "UTC")
        self.schema = self._fitted.schema

    def __call__(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the results for a batch of groups. Errors of the user's functions are passed on."""
        if not batch.num_rows:
            return
        if self._calls.maps:
            yield from self._mapped(batch)
        else:
            yield self._aggregated(batch)

    def _aggregated(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        groups = _Groups(batch.columns[-1])
        rows = self._typed(groups.columns)
        results_by_function: list[pa.Array] = []
        for _, uses in groupby(enumerate(self._calls.functions), key=_call_key):
            functions = [function for _, function in uses]
            pieces = groups.pieces(rows, self._max_rows(functions[0], rows))
            results = pa.Table.from_batches(self._grouped(functions)(0, pieces)).combine_chunks()
            results_by_function += [column.chunk(0) for column in results.columns]
        columns = batch.columns[: len(self._calls.output_schema) - len(self._calls.order)]
        columns += [
            batch.column(source) if source >= 0 else results_by_function[-1 - source] for source in self._calls.order
        ]
        return self._fitted(columns)

    def _mapped(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        (function,) = self._calls.functions
        groups = _Groups(batch.columns[-1])
        # Spark passes the keys as columns of each row of the group.
        keys = [key.take(groups.parents) for key in batch.columns[:-1]]
        rows = self._typed(keys + groups.columns)
        if function.kind in (Kind.MAP_ARROW, Kind.MAP_ARROW_PIECES):
            struct = pa.StructArray.from_arrays(rows.columns, fields=list(rows.schema))
            rows = pa.RecordBatch.from_arrays([struct], ["_0"])
        waiting: list[pa.RecordBatch] = []
        count = 0
        for result in self._grouped([function])(0, groups.pieces(rows, self._max_rows(function, rows))):
            waiting.append(self._fitted(result.column(0).flatten()))
            count += result.num_rows
            if count >= _ROWS_PER_BATCH:
                yield from _combined(waiting)
                waiting, count = [], 0
        yield from _combined(waiting)

    def _max_rows(self, function: UserFunction, rows: pa.RecordBatch) -> int:
        """Return the maximum number of rows per piece of a group; 0 for the whole group."""
        return rows_per_batch(rows, self._calls.conf) if function.kind.piecewise else 0

    def _grouped(self, functions: Sequence[UserFunction]) -> Grouped:
        """Return Spark's function that calls these functions for each group."""
        from pyspark import worker
        from pyspark.worker_message import UDFInfo
        from pyspark.worker_util import pickleSer

        infos = [
            UDFInfo(
                [memoryview(function.command)], list(function.arguments), dict(function.keywords), function.identity
            )
            for function in functions
        ]
        conf, no_conf = worker.RunnerConf(self._calls.conf), worker.EvalConf({})
        grouped: Grouped = worker.read_udfs(pickleSer, infos, functions[0].kind, conf, no_conf)[0]
        return grouped


class _Groups:
    """Rows of groups, stored one group after the other.

    Attributes:
        columns: columns of all rows.
    """

    def __init__(self, lists: pa.ListArray) -> None:
        offsets = np.asarray(lists.offsets)
        self._starts = offsets - offsets[0]
        rows = lists.flatten()
        self.columns: list[pa.Array] = [rows.field(number) for number in range(rows.type.num_fields)]

    @property
    def parents(self) -> pa.Array:
        """Index of each row's group."""
        lengths = np.diff(self._starts)
        return pa.array(np.repeat(np.arange(len(lengths)), lengths))

    def pieces(self, rows: pa.RecordBatch, max_rows: int) -> Iterator[Iterator[pa.RecordBatch]]:
        """Yield each group's rows in slices of at most `max_rows` rows (0: unlimited), without copying."""
        for start, stop in zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True):
            step = max_rows or stop - start
            yield (rows.slice(begin, min(step, stop - begin)) for begin in range(start, stop, step))


def _call_key(use: tuple[int, UserFunction]) -> tuple[int, int]:
    """Return a key that is equal for functions that Spark calls together."""
    number, function = use
    return function.kind, number if function.kind.piecewise else -1


def _combined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    waiting = list(batches)
    if waiting:
        yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()
