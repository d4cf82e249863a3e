"""Functions of the user in Spark's plans, as Spark has pickled them; beside `catalyst`, what touches JVM objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millpond.plan.catalyst.function_code import code_digest
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, items
from millpond.slot.batch.limits import BYTES, RECORDS
from millpond.slot.pipe.user_functions import Kind, UserFunction

_LARGE = "spark.sql.execution.arrow.useLargeVarTypes"


def kind_of(function: Expression) -> Kind | None:
    """The kind of a function of the user; None if it is not known here."""
    number = int(function.java.evalType())
    return Kind(number) if number in list(Kind) else None


def arguments(function: Expression) -> list[tuple[str | None, Expression]]:
    """What a function is called with, each with its name if it is given one."""
    return [
        (str(child.java.key()), child.children[0]) if child.kind == "NamedArgumentExpression" else (None, child)
        for child in function.children
    ]


def command(catalyst: Catalyst, function: Expression) -> bytes:
    """A function of the user, with the type of its result, as Spark has pickled it."""
    byte = catalyst._class("scala.reflect.ClassTag").Byte()
    return bytes(function.java.func().command().toArray(byte))


def function_code(catalyst: Catalyst, expression: Expression) -> tuple[str, str] | None:
    """The name of a function of the user and a digest of its code, empty if it cannot be told; None for all else."""
    if expression.kind not in ("PythonUDF", "PythonUDAF"):
        return None
    return str(expression.java.name()), code_digest(command(catalyst, expression)) or ""


def user_function(
    catalyst: Catalyst,
    function: Expression,
    kind: Kind,
    places: Iterable[tuple[str | None, int]],
) -> UserFunction:
    """A function of the user, to be called with the columns at some places, each with a name or without."""
    java = function.java
    given = list(places)
    return UserFunction(
        name=str(java.name()),
        kind=kind,
        command=command(catalyst, function),
        arguments=tuple(place for name, place in given if name is None),
        keywords=tuple((name, place) for name, place in given if name is not None),
        identity=int(java.resultId().id()),
    )


def broadcasts(function: Expression) -> list[Any]:
    """The JVM's objects of the broadcast variables that a function uses, or that it is sent as, being large."""
    java = function.java.func().broadcastVars()
    return [java.get(index) for index in range(java.size())]


def worker_settings(catalyst: Catalyst) -> dict[str, str]:
    """The session's settings that Spark's Python workers obey."""
    runner = catalyst._class("org.apache.spark.sql.execution.python.ArrowPythonRunner")
    conf = catalyst.spark._jsparkSession.sessionState().conf()
    pairs = {str(pair._1()): str(pair._2()) for pair in items(runner.getPythonRunnerConfMap(conf).toSeq())}
    # The limits of batches are not among them; large types are off, as for the whole query.
    limits = {RECORDS: str(conf.arrowMaxRecordsPerBatch()), BYTES: str(conf.arrowMaxBytesPerBatch())}
    return pairs | limits | {_LARGE: "false"}
