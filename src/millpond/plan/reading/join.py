"""Read a `Join` of two streams: keys, times, condition, the rows each side sends, and the result columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Expression, Node
from millpond.plan.catalyst.optimiser.joins import EqualKeys, equal_keys, state_watermarks
from millpond.plan.catalyst.versions import semi_join_has_right_first, semi_join_is_one_sided
from millpond.plan.reading.join_condition import LEFT, RIGHT, Sides, TimeRange, compile_condition
from millpond.plan.reading.reading import check_key, check_value, unique_name
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.spec.functions import KEY_COLUMNS, MAX_KEY_COLUMNS, key_width
from millpond.spec.kinds.join import FROM_TIME, JoinSide, JoinSpec
from millpond.spec.operators import Field
from millpond.spec.types import holds_floats, parse_type

_KINDS = {
    "Inner": "inner",
    "Cross": "inner",
    "LeftOuter": "left_outer",
    "RightOuter": "right_outer",
    "FullOuter": "full_outer",
    "LeftSemi": "left_semi",
}
_LOW_WATERMARK_MS, _HIGH_WATERMARK_MS = 10_000_000_000, 4_000_000_000_000
"""Two input watermarks (ms), to determine a side's state watermark as a function of the input's."""
_UNBOUNDED_LAG_MS = 1 << 50  # milliseconds


@dataclass
class SideReading:
    """Columns that one side of a join sends to the slot.

    Attributes:
        keys: its key expressions.
        values: the further stored expressions.
        time: the expression of the event time.
        late: the expression of the time that defines lateness.
        match_conditions: conjuncts that a row must fulfil to have any match.
        columns, places: as in `JoinSide`.
        attributes: the plan's columns that `columns` stand for.
    """

    keys: list[Expression]
    time: Expression | None = None
    late: Expression | None = None
    match_conditions: list[Expression] = field(default_factory=list)
    values: list[Expression] = field(default_factory=list)
    columns: list[Field] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    attributes: list[Expression] = field(default_factory=list)

    def value(self, expression: Expression) -> int:
        """Return the number of a stored value, which is added if it is new.

        Raises:
            Unsupported: values of its type cannot be stored.
        """
        for number, known in enumerate(self.values):
            if known.semantic_equals(expression):
                return number
        check_value(expression)
        self.values.append(expression)
        return len(self.values) - 1


@dataclass
class JoinReading:
    """The reading of a `Join` node.

    Attributes:
        spec: the operator's spec.
        left, right: the sides' readings.
        above: conjuncts that Spark evaluates over the joined rows.
        output_lag_ms: lag of the output's watermark behind the input's.
    """

    spec: JoinSpec
    left: SideReading
    right: SideReading
    above: list[Expression]
    output_lag_ms: int


def read_join(catalyst: Catalyst, node: Node) -> JoinReading:
    """Read a `Join` of two streams whose conditions `catalyst.optimiser.conditions.with_settled_conditions` has placed.

    Raises:
        Unsupported: it stays on Spark, for the given reason.
    """
    kind = _KINDS.get(node.join_type)
    if kind is None:
        raise Unsupported(Reason("MP-OPERATOR", f"a {join_title(node)} join of streams"))
    equal = equal_keys(catalyst, node)
    if equal is None or not equal.left:
        raise Unsupported(Reason("MP-OPERATOR", "a join of streams without equal keys"))
    for key in equal.left:
        check_key(key)
    children = dict(zip((LEFT, RIGHT), node.children, strict=True))
    readings = {LEFT: SideReading(equal.left), RIGHT: SideReading(equal.right)}
    expiries = expiries_of(catalyst, node, equal)
    _set_times(readings, children, equal, expiries)
    sides = Sides(*(frozenset(a.expr_id for a in children[name].output) for name in (LEFT, RIGHT)))
    above, condition, bounds = _split_condition(kind, equal.rest, sides, readings)
    names: set[str] = set()
    for name, reading in readings.items():
        if name == LEFT or kind != "left_semi":
            _set_columns(reading, children[name].output, names)
    # the query reads no column, but the number of rows matters
    if not any(reading.columns for reading in readings.values()):
        key = readings[LEFT].keys[0]
        readings[LEFT].columns.append(Field(unique_name("key", names), key.type))
        readings[LEFT].places.append(-1)
    keys = tuple(Field(unique_name(f"key{number}", names), key.type) for number, key in enumerate(equal.left))
    if key_width(keys) > MAX_KEY_COLUMNS:
        raise Unsupported(Reason(KEY_COLUMNS, str(key_width(keys))))
    spec = JoinSpec(
        kind,
        keys,
        # Millpond matches null keys only in full outer joins, as Spark does. Spark also matches nulls of computed keys
        # in other joins.
        tuple(kind == "full_outer" for _ in keys),
        _side(readings[LEFT], names, expiries[LEFT], kind in ("left_outer", "full_outer")),
        _side(readings[RIGHT], names, expiries[RIGHT], kind in ("right_outer", "full_outer")),
        *bounds,
        condition,
        kind == "left_semi" and semi_join_has_right_first(),
    )
    return JoinReading(spec, readings[LEFT], readings[RIGHT], above, _output_lag(spec))


def join_title(node: Node) -> str:
    """Return the type of a join in words."""
    return re.sub("(?<=[a-z])(?=[A-Z])", " ", node.join_type).lower()


class Expiry:
    """Watermark of a side's state: the input's plus `offset`, but at most `cap`.

    A cap comes from a comparison with a constant, from which Spark concludes that state beyond it has to be kept.
    """

    def __init__(self, low: int, high: int) -> None:
        # If the state's watermark does not follow the input's over the whole distance, it is capped by a constant.
        self.cap = None if high - low == _HIGH_WATERMARK_MS - _LOW_WATERMARK_MS else high
        self.offset = high - _HIGH_WATERMARK_MS if self.cap is None else low - _LOW_WATERMARK_MS if low < high else high


def expiries_of(catalyst: Catalyst, node: Node, keys: EqualKeys) -> dict[str, Expiry | None]:
    """Return the watermark of each side's state; None if a side's rows are kept for ever."""
    low = state_watermarks(catalyst, node, keys, _LOW_WATERMARK_MS)
    high = state_watermarks(catalyst, node, keys, _HIGH_WATERMARK_MS)
    both = [None if a is None or b is None else Expiry(a, b) for a, b in zip(low, high, strict=True)]
    return dict(zip((LEFT, RIGHT), both, strict=True))


def event_time_column(expressions: Sequence[Expression]) -> Expression | None:
    """Return the first event-time column among some expressions; None if there is none."""
    return next(
        (e for e in expressions if e.kind in ("AttributeReference", "Alias") and WATERMARK_DELAY in e.metadata), None
    )


def watermarked_key(keys: EqualKeys) -> int | None:
    """Return the number of the key by which Spark removes the state of both sides; None if no key has a watermark."""
    for side in (keys.left, keys.right):
        for number, key in enumerate(side):
            if event_time_column([key]) is not None:
                return number
    return None


def _set_times(
    readings: dict[str, SideReading], children: dict[str, Node], keys: EqualKeys, expiries: dict[str, Expiry | None]
) -> None:
    """Set the time that orders and expires each side's state, and the time that defines lateness."""
    by_key = watermarked_key(keys)
    for name, reading in readings.items():
        reading.late = event_time_column(children[name].output)
        reading.time = reading.late if by_key is None else reading.keys[by_key]
        for time in (reading.time, reading.late):
            if time is not None and parse_type(time.type).name not in ("timestamp", "struct"):
                raise Unsupported(Reason("MP-INPUT-TYPE", f"{time.name} ({time.type}) as event time"))
        # Without a time that orders the rows of a side, no row can expire.
        if reading.time is None:
            expiries[name] = None


