"""Form of an exchange's map side, chosen per batch by a planner strategy that the driver compiles.

The compiler that Spark ships compiles the strategy (`ExchangeStrategy.java`) once per JVM. The strategy recognises a
`MapInArrow` by the first operand of its Python function. It plans the form that a map in the JVM holds for it.
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
"""Form of an exchange's map side: Spark's partial aggregation, a projection of the rows, or the Python function that
writes rows to files."""

_CLASS = "millpond.plan.ExchangeStrategy"
_lock = threading.Lock()
_strategies: list[tuple[Any, Any]] = []
"""Pairs of JVM gateway and compiled strategy; None if the JVM cannot compile it."""


class Combined(NamedTuple):
    """Plan of Spark's partial aggregation of rows.

    Attributes:
        keys: grouping keys, over the columns below.
        functions: aggregate functions and their filters, over the columns below and, as bound references, over the
            copies' columns.
        copies: for each copy of a row, its further grouping columns; empty without copies.
        results: an expression per output column, over bound references to keys, copies' columns, and buffers.
    """

    keys: Sequence[Expression]
    functions: Sequence[tuple[Expression, Expression | None]]
    copies: Sequence[Sequence[Expression]]
    results: Sequence[Expression]


class ExchangeForms:
    """The strategy installed in one session; a stream copies the session, with the strategy, at its start.

    Args:
        catalyst: of the session.
        strategy: the compiled strategy.
    """

    def __init__(self, catalyst: Catalyst, strategy: Any) -> None:
        self._catalyst = catalyst
        self._forms = strategy.getClass().getField("FORMS").get(None)

    @classmethod
    def install(cls, spark: SparkSession) -> ExchangeForms | None:
        """Compile the strategy, if necessary, and add it to a session; return None if it cannot be compiled."""
        catalyst = Catalyst(spark)
        strategy = _strategy(catalyst)
        if strategy is None:
            return None
        with _lock:
            methods = spark._jsparkSession.experimental()
            # A second installation must not add the strategy twice.
            others = [other for other in items(methods.extraStrategies()) if str(other.getClass().getName()) != _CLASS]
            getattr(methods, "extraStrategies_$eq")(catalyst.seq([strategy, *others]))
        return cls(catalyst, strategy)

    def choose(self, exchange: str, form: Form) -> None:
        """Use a form for the batches that are planned from now on."""
        self._forms.put(exchange, form)

    def remove(self, exchange: str) -> None:
        """Remove an exchange whose query has ended."""
        self._forms.remove(exchange)

    def with_forms(
        self,
        mapped: DataFrame,
        exchange: str,
        rows: Sequence[Expression],
        combined: Combined | None = None,
    ) -> DataFrame:
        """Attach the other forms to a `mapInArrow`.

        Args:
            mapped: the result of `mapInArrow`.
            exchange: the exchange's identifier, without a colon.
            rows: an expression per output column, over the columns below.
            combined: the partial aggregation; None if rows cannot be combined.
        """
        catalyst = self._catalyst
        java = catalyst.analyzed(mapped).java
        true = catalyst.literal(True)
        if combined is None:  # the strategy finds rows and results by counting from the end, so both must be present
            combined = Combined([], [], [], rows)
        sizes = len(combined.keys), len(combined.functions), len(combined.copies)
        operands = [catalyst.literal(":".join(map(str, ["millpond-exchange", exchange, *sizes]))), *combined.keys]
        for function, condition in combined.functions:
            operands += [function, true if condition is None else condition]
        operands += [*chain.from_iterable(combined.copies), *rows, *combined.results]
        udf = java.functionExpr()
        children = catalyst.seq([operand.java for operand in operands])
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
        # Also a failure is kept: the same JVM would fail again.
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
