"""Fingerprint of a query: whether it still makes the same state from the same input.

Spark repeats a batch with the application's current query. State that lags behind a sink's output must not be made from
other rows than the sink has shown.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JJavaError

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.python import function_code, time_zone_seen
from millpond.plan.decision.decision import Decided, Decision

_IDENTITY = re.compile(r"(?<!none)#-?\d+")  # identities given by the session; numbers after "none" are positions
_ZONE = re.compile(r'"timeZoneId":"([^"]*)"')
_VARIABLE = re.compile(r"\b(lambda [a-z]+)_\d+")  # variables of lambda functions are numbered, too


def fingerprint(catalyst: Catalyst, decision: Decision) -> str:
    """Return a digest of the query up to its topmost Millpond operators: operators, expressions, sources.

    It is the same in every session, unless Spark's version differs, or the time zone if the query depends on it.
    The digest ignores `spark.sql.ansi.enabled`. For rows without an error, that setting changes only decimals cast to
    strings, and `size` of a null array. The digest does not distinguish sources with equal
    columns, the code of user functions in Java, and constants that Spark abbreviates in a long list.
    """
    # Nodes above these may change freely: they have no part in the state.
    texts = [_text(catalyst, Node(top.node.java.canonicalized())) for top in _topmost(decision.root)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]


def _topmost(decided: Decided) -> list[Decided]:
    if decided.operator is not None and decided.operator.spec is not None:
        return [decided]
    return [top for child in decided.children for top in _topmost(child)]


def _text(catalyst: Catalyst, node: Node) -> str:
    """Return a canonical plan as text."""
    if not node.children:
        return f"{node.kind}({', '.join(column.type for column in node.output)})"
    text = str(node.java.expressions().mkString("; "))
    text = _VARIABLE.sub(r"\1", _IDENTITY.sub("", text))
    text += "".join(f" {detail}" for expression in node.expressions for detail in _hidden_details(catalyst, expression))
    if node.kind == "Join":
        text += f" {node.join_type}"
    if node.kind == "EventTimeWatermark":
        text += f" {node.java.delay().toString()}"
    return f"{node.kind}[{text}]({', '.join(_text(catalyst, child) for child in node.children)})"


def _hidden_details(catalyst: Catalyst, expression: Expression) -> Iterator[str]:
    """Yield details that an expression's text lacks: time zones, and the code of user functions."""
    try:
        fields = str(expression.java.toJSON())
    except Py4JJavaError:  # Spark has no JSON for some expressions with fields of their own
        fields = None
    if fields is not None:
        yield from _ZONE.findall(fields)
    if fields is None or "PythonUD" in fields:
        for part in expression.walk():
            code = function_code(catalyst, part)
            if code is not None:
                zone = time_zone_seen(catalyst, part)
                yield " ".join(code if zone is None else (*code, zone))
