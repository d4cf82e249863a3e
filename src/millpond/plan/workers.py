"""Functions of Millpond in Spark's Python workers: which Python runs them, and what is said if it lacks Millpond."""

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

from millpond.slot.batch.rows import last_first

ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
ArrowColumns = Callable[[Iterator[Any]], Iterator[pa.Array]]
"""A function of columns of batches: of arrays, or of tuples of arrays where there are several columns."""


def _same_python(one: str, other: str) -> bool:
    """Whether two programs are one Python of one environment, whatever each is called."""
    return os.path.dirname(one) == os.path.dirname(other) and os.path.realpath(one) == os.path.realpath(other)


def on_one_host(context: SparkContext) -> bool:
    """Whether all tasks run on the driver's host, in its JVM: the master is `local` or `local[…]`."""
    master: str = context.master
    return master == "local" or master.startswith("local[")


def run_this_python(context: SparkContext) -> bool:
    """Whether Millpond's functions run in the driver's own Python, on its host."""
    return on_one_host(context) and (not _chosen(context) or _all_run_this_python(context))


def _all_run_this_python(context: SparkContext) -> bool:
    """Whether all workers, those of the user's functions too, would run the driver's own Python on its host."""
    with _choosing:
        theirs = shutil.which(context.pythonExec)
    return theirs is not None and _same_python(theirs, sys.executable)


_choosing = threading.Lock()
"""Held by whoever changes which Python the context says, for a moment, or asks: queries are started from any thread."""

_DAEMON = "spark.python.daemon.module"


def load_ahead(context: SparkContext) -> None:
    """Have Spark fork its Python workers from a process that has loaded what pipes need, where all run this Python.

    Left alone are a daemon that the user has chosen, and a Millpond that only this process can find.
    """
    if not on_one_host(context) or not _all_run_this_python(context):
        return
    if Path(__file__).parents[2] in (Path(sys.path[0]).absolute(), Path.cwd()):
        return
    conf = context._jsc.sc().conf()
    if not conf.contains(_DAEMON):
        conf.set(_DAEMON, "millpond.slot.pipe.daemon")


@dataclass(frozen=True, eq=False)
class _Broadcast:
    """A broadcast variable of which only the JVM's object is at hand."""

    _jbroadcast: Any


def map_in_arrow(
    df: DataFrame, function: ArrowFunction, schema: StructType | str, broadcasts: Sequence[Any] = ()
) -> DataFrame:
    """`df.mapInArrow(function, schema)` for a function of Millpond.

    Args:
        df, function, schema: as for `mapInArrow`.
        broadcasts: the JVM's objects of broadcast variables that functions of the user within it need.
    """
    context = df.sparkSession.sparkContext
    with _this_python(context):
        for one in broadcasts:  # as if it were pickled with the function: then Spark sends it along
            context._pickled_broadcast_vars.add(_Broadcast(one))
        return df.mapInArrow(portable(function), schema)


def arrow_column(df: DataFrame, function: ArrowColumns, type_: str, columns: Sequence[str], name: str) -> Column:
    """What a function of Millpond makes of columns, each row of which it is sure to see once.

    Args:
        df: whose rows they are. function: of batches of them. type_: of the result. columns: their names.
        name: what Spark's own `explain()` shows.
    """
    run = portable(function)
    run.__name__ = name
    given: Any = pa.Array if len(columns) == 1 else tuple[pa.Array, ...]
    run.__annotations__ = {"batches": Iterator[given], "return": Iterator[pa.Array]}  # Spark goes by them
    with _this_python(df.sparkSession.sparkContext):
        result: Column = arrow_udf(run, type_).asNondeterministic()(*columns)  # else it might be left out
    return result


def named(function: ArrowFunction, title: str, last: int) -> ArrowFunction:
    """A pipe, or what goes before it, as a function that brings its last columns (hash, mark) to the front for it.

    Its name is what Spark's own `explain()` shows for the node. What it refers to is loaded with it in every worker:
    nothing of the planner, and no kernels.
    """

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return function(last_first(batch, last) for batch in batches)

    run.__name__ = f"millpond[{title}]"
    return run


def portable(function: Callable[[Iterator[Any]], Iterator[Any]]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The same function, picklable, that says what to do where it cannot be loaded.

    What it gives raises ImportError in a Python that lacks Millpond, or what Millpond needs.
    """
    pickled = cloudpickle.dumps(function)

    # Spark sends nested functions as code: this one may name nothing of Millpond's.
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


def _chosen(context: SparkContext) -> bool:
    """Whether somebody has said which Python workers are to run."""
    return "PYSPARK_PYTHON" in os.environ or bool(context.getConf().contains("spark.pyspark.python"))


@contextmanager
def _this_python(context: SparkContext) -> Iterator[None]:
    """Have functions that are made within this context run in this very Python, where nobody chose another.

    Spark's own choice is the `python3` of the PATH, which in a virtual environment that is not activated is another
    Python. On a cluster this one's path means nothing.
    """
    if not on_one_host(context) or _chosen(context):
        yield
        return
    with _choosing:
        chosen = context.pythonExec
        context.pythonExec = sys.executable
        try:
            yield
        finally:
            context.pythonExec = chosen
