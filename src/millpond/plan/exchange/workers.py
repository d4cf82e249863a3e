"""Millpond's functions in Spark's Python workers: the choice of their Python, and the error if it lacks Millpond."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import SparkContext, cloudpickle
from pyspark.sql import Column, DataFrame
from pyspark.sql.functions import arrow_udf
from pyspark.sql.types import StructType

from millpond.tasks.rows import move_last_first

ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
ArrowColumns = Callable[[Iterator[Any]], Iterator[pa.Array]]
"""Function over columns of batches: each item is an array, or a tuple of arrays for several columns."""


def _same_python(one: str, other: str) -> bool:
    """Whether two executables are the same Python of the same environment, under any name."""
    return os.path.dirname(one) == os.path.dirname(other) and os.path.realpath(one) == os.path.realpath(other)


def on_one_host(context: SparkContext) -> bool:
    """Whether all tasks run on the driver's host, in its JVM: the master is `local` or `local[…]`."""
    master: str = context.master
    return master == "local" or master.startswith("local[")


def runs_driver_python(context: SparkContext) -> bool:
    """Whether Millpond's functions run in the driver's own Python, on its host."""
    return on_one_host(context) and (not _python_is_configured(context) or _all_run_driver_python(context))


def _all_run_driver_python(context: SparkContext) -> bool:
    """Whether all workers, also those of user functions, would run the driver's own Python on its host."""
    with _python_lock:
        theirs = shutil.which(context.pythonExec)
    return theirs is not None and _same_python(theirs, sys.executable)


_python_lock = threading.Lock()
"""Guards the context's choice of Python: `_with_driver_python` changes it briefly, and any thread may start a query."""

_DAEMON = "spark.python.daemon.module"


def preload_workers(context: SparkContext) -> None:
    """Make Spark fork its Python workers from a process with the slot stages' imports loaded.

    This requires that all workers run this Python. Nothing is changed if the user has chosen a daemon, or if only this
    process can find Millpond.
    """
    if not on_one_host(context) or not _all_run_driver_python(context):
        return
    # The daemon is another process, which may search neither the script's folder nor the working directory.
    if Path(__file__).parents[3] in (Path(sys.path[0]).absolute(), Path.cwd()):
        return
    conf = context._jsc.sc().conf()
    if not conf.contains(_DAEMON):
        conf.set(_DAEMON, "millpond.worker.daemon")


@dataclass(frozen=True, eq=False)
class _Broadcast:
    """A broadcast variable whose JVM object is all that is available."""

    _jbroadcast: Any


def map_in_arrow(
    df: DataFrame, function: ArrowFunction, schema: StructType | str, broadcasts: Sequence[Any] = ()
) -> DataFrame:
    """Return `df.mapInArrow(function, schema)` for a function of Millpond.

    Args:
        df, function, schema: as for `mapInArrow`.
        broadcasts: the JVM objects of broadcast variables that user functions within it need.
    """
    context = df.sparkSession.sparkContext
    with _with_driver_python(context):
        for broadcast in broadcasts:  # as if it were pickled with the function, so that Spark sends it along
            context._pickled_broadcast_vars.add(_Broadcast(broadcast))
        return df.mapInArrow(portable(function), schema)


def arrow_column(df: DataFrame, function: ArrowColumns, type_: str, columns: Sequence[str], name: str) -> Column:
    """Return a column that a function of Millpond computes; the function sees each row exactly once.

    Args:
        df: the DataFrame of the rows.
        function: a function over batches of the columns.
        type_: the type of the result.
        columns: the names of the columns.
        name: the name in Spark's own `explain()`.
    """
    run = portable(function)
    run.__name__ = name
    batch_type: Any = pa.Array if len(columns) == 1 else tuple[pa.Array, ...]
    run.__annotations__ = {"batches": Iterator[batch_type], "return": Iterator[pa.Array]}  # Spark reads the annotations
    with _with_driver_python(df.sparkSession.sparkContext):
        result: Column = arrow_udf(run, type_).asNondeterministic()(*columns)  # a deterministic column might be pruned
    return result


def named_function(function: ArrowFunction, title: str, last: int) -> ArrowFunction:
    """Wrap a slot stage, or the stage before it: the last columns (hash, mark) are moved to the front.

    Spark's own `explain()` shows the name. Every worker loads everything that the function refers to. So it must not
    refer to the planner or to kernels.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return function(move_last_first(batch, last) for batch in batches)

    run.__name__ = f"millpond[{title}]"
    return run


def portable(function: Callable[[Iterator[Any]], Iterator[Any]]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the same function, picklable, with a helpful error where Millpond cannot be loaded.

    The returned function raises ImportError in a Python that lacks Millpond, or a dependency of it.
    """
    pickled = cloudpickle.dumps(function)

    # Spark pickles nested functions by value: this one may not refer to names of Millpond.
    def run(batches: Iterator[Any]) -> Iterator[Any]:
        import pickle
        import platform
        import sys

        try:
            loaded = pickle.loads(pickled)
        except ImportError as error:
            raise ImportError(
                f"Millpond cannot be loaded by Spark's Python worker {sys.executable} on {platform.node()}: {error}. "
                "Install millpond there as on the driver, or have PYSPARK_PYTHON (spark.pyspark.python) name a Python "
                "that has it on every host."
            ) from error
        yield from loaded(batches)

    run.__name__ = getattr(function, "__name__", type(function).__name__)
    return run


def _python_is_configured(context: SparkContext) -> bool:
    """Whether the user has configured the Python of the workers."""
    return "PYSPARK_PYTHON" in os.environ or bool(context.getConf().contains("spark.pyspark.python"))


@contextmanager
def _with_driver_python(context: SparkContext) -> Iterator[None]:
    """Make functions created in this context run in this very Python, unless the user chose another.

    Spark's default is the `python3` of the PATH. In a virtual environment that is not activated, that is another
    Python. On a cluster, the path of this one means nothing.
    """
    if not on_one_host(context) or _python_is_configured(context):
        yield
        return
    with _python_lock:
        chosen = context.pythonExec
        context.pythonExec = sys.executable
        try:
            yield
        finally:
            context.pythonExec = chosen
