"""User functions in Spark's plans, as Spark has pickled them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, items
from millpond.plan.catalyst.user_code.digest import code_digest, load_function
from millpond.tasks.limits import MAX_BYTES, MAX_RECORDS
from millpond.tasks.user_functions import Kind, UserFunction

_LARGE = "spark.sql.execution.arrow.useLargeVarTypes"
_PICKLED, _ARROW = 100, 101
"""Spark's numbers for plain functions whose values are pickled, or sent as Arrow."""
_TIMESTAMP = re.compile(r"\btimestamp\b")


def kind_of(function: Expression) -> Kind | None:
    """Return the kind of a user function; None if it is unknown here."""
    number = int(function.java.evalType())
    return Kind(number) if number in list(Kind) else None


def arguments(function: Expression) -> list[tuple[str | None, Expression]]:
    """Return a function's arguments, each with its name if it is a named argument."""
    return [
        (str(child.java.key()), child.children[0]) if child.kind == "NamedArgumentExpression" else (None, child)
        for child in function.children
    ]


def command(catalyst: Catalyst, function: Expression) -> bytes:
    """Return a user function, with its result type, as pickled by Spark."""
    byte = catalyst.object("scala.reflect.ClassTag").Byte()
    return bytes(function.java.func().command().toArray(byte))


def load(catalyst: Catalyst, function: Expression) -> Any:
    """Return a copy of a user function, with its result type; a broadcast variable in place of a large function."""
    return load_function(command(catalyst, function), _broadcast_files(function))


def _broadcast_files(function: Expression) -> dict[int, str]:
    """Return the id of each broadcast variable of a function → the driver's file with its pickled value."""
    return {int(variable.id()): str(variable.value().path()) for variable in broadcasts(function)}


def function_code(catalyst: Catalyst, expression: Expression) -> tuple[str, str] | None:
    """Return a user function's name and code digest (empty if unreadable); None for other expressions."""
    if expression.kind not in ("PythonUDF", "PythonUDAF"):
        return None
    digest = code_digest(command(catalyst, expression), _broadcast_files(expression))
    return str(expression.java.name()), digest or ""


def time_zone_seen(catalyst: Catalyst, function: Expression) -> str | None:
    """Return the time zones in which a user function sees timestamps; None if neither argument nor result has any.

    Plain functions see them in the machine's zone, others in the session's.
    """
    if not any(_TIMESTAMP.search(part.type) for part in (function, *function.children)):
        return None
    machine, session = "/".join(time.tzname), str(catalyst.spark.conf.get("spark.sql.session.timeZone"))
    # A plain function's values come pickled or as Arrow; of the latter, versions of Spark differ in the zone.
    return {_PICKLED: machine, _ARROW: f"{session}, {machine}"}.get(int(function.java.evalType()), session)


def user_function(
    catalyst: Catalyst,
    function: Expression,
    kind: Kind,
    places: Iterable[tuple[str | None, int]],
) -> UserFunction:
    """Make the description of a user function.

    Args:
        catalyst: of the session.
        function: the function in the plan.
        kind: its kind.
        places: the positions of its argument columns, each with the argument's name or None.
    """
    java = function.java
    named_places = list(places)
    return UserFunction(
        name=str(java.name()),
        kind=kind,
        command=command(catalyst, function),
        arguments=tuple(place for name, place in named_places if name is None),
        keywords=tuple((name, place) for name, place in named_places if name is not None),
        identity=int(java.resultId().id()),
    )


def broadcasts(function: Expression) -> list[Any]:
    """Return the JVM objects of a function's broadcast variables; a large function is itself sent as a broadcast."""
    java = function.java.func().broadcastVars()
    return [java.get(index) for index in range(java.size())]


def worker_settings(catalyst: Catalyst) -> dict[str, str]:
    """Return the session's settings that Spark's Python workers obey."""
    runner = catalyst.object("org.apache.spark.sql.execution.python.ArrowPythonRunner")
    conf = catalyst.spark._jsparkSession.sessionState().conf()
    pairs = {str(pair._1()): str(pair._2()) for pair in items(runner.getPythonRunnerConfMap(conf).toSeq())}
    # The map lacks the limits of batches. Large types are off, as for the whole query.
    limits = {MAX_RECORDS: str(conf.arrowMaxRecordsPerBatch()), MAX_BYTES: str(conf.arrowMaxBytesPerBatch())}
    return pairs | limits | {_LARGE: "false"}
