"""Choose per batch how Spark plans the map side of an exchange, by a strategy that the driver compiles.

The strategy (`ExchangeStrategy.java`) is compiled by the compiler that Spark ships, once per JVM. It recognises a
`MapInArrow` by the first operand of its Python function and plans it in the form that stands in a map of the JVM.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain
from typing import Any, Literal, NamedTuple

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node, items

log = logging.getLogger("millpond")

Form = Literal["combined", "rows", "files"]
"""How the map side of an exchange runs: as Spark's partial aggregation, as a projection of the rows, or as the Python
function that writes the rows to files."""

_CLASS = "millpond.plan.ExchangeStrategy"
_lock = threading.Lock()
_strategies: list[tuple[Any, Any]] = []
"""For each JVM, by its gateway, the compiled strategy; None where the JVM cannot compile it."""


class Combined(NamedTuple):
    """How Spark combines rows.

    Attributes:
        keys: grouping keys, over the columns below.
        functions: aggregate functions and their filters, over the columns below and, as bound references, over what the
            copies have.
        copies: what each copy of a row has beside the columns below, to be grouped by, too; empty without copies.
        results: an expression per output column, over bound references to keys, what the copies have, and buffers.
    """

    keys: Sequence[Expression]
    functions: Sequence[tuple[Expression, Expression | None]]
    copies: Sequence[Sequence[Expression]]
    results: Sequence[Expression]


class ExchangeForms:
    """The strategy as installed in one session; streams copy the session, with it, when they start.

    Args:
        catalyst: of the session. strategy: the compiled strategy.
    """

    def __init__(self, catalyst: Catalyst, strategy: Any) -> None:
        self._catalyst = catalyst
        self._forms = strategy.getClass().getField("FORMS").get(None)

    @classmethod
    def install(cls, spark: SparkSession) -> ExchangeForms | None:
        """Compile the strategy, if that is not done, and add it to a session; None where that is not possible."""
        catalyst = Catalyst(spark)
        strategy = _strategy(catalyst)
        if strategy is None:
            return None
        with _lock:
            methods = spark._jsparkSession.experimental()
            others = [one for one in items(methods.extraStrategies()) if str(one.getClass().getName()) != _CLASS]
            getattr(methods, "extraStrategies_$eq")(catalyst.seq([strategy, *others]))
        return cls(catalyst, strategy)

    def choose(self, exchange: str, form: Form) -> None:
        """Have batches that are planned from now on use a form."""
        self._forms.put(exchange, form)

    def forget(self, exchange: str) -> None:
        """Drop an exchange that no query has any more."""
        self._forms.remove(exchange)

    def with_forms(
        self,
        mapped: DataFrame,
        exchange: str,
        rows: Sequence[Expression],
        combined: Combined | None = None,
    ) -> DataFrame:
        """Give a `mapInArrow` its other forms.

        Args:
            mapped: the result of `mapInArrow`.
            exchange: identifies the exchange, without a colon.
            rows: an expression per output column, over the columns below.
            combined: how rows are combined; None if they cannot be.
        """
        catalyst = self._catalyst
        java = catalyst.analyzed(mapped).java
        true = catalyst.literal(True)
        if combined is None:  # the strategy counts rows and results from the end, so both have to be there
            combined = Combined([], [], [], rows)
        sizes = len(combined.keys), len(combined.functions), len(combined.copies)
        operands = [catalyst.literal(":".join(map(str, ["millpond-exchange", exchange, *sizes]))), *combined.keys]
        for function, condition in combined.functions:
            operands += [function, true if condition is None else condition]
        operands += [*chain.from_iterable(combined.copies), *rows, *combined.results]
        udf = java.functionExpr()
        children = catalyst.seq([one.java for one in operands])
        fields = (udf.name(), udf.func(), udf.dataType(), children, udf.evalType(), udf.udfDeterministic())
        carrier = udf.copy(*fields, udf.resultId())
        copied = java.copy(carrier, java.output(), java.child(), java.isBarrier(), java.profile())
        return catalyst.dataframe(Node(copied))


def prepare(spark: SparkSession) -> None:
    """Compile the strategy in the background, while the query is planned."""
    threading.Thread(target=_strategy, args=(Catalyst(spark),), name="millpond-compile", daemon=True).start()


def _strategy(catalyst: Catalyst) -> Any:
    gateway = catalyst.spark.sparkContext._gateway
    with _lock:
        for known, strategy in _strategies:
            if known is gateway:
                return strategy
        strategy = _compiled(catalyst)
        _strategies.append((gateway, strategy))
        return strategy


def _compiled(catalyst: Catalyst) -> Any:
    source = files("millpond.plan.catalyst.exchange").joinpath("ExchangeStrategy.java").read_text()
    try:
        compiler = catalyst.new("org.codehaus.janino.SimpleCompiler")
        compiler.setParentClassLoader(catalyst.object("org.apache.spark.util.Utils").getContextOrSparkClassLoader())
        compiler.cook(source)
        (constructor,) = compiler.getClassLoader().loadClass(_CLASS).getConstructors()
        return constructor.newInstance(catalyst.array([]))
    except (Py4JError, PySparkException, TypeError) as error:
        log.warning(
            "rows are not combined before the exchange, and small batches take longer: Spark's driver cannot compile "
            "a planner strategy (%s)",
            (str(error.java_exception) if isinstance(error, Py4JJavaError) else str(error)).partition("\n")[0],
        )
        return None
