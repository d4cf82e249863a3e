"""Whether a query still makes the same state of the same input, as it has to when a batch is repeated.

Spark repeats a batch with the query as the application has it then. State that lags behind what a sink has shown must
not be made from other rows than were shown.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JJavaError

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.python import function_code
from millpond.plan.reading.decision import Decided, Decision

_IDENTITY = re.compile(r"(?<!none)#-?\d+")  # numbers that a session gives; those behind "none" are positions
_ZONE = re.compile(r'"timeZoneId":"([^"]*)"')
_VARIABLE = re.compile(r"\b(lambda [a-z]+)_\d+")  # variables of lambda functions are numbered, too


def fingerprint(catalyst: Catalyst, decision: Decision) -> str:
    """A digest of the query up to its topmost Millpond operators: what they group, count or join, and all below.

    It is the same in every session, unless Spark's version differs, or the time zone where the query asks for it.
    (Whether errors are nulls, `spark.sql.ansi.enabled`, makes no other rows of those that came through.) Not told apart
    are sources of the same columns, the code of functions of the user in Java, and constants beyond what Spark prints
    of a long list.
    """
    texts = [_text(catalyst, Node(top.node.java.canonicalized())) for top in _topmost(decision.root)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]


def _topmost(decided: Decided) -> list[Decided]:
    if decided.operator is not None and decided.operator.spec is not None:
        return [decided]
    return [top for child in decided.children for top in _topmost(child)]


def _text(catalyst: Catalyst, node: Node) -> str:
    """A canonical plan as text."""
    if not node.children:
        return f"{node.kind}({', '.join(column.type for column in node.output)})"
    said = str(node.java.expressions().mkString("; "))
    said = _VARIABLE.sub(r"\1", _IDENTITY.sub("", said))
    said += "".join(f" {one}" for expression in node.expressions for one in _unsaid(catalyst, expression))
    if node.kind == "Join":
        said += f" {node.join_type}"
    if node.kind == "EventTimeWatermark":
        said += f" {node.java.delay().toString()}"
    return f"{node.kind}[{said}]({', '.join(_text(catalyst, child) for child in node.children)})"


def _unsaid(catalyst: Catalyst, expression: Expression) -> Iterator[str]:
    """What an expression's text leaves out: time zones by which casts compute, the code of the user's functions."""
    try:
        fields = str(expression.java.toJSON())
    except Py4JJavaError:  # Spark makes no JSON of some expressions with fields of their own
        fields = None
    if fields is not None:
        yield from _ZONE.findall(fields)
    if fields is None or "PythonUD" in fields:
        for part in expression.walk():
            code = function_code(catalyst, part)
            if code is not None:
                yield " ".join(code)
