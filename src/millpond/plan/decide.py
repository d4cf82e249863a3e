"""Decide for each stateful operator of a query whether it runs on Millpond or stays on Spark, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

import msgspec
from pyspark.sql import DataFrame

from millpond.errors import UnsupportedError, UsageError
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.lookups import is_lookup_join
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Expression, Node
from millpond.plan.catalyst.optimiser.conditions import (
    pruned_deduplications,
    with_settled_conditions,
    with_simplified_conditions,
    without_clock,
    without_repeated_groupings,
)
from millpond.plan.catalyst.optimiser.windows import Needed, needed_columns
from millpond.plan.catalyst.session import in_session
from millpond.plan.changelog.between import unstable_between
from millpond.plan.changelog.changes import (
    CHANGE_COLUMN,
    changelog_source,
    emits_updates,
    leave_updates_to_spark,
    over_changelog,
    refuse_updates_of_spark,
    with_changelog_output,
)
from millpond.plan.lookahead.keys import find_stages, missing_stages
from millpond.plan.lookahead.stages import with_stage_projections, without_stages
from millpond.plan.lookup_reading import read_lookup
from millpond.plan.reading.aggregate import MAPS, check_key, check_one_time, read_aggregate, read_map_groups
from millpond.plan.reading.decision import Decided, Decision, Operator, describe
from millpond.plan.reading.join import read_join
from millpond.plan.reading.processor import EVENT_TIME_NODE, GROUP_STATES, PROCESSORS, read_group_state, read_processor
from millpond.plan.reading.ranking import RANKS, Limits, limits_of, read_over, read_rank
from millpond.plan.reading.reading import InputColumn, Reading, unique_name
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.plan.reconcile import reconciled, with_indexes
from millpond.plan.wrong_in_spark import wrong_in_spark
from millpond.spec.functions import FUNCTIONS, SESSION_DISTINCT, WHOLE_WINDOWS, is_distinct
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec
from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import EventTime, Field, Pattern
from millpond.spec.types import parse_type

_OTHER_STATE = {
    "FlatMapGroupsWithState": "(flat)mapGroupsWithState",
    "TransformWithState": "transformWithState",
    "TransformWithStateInPandas": "transformWithStateInPandas",
    "Intersect": "intersect",  # Spark's optimiser rewrites these to joins and aggregates
    "Except": "except",
}
"""Nodes that hold state on streams and always stay on Spark → their titles."""

_STATE = {"Aggregate", "Deduplicate", "DeduplicateWithinWatermark", "Distinct", "Window", "Join"}
"""Nodes below which a filter on their rows may be moved."""

_FILTERS = {"Filter", "Join", "Generate"}
"""Nodes that filter rows, or from which Spark infers filters."""


@in_session
def decide(
    df: DataFrame,
    output_mode: str = "append",
    changes: str = "upsert",
    pattern: Pattern = "auto",
    map_groups: str = "batch",
) -> Decision:
    """Decide where each stateful operator of a streaming DataFrame runs.

    Args:
        df: a streaming DataFrame.
        output_mode: `append`, `update` or `complete`.
        changes: the changes shown in update mode: `upsert` shows new versions of rows, `all` also deletions.
        pattern: the store pattern of groups that are shown once, where there is a choice.
        map_groups: the input of `applyInPandas` and `applyInArrow` functions: a group's rows in one micro-batch
            (`batch`), as in Spark, or all its rows, once its window has closed (`window`).

    Returns:
        The decision for every operator, with the plan with lookahead stages, if there are any.

    Raises:
        UnsupportedError: all changes are requested, but the query cannot emit all of them; or functions are to be
            called with whole closed windows, which is not possible here.
    """
    catalyst = Catalyst(df.sparkSession)
    marked = catalyst.analyzed(df)
    # Operators are decided without stages, so that a stage never changes where an operator runs.
    analyzed = without_stages(catalyst, marked)
    mode = output_mode.lower()
    # After inlining, only expressions are left that Spark evaluates once for several readers.
    shared = any(node.kind == "WithCTE" for node in analyzed.walk())
    root = _decided(catalyst, analyzed, analyzed, mode, pattern, map_groups, shared=shared)
    all_changes = changes == "all" and mode == "update" and _shows_changes(root, analyzed)

    def with_output(root: Decided) -> Decided:
        return with_indexes(with_changelog_output(root) if all_changes else root)

    wrong = wrong_in_spark(catalyst, analyzed, mode, maps_windows=map_groups == "window")
    decision = Decision(with_output(root), mode, analyzed, all_changes, wrong=wrong)
    # Without stages, with a common table expression, or without operators here, there is nothing to prefetch.
    if marked is analyzed or shared or not decision.on_millpond:
        return decision
    plan = with_stage_projections(catalyst, marked)
    staged = with_output(_decided(catalyst, analyzed, plan, mode, pattern, map_groups, stages=True))
    # Stages must not change the decision: the plan with them must give the same operators.
    if [(operator.title, operator.spec) for operator in staged.operators()] != [
        (operator.title, operator.spec) for operator in decision.operators
    ]:
        return replace(
            decision, stages=missing_stages(plan, (), "they would keep a rule of Spark's from its conditions")
        )
    stages = find_stages(catalyst, staged)
    return replace(
        decision, staged=staged, stages=stages + missing_stages(plan, stages, "nothing reads what they name")
    )


def _decided(
    catalyst: Catalyst,
    analyzed: Node,
    plan: Node,
    mode: str,
    pattern: Pattern,
    map_groups: str,
    *,
    shared: bool = False,
    stages: bool = False,
) -> Decided:
    """Decide about the operators of a plan: the analysed one, or the same with lookahead stages."""
    joins = any(node.joins_streams for node in plan.walk()) and not shared
    windows = any(node.kind == "Window" and node.streaming for node in plan.walk()) and not shared
    # In the rewritten plan, no condition moves past the node that a stage becomes. So all conditions are settled
    # here.
    filters = stages or (any(_filters_state(node) for node in plan.walk()) and not shared)
    if joins or windows or filters:
        plan, with_clock = without_clock(catalyst, plan)
        plan = with_simplified_conditions(catalyst, plan)
        if joins or filters:
            semi_joins = not any(_is_moved(node) for node in plan.walk())  # else the query stays on Spark
            plan = with_settled_conditions(catalyst, plan, pruned=joins, semi_joins=semi_joins)
        plan = with_clock(plan)
    plan = without_repeated_groupings(catalyst, plan)
    needed: Needed = needed_columns(catalyst, plan) if windows else MappingProxyType({})
    decider = _Decider(catalyst, analyzed, plan, mode, map_groups, needed, shared=shared)
    return reconciled(decider.visit(plan), mode, pattern)


def _shows_changes(root: Decided, analyzed: Node) -> bool:
    """Whether rows that the query has shown may change later.

    Raises:
        UnsupportedError: they may change, but the query cannot show all changes.
    """
    try:
        if changelog_source(root) is None:
            return False
        unstable = unstable_between(analyzed, top=True)
        if unstable is not None:
            raise Unsupported(Reason("MP-BETWEEN", unstable))
        if any(column.name.lower() == CHANGE_COLUMN for column in analyzed.output):
            raise UnsupportedError(
                f"The query has a column {CHANGE_COLUMN}, the name of the column with the kind of each change.",
                action="Give the query's column another name.",
            )
        return True
    except Unsupported as error:
        raise UnsupportedError(
            f"The query cannot show all changes. {error.reason}.",
            action="Set spark.millpond.changes to 'upsert', or show the rows of the operator whose changes are wanted.",
        ) from None


class _Decider:
    def __init__(
        self,
        catalyst: Catalyst,
        analyzed: Node,
        settled_plan: Node,
        output_mode: str,
        map_groups: str,
        needed: Needed,
        *,
        shared: bool,
    ) -> None:
        self.catalyst = catalyst
        self.analyzed = analyzed
        self.settled_plan = settled_plan
        self.output_mode = output_mode
        self.map_groups = map_groups
        self.needed = needed
        self.shared = shared

    @cached_property
    def deduplicate_columns(self) -> list[tuple[Node, frozenset[int]]]:
        """Each `Deduplicate` node with the columns that it has on Spark, where unused columns are pruned."""
        nodes = [node for node in self.settled_plan.walk() if node.kind == "Deduplicate"]
        return list(zip(nodes, pruned_deduplications(self.catalyst, self.settled_plan), strict=True))

    @cached_property
    def unstable(self) -> str | None:
        """An expression between two operators that may give a retracted row another value; None if there is none."""
        return unstable_between(self.analyzed)

    def visit(self, node: Node, limits: Limits = MappingProxyType({})) -> Decided:
        below = limits_of(node, limits)
        children = tuple(self.visit(child, below) for child in node.children)
        operator = self._operator(node, limits) if node.streaming else None
        passing = operator.spec.over_updates() if operator is not None and operator.spec is not None else None
        if operator is not None and passing is not None:
            # A lookup join passes changes through, row by row.
            if any(emits_updates(child) for child in children):
                operator = replace(operator, spec=passing)
        elif operator is not None and operator.spec is not None:
            try:
                # Raises where rows change below a node that cannot pass changes on, such as a union.
                updated = [spec for child in children if (spec := changelog_source(child)) is not None]
                # As in Spark, deduplication takes an aggregate's updates as further rows.
                takes_updates = operator.spec.facts.reads_updates_as_rows
                plain = takes_updates and not any(spec.facts.beyond_spark for spec in updated)
                if updated and not plain:
                    if self.unstable is not None:
                        raise Unsupported(Reason("MP-BETWEEN", self.unstable))
                    operator = replace(operator, spec=over_changelog(operator.spec))
                    children = tuple(with_changelog_output(child) for child in children)
                elif not takes_updates:
                    for child in children:
                        refuse_updates_of_spark(child, self.output_mode)
            except Unsupported as unsupported:
                operator = operator.left_to_spark(unsupported.reason)
        # An operator of Spark's would count the updates of Millpond operators below as new rows.
        if operator is not None and operator.spec is None:
            children = tuple(leave_updates_to_spark(child) for child in children)
        if node.kind == EVENT_TIME_NODE:
            children = tuple(_with_emitted_time(node, child) for child in children)
        return Decided(node, children, operator)

    def _operator(self, node: Node, limits: Limits) -> Operator | None:
        if node.joins_streams:
            return self._join(node)
        # A limit on the whole result of complete mode needs no state; any other limit counts rows across batches.
        if node.kind == "GlobalLimit" and (self.output_mode == "append" or not _has_aggregate(node)):
            return Operator("a limit on a stream", reason=Reason("MP-OPERATOR", "a limit on a stream"))
        if node.kind in _OTHER_STATE:
            title = _OTHER_STATE[node.kind]
            return Operator(title, reason=Reason("MP-OPERATOR", title))
        reader: dict[str, Callable[[Node], tuple[Reading, OperatorSpec]]]
        reader = {
            "Aggregate": self._aggregate,
            "Deduplicate": self._deduplicate,
            "DeduplicateWithinWatermark": self._within,
            "Distinct": self._distinct,
            "Window": lambda window: self._window(window, limits),
        }
        reader |= dict.fromkeys(PROCESSORS, self._processor) | dict.fromkeys(GROUP_STATES, self._group_state)
        if is_lookup_join(node):
            return self._lookup(node)
        if self.map_groups == "window":
            reader |= dict.fromkeys(MAPS, self._map_groups)
        if node.kind not in reader:
            return None
        title = describe(node)
        if self.shared:
            return Operator(title, reason=Reason("MP-CTE"))
        try:
            reading, spec = reader[node.kind](node)
        except Unsupported as unsupported:
            return Operator(title, reason=unsupported.reason)
        if (code := spec.unsupported) is not None:
            return Operator(title, reason=Reason(code, title))
        return Operator(title, spec, reading=reading)

    def _join(self, node: Node) -> Operator:
        title = describe(node)
        if self.shared:
            return Operator(title, reason=Reason("MP-CTE"))
        try:
            if _is_moved(node):
                raise Unsupported(Reason("MP-OPERATOR", "a left semi join that Spark moves below its left side"))
            reading = read_join(self.catalyst, node)
            self._check_watermarks(reading.spec.lag is not None)
        except Unsupported as unsupported:
            return Operator(title, reason=unsupported.reason)
        return Operator(title, reading.spec, reading=reading)

    def _aggregate(self, node: Node) -> tuple[Reading, OperatorSpec]:
        reading = read_aggregate(self.catalyst, node, closing=self.output_mode != "complete")
        if reading.session is not None:
            if self.output_mode == "update":
                raise Unsupported(Reason("MP-MODE", self.output_mode))
            timed = reading.session.marked
        else:
            timed = reading.time is not None
        # Without a watermark no group closes, so append mode would never show one; Spark refuses such a query, too.
        if self.output_mode == "append" and not timed:
            raise Unsupported(Reason("MP-WATERMARK"))
        self._check_watermarks(timed)
        spec = reading.spec(self.output_mode)
        if not spec.keeps_rows:
            for number, call in enumerate(spec.calls):
                if FUNCTIONS[call.function].whole:
                    raise Unsupported(Reason(WHOLE_WINDOWS, reading.function_name(number)))
                if reading.session is not None and is_distinct(call):
                    raise Unsupported(Reason(SESSION_DISTINCT, reading.function_name(number)))
        return reading, spec

    def _map_groups(self, node: Node) -> tuple[Reading, OperatorSpec]:
        reading = read_map_groups(self.catalyst, node, self.output_mode)
        self._check_watermarks(timed=True)
        return reading, reading.spec(self.output_mode)

    def _processor(self, node: Node) -> tuple[Reading, OperatorSpec]:
        reading, spec = read_processor(self.catalyst, node)
        self._check_watermarks(spec.time_mode == "event")
        return reading, spec

    def _group_state(self, node: Node) -> tuple[Reading, OperatorSpec]:
        reading, spec = read_group_state(self.catalyst, node)
        self._check_watermarks(spec.needs_no_data_batches)
        return reading, spec

    def _lookup(self, node: Node) -> Operator | None:
        """Read a lookup join; None if it stays on Spark, which is not reported: it has no state."""
        try:
            read = None if self.shared else read_lookup(self.catalyst, node)
        except Unsupported:
            return None
        return None if read is None else Operator(describe(node), read[1], reading=read[0])

    def _check_watermarks(self, timed: bool) -> None:
        # With this setting off, one watermark holds for all operators, which changes what is late.
        single = self.catalyst.spark.conf.get("spark.sql.streaming.statefulOperator.allowMultiple", "true") == "false"
        if timed and single:
            raise Unsupported(Reason("MP-SINGLE"))

    def _window(self, node: Node, limits: Limits) -> tuple[Reading, OperatorSpec]:
        """Read a rank with a filter on it, or aggregates over rows."""
        if any(result.children[0].children[0].kind in RANKS for result in node.list("windowExpressions")):
            if self.output_mode == "append":
                raise Unsupported(Reason("MP-MODE", self.output_mode))
            return read_rank(node, limits, self.needed)
        return read_over(self.catalyst, node, self.needed)

    def _distinct(self, node: Node) -> tuple[Reading, OperatorSpec]:
        """Read `SELECT DISTINCT`: a grouping by all columns without functions, as in Spark."""
        reading = Reading()
        names: set[str] = set()
        for attribute in node.output:
            _check_key(attribute)
            reading.raw.append(attribute)
            column = Field(unique_name(attribute.name, names), attribute.type)
            reading.keys.append(InputColumn(column, (len(reading.raw) - 1,), "{0}"))
        reading.set_hash([key.field.name for key in reading.keys])
        if self.output_mode == "append":
            raise Unsupported(Reason("MP-MODE", self.output_mode))
        return reading, reading.spec(self.output_mode)

    def _deduplicate(self, node: Node) -> tuple[Reading, DeduplicateSpec]:
        reading = Reading()
        names: set[str] = set()
        keys = node.list("keys")
        for attribute in node.output:
            reading.raw.append(attribute)
            column = Field(unique_name(attribute.name, names), attribute.type)
            reading.inputs.append(InputColumn(column, (len(reading.raw) - 1,), "{0}"))
        positions = []
        for key in keys:
            check_key(key)
            positions.append(next(i for i, attribute in enumerate(node.output) if attribute.expr_id == key.expr_id))
        reading.set_hash([reading.inputs[position].field.name for position in positions])
        marked = [attribute for attribute in node.output if WATERMARK_DELAY in attribute.metadata]
        timed = bool(marked)
        # On Spark, an unused column is pruned below the node, so no row is late by it.
        if node.kind == "Deduplicate" and not {column.expr_id for column in marked} <= {key.expr_id for key in keys}:
            native = next(columns for deduplicate, columns in self.deduplicate_columns if deduplicate is node)
            marked = [attribute for attribute in marked if attribute.expr_id in native]
        check_one_time(marked)
        for position, attribute in enumerate(node.output):
            _check_arrow_type(attribute)
            # not only a key column: Spark drops late rows by any column with a watermark
            if reading.time is None and any(attribute is column for column in marked):
                reading.time = EventTime(position)
        self._check_watermarks(timed)
        columns = tuple(column.field for column in reading.inputs)
        return reading, DeduplicateSpec(columns, tuple(positions), reading.time, timed and reading.time is None)

    def _within(self, node: Node) -> tuple[Reading, WithinSpec]:
        reading, spec = self._deduplicate(node)
        marked = [attribute for attribute in node.output if WATERMARK_DELAY in attribute.metadata]
        # A key expires one delay after its event time, so exactly one column has to give both.
        if spec.time is None or len(marked) != 1 or not marked[0].type.startswith("timestamp"):
            names = ", ".join(attribute.name for attribute in marked) or "no column with a watermark"
            raise Unsupported(Reason("MP-EVENT-TIME", names))
        delay = int(marked[0].metadata[WATERMARK_DELAY])
        return reading, WithinSpec(spec.columns, spec.keys, spec.time, delay)


def _with_emitted_time(node: Node, below: Decided) -> Decided:
    """Set the processor's output column whose event time closes state in operators above."""
    operator = below.operator
    if operator is None or not isinstance(operator.spec, ProcessorSpec):
        return below
    if operator.spec.time_mode != "event":  # on Spark, no watermark passes the processor in other time modes
        return replace(
            below, operator=operator.left_to_spark(Reason("MP-PROCESSOR", "an event time in another time mode"))
        )
    column = node.expression("eventTime").expr_id
    position = next(number for number, output in enumerate(below.node.output) if output.expr_id == column)
    return replace(below, operator=replace(operator, spec=msgspec.structs.replace(operator.spec, emitted=position)))


