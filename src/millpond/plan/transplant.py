"""Rewrites a query so that its stateful operators run in slots: projection, key hash, markers, exchange, pipe.

Each chosen node becomes child → projection and key hash → marker rows → exchange by hash range → pipe → projection
under the old identities, so that no node above it notices (docs/architecture.md, "The transplant").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, ByteType, DataType, LongType, StructField, StructType

from millpond.metrics import COMBINED, FIGURE_COLUMN, FIGURES, observation, unpacking
from millpond.plan.catalyst.conditions import without_replaceables
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.changelog.changes import filtered
from millpond.plan.exchange import NO_SIDES, MapSides, exchanged
from millpond.plan.lookahead.stages import columns_of, plain_columns, title
from millpond.plan.lookups import LookupReading
from millpond.plan.reading.aggregate import Derived, Reading, prepared, rewrite
from millpond.plan.reading.decision import Decided, Decision, Operator, Stage
from millpond.plan.reading.functions import piped_type
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.join_input import joined_sides
from millpond.plan.reading.map_groups import MAPS
from millpond.plan.reading.processor import EMITTED_TIME, ProcessorReading
from millpond.plan.workers import ArrowColumns, ArrowFunction, arrow_column, map_in_arrow, named
from millpond.slot.batch.task import PipeTask
from millpond.slot.pipe.hints import KeysPassing
from millpond.slot.pipe.pipe import Pipe
from millpond.spec.operators import OP

_DERIVED = {"boolean": BooleanType(), "bigint": LongType()}
"""Types of the columns that the pipe's input has beside those of the query (see `plan.aggregate`)."""


def transplant(
    df: DataFrame,
    decision: Decision,
    partitions: int,
    pipes: Sequence[ArrowFunction],
    sides: MapSides = NO_SIDES,
    figures: tuple[str, ...] = FIGURES,
    tasks: Sequence[PipeTask] = (),
    stores: int = 1,
) -> DataFrame:
    """The same query with the decided operators in slots.

    Args:
        df: the user's DataFrame, from which `decision` was made.
        decision: what `decide` said.
        partitions: how many partitions the state has.
        pipes: what runs in Spark's worker for each operator, by its number; picklable.
        sides: the map sides of the operators' exchanges.
        figures: what every operator reports.
        tasks: of each operator, by its number; they say which stages of the query may announce keys.
        stores: into how many partitions Spark divides state stores of its own, if the query needs no-data batches.
    """
    surgeon = _Surgeon(Catalyst(df.sparkSession), decision, partitions, pipes, sides, figures, tasks, stores)
    root = decision.staged if surgeon.stages and decision.staged is not None else decision.root
    rewritten = surgeon.visit(root)
    if decision.all_changes:
        return with_kinds(surgeon.catalyst, rewritten, surgeon.kind_of(rewritten), split=filtered(root))
    return surgeon.catalyst.dataframe(rewritten)