def _split_condition(
    kind: str, rest: Expression | None, sides: Sides, readings: dict[str, SideReading]
) -> tuple[list[Expression], list[Any] | None, tuple[int | None, int | None]]:
    """Split the condition besides the keys.

    Returns:
        The conjuncts that Spark evaluates above the join; the condition that the slot evaluates; the time range.
    """
    parts = [] if rest is None else rest.conjuncts
    _choose_times(parts, sides, readings)
    times = [readings[name].time for name in (LEFT, RIGHT)]
    range_ = None
    if all(time is not None and time.kind == "AttributeReference" and time.type == "timestamp" for time in times):
        range_ = TimeRange(*(time.expr_id for time in times if time is not None))
    above: list[Expression] = []
    within: list[list[Any]] = []
    for part in parts:
        side = sides.of(part)
        if side is not None:
            # Spark evaluates it before the exchange, and the slot gets one flag per row. A condition without columns is
            # evaluated on both sides, as on Spark: its value may differ in a later batch.
            reads = any(inner.kind == "AttributeReference" for inner in part.walk())
            for name in (side,) if reads else (LEFT, RIGHT):
                readings[name].match_conditions.append(part)
        elif range_ is not None and range_.apply_bound(part):
            pass
        elif kind == "inner":
            above.append(part)
        else:
            # An outer or semi join has to know which rows have a match, so the slot evaluates the conjunct.
            within.append(compile_condition(part, sides, lambda name, expression: readings[name].value(expression)))
    condition = None if not within else within[0] if len(within) == 1 else ["and", *within]
    return above, condition, (None, None) if range_ is None else (range_.earliest, range_.latest)


