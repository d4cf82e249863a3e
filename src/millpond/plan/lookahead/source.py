"""The query's own projections and filters, over what its source will give next: which keys an operator will ask for.

The source is a lookahead operator (Keyed Prefetching §IV-A) of every stateful operator that has no other one below.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Node
from millpond.plan.reading.aggregate import Reading, prepared
from millpond.plan.reading.decision import Decided, Decision
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.join_input import announced_columns, joined_sides
from millpond.plan.reading.map_groups import MAPS

_FILES = frozenset({"parquet", "orc", "json", "csv", "text"})
_OTHERWISE = ("latestfirst", "cleansource", "filenameonly", "maxbytespertrigger", "recursivefilelookup")
"""Options by which a file source takes other files than the oldest that were not read yet, or removes them."""
_PROJECTING = frozenset(
    {"EventTimeWatermark", "Expand", "Filter", "Generate", "Project", "ResolvedHint", "SubqueryAlias", "Union", "View"}
)
_OTHERS = frozenset(
    {"Exists", "InSubquery", "ListQuery", "PythonUDAF", "PythonUDF", "PythonUDTF", "ScalaUDF", "ScalarSubquery"}
)
"""Expressions that are the user's own, or read tables: they are not computed another time for the sake of hints."""
_LIMITS = ("maxoffsetspertrigger", "minoffsetspertrigger", "maxtriggerdelay")
"""Options by which a Kafka source takes a part of what is there."""


def foreseen(source: Node) -> Literal["numbers", "kafka", "files"] | None:
    """Of what kind a source is whose next rows are known; None where they are not."""
    options = {name.lower(): value for name, value in source.relation_options.items()}
    kind = source.source.rpartition(".")[2].lower()
    if kind == "rate-micro-batch" and "rowsperbatch" in options:
        return "numbers"
    if kind == "kafka" and not any(limit in options for limit in _LIMITS):
        return "kafka"
    if source.kind == "StreamingRelation" and kind in _FILES:
        path = options.get("path", "*")
        local = urlsplit(path).scheme in ("", "file") and not set(path) & set("*?[{")
        plain = not any(options.get(name, "false").lower() not in ("false", "off") for name in _OTHERWISE)
        return "files" if local and plain else None
    return None


def announced(decision: Decision) -> dict[int, tuple[str, ...]]:
    """Who may announce keys of each operator that can be told of them, in the order of the plan, by operator index."""
    source = source_of(decision)
    fed = fed_by_source(decision) if source is not None and foreseen(source) is not None else {}
    found = {}
    for one in decision.ours:
        if one.index is not None and one.spec is not None and (one.spec.keyed or one.spec.announced):
            stages = sorted(stage.announces[one.index][:2] for stage in decision.stages if one.index in stage.announces)
            names = dict.fromkeys(name for _, name in stages)  # stages of two branches may share one
            found[one.index] = (*(["source"] if one.index in fed else []), *names, "exchange")
    return found


def source_of(decision: Decision) -> Node | None:
    """The query's one source; None if it has several."""
    found = [node for node in decision.analyzed.walk() if node.kind.startswith("StreamingRelation")]
    if not found or any(not one.java.canonicalized().equals(found[0].java.canonicalized()) for one in found[1:]):
        return None
    return found[0]


def fed_by_source(decision: Decision) -> dict[int, Decided]:
    """The nodes of the operators whose keys can be told from the rows of the source, by operator index."""
    found = {}
    for decided in decision.root.walk():
        operator = decided.operator
        if operator is None or operator.spec is None or operator.index is None or not operator.spec.keyed:
            continue
        below = (one for child in decided.children for one in child.operators())
        reading = operator.reading
        if operator.spec.announced and not isinstance(reading, JoinReading):
            continue
        plain = isinstance(reading, JoinReading) or (isinstance(reading, Reading) and reading.assigned is None)
        if plain and decided.node.kind not in MAPS and next(below, None) is None and _may_be_repeated(decided):
            found[operator.index] = decided
    return found


def _may_be_repeated(decided: Decided) -> bool:
    """Whether an operator's keys come from the source by projections and filters of Spark's that always do the same."""
    assert decided.operator is not None
    reading = decided.operator.reading
    if isinstance(reading, JoinReading):
        raw = [key for side in (reading.left, reading.right) for key in side.keys]
    else:
        raw = list(reading.raw) if isinstance(reading, Reading) else []
    for node in (one for child in decided.node.children for one in child.walk()):
        if node.kind.startswith("StreamingRelation"):
            continue
        if node.kind not in _PROJECTING:
            return False
        raw += node.expressions
    return all(one.deterministic and not any(part.kind in _OTHERS for part in one.walk()) for one in raw)


def key_hashes(catalyst: Catalyst, decided: Decided, rows: DataFrame) -> DataFrame:
    """The hashes of the keys that an operator will ask for, in the first column, and what it asks for beside them.

    Args:
        catalyst: of a session for it. decided: the operator's node. rows: of the source, a batch DataFrame.
    """
    assert decided.operator is not None
    reading = decided.operator.reading
    children = [_over(catalyst, child, catalyst.analyzed(rows)) for child in decided.node.children]
    if isinstance(reading, JoinReading):
        sides = zip(children, joined_sides(catalyst, reading), strict=True)
        one, other = (
            catalyst.dataframe(catalyst.project(aliases, child)).select(
                *map(F.expr, announced_columns(reading, columns))
            )
            for child, (aliases, columns) in sides
        )
        return one.union(other)
    assert isinstance(reading, Reading)
    return prepared(catalyst, children[0], reading.raw, reading.columns, reading.hash).select("__hash")


def _over(catalyst: Catalyst, node: Node, rows: Node) -> Node:
    """A plan over other rows of its source."""
    if node.kind.startswith("StreamingRelation"):
        pairs = zip(rows.output, node.output, strict=True)
        return catalyst.project([catalyst.stand_in(catalyst.fitted(new, old), old) for new, old in pairs], rows)
    children = [_over(catalyst, child, rows) for child in node.children]
    if all(new is old for new, old in zip(children, node.children, strict=True)):
        return node
    return children[0] if node.kind == "EventTimeWatermark" else catalyst.with_children(node, children)
