"""Lookup joins (`millpond.enrich`) in Spark's plans, where they are a function over record batches."""

from __future__ import annotations

import pickle

from pyspark.core.broadcast import Broadcast

from millpond.lookup.function import PREFIX, Lookup
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.python import load
from millpond.spec.kinds.enrich import EnrichSpec

LOOKUP_NODE = "MapInArrow"
"""The node that calls a function with record batches."""


def is_lookup_join(node: Node) -> bool:
    """Whether a node is a lookup join."""
    return node.kind == LOOKUP_NODE and _name(node).startswith(PREFIX)


def lookup_title(node: Node) -> str:
    """Return the operator's title, which does not depend on the looked-up columns or the table."""
    return _name(node).partition(" from ")[0]


def why_not_repeatable(node: Node) -> str:
    """Explain, as a clause, why a repeated batch may produce other rows."""
    return (
        f"'{_name(node)}' may find something else when a batch is run again"
        " (if it does not, set spark.millpond.commit.mode=async)"
    )


def lookup_spec(catalyst: Catalyst, node: Node) -> EnrichSpec | None:
    """Return the spec of a lookup join; None if the function only has a name like one."""
    try:
        loaded = load(catalyst, _function(node))
        if isinstance(loaded, Broadcast):  # a table with much data
            loaded = pickle.loads(loaded.value)
    except Exception:  # any exception of the user's own code; an encrypted broadcast cannot be read
        return None
    function = loaded[0] if isinstance(loaded, tuple) else None
    code = getattr(function, "__code__", None)
    if function is None or code is None or code.co_freevars != ("pickled",):  # not made by `workers.portable`
        return None
    lookup = pickle.loads(function.__closure__[0].cell_contents)
    return lookup.spec if isinstance(lookup, Lookup) else None


def _function(node: Node) -> Expression:
    return next(expression for expression in node.expressions if expression.kind == "PythonUDF")


def _name(node: Node) -> str:
    return str(_function(node).java.name())
