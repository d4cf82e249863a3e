"""Draws Spark's plan of a window count on Millpond into `docs/plan.svg`: `python -m docs.plan_picture`."""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from html import escape
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

import millpond

PICTURE = Path(__file__).with_name("plan.svg")

NOTES = {
    "CollectMetrics millpond": "figures of the operator, for observedMetrics",
    "MapInArrow millpond[aggregate": "the operator: rows go to the slot, results come back",
    "Exchange": "to partitions, by key group",
    "HashAggregate": "combines rows: one per group and task",
    "LocalTableScan <empty>": "the source, which has no rows in this batch",
    "LocalTableScan [": "a marker row per partition: each partition runs in each batch",
    "StreamingDeduplicate": "no rows and no tasks: Spark schedules no-data batches for it",
    "Scan ExistingRDD millpond": "a relation without partitions",
}
"""What is written beside the nodes whose labels begin so."""

_ROW, _STEP, _WIDTH = 34, 22, 1100
_WITH_COLUMNS = ("LocalTableScan", "StreamingDeduplicate", "Scan ExistingRDD")


class Shown(NamedTuple):
    """A node of a plan: how deep it lies, and its label."""

    depth: int
    label: str


def shown(tree: str) -> Iterator[Shown]:
    """Read the physical plan that Spark's `explain()` prints; of projections in a row, the first."""
    above: list[int] = []  # where the nodes begin that this one lies below
    before = None
    for line in tree.splitlines():
        found = re.match(r"([ :]*(?:[+:]- )?)(?:\*\(\d+\) )?([A-Z]\w+.*)", line)
        if found is None:
            continue
        label = _label(found[2])
        if label != "Project" or before != "Project":
            above = [at for at in above if at < len(found[1])]
            yield Shown(len(above), label)
            above.append(len(found[1]))
        before = label


def _label(text: str) -> str:
    text = re.sub(r"#\d+L?(-T\d+ms)?", "", text)
    named = re.match(r"(?:HashAggregate|MapInArrow millpond\[.*?\]|CollectMetrics \S+?(?=,))", text)
    if named is not None:
        return named[0]
    if text.startswith(_WITH_COLUMNS):
        return re.sub(r"(\]).*", r"\1", text) if "[no-data" not in text else text
    return text.split(" ")[0] if not text.startswith("LocalTableScan") else text


def drawn(nodes: list[Shown]) -> str:
    """The nodes as SVG, with what they are for."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_ROW * len(nodes) + 12}" font-size="13" '
        'font-family="ui-monospace, monospace">',
        f'<rect width="{_WIDTH}" height="{_ROW * len(nodes) + 12}" fill="#fff"/>',
    ]
    for row, node in enumerate(nodes):
        x, y = 10 + _STEP * node.depth, 8 + _ROW * row
        parent = next((at for at in range(row - 1, -1, -1) if nodes[at].depth < node.depth), None)
        if parent is not None:
            left, top = 10 + _STEP * nodes[parent].depth + 8, 8 + _ROW * parent + 25
            lines.append(f'<path d="M{left} {top}V{y + 12}H{x}" fill="none" stroke="#888"/>')
        note = next((said for begin, said in NOTES.items() if node.label.startswith(begin)), None)
        fill = "#e6f1ef" if note else "#f4f4f4"
        width = 16 + 7.9 * len(node.label)
        lines.append(f'<rect x="{x}" y="{y}" width="{width:.0f}" height="25" rx="4" fill="{fill}" stroke="#888"/>')
        lines.append(f'<text x="{x + 8}" y="{y + 17}">{escape(node.label)}</text>')
        if note:
            said = f'<text x="{x + width + 10:.0f}" y="{y + 17}" fill="#555" font-family="sans-serif">{note}</text>'
            lines.append(said)
    return "\n".join([*lines, "</svg>", ""])


def window_count(spark: SparkSession, folder: Path) -> StreamingQuery:
    """Run the query that is drawn: one batch, and the no-data batch after it."""
    rows = spark.range(100).select(F.timestamp_seconds("id").alias("at"), (F.col("id") % 3).alias("user"))
    rows.write.parquet(str(folder / "in"))
    stream: DataFrame = spark.readStream.schema(rows.schema).parquet(str(folder / "in"))
    windows = stream.withWatermark("at", "10 seconds").groupBy(F.window("at", "1 minute"), "user")
    writer = millpond.writeStream(windows.agg(F.count("*").alias("clicks"))).outputMode("append").format("noop")
    query: StreamingQuery = (
        writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    )
    query.awaitTermination()
    return query


def plan(query: StreamingQuery) -> str:
    """The physical plan of a query's last batch, as `explain()` prints it."""
    with redirect_stdout(io.StringIO()) as printed:
        query.explain()
    return printed.getvalue()


if __name__ == "__main__":
    session = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
    with tempfile.TemporaryDirectory() as temporary:
        PICTURE.write_text(drawn(list(shown(plan(window_count(session, Path(temporary)))))))
    session.stop()