def _check_arrow_type(attribute: Expression) -> None:
    """Refuse a column that Spark cannot hand to Python and take back unchanged."""
    try:
        parse_type(attribute.type).arrow  # noqa: B018 — a type without an Arrow form raises
    except UsageError:
        raise Unsupported(Reason("MP-INPUT-TYPE", f"{attribute.name} ({attribute.type})")) from None


def _check_key(attribute: Expression) -> None:
    if WATERMARK_DELAY in attribute.metadata:
        raise Unsupported(Reason("MP-EVENT-TIME", attribute.name))
    check_key(attribute)


def _is_moved(node: Node) -> bool:
    """Whether this is a semi join of two streams that Spark moves below state, where rows match at other times."""
    below = node.children[0].walk() if node.joins_streams and node.join_type == "LeftSemi" else ()
    return any(
        one.joins_streams or (one.streaming and one.kind in ("Aggregate", "Distinct", "Window")) for one in below
    )


def _filters_state(node: Node) -> bool:
    inner = (below for child in node.children for below in child.walk())
    return node.kind in _FILTERS and any(below.streaming and below.kind in _STATE for below in inner)


def _has_aggregate(node: Node) -> bool:
    """Whether a streaming aggregation is below: in complete mode, its output is the whole result so far."""
    return any(below.streaming and below.kind in ("Aggregate", "Distinct") for below in node.walk())
