"""Checks that the query that takes Spark's state over has made it: columns with a watermark, rows, keys of joins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.ddl import quoted
from millpond.errors import StateIncompatibleError
from millpond.plan.catalyst.buffers import Buffers
from millpond.plan.catalyst.nodes import SESSION_WINDOW, TIME_WINDOW, WATERMARK_DELAY, Expression, Node
from millpond.plan.reading.aggregate import Reading, metadata
from millpond.plan.reading.decision import Operator
from millpond.plan.reading.windows import assigned, windows_of
from millpond.plan.spark_state.contradictions import (
    Check,
    Span,
    Times,
    contradiction,
    micros,
    of_closed,
    of_neighbours,
    of_sessions,
    of_windows,
    with_neighbours,
)
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.join import JoinSpec
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import AggregateCall, Field
from millpond.spec.types import parse_type
from millpond.words import length

_TIMES = ("timestamp", "timestamp_ntz")
_ADVICE = "Give this query a new checkpointLocation and let it begin anew (`millpond docs moving-a-job`)."


def check_groups(
    node: Node,
    operator: Operator,
    spec: AggregateSpec | SessionSpec,
    reading: Reading,
    buffers: Buffers,
    flat: DataFrame,
    place: str,
    first: int,
    times: Times,
) -> None:
    """See that groups are those that the query makes, as far as their times tell.

    Args:
        node, operator, spec, reading: of the query. buffers: what Spark keeps of it. flat: its rows.
        place: which of their columns groups are. first: the first column of the functions.
        times: the query's watermarks.
    """
    checks: list[Check] = []
    closed = times.watermark - spec.lag if spec.lag is not None and spec.closes else None
    groupings = node.output if node.kind == "Distinct" else node.list("groupingExpressions")
    for number, grouping in enumerate(groupings):
        column, marked = f"{place}{number}", WATERMARK_DELAY in metadata(grouping)
        end, own = end_of(node, grouping, column)
        checks += own
        if reading.session is not None and number == reading.session.position and reading.session.gap is not None:
            counts = (at for call, at in zip(spec.calls, buffers.calls, strict=True) if at and _counts_rows(call))
            rows = next((f"v{first + at.start}" for at in counts), None)
            checks += of_sessions(reading.session.gap, _span(grouping, column), rows)
        whole = assigned(node, grouping) if node.kind == "Aggregate" else None
        if whole is not None and whole.expanded:
            span = _span(grouping, column)
            others = [f"{place}{other}" for other in range(len(groupings)) if other != number]
            flat = with_neighbours(flat, span, others)
            checks += of_neighbours(whole.windows, span, closed)
        if end is not None and closed is not None and marked:
            checks += of_closed(*end, "groups", closed)
    check(operator, flat, checks)


def end_of(node: Node, key: Expression, column: str) -> tuple[tuple[str, str] | None, list[Check]]:
    """When a key is over, as SQL in microseconds and for people, None if it is no time; checks of it if it is a window.

    Args:
        node: what has the key. key: of the query. column: SQL of the key in the state.
    """
    dtype = parse_type(key.type)
    if dtype.name in _TIMES:
        return (micros(column, dtype.name), column), []
    if not metadata(key).keys() & {TIME_WINDOW, SESSION_WINDOW} or dtype.name != "struct":
        return None, []
    span = _span(key, column)
    windows = windows_of(node, key) if TIME_WINDOW in metadata(key) else None
    return (span.stop, span.end), [] if windows is None else of_windows(windows, span)


def _span(key: Expression, column: str) -> Span:
    return Span.of(column, parse_type(key.type).fields[0][1].name)


def _counts_rows(call: AggregateCall) -> bool:
    return call.function == "count" and not call.inputs and call.filter is None


def check(operator: Operator, state: DataFrame, checks: Sequence[Check]) -> None:
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
    """See that rows lie under the keys that the query joins them by: a schema has only their types.

    Args:
        operator: the join. ours: the side's keys, which are the columns `spec.keys` of `state`. side: left or right.
        state: the side's rows. held: the keys that they lie under, `__k0` …; values: what they have, `__v0` ….
    """
    keys = [f"__k{number}" for number in range(len(held))]
    alike = _alike(state, keys, held, [quoted(field.name) for field in spec.keys], spec.keys)
    if len(held) == len(ours) and all(alike) and len(set().union(*alike)) == len(ours):
        return
    found = _alike(state, keys, held, [f"__v{number}" for number in range(len(values))], values)
    theirs = [
        " or ".join(values[at].name for at in sorted(places)) or f"something {field.type}"
        for field, places in zip(held, found, strict=True)
    ]
    raise refused(
        operator,
        f"the query joins by ({', '.join(key.name for key in ours)}) on its {side} side; its checkpoint joins by "
        f"({', '.join(theirs)}) there",
    )


def _alike(
    state: DataFrame, keys: Sequence[str], held: Sequence[Field], columns: Sequence[str], fields: Sequence[Field]
) -> list[set[int]]:
    """For each key of the state, which columns it is the same as in all rows."""
    pairs = [
        (key, column)
        for key, one in enumerate(held)
        for column, other in enumerate(fields)
        if parse_type(one.type) == parse_type(other.type) and parse_type(one.type).name != "map"
    ]
    if not pairs:
        return [set() for _ in keys]
    row = state.agg(*(F.expr(f"bool_and({keys[key]} <=> {columns[column]})") for key, column in pairs)).first()
    assert row is not None
    found: list[set[int]] = [set() for _ in keys]
    for (key, column), same in zip(pairs, row, strict=True):
        if same is not False:  # without rows, nothing is known
            found[key].add(column)
    return found


def compare_times(
    operator: Operator,
    columns: Sequence[Field],
    ours: Sequence[dict[str, Any]],
    held: Sequence[dict[str, Any]],
    times: Times,
) -> None:
    """See that the columns with a watermark are those that had one.

    Its delay may change, as natively. A schema is that of the first run: if that had no watermark, a later one may.
    """
    for column, own, theirs in zip(columns, ours, held, strict=False):
        delay, was = own.get(WATERMARK_DELAY), theirs.get(WATERMARK_DELAY)
        if delay is None and was is not None:
            raise refused(
                operator,
                f"the query has no watermark on {column.name}; its checkpoint has one of {length(was * 1000)}",
            )
        if delay is not None and was is None and not times.following:
            raise refused(
                operator,
                f"the query has a watermark of {length(delay * 1000)} on {column.name}; its checkpoint has none",
            )


def refused(operator: Operator, why: str) -> StateIncompatibleError:
    """The error for state that an operator cannot take over."""
    return StateIncompatibleError(f"The state of '{operator.title}' cannot be taken over: {why}.", action=_ADVICE)
