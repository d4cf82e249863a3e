"""Factory for plans and expressions in the JVM of one session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Expression, Node, scala_seq
from millpond.plan.catalyst.session import copied_session, java_class
from millpond.plan.catalyst.versions import copied, inline_cte, scan_of_rdd

_LOGICAL = "org.apache.spark.sql.catalyst.plans.logical"
_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions"
_NO_DATA_SCAN = "millpond[no-data batches]"
_NO_DATA_COLUMN = "millpond_no_data_batches"


@dataclass(frozen=True)
class Catalyst:
    """Factory for plans and expressions in one session's JVM.

    Attributes:
        spark: a classic (py4j) session.
    """

    spark: SparkSession

    def new(self, name: str, *arguments: Any) -> Any:
        """Create an object of a class, by the class's full name."""
        return self.object(name)(*arguments)

    def object(self, name: str) -> Any:
        """Return a Scala object, or a class, by its full name."""
        return java_class(self.spark, name)

    def seq(self, items: Sequence[Any]) -> Any:
        """Return an indexed Scala sequence of JVM objects."""
        gateway = self.spark.sparkContext._gateway
        assert gateway is not None
        return scala_seq(gateway._gateway_client, items)

    def array(self, items: Sequence[Any]) -> Any:
        """Return a Java array of objects."""
        gateway = self.spark.sparkContext._gateway
        assert gateway is not None
        objects = gateway.new_array(self.object("java.lang.Object"), len(items))
        for index, item in enumerate(items):
            objects[index] = item
        return objects

    def literal(self, value: str | bool | int) -> Expression:
        """Return a literal: a string, a boolean or an int."""
        types = self.object("org.apache.spark.sql.types.DataTypes")
        type_ = {str: types.StringType, bool: types.BooleanType, int: types.IntegerType}[type(value)]
        return Expression(self.object(f"{_EXPRESSIONS}.Literal").create(value, type_))

    def count(self, operands: Sequence[Expression]) -> Expression:
        """Return the aggregate function `count`."""
        return Expression(self.new(f"{_EXPRESSIONS}.aggregate.Count", self.seq([operand.java for operand in operands])))

    def max_of(self, operand: Expression) -> Expression:
        """Return the aggregate function `max`."""
        return Expression(self.new(f"{_EXPRESSIONS}.aggregate.Max", operand.java))

    def conjunction(self, one: Expression | None, other: Expression | None) -> Expression | None:
        """Return the conjunction of two conditions; None stands for true."""
        if one is None or other is None:
            return one or other
        return Expression(self.new(f"{_EXPRESSIONS}.And", one.java, other.java))

    def conditional(self, condition: Expression, expression: Expression) -> Expression:
        """Return `IF(condition, expression, NULL)`."""
        null = self.null_of_type(expression)
        return Expression(self.new(f"{_EXPRESSIONS}.If", condition.java, expression.java, null.java))

    def is_aggregate_function(self, expression: Expression) -> bool:
        """Whether an expression is an aggregate function, without the call around it."""
        name = f"{_EXPRESSIONS}.aggregate.AggregateFunction"
        return bool(self.object("py4j.reflection.TypeUtil").isInstanceOf(name, expression.java))

    def analyzed(self, df: DataFrame) -> Node:
        """Return the analysed plan, with common table expressions inlined where Spark's optimiser would."""
        plan = Node(df._jdf.queryExecution().analyzed())
        return self._inline(plan) if any(node.kind == "WithCTE" for node in plan.walk()) else plan

    def _inline(self, plan: Node) -> Node:
        rule = self.object("org.apache.spark.sql.catalyst.optimizer.InlineCTE")
        return Node(inline_cte(rule, plan.java))

    def filter(self, condition: Expression, child: Node) -> Node:
        """Return `SELECT * FROM child WHERE condition`."""
        return Node(self.new(f"{_LOGICAL}.Filter", condition.java, child.java))

    def dataframe(self, plan: Node) -> DataFrame:
        """Return the DataFrame of a plan."""
        dataset = self.object("org.apache.spark.sql.classic.Dataset")
        return DataFrame(dataset.ofRows(self.spark._jsparkSession, plan.java), self.spark)

    def with_children(self, tree: Node, children: Sequence[Node]) -> Node:
        """Return the same node over other children; the node itself, if they are the ones that it has."""
        if all(new is old for new, old in zip(children, tree.children, strict=True)):
            return tree
        return Node(tree.java.withNewChildren(self.seq([child.java for child in children])))

    def with_operands(self, expression: Expression, operands: Sequence[Expression]) -> Expression:
        """Return the same expression over other operands; the expression itself, if they are the ones that it has."""
        if all(new is old for new, old in zip(operands, expression.children, strict=True)):
            return expression
        return Expression(expression.java.withNewChildren(self.seq([o.java for o in operands])))

    def alias(self, expression: Expression, name: str) -> Expression:
        """Return `expression AS name`, under a new identity."""
        fresh = self.object(f"{_EXPRESSIONS}.NamedExpression").newExprId()
        return self._alias(expression, name, fresh, self.seq([]), None)

    def aliased_as(self, expression: Expression, old: Expression) -> Expression:
        """Return `expression` under the name, identity, qualifier and metadata of `old`.

        Nodes above need no change. The metadata carries the watermark's delay to stateful operators above.
        """
        return self._alias(expression, old.name, old.java.exprId(), old.java.qualifier(), old.java.metadata())

    def _alias(self, expression: Expression, name: str, expr_id: Any, qualifier: Any, metadata: Any) -> Expression:
        option = self.object("scala.Option").apply(metadata)
        alias = self.object(f"{_EXPRESSIONS}.Alias")
        return Expression(alias(expression.java, name, expr_id, qualifier, option, self.seq([])))

    def with_metadata(self, column: Expression, name: str, value: str) -> Expression:
        """Return a column under its own name and identity, with an entry added to its metadata."""
        builder = self.new("org.apache.spark.sql.types.MetadataBuilder").withMetadata(column.java.metadata())
        metadata = builder.putString(name, value).build()
        return self._alias(column, column.name, column.java.exprId(), column.java.qualifier(), metadata)

    def without_errors(self, expression: Expression) -> Expression:
        """Return `expression` with null in place of each part that would fail.

        Each part is wrapped by itself: Spark computes a repeated part once, beforehand, outside the expression that
        would catch its errors.
        """
        if not expression.children or (expression.foldable and expression.evaluates):
            return expression
        if not any(operand.kind == "LambdaFunction" for operand in expression.children):
            expression = self.with_operands(
                expression, [self.without_errors(operand) for operand in expression.children]
            )
        return Expression(self.new(f"{_EXPRESSIONS}.TryEval", expression.java))

    def null_as_declared(self, like: Expression) -> Expression:
        """Return a null of the type and declared nullability of `like`."""
        null = self.null_of_type(like)
        return null if like.nullable else self.not_null(null)

    def null_of_type(self, like: Expression) -> Expression:
        """Return a null of the type of `like`."""
        return Expression(self.new(f"{_EXPRESSIONS}.Literal", None, like.java.dataType()))

    def placeholder(self, like: Expression) -> Expression:
        """Return a constant for an unused column: null, or the default of a type that may not be null."""
        if like.nullable:
            return self.null_as_declared(like)
        return Expression(self.object(f"{_EXPRESSIONS}.Literal").default(like.java.dataType()))

    def not_null(self, expression: Expression) -> Expression:
        """Return `expression`, declared never null."""
        return Expression(self.new(f"{_EXPRESSIONS}.KnownNotNull", expression.java))

    def cast_to(self, expression: Expression, wanted: Expression) -> Expression:
        """Return `expression` with exactly the type and nullability of `wanted`, nested types included.

        Spark declares the output of a stream's stateful operators nullable throughout.

        Only quantiles of decimals have another type, that of doubles. One that does not fit is null in any mode of the
        session, as in Spark.
        """
        java, type_ = expression.java, wanted.java.dataType()
        if not java.dataType().equals(type_):
            if type_.typeName() == "array" and not type_.containsNull():
                # Spark refuses a cast to elements that are never null where it may give null. So the cast is to
                # elements that may be null, which are then declared never null, as Spark's functions do.
                nullable = self.object("org.apache.spark.sql.types.DataTypes").createArrayType(type_.elementType())
                java = self.new(f"{_EXPRESSIONS}.KnownNotContainsNull", self._cast(java, nullable))
            else:
                java = self._cast(java, type_)
        if wanted.nullable and not java.nullable():
            java = self.new(f"{_EXPRESSIONS}.KnownNullable", java)
        return Expression(java)

    def _cast(self, expression: Any, type_: Any) -> Any:
        no_time_zone = self.object("scala.Option").apply(None)
        mode = self.object(f"{_EXPRESSIONS}.EvalMode").LEGACY()
        return self.new(f"{_EXPRESSIONS}.Cast", expression, type_, no_time_zone, mode)

    def project(self, named: Sequence[Expression], child: Node) -> Node:
        """Return `SELECT named FROM child`."""
        return Node(self.new(f"{_LOGICAL}.Project", self.seq([n.java for n in named]), child.java))

    def stateless_limit(self, limit: Node) -> Node:
        """Return a limit over complete results in a form that Spark does not plan as a stateful limit.

        Spark plans a limit as stateful unless it sees a streaming `Aggregate` below, and the rewriting has removed
        that. Spark looks for a global limit directly above a local one. So rows are gathered, and sorted, in another
        way.
        """
        (local,) = limit.children
        if local.kind != "LocalLimit":
            return limit
        return self.with_children(limit, [self._sorted_together(local.children[0])])

    def _sorted_together(self, node: Node) -> Node:
        """Return a plan that sorts in one partition, if it sorts its rows last; projections may follow."""
        if node.kind in ("Project", "SubqueryAlias", "View"):
            return self.with_children(node, [self._sorted_together(node.children[0])])
        if node.kind != "Sort":
            return node
        together = self.new(f"{_LOGICAL}.Repartition", 1, True, node.children[0].java)
        return Node(copied(node.java, node.java.order(), False, together))

    def rows(self, values: Sequence[int], name: str) -> DataFrame:
        """Return a bigint column of constant rows."""
        return self.spark.sql("VALUES " + ", ".join(f"({value}L)" for value in values) + f" AS t({name})")

    def streaming_rows(self, values: Sequence[int], name: str) -> DataFrame:
        """Return a bigint column of constant rows in every micro-batch (a streaming `LocalRelation`)."""
        local = self.local_relation(self.rows(values, name))
        relation = self.object(f"{_LOGICAL}.LocalRelation")
        return self.dataframe(Node(relation(local.output(), local.data(), True, local.stream())))

    def local_relation(self, constants: DataFrame) -> Any:
        """Return the `LocalRelation` of constant rows: their columns and data."""
        execution = constants._jdf.queryExecution()
        # versions of Spark differ in the plan that has it
        plans = (Node(plan()) for plan in (execution.analyzed, execution.optimizedPlan))
        return next(node.java for plan in plans for node in plan.walk() if node.kind == "LocalRelation")

    def watermark_batch_source(self, like: DataFrame, stores: int) -> DataFrame:
        """Return a streaming DataFrame without partitions that makes Spark schedule no-data batches.

        Spark runs a no-data batch if the watermark has moved, and may close state of a Spark operator in the plan. Here
        that operator is a deduplication over no partitions: no task, no state store, no source. It sees the query's
        watermark only if the session has `statefulOperator.allowMultiple` off.

        Args:
            like: a DataFrame with the columns to return.
            stores: the number of partitions of Spark's own state stores.
        """
        watched = self._no_partitions({WATERMARK_DELAY: 0}, stores)
        return self._columns_of(like, watched.dropDuplicates(watched.columns))

    def clock_batch_source(self, like: DataFrame, stores: int, output_mode: str) -> DataFrame:
        """Return the same, with groups whose state times out by processing time: Spark schedules batch after batch.

        Args:
            like, stores: as for `watermark_batch_source`.
            output_mode: of the query.
        """
        groups = self._no_partitions({}, stores).groupBy(_NO_DATA_COLUMN)
        timed = groups.applyInPandasWithState(
            millpond_no_data_batches, f"{_NO_DATA_COLUMN} timestamp", "n int", output_mode, "ProcessingTimeTimeout"
        )
        return self._columns_of(like, timed)

    def _no_partitions(self, metadata: dict[str, int], stores: int) -> DataFrame:
        """Return a streaming scan of an RDD without partitions: one timestamp column, with a readable name.

        The scan declares the partitioning that the stateful operator above requires. Otherwise Spark would add an
        exchange with as many partitions as there are stores.
        """
        rdd = self.spark.sparkContext._jsc.emptyRDD().rdd().setName(_NO_DATA_SCAN)
        column = F.timestamp_millis("id").alias(_NO_DATA_COLUMN, metadata=metadata)
        output = self.seq([column.java for column in self.analyzed(self.spark.range(1).select(column)).output])
        divided = self.new("org.apache.spark.sql.catalyst.plans.physical.HashPartitioning", output, stores)
        return self.dataframe(self.scan(output, rdd, divided, streaming=True))

    def scan(self, output: Any, rdd: Any, partitioning: Any, *, streaming: bool) -> Node:
        """Return a scan of an RDD of rows; a stream's arrive in every batch.

        Args:
            output: the columns.
            rdd: the rows.
            partitioning: how the rows are divided.
            streaming: whether it is a stream.
        """
        none = self.object("scala.Option").empty()
        fields = [output, rdd, partitioning, self.seq([]), streaming, none, self.spark._jsparkSession, none, none]
        relation = self.object("org.apache.spark.sql.execution.LogicalRDD")
        return Node(scan_of_rdd(relation, *fields))

    def _columns_of(self, like: DataFrame, rows: DataFrame) -> DataFrame:
        return rows.select(*(F.lit(None).cast(field.dataType).alias(field.name) for field in like.schema))

    def in_own_session(self, df: DataFrame, settings: dict[str, str]) -> DataFrame:
        """Return the same DataFrame in a copy of the session with `settings`; streaming listeners do not see it run."""
        return Catalyst(copied_session(self.spark, settings)).dataframe(Node(df._jdf.queryExecution().analyzed()))

    def check_streaming(self, plan: Node, output_mode: str) -> None:
        """Run Spark's own check of streaming operations; raise Spark's own error."""
        modes = self.object("org.apache.spark.sql.streaming.OutputMode")
        mode = {"append": modes.Append, "update": modes.Update, "complete": modes.Complete}[output_mode.lower()]()
        checker = self.object("org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker")
        checker.checkForStreaming(plan.java, mode)

    def passes_streaming_check(self, plan: Node, output_mode: str) -> bool:
        """Whether a plan passes Spark's own check of streaming operations."""
        try:
            self.check_streaming(plan, output_mode)
        except AnalysisException:
            return False
        return True

    def without_distincts(self, plan: Node) -> Node:
        """Return the plan with DISTINCT removed from every aggregate of a streaming `Aggregate`."""
        plan = self.with_children(plan, [self.without_distincts(child) for child in plan.children])
        if plan.kind != "Aggregate" or not plan.streaming:
            return plan
        return self.aggregate(plan, [self._plain(result) for result in plan.list("aggregateExpressions")])

    def aggregate(self, node: Node, results: Sequence[Expression]) -> Node:
        """Return the same aggregate with other results."""
        java = node.java
        return Node(
            copied(java, java.groupingExpressions(), self.seq([result.java for result in results]), java.child())
        )

    def optimized(self, plan: Node) -> Node:
        """Return the plan after Spark's optimiser."""
        optimizer = self.spark._jsparkSession.sessionState().optimizer()
        return Node(optimizer.execute(plan.java))

    def physical_aggregate(self, node: Node) -> Any:
        """Return groupings, aggregate functions and results of an aggregate, as Spark's planner extracts them."""
        return self.object("org.apache.spark.sql.catalyst.planning.PhysicalAggregation").unapply(node.java).get()

    def _plain(self, expression: Expression) -> Expression:
        if expression.kind == "AggregateExpression":
            java = expression.java
            kind = self.object(f"{_EXPRESSIONS}.aggregate.AggregateExpression")
            return Expression(kind(java.aggregateFunction(), java.mode(), False, java.filter(), java.resultId()))
        return self.with_operands(expression, [self._plain(child) for child in expression.children])


def millpond_no_data_batches(key: Any, frames: Any, state: Any) -> Any:
    """Fail: the groups that make Spark schedule batches have no rows. Spark's plan shows the function's name."""
    raise AssertionError("no group has rows")
