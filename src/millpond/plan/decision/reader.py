"""Read an operator from a plan's node, whatever its kind, or say why it stays on Spark."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.lookups import is_lookup_join, lookup_spec
from millpond.plan.catalyst.nodes import SESSION_WINDOW, Node
from millpond.plan.catalyst.optimiser.conditions import pruned_deduplications
from millpond.plan.catalyst.optimiser.settle import moves_below_state
from millpond.plan.catalyst.optimiser.times import hidden_times
from millpond.plan.catalyst.optimiser.windows import Needed
from millpond.plan.catalyst.session import is_on
from millpond.plan.decision.decision import Operator, describe
from millpond.plan.reading.aggregate import MAPS, read_aggregate, read_map_groups
from millpond.plan.reading.deduplicate import read_deduplicate, read_distinct, read_within
from millpond.plan.reading.join import JoinReading, read_join
from millpond.plan.reading.processor import (
    GROUP_STATES,
    PROCESSORS,
    by_event_time,
    read_group_state,
    read_processor,
)
from millpond.plan.reading.ranking import RANKS, Limits, read_over, read_rank
from millpond.plan.reading.reading import LookupReading, Reading
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.spec.functions import FUNCTIONS, SESSION_DISTINCT, WHOLE_WINDOWS, is_distinct
from millpond.spec.kinds.union import OperatorSpec

_OTHER_STATE = {
    "FlatMapGroupsWithState": "(flat)mapGroupsWithState",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPandas": "transformWithStateInPandas",
    "Intersect": "intersect",  # Spark's optimiser rewrites these to joins and aggregates
    "Except": "except",
}
"""Nodes that hold state on streams and always stay on Spark → their titles."""

ALLOW_MULTIPLE = "spark.sql.streaming.statefulOperator.allowMultiple"
_MERGE_LOCALLY = "spark.sql.streaming.sessionWindow.merge.sessions.in.local.partition"
"""With this setting, rows are late by the sessions of their input partition."""

_Read = tuple[Reading | JoinReading, OperatorSpec]


class OperatorReader:
    """Reads the operators of one query.

    Args:
        catalyst: of the query's session.
        plan: the query's plan with settled conditions.
        output_mode: `append`, `update` or `complete`.
        map_groups: the input of `applyInPandas` and `applyInArrow` functions: `batch` or `window`.
        needed: the columns that its `Window` nodes need.
        shared: whether Spark evaluates a common table expression of it once for several readers.
    """

    def __init__(
        self, catalyst: Catalyst, plan: Node, output_mode: str, map_groups: str, needed: Needed, *, shared: bool
    ) -> None:
        self._catalyst = catalyst
        self._plan = plan
        self._output_mode = output_mode
        self._map_groups = map_groups
        self._needed = needed
        self._shared = shared

    @cached_property
    def _native_columns(self) -> dict[Node, frozenset[int]]:
        """Each `Deduplicate` node → the columns that it has on Spark, where unused columns are pruned."""
        nodes = [node for node in self._plan.walk() if node.kind == "Deduplicate"]
        return dict(zip(nodes, pruned_deduplications(self._catalyst, self._plan), strict=True))

    @cached_property
    def _hidden_times(self) -> frozenset[int]:
        return hidden_times(self._catalyst, self._plan)

    def read(self, node: Node, limits: Limits) -> Operator | None:
        """Read a streaming node; None if it is no operator.

        Args:
            node: the node.
            limits: the greatest values that the filters above let pass.
        """
        # A limit on the whole result of complete mode needs no state; any other limit counts rows across batches.
        if node.kind == "GlobalLimit" and (self._output_mode == "append" or not _has_aggregate(node)):
            return Operator("a limit on a stream", reason=Reason("MP-OPERATOR", "a limit on a stream"))
        if node.kind in _OTHER_STATE:
            title = _OTHER_STATE[node.kind]
            return Operator(title, reason=Reason("MP-OPERATOR", title))
        if is_lookup_join(node):
            return self._lookup(node)
        read = self._reader(node, limits)
        if read is None:
            return None
        title = describe(node)
        if self._shared:
            return Operator(title, reason=Reason("MP-CTE"))
        try:
            self._check_times(node)
            reading, spec = read(node)
        except Unsupported as unsupported:
            return Operator(title, reason=unsupported.reason)
        if (code := spec.unsupported) is not None:
            return Operator(title, reason=Reason(code, title))
        return Operator(title, spec, reading=reading)

    def _reader(self, node: Node, limits: Limits) -> Callable[[Node], _Read] | None:
        """Return what reads this kind of node; None if it is no operator that could run here."""
        if node.joins_streams:
            return self._join
        if node.kind in PROCESSORS:
            return self._processor
        if node.kind in GROUP_STATES:
            return self._group_state
        if node.kind in MAPS:
            return self._groups if self._map_groups == "window" else None
        readers: dict[str, Callable[[Node], _Read]] = {
            "Aggregate": self._aggregate,
            "Deduplicate": self._deduplicate,
            "DeduplicateWithinWatermark": self._within,
            "Distinct": self._distinct,
            "Window": lambda window: self._window(window, limits),
        }
        return readers.get(node.kind)

    def _check_times(self, node: Node) -> None:
        """Refuse a node for which rows are late on Spark by a column that has no watermark in the analysed plan."""
        # These operators drop no late rows. Nor do aggregates in complete mode, unless they have sessions.
        if node.kind == "Window" or (node.kind in (*PROCESSORS, *GROUP_STATES) and not by_event_time(node)):
            return
        if node.kind == "Aggregate":
            columns = node.list("groupingExpressions")
            if self._output_mode == "complete" and not any(SESSION_WINDOW in column.metadata for column in columns):
                return
        else:
            columns = [column for child in node.children for column in child.output]
        for column in columns:
            if column.kind == "AttributeReference" and column.expr_id in self._hidden_times:
                detail = f"{column.name}, a needless cast of a column with a watermark"
                raise Unsupported(Reason("MP-EVENT-TIME", detail))

    def _join(self, node: Node) -> _Read:
        if moves_below_state(node):
            raise Unsupported(Reason("MP-OPERATOR", "a left semi join that Spark moves below its left side"))
        reading = read_join(self._catalyst, node)
        self._check_watermarks(reading.spec.lag is not None)
        return reading, reading.spec

    def _aggregate(self, node: Node) -> _Read:
        reading = read_aggregate(self._catalyst, node, closing=self._output_mode != "complete")
        if reading.session is not None:
            if is_on(self._catalyst.spark, _MERGE_LOCALLY, False):
                detail = f"sessions that Spark merges before the exchange ({_MERGE_LOCALLY})"
                raise Unsupported(Reason("MP-OPERATOR", detail))
            if self._output_mode == "update":
                raise Unsupported(Reason("MP-MODE", self._output_mode))
            timed = reading.session.marked
        else:
            timed = reading.time is not None
        # Without a watermark no group closes, so append mode would never show one; Spark refuses such a query, too.
        if self._output_mode == "append" and not timed:
            raise Unsupported(Reason("MP-WATERMARK"))
        self._check_watermarks(timed)
        spec = reading.spec(self._output_mode)
        if not spec.keeps_rows:
            for number, call in enumerate(spec.calls):
                if FUNCTIONS[call.function].whole:
                    raise Unsupported(Reason(WHOLE_WINDOWS, reading.function_name(number)))
                if reading.session is not None and is_distinct(call):
                    raise Unsupported(Reason(SESSION_DISTINCT, reading.function_name(number)))
        return reading, spec

    def _groups(self, node: Node) -> _Read:
        reading = read_map_groups(self._catalyst, node, self._output_mode)
        self._check_watermarks(timed=True)
        return reading, reading.spec(self._output_mode)

    def _processor(self, node: Node) -> _Read:
        reading, spec = read_processor(self._catalyst, node)
        self._check_watermarks(spec.time_mode == "event")
        return reading, spec

    def _group_state(self, node: Node) -> _Read:
        reading, spec = read_group_state(self._catalyst, node)
        self._check_watermarks(spec.needs_no_data_batches)
        return reading, spec

    def _lookup(self, node: Node) -> Operator | None:
        """Read a lookup join; None if it stays on Spark, which is not reported: it has no state."""
        spec = None if self._shared else lookup_spec(self._catalyst, node)
        if spec is None:  # a function of the user's that only has a name like that of a lookup join
            return None
        try:
            return Operator(describe(node), spec, reading=LookupReading.of(node, spec))
        except Unsupported:
            return None

    def _check_watermarks(self, timed: bool) -> None:
        # With this setting off, one watermark holds for all operators, which changes what is late.
        if timed and not is_on(self._catalyst.spark, ALLOW_MULTIPLE, True):
            raise Unsupported(Reason("MP-SINGLE"))

    def _window(self, node: Node, limits: Limits) -> _Read:
        """Read a rank with a filter on it, or aggregates over rows."""
        if any(result.children[0].children[0].kind in RANKS for result in node.list("windowExpressions")):
            if self._output_mode == "append":
                raise Unsupported(Reason("MP-MODE", self._output_mode))
            return read_rank(node, limits, self._needed)
        return read_over(self._catalyst, node, self._needed)

    def _distinct(self, node: Node) -> _Read:
        if self._output_mode == "append":
            raise Unsupported(Reason("MP-MODE", self._output_mode))
        reading = read_distinct(node)
        return reading, reading.spec(self._output_mode)

    def _deduplicate(self, node: Node) -> _Read:
        reading, spec = read_deduplicate(node, lambda: self._native_columns[node])
        self._check_watermarks(spec.needs_no_data_batches)
        return reading, spec

    def _within(self, node: Node) -> _Read:
        reading, spec = read_within(node)
        self._check_watermarks(timed=True)
        return reading, spec


def _has_aggregate(node: Node) -> bool:
    """Whether a streaming aggregation is below: in complete mode, its output is the whole result so far."""
    return any(below.streaming and below.kind in ("Aggregate", "Distinct") for below in node.walk())
