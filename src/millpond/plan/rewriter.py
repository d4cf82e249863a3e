"""Rewrite a query so that its stateful operators run in slots.

Each chosen node becomes a chain, bottom up: projection and key hash, marker rows, exchange by hash range, slot stage,
projection. The last one has the old column identities, so nodes above need no change: see
docs/architecture/01-rewriting-the-plan.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, ByteType, DataType, LongType, StructField, StructType

from millpond.metrics import COMBINED_METRICS, METRIC_COLUMN, OPERATOR_METRICS, observation_name, unpack_sql
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.optimiser.conditions import without_replaceables
from millpond.plan.catalyst.session import in_session
from millpond.plan.changelog.changes import CHANGE_COLUMN, may_split_updates
from millpond.plan.decision.decision import Decided, Decision, Operator, Stage
from millpond.plan.exchange.map_side import NO_SIDES, MapSides, exchanged
from millpond.plan.exchange.workers import ArrowColumns, ArrowFunction, arrow_column, map_in_arrow, named_function
from millpond.plan.lookahead.stages import stage_columns, stage_title, unmarked_columns
from millpond.plan.reading.aggregate import MAPS, project_input, rewrite_expression
from millpond.plan.reading.functions import slot_result_type
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.join_input import side_projections
from millpond.plan.reading.processor import EVENT_TIME_NODE, ProcessorReading
from millpond.plan.reading.reading import InputColumn, LookupReading, Reading
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import OP
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.hints import PassingHints
from millpond.worker.slot_stage import SlotStage

_DERIVED = {"boolean": BooleanType(), "bigint": LongType()}
"""Types of input columns of the slot stage that the plan reader adds to those of the query (see `plan.reading`)."""


@in_session
def rewrite_plan(
    df: DataFrame,
    decision: Decision,
    partitions: int,
    stages: Sequence[ArrowFunction],
    sides: MapSides = NO_SIDES,
    metrics: tuple[str, ...] = OPERATOR_METRICS,
    tasks: Sequence[OperatorTask] = (),
    stores: int = 1,
) -> DataFrame:
    """Return the same query with the decided operators in slots.

    Args:
        df: the user's DataFrame, from which `decision` was made.
        decision: the result of `decide`.
        partitions: the number of state partitions.
        stages: the picklable function that Spark's worker runs for each operator, by its number.
        sides: the map sides of the operators' exchanges.
        metrics: the metrics that every operator reports.
        tasks: the task of each operator, by its number; they name the lookahead stages that may prefetch keys.
        stores: the number of partitions of Spark's own state stores, if the query needs no-data batches.
    """
    rewriter = _PlanRewriter(Catalyst(df.sparkSession), decision, partitions, stages, sides, metrics, tasks, stores)
    root = decision.staged if rewriter.lookahead_stages and decision.staged is not None else decision.root
    rewritten = rewriter.visit(root)
    if decision.all_changes:
        return with_change_column(
            rewriter.catalyst, rewritten, rewriter.change_kind(rewritten), split=may_split_updates(root)
        )
    return rewriter.catalyst.dataframe(rewritten)


class _PlanRewriter:
    def __init__(
        self,
        catalyst: Catalyst,
        decision: Decision,
        partitions: int,
        stages: Sequence[ArrowFunction],
        sides: MapSides,
        metrics: tuple[str, ...],
        tasks: Sequence[OperatorTask],
        stores: int,
    ) -> None:
        self.catalyst = catalyst
        self.partitions = partitions
        self.slot_stages = stages
        self.sides = sides
        self.metrics = metrics
        self.complete = decision.output_mode == "complete"
        self.clock_operator = next(
            (operator.index for operator in decision.on_millpond if operator.due_by_processing_time), None
        )
        self.watermark_operator = next(
            (operator.index for operator in decision.on_millpond if operator.needs_no_data_batches), None
        )
        self.output_mode = decision.output_mode
        self.tasks = tasks
        self.stores = stores
        self.lookahead_stages = {id(stage.node): stage for stage in decision.stages if self._hints_of(stage)}
        self._change_kinds: set[int] = set()  # identities of columns that hold the kind of a change (`OP`)

    def visit(self, decided: Decided) -> Node:
        if decided.node.kind == EVENT_TIME_NODE and _runs_on_millpond(decided.children[0]):
            (processor,) = decided.children  # the node only marks a column of the processor's output
            assert processor.operator is not None
            below = self.visit(processor.children[0])
            return self._replace(processor.node, processor.operator, below, decided.node)
        children = [self.visit(child) for child in decided.children]
        if stage_columns(decided.node) is not None:
            return self._replace_stage(decided.node, children[0])
        operator = decided.operator
        if operator is not None and operator.spec is not None:
            if isinstance(operator.reading, JoinReading):
                return self._replace_join(decided.node, operator, operator.reading, children)
            return self._replace(decided.node, operator, children[0], decided.node)
        if all(new is old.node for new, old in zip(children, decided.children, strict=True)):
            return decided.node
        node = self.catalyst.with_children(decided.node, children)
        kind = self.change_kind(children[0]) if node.kind == "Project" else None
        if kind is not None:  # a projection over single rows keeps the change kind of each row
            return self.catalyst.project([*node.list("projectList"), kind], children[0])
        # Spark plans this limit as stateful unless a streaming Aggregate is below, and that has been replaced.
        limits = node.kind == "GlobalLimit" and self.complete and operator is None
        return self.catalyst.stateless_limit(node) if limits else node

    def _hints_of(self, stage: Stage) -> list[tuple[OperatorTask, str, Sequence[Expression]]]:
        """Return for each operator that a stage prefetches for: its task, the hint's name, the hint's columns."""
        known = ((task, stage.hints[task.operator]) for task in self.tasks if task.operator in stage.hints)
        return [(task, hint.name, hint.columns) for task, hint in known if hint.name in task.lookaheads]

    def _replace_stage(self, node: Node, below: Node) -> Node:
        """Replace a lookahead stage: rows pass unchanged, after their prefetch hints were sent."""
        kind = self.change_kind(below)
        rows = self.catalyst.project([*unmarked_columns(node), *([] if kind is None else [kind])], below)
        stage = self.lookahead_stages.get(id(node))
        if stage is None:
            return rows
        hints = self._hints_of(stage)
        columns = [column for _, _, expressions in hints for column in expressions]
        function = PassingHints([(task, name, len(expressions)) for task, name, expressions in hints])
        return with_hints(self.catalyst, rows, columns, function, f"millpond[{stage_title(stage.columns)}]")

    def change_kind(self, node: Node) -> Expression | None:
        """Return the column that holds the kind of each change; None if the node has no changelog."""
        return next((column for column in node.output if column.expr_id in self._change_kinds), None)

    def _replace(self, node: Node, operator: Operator, child: Node, shown_as: Node) -> Node:
        """Replace an operator over one input by an exchange and a slot stage; the columns are those of `shown_as`."""
        spec, reading = operator.spec, operator.reading
        assert spec is not None
        assert operator.index is not None
        assert isinstance(reading, Reading)
        rows = self._input_rows(node, operator.index, spec, reading, child)
        schema = StructType([StructField(name, type_) for name, type_ in _slot_results(node, spec, reading)])
        if spec.changes:
            schema.add(OP.name, ByteType())
        stage, broadcasts = self._stage_with_user_code(operator, reading, schema)
        sent = self.sides.map_output(self.catalyst, operator.index, rows, reading.hash, len(reading.keys))
        slot_rows = self._through_slot(sent, operator, schema, stage, broadcasts)
        kinds = []
        if spec.changes:
            kinds = [self.catalyst.alias(slot_rows.output[-1], OP.name)]
            self._change_kinds.add(kinds[0].expr_id)
        return self._reattach(node, reading, slot_rows, kinds, shown_as.output)

    def _input_rows(self, node: Node, index: int, spec: OperatorSpec, reading: Reading, child: Node) -> DataFrame:
        """Return the operator's input columns, the arguments of its combination, and the key hash."""
        if node.kind in MAPS:  # the grouping columns are projected directly below the node
            (child,) = child.children
        # The operator assigns the windows itself, so Spark need not make a row per window: the Expand is removed.
        if reading.assignment is not None and reading.assignment.expanded:
            (below,) = child.children
            child = below if child.kind == "Expand" else self.catalyst.with_children(child, below.children)
        columns, raw = reading.columns, reading.raw
        if spec.retracts:
            kind = self.change_kind(child)
            assert kind is not None
            # The kind is the last input column, so that the positions of the operator's own columns stay.
            columns, raw = [*columns, InputColumn(OP, (len(raw),), "{0}")], [*raw, kind]
        combination = self.sides.combination(index)
        extra = () if combination is None else combination.arguments
        return project_input(self.catalyst, child, raw, columns, reading.hash, extra)

    def _stage_with_user_code(
        self, operator: Operator, reading: Reading, schema: StructType
    ) -> tuple[ArrowFunction, Sequence[Any]]:
        """Return the operator's stage with the user's functions or processor, and the broadcast variables of these."""
        assert operator.index is not None
        stage, users = self.slot_stages[operator.index], reading.user_calls
        if users.functions:
            assert isinstance(stage, SlotStage)
            stage = stage.with_functions(users.for_worker(self.catalyst, operator.title, schema))
        if isinstance(reading, ProcessorReading):
            assert isinstance(stage, SlotStage)
            assert reading.processor is not None
            return stage.with_processor(reading.processor), reading.broadcasts
        return stage, users.broadcasts

    def _replace_join(self, node: Node, operator: Operator, reading: JoinReading, children: list[Node]) -> Node:
        both = [
            self.catalyst.dataframe(self.catalyst.project(aliases, child)).select(*(F.expr(sql) for sql in columns))
            for child, (aliases, columns) in zip(children, side_projections(self.catalyst, reading), strict=True)
        ]
        attributes = reading.left.attributes + reading.right.attributes
        types = [attribute.data_type for attribute in attributes] or [reading.left.keys[0].data_type]
        schema = StructType(
            [StructField(field.name, type_) for field, type_ in zip(reading.spec.output_fields, types, strict=True)]
        )
        assert operator.index is not None
        sent = self.sides.map_output(self.catalyst, operator.index, both[0].union(both[1]), "", 0)
        slot_rows = self._through_slot(sent, operator, schema, self.slot_stages[operator.index])
        # for a join without columns, the slot stage returns one column
        pairs = zip(slot_rows.output, node.output, strict=False)
        joined = self.catalyst.project([self._aliased_as(self._cast(new, old), old) for new, old in pairs], slot_rows)
        # Only inner joins leave conjuncts to Spark: other joins have to know which rows have a match.
        for conjunct in reading.above:
            joined = self.catalyst.filter(conjunct, joined)
        return joined

    def _through_slot(
        self,
        sent: DataFrame,
        operator: Operator,
        schema: StructType,
        stage: ArrowFunction,
        broadcasts: Sequence[Any] = (),
    ) -> Node:
        """Send the map side's output through the exchange and the operator's stage; the result has `schema`."""
        assert operator.index is not None
        # Added last: results are matched to the node's columns by position.
        schema.add(METRIC_COLUMN, LongType())
        catalyst = self.catalyst
        located = self.sides.located
        function = named_function(stage, operator.title, 2 if located is None else 3)
        no_data = self._no_data_source(operator, sent)
        received = exchanged(catalyst, sent, self.partitions, catalyst.streaming_rows, no_data, located)
        slot_rows = map_in_arrow(received, function, schema, broadcasts)
        metrics = self.metrics
        if operator.spec is not None:
            metrics += operator.spec.extra_metrics
        if self.sides.combination(operator.index) is not None:
            metrics += COMBINED_METRICS
        # Slots send metrics as extra rows with METRIC_COLUMN set. Spark aggregates them by `observe`, then they are
        # dropped.
        watched = slot_rows.observe(
            observation_name(operator.index),
            *(F.expr(unpack_sql(metric)).alias(metric) for metric in metrics),
        )
        # The observation has to be below this filter, which removes the rows that carry metrics.
        results = watched.filter(F.col(METRIC_COLUMN).isNull()).drop(METRIC_COLUMN)
        return self.catalyst.analyzed(results)

    def _no_data_source(self, operator: Operator, sent: DataFrame) -> DataFrame | None:
        """Return the source that makes Spark schedule no-data batches, if it belongs to this operator.

        It belongs to the first operator that needs it. If any operator needs processing time, the source follows the
        clock instead of the watermark.
        """
        if self.clock_operator is not None:
            is_clock_operator = operator.index == self.clock_operator
            return self.catalyst.clock_batch_source(sent, self.stores, self.output_mode) if is_clock_operator else None
        return (
            self.catalyst.watermark_batch_source(sent, self.stores)
            if operator.index == self.watermark_operator
            else None
        )

    def _reattach(
        self, node: Node, reading: Reading, slot_rows: Node, extra: list[Expression], output: list[Expression]
    ) -> Node:
        """Put the node's results, computed from the slot stage's output, under their old names and identities.

        Args:
            node: the replaced node.
            reading: the node's reading.
            slot_rows: the slot stage's output.
            extra: columns that follow the results.
            output: the expected columns.
        """
        if node.kind != "Aggregate":
            if node.kind == "Window":
                return self.catalyst.project(self._window_results(node, reading, slot_rows) + extra, slot_rows)
            pairs = zip(slot_rows.output, output, strict=False)
            results = [self._aliased_as(self._cast(new, old), old) for new, old in pairs]
            return self.catalyst.project(results + extra, slot_rows)
        groupings = [grouping for _, grouping in reading.results(node.list("groupingExpressions"))]
        known = list(zip(groupings + reading.aggregates, slot_rows.output, strict=False))

        def replace(expression: Expression) -> Expression | None:
            # A literal stays one, as on Spark: a function may need a constant argument that equals a grouping literal.
            if expression.kind == "Literal":
                return None
            return next((self._cast(new, old) for old, new in known if old.semantic_equals(expression)), None)

        results = []
        for result, old in zip(node.list("aggregateExpressions"), node.output, strict=True):
            value = result.children[0] if result.kind == "Alias" else result
            results.append(self._aliased_as(rewrite_expression(self.catalyst, value, replace), old))
        return self.catalyst.project(results + extra, slot_rows)

    def _window_results(self, node: Node, reading: Reading, slot_rows: Node) -> list[Expression]:
        """Return a window's columns; its functions' arguments end here, and unused columns are blank."""
        passed = [
            (reading.raw[column.raw[0]], new)
            for column, new in zip(reading.inputs, slot_rows.output, strict=False)
            if column.sql == "{0}" and reading.raw[column.raw[0]].kind == "AttributeReference"
        ]
        known = {old.expr_id: new for old, new in passed}
        results = zip(node.list("windowExpressions"), slot_rows.output[len(reading.inputs) :], strict=False)
        known |= {result.expr_id: new for result, new in results}
        return [
            self._aliased_as(self._cast(known[old.expr_id], old), old)
            if old.expr_id in known
            else self.catalyst.aliased_as(self.catalyst.placeholder(old), old)
            for old in node.output
        ]

    def _aliased_as(self, new: Expression, old: Expression) -> Expression:
        return self.catalyst.aliased_as(self.catalyst.cast_to(new, old), old)

    def _cast(self, new: Expression, old: Expression) -> Expression:
        """Cast the slot stage's column to the type and nullability in the plan."""
        if new.type != old.type:
            new = self.catalyst.cast_to(new, old)
        # `mapInArrow` declares all columns nullable, but nodes above were analysed with the old nullability.
        return new if old.nullable else self.catalyst.not_null(new)


