"""Checks that the query has made the Spark state it takes over: watermark columns, rows, join keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.errors import StateIncompatibleError
from millpond.humanize import duration
from millpond.plan.catalyst.nodes import SESSION_WINDOW, TIME_WINDOW, WATERMARK_DELAY, Expression, Node
from millpond.plan.decision.decision import Operator
from millpond.plan.reading.reading import Reading
from millpond.plan.reading.windows import window_assignment, windows_of
from millpond.plan.spark_state.columns import StoredGroups
from millpond.plan.spark_state.contradictions import (
    Check,
    Span,
    Times,
    closed_checks,
    contradiction,
    micros,
    neighbour_checks,
    session_checks,
    window_checks,
    with_neighbours,
)
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.join import JoinSpec
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import Field
from millpond.spec.types import parse_type
from millpond.tasks.ddl import quoted

_TIMES = ("timestamp", "timestamp_ntz")
_ADVICE = "Give this query a new checkpointLocation and let it start from empty state (`millpond docs moving-a-job`)."


def check_groups(
    node: Node,
    operator: Operator,
    spec: AggregateSpec | SessionSpec,
    reading: Reading,
    stored: StoredGroups,
    times: Times,
) -> None:
    """Check that the state's groups can be those of the query, by their times.

    Args:
        node, operator, spec, reading: of the query.
        stored: the groups in the state.
        times: the query's watermarks.

    Raises:
        StateIncompatibleError: another query has made the state.
    """
    rows = stored.rows
    checks: list[Check] = []
    closed = times.watermark - spec.lag if spec.lag is not None and spec.needs_no_data_batches else None
    groupings = node.output if node.kind == "Distinct" else node.list("groupingExpressions")
    for number, grouping in enumerate(groupings):
        column, marked = f"{stored.prefix}{number}", WATERMARK_DELAY in grouping.metadata
        end, own = end_and_checks(node, grouping, column)
        checks += own
        if reading.session is not None and number == reading.session.position and reading.session.gap is not None:
            checks += session_checks(reading.session.gap, _span(grouping, column), _row_count(spec, stored))
        whole = window_assignment(node, grouping) if node.kind == "Aggregate" else None
        if whole is not None and whole.expanded:
            span = _span(grouping, column)
            others = [f"{stored.prefix}{other}" for other in range(len(groupings)) if other != number]
            rows = with_neighbours(rows, span, others)
            checks += neighbour_checks(whole.windows, span, closed)
        if end is not None and closed is not None and marked:
            checks += closed_checks(*end, "groups", closed)
    check_rows(operator, rows, checks)


def end_and_checks(node: Node, key: Expression, column: str) -> tuple[tuple[str, str] | None, list[Check]]:
    """Return a key's end, as SQL in microseconds and for people, and the checks of a window key.

    The end is None if the key is not a time.

    Args:
        node: the node that has the key.
        key: the key in the query.
        column: SQL of the key in the state.
    """
    dtype = parse_type(key.type)
    if dtype.name in _TIMES:
        return (micros(column, dtype.name), column), []
    if not key.metadata.keys() & {TIME_WINDOW, SESSION_WINDOW} or dtype.name != "struct":
        return None, []
    span = _span(key, column)
    windows = windows_of(node, key) if TIME_WINDOW in key.metadata else None
    return (span.stop, span.end), [] if windows is None else window_checks(windows, span)


def _span(key: Expression, column: str) -> Span:
    return Span.of(column, parse_type(key.type).fields[0][1].name)


def _row_count(spec: AggregateSpec | SessionSpec, stored: StoredGroups) -> str | None:
    """Return the column with the number of a group's rows; None if the query does not count them."""
    for call, buffer in zip(spec.calls, stored.buffers.calls, strict=True):
        if buffer and call.function == "count" and not call.inputs and call.filter is None:
            return f"v{stored.first + buffer.start}"
    return None


def check_rows(operator: Operator, state: DataFrame, checks: Sequence[Check]) -> None:
    """Refuse rows that another query has made."""
    why = contradiction(state, checks)
    if why is not None:
        raise refused(operator, why)


def check_keys(
    operator: Operator,
    ours: Sequence[Expression],
    spec: JoinSpec,
    side: str,
    state: DataFrame,
    held: Sequence[Field],
    values: Sequence[Field],
) -> None:
    """Check that rows are stored under the query's join keys: the schema only has the keys' types.

    Args:
        operator: the join.
        ours: the side's keys, which are the columns `spec.keys` of `state`.
        spec: the join's spec.
        side: left or right.
        state: the side's rows.
        held: the keys in the state, `__k0` ….
        values: the columns in the state, `__v0` ….
    """
    # A schema has only the types of the keys, so their values are compared in all rows.
    keys = [f"__k{number}" for number in range(len(held))]
    equal_to_ours = _equal_columns(state, keys, held, [quoted(field.name) for field in spec.keys], spec.keys)
    if len(held) == len(ours) and all(equal_to_ours) and len(set().union(*equal_to_ours)) == len(ours):
        return
    equal_values = _equal_columns(state, keys, held, [f"__v{number}" for number in range(len(values))], values)
    theirs = [
        " or ".join(values[position].name for position in sorted(positions)) or f"something {field.type}"
        for field, positions in zip(held, equal_values, strict=True)
    ]
    raise refused(
        operator,
        f"the query joins by ({', '.join(key.name for key in ours)}) on its {side} side; its checkpoint joins by "
        f"({', '.join(theirs)}) there",
    )


def _equal_columns(
    state: DataFrame, keys: Sequence[str], held: Sequence[Field], columns: Sequence[str], fields: Sequence[Field]
) -> list[set[int]]:
    """Return for each key of the state the columns that equal it in all rows."""
    pairs = [
        (key, column)
        for key, key_field in enumerate(held)
        for column, column_field in enumerate(fields)
        if parse_type(key_field.type) == parse_type(column_field.type) and parse_type(key_field.type).name != "map"
    ]
    if not pairs:
        return [set() for _ in keys]
    row = state.agg(*(F.expr(f"bool_and({keys[key]} <=> {columns[column]})") for key, column in pairs)).first()
    assert row is not None
    equal_columns: list[set[int]] = [set() for _ in keys]
    for (key, column), same in zip(pairs, row, strict=True):
        if same is not False:  # without rows, any column may be the key
            equal_columns[key].add(column)
    return equal_columns


def compare_times(
    operator: Operator,
    columns: Sequence[Field],
    ours: Sequence[dict[str, Any]],
    held: Sequence[dict[str, Any]],
    times: Times,
) -> None:
    """Check that the columns with a watermark are those that had one in the checkpoint.

    The delay may change, as on Spark. The schema is that of the first run: if that had no watermark, a later run may
    have one.
    """
    for column, own, theirs in zip(columns, ours, held, strict=False):
        delay, was = own.get(WATERMARK_DELAY), theirs.get(WATERMARK_DELAY)
        if delay is None and was is not None:
            raise refused(
                operator,
                f"the query has no watermark on {column.name}; its checkpoint has one of {duration(was * 1000)}",
            )
        if delay is not None and was is None and not times.following:
            raise refused(
                operator,
                f"the query has a watermark of {duration(delay * 1000)} on {column.name}; its checkpoint has none",
            )


def refused(operator: Operator, why: str) -> StateIncompatibleError:
    """Make the error for state that an operator cannot take over."""
    return StateIncompatibleError(f"The state of '{operator.title}' cannot be taken over: {why}.", action=_ADVICE)