class _Surgeon:
    def __init__(
        self,
        catalyst: Catalyst,
        decision: Decision,
        partitions: int,
        pipes: Sequence[ArrowFunction],
        sides: MapSides,
        figures: tuple[str, ...],
        tasks: Sequence[PipeTask],
        stores: int,
    ) -> None:
        self.catalyst = catalyst
        self.partitions = partitions
        self.pipes = pipes
        self.sides = sides
        self.figures = figures
        self.complete = decision.output_mode == "complete"
        self.ticking = next((one.index for one in decision.ours if one.ticks), None)
        self.watching = next((one.index for one in decision.ours if one.closes), None)
        self.output_mode = decision.output_mode
        self.tasks = tasks
        self.stores = stores
        self.stages = {id(stage.node): stage for stage in decision.stages if self._announced_by(stage)}
        self._kinds: set[int] = set()  # identities of the columns that say what kind of change a row is

    def visit(self, decided: Decided) -> Node:
        if decided.node.kind == EMITTED_TIME and _runs_here(decided.children[0]):
            (processor,) = decided.children  # whose columns they are, one of them marked
            assert processor.operator is not None
            below = self.visit(processor.children[0])
            return self._replace(processor.node, processor.operator, below, decided.node)
        children = [self.visit(child) for child in decided.children]
        if columns_of(decided.node) is not None:
            return self._passing(decided.node, children[0])
        operator = decided.operator
        if operator is not None and operator.spec is not None:
            if isinstance(operator.reading, JoinReading):
                return self._replace_join(decided.node, operator, operator.reading, children)
            return self._replace(decided.node, operator, children[0], decided.node)
        if all(new is old.node for new, old in zip(children, decided.children, strict=True)):
            return decided.node
        node = self.catalyst.with_children(decided.node, children)
        kind = self.kind_of(children[0]) if node.kind == "Project" else None
        if kind is not None:  # changes travel through what computes columns of single rows
            return self.catalyst.project([*node.list("projectList"), kind], children[0])
        limits = node.kind == "GlobalLimit" and self.complete and operator is None
        return self.catalyst.stateless_limit(node) if limits else node

    def _announced_by(self, stage: Stage) -> list[tuple[PipeTask, str, Sequence[Expression]]]:
        """What a stage announces: of which operator, under which name, and what is computed for it."""
        known = ((task, stage.announces[task.operator]) for task in self.tasks if task.operator in stage.announces)
        return [(task, one.name, one.columns) for task, one in known if one.name in task.lookaheads]

    def _passing(self, node: Node, below: Node) -> Node:
        """A stage: the rows themselves, announced on their way."""
        kind = self.kind_of(below)
        rows = self.catalyst.project([*plain_columns(node), *([] if kind is None else [kind])], below)
        stage = self.stages.get(id(node))
        if stage is None:
            return rows
        announced = self._announced_by(stage)
        columns = [column for _, _, some in announced for column in some]
        function = KeysPassing([(task, name, len(some)) for task, name, some in announced])
        return announcing(self.catalyst, rows, columns, function, f"millpond[{title(stage.columns)}]")

    def kind_of(self, node: Node) -> Expression | None:
        """The column by which a node's rows say what kind of change they are."""
        return next((column for column in node.output if column.expr_id in self._kinds), None)

    def _replace(self, node: Node, operator: Operator, child: Node, shown_as: Node) -> Node:
        reading = operator.reading
        assert isinstance(reading, Reading)
        if node.kind in MAPS:  # what it groups by is projected right below it
            (child,) = child.children
        if reading.assigned is not None and reading.assigned.expanded:
            (below,) = child.children
            child = below if child.kind == "Expand" else self.catalyst.with_children(child, below.children)
        columns, raw = reading.columns, reading.raw
        if operator.spec is not None and operator.spec.retracts:
            kind = self.kind_of(child)
            assert kind is not None
            columns, raw = [*columns, Derived(OP, (len(raw),), "{0}")], [*raw, kind]
        assert operator.index is not None
        combination = self.sides.combination(operator.index)
        more = () if combination is None else combination.arguments
        rows = prepared(self.catalyst, child, raw, columns, reading.hash, more)
        if node.kind in MAPS or isinstance(reading, ProcessorReading | LookupReading):
            names = [f"result{index}" for index in range(len(node.output))]
            types: list[DataType] = [column.data_type for column in node.output]
        elif operator.spec is not None and operator.spec.keeps_columns:
            names = [column.field.name for column in reading.inputs]
            types = [
                reading.raw[column.raw[0]].data_type if column.sql == "{0}" else _DERIVED[column.field.type]
                for column in reading.inputs
            ]
            for index, result in enumerate(node.list("windowExpressions") if node.kind == "Window" else []):
                names.append(f"window{index}")
                types.append(result.data_type)
        else:
            shown = reading.results(node.list("groupingExpressions") if node.kind == "Aggregate" else node.output)
            names, types = [name for name, _ in shown], [key.data_type for _, key in shown]
            names += [f"call{index}" for index in range(len(reading.aggregates))]
            types += [piped_type(aggregate) for aggregate in reading.aggregates]
        schema = StructType([StructField(name, type_) for name, type_ in zip(names, types, strict=True)])
        changes = operator.spec is not None and operator.spec.changes
        if changes:
            schema.add(OP.name, ByteType())
        pipe, users, broadcasts = self.pipes[operator.index or 0], reading.users, reading.users.broadcasts
        if users.functions:
            assert isinstance(pipe, Pipe)
            pipe = pipe.calling(users.called(self.catalyst, operator.title, schema))
        if isinstance(reading, ProcessorReading):
            assert isinstance(pipe, Pipe)
            assert reading.processor is not None
            pipe, broadcasts = pipe.processing(reading.processor), reading.broadcasts
        sent = self.sides.sent(self.catalyst, operator.index, rows, reading.hash, len(reading.keys))
        piped = self._through_pipe(sent, operator, schema, pipe, broadcasts)
        kinds = []
        if changes:
            kinds = [self.catalyst.alias(piped.output[-1], OP.name)]
            self._kinds.add(kinds[0].expr_id)
        return self._reattach(node, reading, piped, kinds, shown_as.output)

    def _replace_join(self, node: Node, operator: Operator, reading: JoinReading, children: list[Node]) -> Node:
        both = [
            self.catalyst.dataframe(self.catalyst.project(aliases, child)).select(*(F.expr(sql) for sql in columns))
            for child, (aliases, columns) in zip(children, joined_sides(self.catalyst, reading), strict=True)
        ]
        attributes = reading.left.attributes + reading.right.attributes
        types = [attribute.data_type for attribute in attributes] or [reading.left.keys[0].data_type]
        schema = StructType(
            [StructField(field.name, type_) for field, type_ in zip(reading.spec.output_fields, types, strict=True)]
        )
        assert operator.index is not None
        sent = self.sides.sent(self.catalyst, operator.index, both[0].union(both[1]), "", 0)
        piped = self._through_pipe(sent, operator, schema, self.pipes[operator.index])
        pairs = zip(piped.output, node.output, strict=False)  # of a join without columns, the pipe gives one
        joined = self.catalyst.project([self._stand_in(self._as(new, old), old) for new, old in pairs], piped)
        for conjunct in reading.above:
            joined = self.catalyst.filter(conjunct, joined)
        return joined

    def _through_pipe(
        self,
        sent: DataFrame,
        operator: Operator,
        schema: StructType,
        pipe: ArrowFunction,
        broadcasts: Sequence[Any] = (),
    ) -> Node:
        """Send what a map side gives through the exchange and the operator's pipe, which gives rows of `schema`."""
        assert operator.index is not None
        schema.add(FIGURE_COLUMN, LongType())
        catalyst = self.catalyst
        function = named(pipe, operator.title, 2)
        watching = self._watching(operator, sent)
        received = exchanged(catalyst, sent, self.partitions, catalyst.streaming_rows, watching)
        piped = map_in_arrow(received, function, schema, broadcasts)
        figures = self.figures
        if operator.spec is not None:
            figures += operator.spec.figures
        if self.sides.combination(operator.index) is not None:
            figures += COMBINED
        watched = piped.observe(
            observation(operator.index),
            *(F.expr(unpacking(figure)).alias(figure) for figure in figures),
        )
        results = watched.filter(F.col(FIGURE_COLUMN).isNull()).drop(FIGURE_COLUMN)
        return self.catalyst.analyzed(results)

    def _watching(self, operator: Operator, sent: DataFrame) -> DataFrame | None:
        """What has Spark run batches without data, beside the first operator that has something to do in them."""
        if self.ticking is not None:
            ticking = operator.index == self.ticking
            return self.catalyst.watching_clock(sent, self.stores, self.output_mode) if ticking else None
        return self.catalyst.watching_watermark(sent, self.stores) if operator.index == self.watching else None

    def _reattach(
        self, node: Node, reading: Reading, piped: Node, more: list[Expression], output: list[Expression]
    ) -> Node:
        """Put the node's results, computed from the pipe's output, under their old names and identities.

        `more` are columns to come after them, `output` the columns that are expected.
        """
        if node.kind != "Aggregate":
            if node.kind == "Window":
                return self.catalyst.project(self._window_results(node, reading, piped) + more, piped)
            pairs = zip(piped.output, output, strict=False)
            results = [self._stand_in(self._as(new, old), old) for new, old in pairs]
            return self.catalyst.project(results + more, piped)
        groupings = [grouping for _, grouping in reading.results(node.list("groupingExpressions"))]
        known = list(zip(groupings + reading.aggregates, piped.output, strict=False))

        def replace(expression: Expression) -> Expression | None:
            return next((self._as(new, old) for old, new in known if old.means(expression)), None)

        results = []
        for result, old in zip(node.list("aggregateExpressions"), node.output, strict=True):
            value = result.children[0] if result.kind == "Alias" else result
            results.append(self._stand_in(rewrite(self.catalyst, value, replace), old))
        return self.catalyst.project(results + more, piped)

    def _window_results(self, node: Node, reading: Reading, piped: Node) -> list[Expression]:
        """A window's columns: arguments of its functions end here, and what nobody reads did not come through."""
        carried = [
            (reading.raw[column.raw[0]], new)
            for column, new in zip(reading.inputs, piped.output, strict=False)
            if column.sql == "{0}" and reading.raw[column.raw[0]].kind == "AttributeReference"
        ]
        known = {old.expr_id: new for old, new in carried}
        results = zip(node.list("windowExpressions"), piped.output[len(reading.inputs) :], strict=False)
        known |= {result.expr_id: new for result, new in results}
        return [
            self._stand_in(self._as(known[old.expr_id], old), old)
            if old.expr_id in known
            else self.catalyst.stand_in(self.catalyst.blank(old), old)
            for old in node.output
        ]

    def _stand_in(self, new: Expression, old: Expression) -> Expression:
        return self.catalyst.stand_in(self.catalyst.fitted(new, old), old)

    def _as(self, new: Expression, old: Expression) -> Expression:
        """The pipe's column with the type, if it is another, and the nullability that the plan knew."""
        if new.type != old.type:
            new = self.catalyst.fitted(new, old)
        return new if old.nullable else self.catalyst.not_null(new)


