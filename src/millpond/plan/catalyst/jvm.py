"""Makes plans and expressions, in the JVM of one session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from py4j.java_gateway import JavaClass
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millpond.errors import UsageError
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Expression, Node
from millpond.plan.catalyst.versions import copied, inline_cte, scan_of_rdd

_LOGICAL = "org.apache.spark.sql.catalyst.plans.logical"
_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions"
_BETWEEN = "\x1e\n"
_NO_DATA_SCAN = "millpond[no-data batches]"
_NO_DATA_COLUMN = "millpond_no_data_batches"


@dataclass(frozen=True)
class Catalyst:
    """Makes plans and expressions in one session's JVM.

    Attributes:
        spark: a classic (py4j) session.
    """

    spark: SparkSession

    def _class(self, name: str) -> Any:
        """A class by its full name. (By way of its packages, py4j would ask the JVM about each of them every time.)"""
        context = self.spark.sparkContext
        assert context._gateway is not None
        return JavaClass(name, context._gateway._gateway_client)

    def new(self, name: str, *arguments: Any) -> Any:
        """A new object of a class, by its full name."""
        return self._class(name)(*arguments)

    def object(self, name: str) -> Any:
        """A Scala object, or a class with static methods, by its full name."""
        return self._class(name)

    def seq(self, items: Sequence[Any]) -> Any:
        """An indexed Scala sequence of JVM objects."""
        return self._seq(items, indexed=True)

    def array(self, items: Sequence[Any]) -> Any:
        """A Java array of objects."""
        gateway = self.spark.sparkContext._gateway
        assert gateway is not None
        made = gateway.new_array(self._class("java.lang.Object"), len(items))
        for index, item in enumerate(items):
            made[index] = item
        return made

    def literal(self, value: str | bool | int) -> Expression:
        """A constant: a string, a boolean or an int."""
        types = self._class("org.apache.spark.sql.types.DataTypes")
        type_ = {str: types.StringType, bool: types.BooleanType, int: types.IntegerType}[type(value)]
        return Expression(self._class(f"{_EXPRESSIONS}.Literal").create(value, type_))

    def count(self, operands: Sequence[Expression]) -> Expression:
        """The aggregate function `count`."""
        return Expression(self._class(f"{_EXPRESSIONS}.aggregate.Count")(self._seq([one.java for one in operands])))

    def max_of(self, operand: Expression) -> Expression:
        """The aggregate function `max`."""
        return Expression(self._class(f"{_EXPRESSIONS}.aggregate.Max")(operand.java))

    def conjunction(self, one: Expression | None, other: Expression | None) -> Expression | None:
        """The conjunction of two conditions, of which None is always true."""
        if one is None or other is None:
            return one or other
        return Expression(self._class(f"{_EXPRESSIONS}.And")(one.java, other.java))

    def _seq(self, items: Sequence[Any], *, indexed: bool = False) -> Any:
        array = self._class("java.util.ArrayList")()
        for item in items:
            array.add(item)
        scala = self._class("scala.jdk.javaapi.CollectionConverters").asScala(array)
        return scala.toIndexedSeq() if indexed else scala.toSeq()

    @property
    def session_id(self) -> str:
        """What tells this session from others of the application."""
        return str(self.spark._jsparkSession.sessionUUID())

    @property
    def settings(self) -> dict[str, str]:
        """What the session's settings have been set to, asked for at once (PySpark asks for each)."""
        text = str(self.spark._jsparkSession.conf().getAll().mkString(_BETWEEN))
        name_and_value = (one.partition(" -> ") for one in text.split(_BETWEEN) if one)
        return {name: value for name, _, value in name_and_value}

    @property
    def process_id(self) -> int:
        """The JVM's."""
        return int(self._class("java.lang.ProcessHandle").current().pid())

    def analyzed(self, df: DataFrame) -> Node:
        """The analysed plan of a DataFrame, common table expressions inlined where Spark's optimiser would."""
        plan = Node(df._jdf.queryExecution().analyzed())
        return self._inline(plan) if any(node.kind == "WithCTE" for node in plan.walk()) else plan

    def _inline(self, plan: Node) -> Node:
        rule = self._class("org.apache.spark.sql.catalyst.optimizer.InlineCTE")
        return Node(inline_cte(rule, plan.java))

    def filter(self, condition: Expression, child: Node) -> Node:
        """`SELECT * FROM child WHERE condition`."""
        return Node(self._class(f"{_LOGICAL}.Filter")(condition.java, child.java))

    def dataframe(self, plan: Node) -> DataFrame:
        """The DataFrame of a plan."""
        dataset = self._class("org.apache.spark.sql.classic.Dataset")
        return DataFrame(dataset.ofRows(self.spark._jsparkSession, plan.java), self.spark)

    def with_children(self, tree: Node, children: Sequence[Node]) -> Node:
        """The same node over other children."""
        return Node(tree.java.withNewChildren(self._seq([child.java for child in children], indexed=True)))

    def with_operands(self, expression: Expression, operands: Sequence[Expression]) -> Expression:
        """The same expression over other operands."""
        return Expression(expression.java.withNewChildren(self._seq([o.java for o in operands], indexed=True)))

    def alias(self, expression: Expression, name: str) -> Expression:
        """`expression AS name`, under a new identity."""
        fresh = self._class(f"{_EXPRESSIONS}.NamedExpression").newExprId()
        return self._alias(expression, name, fresh, self._seq([]), None)

    def stand_in(self, expression: Expression, old: Expression) -> Expression:
        """`expression` under the name, identity, qualifier and metadata of `old`, so that nodes above never notice.

        The metadata carries the watermark's delay to stateful operators above.
        """
        return self._alias(expression, old.name, old.java.exprId(), old.java.qualifier(), old.java.metadata())

    def _alias(self, expression: Expression, name: str, expr_id: Any, qualifier: Any, metadata: Any) -> Expression:
        option = self._class("scala.Option").apply(metadata)
        alias = self._class(f"{_EXPRESSIONS}.Alias")
        return Expression(alias(expression.java, name, expr_id, qualifier, option, self._seq([])))

    def tagged(self, column: Expression, name: str, value: str) -> Expression:
        """A column under its own name and identity, with something more in its metadata."""
        builder = self._class("org.apache.spark.sql.types.MetadataBuilder")().withMetadata(column.java.metadata())
        metadata = builder.putString(name, value).build()
        return self._alias(column, column.name, column.java.exprId(), column.java.qualifier(), metadata)

    def without_errors(self, expression: Expression) -> Expression:
        """`expression`, with null for each part of it that would end the query with an error.

        Each part by itself: what occurs twice Spark computes once, beforehand, outside of whatever catches its errors.
        """
        if not expression.children or (expression.foldable and expression.succeeds):
            return expression
        if not any(operand.kind == "LambdaFunction" for operand in expression.children):
            expression = self.with_operands(expression, [self.without_errors(one) for one in expression.children])
        return Expression(self._class(f"{_EXPRESSIONS}.TryEval")(expression.java))

    def null(self, like: Expression) -> Expression:
        """A null of the type of `like`, declared as that is."""
        null = self.unknown(like)
        return null if like.nullable else self.not_null(null)

    def unknown(self, like: Expression) -> Expression:
        """A null of the type of `like`."""
        return Expression(self._class(f"{_EXPRESSIONS}.Literal")(None, like.java.dataType()))

    def blank(self, like: Expression) -> Expression:
        """A constant for a column that nobody reads: null, or the default of a type that may not be null."""
        if like.nullable:
            return self.null(like)
        return Expression(self._class(f"{_EXPRESSIONS}.Literal").default(like.java.dataType()))

    def not_null(self, expression: Expression) -> Expression:
        """`expression`, declared never null."""
        return Expression(self._class(f"{_EXPRESSIONS}.KnownNotNull")(expression.java))

    def fitted(self, expression: Expression, wanted: Expression) -> Expression:
        """`expression` with exactly the type and nullability of `wanted`, inside of nested types too.

        Spark declares what stateful operators of a stream give to be nullable throughout.
        """
        java = expression.java
        if not java.dataType().equals(wanted.java.dataType()):
            no_time_zone = self._class("scala.Option").apply(None)
            java = self._class(f"{_EXPRESSIONS}.Cast")(java, wanted.java.dataType(), no_time_zone)
        if wanted.nullable and not java.nullable():
            java = self._class(f"{_EXPRESSIONS}.KnownNullable")(java)
        return Expression(java)

    def project(self, named: Sequence[Expression], child: Node) -> Node:
        """`SELECT named FROM child`."""
        return Node(self._class(f"{_LOGICAL}.Project")(self._seq([n.java for n in named]), child.java))

    def stateless_limit(self, limit: Node) -> Node:
        """The same limit over complete results, in a form that Spark does not take for a limit of a stream's rows.

        Spark plans a limit as stateful unless it sees a streaming `Aggregate` below, and there is none any more. What
        it looks for is a global limit right above a local one: rows are brought together, and sorted, in another way.
        """
        (local,) = limit.children
        if local.kind != "LocalLimit":
            return limit
        (below,) = local.children
        if below.kind == "Sort":
            together = self._class(f"{_LOGICAL}.Repartition")(1, True, below.children[0].java)
            below = Node(copied(below.java, below.java.order(), False, together))
        return self.with_children(limit, [below])

    def rows(self, values: Sequence[int], name: str) -> DataFrame:
        """A bigint column of constant rows."""
        return self.spark.sql("VALUES " + ", ".join(f"({value}L)" for value in values) + f" AS t({name})")

    def streaming_rows(self, values: Sequence[int], name: str) -> DataFrame:
        """A bigint column of constant rows that takes part in every micro-batch (a streaming `LocalRelation`)."""
        rows = self.rows(values, name)
        execution = rows._jdf.queryExecution()
        plans = (Node(plan()) for plan in (execution.analyzed, execution.optimizedPlan))  # the versions differ in which
        local = next(node.java for plan in plans for node in plan.walk() if node.kind == "LocalRelation")
        relation = self._class(f"{_LOGICAL}.LocalRelation")
        return self.dataframe(Node(relation(local.output(), local.data(), True, local.stream())))

    def watching_watermark(self, like: DataFrame, stores: int) -> DataFrame:
        """Return a streaming DataFrame without partitions that makes Spark schedule no-data batches.

        Spark runs a no-data batch when the watermark has moved and the plan holds a stateful operator of its own whose
        state the watermark may close. Here that operator is a deduplication over no partitions: no task, no state
        store, no source. It sees the query's watermark only if the session has `statefulOperator.allowMultiple` off.

        Args:
            like: whose columns it has. stores: into how many partitions Spark divides the query's state stores.
        """
        watched = self._no_partitions({WATERMARK_DELAY: 0}, stores)
        return self._columns_of(like, watched.dropDuplicates(watched.columns))

    def watching_clock(self, like: DataFrame, stores: int, output_mode: str) -> DataFrame:
        """Return the same, with groups whose state times out by the clock: Spark schedules batch after batch.

        Args:
            like, stores: as for `watching_watermark`. output_mode: of the query.
        """
        groups = self._no_partitions({}, stores).groupBy(_NO_DATA_COLUMN)
        timed = groups.applyInPandasWithState(
            millpond_no_data_batches, f"{_NO_DATA_COLUMN} timestamp", "n int", output_mode, "ProcessingTimeTimeout"
        )
        return self._columns_of(like, timed)

    def _no_partitions(self, metadata: dict[str, int], stores: int) -> DataFrame:
        """Return a streaming scan of an RDD without partitions, named for people: one timestamp column.

        It says that it is divided as the stateful operator above asks for. Else Spark would put an exchange between
        them, which has as many partitions as there are stores.
        """
        rdd = self.spark.sparkContext._jsc.emptyRDD().rdd().setName(_NO_DATA_SCAN)
        column = F.timestamp_millis("id").alias(_NO_DATA_COLUMN, metadata=metadata)
        output = self._seq([one.java for one in self.analyzed(self.spark.range(1).select(column)).output])
        divided = self._class("org.apache.spark.sql.catalyst.plans.physical.HashPartitioning")(output, stores)
        none = self._class("scala.Option").empty()
        fields = [output, rdd, divided, self._seq([]), True, none, self.spark._jsparkSession, none, none]
        relation = self._class("org.apache.spark.sql.execution.LogicalRDD")
        return self.dataframe(Node(scan_of_rdd(relation, *fields)))

    def _columns_of(self, like: DataFrame, rows: DataFrame) -> DataFrame:
        return rows.select(*(F.lit(None).cast(field.dataType).alias(field.name) for field in like.schema))

    def qualified(self, path: str) -> str:
        """The full URL that Spark makes of a path: of its default file system, absolute.

        Raises:
            UsageError: it is no path, or of a file system that Spark has not been set up for.
        """
        try:
            hadoop = self._class("org.apache.hadoop.fs.Path")(path)
            system = hadoop.getFileSystem(self.spark._jsparkSession.sessionState().newHadoopConf())
            return str(system.makeQualified(hadoop).toString())
        except (Py4JJavaError, PySparkException) as error:
            cause = getattr(error, "java_exception", error)
            raise UsageError(
                f"Spark cannot use {path!r} as a location: {cause}.",
                action="Give a checkpointLocation that Spark can reach.",
            ) from None

    def delete_at_exit(self, folder: str) -> None:
        """Have Spark delete a local folder when the application ends, as it deletes its own temporary ones."""
        hooks = self._class("org.apache.spark.util.ShutdownHookManager")
        hooks.registerShutdownDeleteDir(self._class("java.io.File")(folder))

    def runs(self, query_id: str | None) -> bool:
        """Whether the application runs the query of this id, in whatever session."""
        return query_id is not None and self._active_run(query_id) is not None

    def check_sink(self, name: str) -> None:
        """See that Spark knows a format that is written to; raises Spark's own error."""
        if name not in ("", "foreach", "foreachBatch", "memory"):
            source = self._class("org.apache.spark.sql.execution.datasources.DataSource")
            source.lookupDataSource(name, self.spark._jsparkSession.sessionState().conf())

    def _active_run(self, query_id: str) -> Any:
        queries = self.spark._jsparkSession.sharedState().activeStreamingQueries()
        return queries.get(self._class("java.util.UUID").fromString(query_id))

    def stop_active_run(self, query_id: str | None) -> None:
        """Stop the application's running query of this id, if any, as Spark does when it is started again.

        Raises:
            UsageError: it runs, and `spark.sql.streaming.stopActiveRunOnRestart` is false.
        """
        running = None if query_id is None else self._active_run(query_id)
        if running is None:
            return
        if self.spark.conf.get("spark.sql.streaming.stopActiveRunOnRestart", "true") != "true":
            raise UsageError(
                f"The query with id {query_id} is running in this application already.",
                action="Stop it first, or set spark.sql.streaming.stopActiveRunOnRestart to true.",
            )
        running.stop()

    def in_own_session(self, df: DataFrame, settings: dict[str, str]) -> DataFrame:
        """The same DataFrame in a copy of the session with `settings`; listeners do not hear of its queries."""
        copy = Catalyst(SparkSession(self.spark.sparkContext, self.spark._jsparkSession.cloneSession()))
        for name, value in settings.items():
            copy.spark.conf.set(name, value)
        return copy.dataframe(Node(df._jdf.queryExecution().analyzed()))

    def check_streaming(self, plan: Node, output_mode: str) -> None:
        """Spark's own check of what a stream may do; raises Spark's own error."""
        modes = self._class("org.apache.spark.sql.streaming.OutputMode")
        mode = {"append": modes.Append, "update": modes.Update, "complete": modes.Complete}[output_mode.lower()]()
        checker = self._class("org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker")
        checker.checkForStreaming(plan.java, mode)

    def without_distincts(self, plan: Node) -> Node:
        """The plan with every DISTINCT aggregate of a streaming `Aggregate` made an ordinary one."""
        children = [self.without_distincts(child) for child in plan.children]
        if any(new is not old for new, old in zip(children, plan.children, strict=True)):
            plan = self.with_children(plan, children)
        if plan.kind != "Aggregate" or not plan.streaming:
            return plan
        results = [self._plain(result) for result in plan.list("aggregateExpressions")]
        java = plan.java
        return Node(
            copied(java, java.groupingExpressions(), self._seq([result.java for result in results]), java.child())
        )

    def aggregate(self, node: Node, results: Sequence[Expression]) -> Node:
        """The same aggregate with other results."""
        java = node.java
        return Node(copied(java, java.groupingExpressions(), self._seq([one.java for one in results]), java.child()))

    def optimized(self, plan: Node) -> Node:
        """What Spark's optimiser makes of a plan."""
        optimizer = self.spark._jsparkSession.sessionState().optimizer()
        return Node(optimizer.execute(plan.java))

    def physical_aggregate(self, node: Node) -> Any:
        """Groupings, aggregate functions and results of an aggregate as the planner takes them apart."""
        return self._class("org.apache.spark.sql.catalyst.planning.PhysicalAggregation").unapply(node.java).get()

    def _plain(self, expression: Expression) -> Expression:
        if expression.kind == "AggregateExpression":
            java = expression.java
            kind = self._class(f"{_EXPRESSIONS}.aggregate.AggregateExpression")
            return Expression(kind(java.aggregateFunction(), java.mode(), False, java.filter(), java.resultId()))
        if not expression.children:
            return expression
        return self.with_operands(expression, [self._plain(child) for child in expression.children])


def millpond_no_data_batches(key: Any, frames: Any, state: Any) -> Any:
    """Fail: the groups that make Spark schedule batches have no rows. Spark's plan shows the function's name."""
    raise AssertionError("no group has rows")
