"""Prefetch hints from the source: the query's projections and filters over the next rows of its source.

The source is a lookahead operator (Keyed Prefetching §IV-A) of every stateful operator without another one below.
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Node
from millpond.plan.decision.decision import Decided, Decision
from millpond.plan.reading.aggregate import MAPS, project_input
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.join_input import hint_columns, side_projections
from millpond.plan.reading.reading import Reading

_FILES = frozenset({"parquet", "orc", "json", "csv", "text"})
_UNPREDICTABLE_OPTIONS = ("latestfirst", "cleansource", "filenameonly", "maxbytespertrigger", "recursivefilelookup")
"""Options by which a file source reads other files than the oldest unread ones, or removes files."""
_ROW_WISE_NODES = frozenset(
    {"EventTimeWatermark", "Expand", "Filter", "Generate", "Project", "ResolvedHint", "SubqueryAlias", "Union", "View"}
)
_NOT_REPEATED = frozenset(
    {"Exists", "InSubquery", "ListQuery", "PythonUDAF", "PythonUDF", "PythonUDTF", "ScalaUDF", "ScalarSubquery"}
)
"""Expressions of the user, or over tables: they are not evaluated a second time just for hints."""
_KAFKA_LIMITS = ("maxoffsetspertrigger", "minoffsetspertrigger", "maxtriggerdelay")
"""Options by which a Kafka source reads only a part of the available rows."""


def predictable_kind(source: Node) -> Literal["numbers", "kafka", "files"] | None:
    """Return the kind of a source whose next rows are known; None for other sources."""
    options = {name.lower(): value for name, value in source.relation_options.items()}
    kind = source.source.rpartition(".")[2].lower()
    if kind == "rate-micro-batch" and "rowsperbatch" in options:
        return "numbers"
    if kind == "kafka" and not any(limit in options for limit in _KAFKA_LIMITS):
        return "kafka"
    if source.kind == "StreamingRelation" and kind in _FILES:
        path = options.get("path", "*")
        local = urlsplit(path).scheme in ("", "file") and not set(path) & set("*?[{")
        plain = not any(options.get(name, "false").lower() not in ("false", "off") for name in _UNPREDICTABLE_OPTIONS)
        return "files" if local and plain else None
    return None


def prefetch_sources(decision: Decision) -> dict[int, tuple[str, ...]]:
    """Return operator index → names of its prefetch sources, in plan order, for operators that can be prefetched."""
    source = source_of(decision)
    fed = fed_by_source(decision) if source is not None and predictable_kind(source) is not None else {}
    sources = {}
    for operator in decision.on_millpond:
        if (
            operator.index is not None
            and operator.spec is not None
            and (operator.spec.located_by_hash or operator.spec.hint_columns)
        ):
            stages = sorted(
                stage.hints[operator.index][:2] for stage in decision.stages if operator.index in stage.hints
            )
            names = dict.fromkeys(name for _, name in stages)  # stages of two branches may share a name
            sources[operator.index] = (*(["source"] if operator.index in fed else []), *names, "exchange")
    return sources


def source_of(decision: Decision) -> Node | None:
    """Return the query's only source; None if it has several."""
    sources = [node for node in decision.analyzed.walk() if node.kind.startswith("StreamingRelation")]
    if not sources or any(
        not other.java.canonicalized().equals(sources[0].java.canonicalized()) for other in sources[1:]
    ):
        return None
    return sources[0]


def fed_by_source(decision: Decision) -> dict[int, Decided]:
    """Return operator index → its node, for operators whose keys can be computed from rows of the source."""
    fed = {}
    for decided in decision.root.walk():
        operator = decided.operator
        if operator is None or operator.spec is None or operator.index is None or not operator.spec.located_by_hash:
            continue
        below = (inner for child in decided.children for inner in child.operators())
        reading = operator.reading
        # Hints from the source carry the hash only; for joins, also the side and the time.
        if operator.spec.hint_columns and not isinstance(reading, JoinReading):
            continue
        plain = isinstance(reading, JoinReading) or (isinstance(reading, Reading) and reading.assignment is None)
        if plain and decided.node.kind not in MAPS and next(below, None) is None and _is_repeatable(decided):
            fed[operator.index] = decided
    return fed


def _is_repeatable(decided: Decided) -> bool:
    """Whether an operator's keys follow from the source by deterministic projections and filters of Spark."""
    assert decided.operator is not None
    reading = decided.operator.reading
    if isinstance(reading, JoinReading):
        raw = [key for side in (reading.left, reading.right) for key in side.keys]
    else:
        raw = list(reading.raw) if isinstance(reading, Reading) else []
    for node in (descendant for child in decided.node.children for descendant in child.walk()):
        if node.kind.startswith("StreamingRelation"):
            continue
        if node.kind not in _ROW_WISE_NODES:
            return False
        raw += node.expressions
    return all(
        expression.deterministic and not any(part.kind in _NOT_REPEATED for part in expression.walk())
        for expression in raw
    )


def key_hashes(catalyst: Catalyst, decided: Decided, rows: DataFrame) -> DataFrame:
    """Return the key hashes that an operator will access, then the further columns of its hints.

    Args:
        catalyst: of a separate session.
        decided: the operator's node.
        rows: rows of the source, a batch DataFrame.
    """
    assert decided.operator is not None
    reading = decided.operator.reading
    children = [_rebased(catalyst, child, catalyst.analyzed(rows)) for child in decided.node.children]
    if isinstance(reading, JoinReading):
        sides = zip(children, side_projections(catalyst, reading), strict=True)
        left, right = (
            catalyst.dataframe(catalyst.project(aliases, child)).select(*map(F.expr, hint_columns(reading, columns)))
            for child, (aliases, columns) in sides
        )
        return left.union(right)
    assert isinstance(reading, Reading)
    return project_input(catalyst, children[0], reading.raw, reading.columns, reading.hash).select("__hash")


def _rebased(catalyst: Catalyst, node: Node, rows: Node) -> Node:
    """Return a plan over other rows of its source."""
    if node.kind.startswith("StreamingRelation"):
        pairs = zip(rows.output, node.output, strict=True)
        return catalyst.project([catalyst.aliased_as(catalyst.cast_to(new, old), old) for new, old in pairs], rows)
    children = [_rebased(catalyst, child, rows) for child in node.children]
    if all(new is old for new, old in zip(children, node.children, strict=True)):
        return node
    # A batch DataFrame has no watermark: its rows pass unchanged.
    return children[0] if node.kind == "EventTimeWatermark" else catalyst.with_children(node, children)