def _runs_on_millpond(decided: Decided) -> bool:
    return decided.operator is not None and decided.operator.spec is not None


def _slot_results(node: Node, spec: OperatorSpec, reading: Reading) -> list[tuple[str, DataType]]:
    """Return names and types of the columns that an operator's slot stage returns, without the kind of a change."""
    if node.kind in MAPS or isinstance(reading, ProcessorReading | LookupReading):
        # Names are positional: the plan's may repeat, and `mapInArrow` reads dots in names as paths.
        return [(f"result{index}", column.data_type) for index, column in enumerate(node.output)]
    if spec.facts.emits_input_rows:
        windows = node.list("windowExpressions") if node.kind == "Window" else []
        return [
            *(
                (
                    column.field.name,
                    reading.raw[column.raw[0]].data_type if column.sql == "{0}" else _DERIVED[column.field.type],
                )
                for column in reading.inputs
            ),
            *((f"window{index}", result.data_type) for index, result in enumerate(windows)),
        ]
    shown = reading.results(node.list("groupingExpressions") if node.kind == "Aggregate" else node.output)
    return [
        *((name, key.data_type) for name, key in shown),
        *((f"call{index}", slot_result_type(aggregate)) for index, aggregate in enumerate(reading.aggregates)),
    ]


def with_hints(
    catalyst: Catalyst, below: Node, columns: Sequence[Expression], function: ArrowColumns, name: str
) -> Node:
    """Return the same rows; each passes once the function has seen columns computed from it.

    Args:
        catalyst: of the session.
        below: the node whose rows pass.
        columns: expressions over its columns. An expression that fails for a row is no error, since the row may be
            filtered out later.
        function: returns true for each row.
        name: the function's name in Spark's own `explain()`.
    """
    safe = [catalyst.without_errors(without_replaceables(catalyst, expression)) for expression in columns]
    mark = "__ahead"
    while any(column.name.lower().startswith(mark) for column in below.output):
        mark += "_"
    names = [f"{mark}{number}" for number in range(len(columns))]
    named_function = [catalyst.alias(expression, name_) for expression, name_ in zip(safe, names, strict=True)]
    frame = catalyst.dataframe(catalyst.project([*below.output, *named_function], below))
    seen = arrow_column(frame, function, "boolean", names, name)
    # The filter makes Spark evaluate the function: an unused column would be pruned.
    return catalyst.project(below.output, catalyst.analyzed(frame.withColumn(mark, seen).where(mark)))


def with_change_column(catalyst: Catalyst, plan: Node, kind: Expression | None, *, split: bool) -> DataFrame:
    """Return the rows of a changelog for users: the column `_op` is `I`, `U` or `D`.

    Args:
        catalyst: of the session.
        plan: the plan that returns the changelog.
        kind: its column with the kind of change.
        split: whether one row of an update may be missing; an update then shows as a deletion and an insertion.
    """
    assert kind is not None
    position = [column.expr_id for column in plan.output].index(kind.expr_id)
    columns = [column.name for column in plan.output]
    frame = catalyst.dataframe(plan).toDF(*(f"c{number}" for number in range(len(columns))))
    value = F.col(f"c{position}")
    # Only the new row of an update is shown.
    if not split:
        frame = frame.filter(value != -2)
    # If a filter may drop one row of an update, each row has to stand alone, as a deletion or an insertion.
    shown = F.when(value == 1, "I").when(value == 2, "I" if split else "U").otherwise("D").alias(CHANGE_COLUMN)
    others = [F.col(f"c{number}").alias(name) for number, name in enumerate(columns) if number != position]
    return frame.select(*others, shown)
