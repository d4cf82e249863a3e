"""Checks before a query starts, which refuse queries that would give wrong rows or break their state later."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pyspark
from pyspark import SparkContext
from pyspark.errors import IllegalArgumentException
from pyspark.sql import DataFrame, SparkSession

from millpond.conf import OnWrongInSpark
from millpond.errors import SettingError, UnsupportedError, UsageError, WrongInSparkError
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Node
from millpond.plan.catalyst.session import STREAMING_CHECK, is_on
from millpond.plan.catalyst.versions import TESTED, is_tested
from millpond.plan.decision.decision import Decided, Decision, Operator
from millpond.plan.decision.reader import ALLOW_MULTIPLE
from millpond.plan.reading.processor import is_asynchronous
from millpond.plan.reading.user_functions import USER_AGGREGATE

log = logging.getLogger("millpond")

_warned: set[str] = set()  # applications that were warned that failed tasks are not retried


def check_session(df: DataFrame) -> None:
    """Refuse an object that is not a DataFrame, and a DataFrame whose session `check_spark` refuses.

    Raises:
        UsageError: see `check_spark`.
    """
    if not hasattr(df, "sparkSession"):
        raise UsageError(f"A streaming DataFrame is wanted, not {type(df).__name__}.", action="Pass the DataFrame.")
    check_spark(df.sparkSession)


def check_spark(spark: SparkSession) -> None:
    """Refuse an object that is not a session, Spark Connect, and untested versions of Spark.

    Raises:
        UsageError: names the sessions and versions that work.
    """
    if not hasattr(spark, "readStream"):
        raise UsageError(f"A SparkSession is wanted, not {type(spark).__name__}.", action="Pass the session.")
    if not hasattr(spark, "_jsparkSession") or type(spark).__module__.startswith("pyspark.sql.connect"):
        raise UsageError(
            "Millpond reads the query's plan in the driver's JVM, which a Spark Connect session does not offer.",
            action="Use a classic session: SparkSession.builder.master(…).getOrCreate(), without remote().",
        )
    version = spark.version
    if not is_tested(version):
        raise UsageError(
            f"Millpond was never tested with Spark {version} (PySpark {pyspark.__version__}).",
            action=f"Use one of the tested versions: {', '.join(f'{v}.x' for v in TESTED)}.",
        )


def check_stream(df: DataFrame, decision: Decision) -> None:
    """Let Spark check the query as the user wrote it, with its output mode; the errors are Spark's.

    Where Millpond runs them, it allows more than Spark: DISTINCT in aggregates, top-N, aggregates over each key's last
    rows, and operators above others that produce a changelog.
    """
    if not is_on(df.sparkSession, STREAMING_CHECK, True):
        return
    catalyst = Catalyst(df.sparkSession)
    if is_on(df.sparkSession, ALLOW_MULTIPLE, True):
        _check_watermarks(decision.analyzed)
    plan = _checkable_plan(catalyst, decision.root, decision.analyzed)
    catalyst.check_streaming(plan, decision.output_mode)


def check_wrong_in_spark(df: DataFrame, decision: Decision, action: OnWrongInSpark) -> None:
    """Refuse query shapes for which Spark gives wrong rows, or warn of them.

    Args:
        df: the query.
        decision: where its operators run.
        action: the setting `onWrongInSpark`.

    Raises:
        WrongInSparkError: names the operators, the wrong rows and the alternatives.
        AnalysisException: Spark does not run the query at all.
    """
    if not decision.wrong:
        return
    check_stream(df, decision)  # a query that Spark refuses has Spark's own error
    refused = [wrong for wrong in decision.wrong if action == "error" or (action == "auto" and wrong.certain)]
    for wrong in decision.wrong:
        if not refused:
            log.warning("'%s' gives wrong rows, as in Spark: %s. %s.", wrong.title, wrong, wrong.advice)
    if refused:
        raise WrongInSparkError(
            " ".join(f"The operator '{wrong.title}' would give wrong rows, as in Spark: {wrong}." for wrong in refused),
            action=" ".join(dict.fromkeys(f"{wrong.advice}." for wrong in refused))
            + " Or set spark.millpond.onWrongInSpark to 'warn' to run the query as it is.",
        )


def check_user_functions(spark: SparkSession, decision: Decision) -> None:
    """Refuse user code that neither Millpond nor Spark runs: in Spark, the first batch would fail.

    This applies to aggregates by user functions and to asynchronous processors.

    Raises:
        UnsupportedError: gives the reason why the operator does not run on Millpond.
    """
    for decided in decision.root.walk():
        operator, node = decided.operator, decided.node
        if operator is None or operator.reason is None:
            continue
        if is_asynchronous(Catalyst(spark), node):
            feature = "asynchronous processors"
        elif node.kind == "Aggregate" and any(
            part.kind == USER_AGGREGATE
            for expression in node.list("aggregateExpressions")
            for part in expression.walk()
        ):
            feature = "functions of the user there on streams"
        else:
            continue
        raise UnsupportedError(
            f"The operator '{operator.title}' is not supported: {operator.reason}.",
            action=f"{operator.reason.advice}. Spark does not run {feature}.",
        )


def unsupported_anywhere(df: DataFrame, decision: Decision) -> list[Operator]:
    """Return the operators left to Spark that Spark does not run on streams.

    Spark checks whole queries, and reports the first error only. An operator is at fault if both the query and the part
    of the plan up to the operator fail this check.
    """
    catalyst = Catalyst(df.sparkSession)
    on_spark = [
        decided for decided in decision.root.walk() if decided.operator is not None and decided.operator.spec is None
    ]
    checked = is_on(df.sparkSession, STREAMING_CHECK, True)
    mode = decision.output_mode
    if not on_spark or (checked and _passes_spark_check(catalyst, decision.root, decision.analyzed, mode)):
        return []
    return [
        decided.operator
        for decided in on_spark
        if decided.operator is not None
        and (
            decided.node.kind == "Window"
            or (checked and not _passes_spark_check(catalyst, decided, decided.node, mode))
        )
    ]


def _passes_spark_check(catalyst: Catalyst, decided: Decided, plan: Node, mode: str) -> bool:
    return catalyst.passes_streaming_check(_checkable_plan(catalyst, decided, plan), mode)


def _checkable_plan(catalyst: Catalyst, decided: Decided, plan: Node) -> Node:
    """Return the plan without the parts that only Millpond allows."""
    specs = [operator.spec for operator in decided.operators() if operator.spec is not None]
    if any(spec.facts.beyond_spark or spec.retracts for spec in specs):
        plan = _with_projections(catalyst, decided)
    if any(call.distinct for spec in specs for call in spec.calls):
        plan = catalyst.without_distincts(plan)
    return plan


def _check_watermarks(plan: Node) -> None:
    """Refuse a watermark above another one, as Spark does when such a query runs."""
    for upper in (node for node in plan.walk() if node.kind == "EventTimeWatermark"):
        lower = next((node for node in upper.children[0].walk() if node.kind == "EventTimeWatermark"), None)
        if lower is not None:
            above, below = (node.expression("eventTime").name for node in (upper, lower))
            raise UsageError(
                f"Redefining the watermark is disallowed: withWatermark('{above}', …) lies above "
                f"withWatermark('{below}', …).",
                action="Keep one of them for each source.",
            )


def _with_projections(catalyst: Catalyst, decided: Decided, *, consumed: bool = False) -> Node:
    """Replace operators that only Millpond defines by projections of the same columns.

    Args:
        decided: the plan.
        consumed: whether the operator above consumes the changelog of the topmost operator.
    """
    node, spec = decided.node, decided.operator.spec if decided.operator is not None else None
    below = consumed if decided.operator is None else spec is not None and spec.retracts
    children = [_with_projections(catalyst, child, consumed=below) for child in decided.children]
    if spec is not None and (spec.facts.beyond_spark or (consumed and spec.emits_updates)):
        known = {column.expr_id for column in children[0].output} if node.kind == "Window" else set()
        columns = [
            column if column.expr_id in known else catalyst.aliased_as(catalyst.null_as_declared(column), column)
            for column in node.output
        ]
        return catalyst.project(columns, children[0])
    return catalyst.with_children(node, children)


def check_name(spark: SparkSession, name: str | None) -> None:
    """Refuse the name of a running query, as Spark does, before any work for the new query.

    Raises:
        IllegalArgumentException: Spark's own.
    """
    if name is not None and any(query.name == name for query in spark.streams.active):
        raise IllegalArgumentException(
            f"Cannot start query with name {name} as a query with that name is already active in this SparkSession"
        )


def check_writer(spark: SparkSession, option: Callable[[str], str | None]) -> None:
    """Refuse settings that Spark refuses for a stateful query, but not for the rewritten one, which looks stateless.

    Raises:
        UsageError: asynchronous progress tracking.
        SettingError: too few retained batches.
    """
    if (option("asyncProgressTrackingEnabled") or "false").lower() == "true":
        raise UsageError(
            "Asynchronous progress tracking leaves batches out of Spark's commit log, which the state follows.",
            action="Remove the option asyncProgressTrackingEnabled.",
        )
    retained = int(spark.conf.get("spark.sql.streaming.minBatchesToRetain", "100") or 100)
    if retained < 2:
        raise SettingError(
            f"spark.sql.streaming.minBatchesToRetain is {retained}, but a restart may need the batch before the last.",
            action="Set it to 2 or more (Spark's default is 100).",
        )
    application = spark.sparkContext.applicationId
    # `local[N,F]` gives a task F attempts; `local[N]` gives it one.
    if spark.sparkContext.master.startswith("local[") and "," not in spark.sparkContext.master:
        if application not in _warned:
            log.warning(
                "%s never tries a failed task again: a slot that dies within one ends the query (local[N,4] retries)",
                spark.sparkContext.master,
            )
        _warned.add(application)


def check_speculation(context: SparkContext) -> None:
    """Refuse speculation where output may differ between attempts: state goes on from the attempt that began last.

    Raises:
        SettingError: Spark may use the output of another one.
    """
    if not context._jsc.sc().isLocal() and str(context.getConf().get("spark.speculation", "false")).lower() == "true":
        raise SettingError(
            "With spark.speculation, Spark runs two attempts of a task at once, and this query may give other rows in "
            "each.",
            action="Set spark.speculation to false; or, if the rows are the same, spark.millpond.commit.mode to async.",
        )
