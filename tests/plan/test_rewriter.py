"""The rewritten plan: the same schema, the same identities, and what the pipe gets and gives."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Node
from millpond.plan.catalyst.session import active, session_id
from millpond.plan.decide import decide
from millpond.plan.rewriter import rewrite_plan


class NoPipe:
    """A pipe that is only planned, never run."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches


def rewritten(df: DataFrame, mode: str = "update", partitions: int = 3) -> DataFrame:
    return rewrite_plan(df, decide(df, mode), partitions, [NoPipe()] * 9)


QUERIES = {
    "columns": lambda df: df.groupBy("k", "st").agg(F.count("*"), F.sum("v").alias("t"), F.max("dec"), F.avg("dec")),
    "global": lambda df: df.agg(F.count("*"), F.first("s")),
    "arithmetic": lambda df: df.groupBy((F.col("k") % 7).alias("r")).agg(
        (F.sum("v") / F.count("v") + F.col("r")).alias("x")
    ),
    "having": lambda df: df.groupBy("s").agg(F.sum("v").alias("t")).filter("t > 3").select((F.col("t") + 1).alias("u")),
    "booleans": lambda df: df.groupBy("b").agg(F.expr("bool_and(b)"), F.expr("any_value(s)"), F.expr("count_if(b)")),
    "nested": lambda df: df.groupBy(F.struct(F.lit(1), "k").alias("key")).agg(
        F.collect_list("v"), F.struct(F.count("*"), F.collect_set("st")).alias("both"), F.max(F.struct(F.lit(1)))
    ),
    "constants": lambda df: df.select(F.lit(1).alias("one"), F.array(F.lit("a")).alias("array"), "k").distinct(),
    "deduplicated": lambda df: df.dropDuplicates(["k", "s"]),
    "columns that nobody reads": lambda df: (
        df.withColumn("one", F.lit(1))
        .withColumn("many", F.array(F.lit("a")))
        .withColumn("r", F.row_number().over(Window.partitionBy("k").orderBy("v")))
        .filter("r <= 3")
        .select("k", "r")
    ),
    "metadata": lambda df: df.withMetadata("k", {"note": "kept"}).groupBy("k").agg(F.max("v")),
}


@pytest.mark.parametrize("name", QUERIES)
def test_keeps_the_schema(stream: DataFrame, name: str) -> None:
    df = QUERIES[name](stream)
    new = rewritten(df)
    for now, before in zip(new.schema, df.schema, strict=True):
        assert (now, now.metadata) == (before, before.metadata)
    assert new.isStreaming


def test_keeps_identities(stream: DataFrame) -> None:
    df = stream.groupBy("k").agg(F.sum("v").alias("t"))
    catalyst = Catalyst(df.sparkSession)
    old, new = catalyst.analyzed(df), catalyst.analyzed(rewritten(df))
    assert [a.expr_id for a in old.output] == [a.expr_id for a in new.output]


def nodes(df: DataFrame) -> list[Node]:
    return list(Catalyst(df.sparkSession).analyzed(df).walk())


def test_the_pipe_gets_columns_hash_and_mark_and_bears_a_name(stream: DataFrame) -> None:
    (pipe,) = [n for n in nodes(rewritten(stream.groupBy("k").agg(F.sum("v")))) if n.kind == "MapInArrow"]
    assert [a.name for a in pipe.children[0].output] == ["k", "input0", "__hash", "__mark"]
    assert [a.type for a in pipe.children[0].output] == ["int", "bigint", "bigint", "boolean"]
    assert "millpond[aggregate by k]" in str(pipe)


def test_markers_carry_each_partitions_lowest_hash(spark: SparkSession, stream: DataFrame) -> None:
    (local,) = [n for n in nodes(rewritten(stream.groupBy("k").count(), partitions=5)) if n.kind == "LocalRelation"]
    assert local.streaming
    rows = local.java.toString()
    assert "low" in rows
    low = [local.java.data().apply(index).getLong(0) & ((1 << 64) - 1) for index in range(5)]
    groups = [value >> 49 for value in low]
    assert [group * 5 >> 15 for group in groups] == [0, 1, 2, 3, 4]
    assert all((group - 1) * 5 >> 15 == p - 1 for p, group in enumerate(groups) if p)
    assert all(value & ((1 << 49) - 1) == 0 for value in low)


def test_batch_aggregates_are_left_alone(spark: SparkSession, stream: DataFrame) -> None:
    names = spark.range(9).groupBy((F.col("id") % 3).alias("id")).agg(F.count("*").alias("n"))
    df = stream.join(names, F.col("k") == F.col("id")).groupBy("n").count()
    kinds = [node.kind for node in nodes(rewritten(df))]
    assert kinds.count("Aggregate") == 1
    assert kinds.count("MapInArrow") == 1


def test_several_operators(stream: DataFrame) -> None:
    df = stream.dropDuplicates(["k"]).groupBy("s").count().unionByName(stream.groupBy("s").count())
    new = rewritten(df)
    assert [node.kind for node in nodes(new)].count("MapInArrow") == 3
    assert new.schema.simpleString() == df.schema.simpleString()


def test_wide_keys_are_planned_in_time(stream: DataFrame) -> None:
    """Optimising must not grow exponentially with the number of hashed columns."""
    wide = stream.select(*[(F.col("v") + i).alias(f"c{i}") for i in range(16)]).distinct()
    catalyst = Catalyst(wide.sparkSession)
    plan = catalyst.analyzed(rewritten(wide, "append"))
    (exchange,) = [node for node in plan.walk() if node.kind == "RepartitionByExpression"]
    collapse = catalyst.object("org.apache.spark.sql.catalyst.optimizer.CollapseProject")
    assert collapse.apply(exchange.java).constraints().size() < 1000


def test_the_session_of_the_query_counts_and_no_other(stream: DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    spark = stream.sparkSession
    other = spark.newSession()
    sessions: list[str] = []
    visit = Catalyst.with_children

    def seen(catalyst: Catalyst, tree: Node, children: list[Node]) -> Node:
        sessions.append(session_of(catalyst))
        return visit(catalyst, tree, children)

    monkeypatch.setattr(Catalyst, "with_children", seen)
    df = stream.groupBy("k").count().filter("count > 1")
    with active(other):
        new = rewritten(df)
        assert session_of(Catalyst(spark)) == session_id(other)
    assert new.sparkSession is spark
    assert set(sessions) == {session_id(spark)}


def session_of(catalyst: Catalyst) -> str:
    """The identifier of the session that is active in this thread."""
    sessions = catalyst.object("org.apache.spark.sql.classic.SparkSession")
    return str(sessions.getActiveSession().get().sessionUUID())