def _choose_times(parts: Sequence[Expression], sides: Sides, readings: dict[str, SideReading]) -> None:
    """Without watermarks, order state by timestamps that the condition compares."""
    for part in parts:
        if part.kind not in ("LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual"):
            continue
        attributes = [e for e in part.walk() if e.kind == "AttributeReference" and e.type == "timestamp"]
        left = [a for a in attributes if sides.of(a) == LEFT]
        right = [a for a in attributes if sides.of(a) == RIGHT]
        if len(left) == len(right) == 1:
            for name, (attribute,) in ((LEFT, left), (RIGHT, right)):
                if readings[name].time is None:
                    readings[name].time = attribute


def _set_columns(reading: SideReading, attributes: Sequence[Expression], names: set[str]) -> None:
    for attribute in attributes:
        reading.attributes.append(attribute)
        reading.columns.append(Field(unique_name(attribute.name, names), attribute.type))
        # Different floats may be equal as keys, so a column of a float key is stored as a value, too.
        key = next((n for n, key in enumerate(reading.keys) if _is_column(key, attribute)), None)
        if reading.time is not None and _is_column(reading.time, attribute) and attribute.type == "timestamp":
            reading.places.append(FROM_TIME)
        elif key is not None and not holds_floats(parse_type(attribute.type)):
            reading.places.append(-1 - key)
        else:
            reading.places.append(reading.value(attribute))


def _is_column(expression: Expression, attribute: Expression) -> bool:
    return expression.kind == "AttributeReference" and expression.expr_id == attribute.expr_id


def _side(reading: SideReading, names: set[str], expiry: Expiry | None, keeps: bool) -> JoinSide:
    same = reading.late is not None and reading.time is not None and reading.late.semantic_equals(reading.time)
    return JoinSide(
        tuple(reading.columns),
        tuple(reading.places),
        tuple(Field(unique_name("value", names), value.type) for value in reading.values),
        keeps,
        "none" if reading.late is None else "time" if same else "late",
        None if expiry is None else expiry.offset,
        None if expiry is None else expiry.cap,
        bool(reading.match_conditions),
    )


def _output_lag(spec: JoinSpec) -> int:
    """Return the lag of the output's watermark behind the input's: that of the slower side's state."""
    sides = [spec.left] if spec.kind == "left_semi" and semi_join_is_one_sided() else [spec.left, spec.right]
    if any(side.expiry_cap_ms is not None for side in sides):
        # A capped side keeps rows of any age, so the output may be as old.
        return _UNBOUNDED_LAG_MS
    return max([0, *(-side.expiry_ms for side in sides if side.expiry_ms is not None)])