def _runs_here(decided: Decided) -> bool:
    return decided.operator is not None and decided.operator.spec is not None


def announcing(
    catalyst: Catalyst, below: Node, columns: Sequence[Expression], function: ArrowColumns, name: str
) -> Node:
    """The same rows, which are let through once a function has seen columns that are computed of them.

    Args:
        catalyst: of the session. below: gives the rows. columns: over its columns; that one of them cannot be computed
            for a row, which may not get any further, is no error.
        function: gives true for each row. name: what Spark's own `explain()` calls it.
    """
    safe = [catalyst.without_errors(without_replaceables(catalyst, one)) for one in columns]
    mark = "__ahead"
    while any(column.name.lower().startswith(mark) for column in below.output):
        mark += "_"
    names = [f"{mark}{at}" for at in range(len(columns))]
    named = [catalyst.alias(one, name_) for one, name_ in zip(safe, names, strict=True)]
    frame = catalyst.dataframe(catalyst.project([*below.output, *named], below))
    seen = arrow_column(frame, function, "boolean", names, name)
    return catalyst.project(below.output, catalyst.analyzed(frame.withColumn(mark, seen).where(mark)))


def with_kinds(catalyst: Catalyst, plan: Node, kind: Expression | None, *, split: bool) -> DataFrame:
    """The rows of a changelog as a user sees them: the column `_op` says `I`, `U` or `D`.

    Args:
        plan: gives the changelog.
        kind: its column of kinds.
        split: whether either image of an update may be missing: it then shows as a deletion and an insertion.
    """
    assert kind is not None
    position = [column.expr_id for column in plan.output].index(kind.expr_id)
    columns = [column.name for column in plan.output]
    frame = catalyst.dataframe(plan).toDF(*(f"c{number}" for number in range(len(columns))))
    value = F.col(f"c{position}")
    if not split:
        frame = frame.filter(value != -2)
    shown = F.when(value == 1, "I").when(value == 2, "I" if split else "U").otherwise("D").alias("_op")
    others = [F.col(f"c{number}").alias(name) for number, name in enumerate(columns) if number != position]
    return frame.select(*others, shown)
