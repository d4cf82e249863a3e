"""Read `dropDuplicates`, `dropDuplicatesWithinWatermark` and `SELECT DISTINCT`."""

from __future__ import annotations

from collections.abc import Callable, Container

from millpond.errors import UsageError
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Expression, Node
from millpond.plan.reading.reading import InputColumn, Reading, check_key, check_one_time, unique_name
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec
from millpond.spec.operators import EventTime, Field
from millpond.spec.types import parse_type


def read_distinct(node: Node) -> Reading:
    """Read a `Distinct`: a grouping by all columns without functions, as in Spark."""
    reading = Reading()
    names: set[str] = set()
    for attribute in node.output:
        if WATERMARK_DELAY in attribute.metadata:
            raise Unsupported(Reason("MP-EVENT-TIME", attribute.name))
        check_key(attribute)
        reading.keys.append(_column(reading, attribute, names))
    reading.set_hash([key.field.name for key in reading.keys])
    return reading


def read_deduplicate(node: Node, native_columns: Callable[[], Container[int]]) -> tuple[Reading, DeduplicateSpec]:
    """Read a `Deduplicate`.

    Args:
        node: the node.
        native_columns: returns the identities of the columns that it has on Spark, where unused ones are pruned.
    """
    keys = {key.expr_id for key in node.list("keys")}
    marked = _marked(node)
    if not {column.expr_id for column in marked} <= keys:
        native = native_columns()  # no row is late by a pruned column
        marked = [column for column in marked if column.expr_id in native]
    return _read(node, marked)


def read_within(node: Node) -> tuple[Reading, WithinSpec]:
    """Read a `DeduplicateWithinWatermark`."""
    marked = _marked(node)
    reading, spec = _read(node, marked)
    # A key expires one delay after its event time, so exactly one column has to give both.
    if spec.time is None or len(marked) != 1 or not marked[0].type.startswith("timestamp"):
        names = ", ".join(column.name for column in marked) or "no column with a watermark"
        raise Unsupported(Reason("MP-EVENT-TIME", names))
    delay = int(marked[0].metadata[WATERMARK_DELAY])
    return reading, WithinSpec(spec.columns, spec.keys, spec.time, delay)


def _marked(node: Node) -> list[Expression]:
    return [column for column in node.output if WATERMARK_DELAY in column.metadata]


def _read(node: Node, marked: list[Expression]) -> tuple[Reading, DeduplicateSpec]:
    """Read the columns, the keys, and the time: the first column of those by which Spark drops late rows."""
    reading = Reading()
    names: set[str] = set()
    for attribute in node.output:
        reading.inputs.append(_column(reading, attribute, names))
    ids = [attribute.expr_id for attribute in node.output]
    positions = []
    for key in node.list("keys"):
        check_key(key)
        positions.append(ids.index(key.expr_id))
    reading.set_hash([reading.inputs[position].field.name for position in positions])
    check_one_time(marked)
    for attribute in node.output:
        _check_arrow_type(attribute)
    if marked:  # not only a key column: Spark drops late rows by any column with a watermark
        reading.time = EventTime(node.output.index(marked[0]))
    columns = tuple(column.field for column in reading.inputs)
    unread_time = bool(_marked(node)) and reading.time is None
    return reading, DeduplicateSpec(columns, tuple(positions), reading.time, unread_time)


def _column(reading: Reading, attribute: Expression, names: set[str]) -> InputColumn:
    reading.raw.append(attribute)
    field = Field(unique_name(attribute.name, names), attribute.type)
    return InputColumn(field, (len(reading.raw) - 1,), "{0}")


def _check_arrow_type(attribute: Expression) -> None:
    """Refuse a column that Spark cannot hand to Python and take back unchanged."""
    try:
        parse_type(attribute.type).arrow  # noqa: B018 — a type without an Arrow form raises
    except UsageError:
        raise Unsupported(Reason("MP-INPUT-TYPE", f"{attribute.name} ({attribute.type})")) from None
