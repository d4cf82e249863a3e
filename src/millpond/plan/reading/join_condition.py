"""Parts of a join's condition besides equal keys: a time range, one side's predicates, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millpond.plan.catalyst.nodes import Expression
from millpond.plan.catalyst.stable import unstable_part
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.spec.types import parse_type

_DAY_MICROS = 86_400_000_000
_ORDER = {"LessThan": "<", "LessThanOrEqual": "<=", "GreaterThan": ">", "GreaterThanOrEqual": ">="}
_COMPARISONS = {**_ORDER, "EqualTo": "=", "EqualNullSafe": "<=>"}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_FIXED_ZONES = {"utc", "gmt", "z", "etc/utc", "etc/gmt", "+00:00", "utc+00:00", "gmt+00:00", "zulu", "universal"}

LEFT, RIGHT = "left", "right"


@dataclass(frozen=True)
class Sides:
    """The columns of each side of a join (expression ids)."""

    left: frozenset[int]
    right: frozenset[int]

    def of(self, expression: Expression) -> str | None:
        """Return the side that an expression refers to (`left` for constants); None if it refers to both."""
        ids = {part.expr_id for part in expression.walk() if part.kind == "AttributeReference"}
        # Computed once for each row of a side, it could not differ from pair to pair.
        if not expression.deterministic:
            return None
        return LEFT if ids <= self.left else RIGHT if ids <= self.right else None


class _Linear(NamedTuple):
    """A linear form: left · (left time) + right · (right time) + constant microseconds.

    It is a time, unless it is an interval.
    """

    left: int
    right: int
    constant: int
    interval: bool = False

    def minus(self, other: _Linear, *, interval: bool) -> _Linear:
        return _Linear(self.left - other.left, self.right - other.right, self.constant - other.constant, interval)


class TimeRange:
    """Bounds of the left time minus the right time, in microseconds, collected from conjuncts.

    Args:
        left, right: expression ids of the sides' times.
    """

    def __init__(self, left: int, right: int) -> None:
        self._times = {left: _Linear(1, 0, 0), right: _Linear(0, 1, 0)}
        self.earliest: int | None = None
        self.latest: int | None = None

    def apply_bound(self, conjunct: Expression) -> bool:
        """Apply a conjunct's bound; return False if it is not a bound of these times."""
        order = _ORDER.get(conjunct.kind)
        if order is None:
            return False
        left, right = (self._linear(operand) for operand in conjunct.children)
        if left is None or right is None or left.interval != right.interval:
            return False
        difference = left.minus(right, interval=True)
        if (difference.left, difference.right) == (-1, 1):
            difference = _Linear(1, -1, -difference.constant)
            order = _MIRRORED[order]
        if (difference.left, difference.right) != (1, -1):
            return False
        bound = -difference.constant
        if order in ("<", "<="):
            # Times are whole microseconds, so a strict bound equals a closed one a microsecond further.
            bound -= order == "<"
            self.latest = bound if self.latest is None else min(self.latest, bound)
        else:
            bound += order == ">"
            self.earliest = bound if self.earliest is None else max(self.earliest, bound)
        return True

    def _linear(self, expression: Expression) -> _Linear | None:
        if expression.kind == "AttributeReference":
            return self._times.get(expression.expr_id) if expression.type == "timestamp" else None
        if expression.foldable:
            return _interval(expression)
        if expression.kind == "Cast" and expression.type == expression.children[0].type:
            return self._linear(expression.children[0])
        if expression.kind in ("TimestampAddInterval", "TimeAdd"):
            base, interval = (self._linear(child) for child in expression.children)
            if base is None or interval is None or base.interval or not interval.interval:
                return None
            if _may_have_days(expression.children[1]) and not _has_fixed_days(expression):
                return None
            return base._replace(constant=base.constant + interval.constant)
        if expression.kind == "SubtractTimestamps":
            # The difference counts days.
            left, right = (self._linear(child) for child in expression.children)
            if left is None or right is None or left.interval or right.interval or not _has_fixed_days(expression):
                return None
            return left.minus(right, interval=True)
        return None


def _interval(expression: Expression) -> _Linear | None:
    """Return a constant interval with days of 24 hours, in microseconds; None if it has months."""
    interval = expression.interval
    if interval is None or interval.months:
        return None
    return _Linear(0, 0, interval.days * _DAY_MICROS + interval.microseconds, True)


def _may_have_days(interval: Expression) -> bool:
    """Whether an interval may have days; that of one which is not constant is unknown."""
    constant = interval.interval if interval.foldable else None
    return constant is None or constant.days != 0


def _has_fixed_days(expression: Expression) -> bool:
    """Whether days have 24 hours in an expression's time zone.

    Spark sets it at analysis; the session's may be another by now.
    """
    return str(expression.get("timeZoneId")).lower() in _FIXED_ZONES


def compile_condition(conjunct: Expression, sides: Sides, value: Callable[[str, Expression], int]) -> list[Any]:
    """Compile a conjunct over both sides to the form that the slot evaluates (see `JoinSpec.condition`).

    Args:
        conjunct: the expression.
        sides: the columns of each side.
        value: returns the number of a side's stored value, which is computed below the exchange.

    Raises:
        Unsupported: a part of it is unknown, or may have another value in the batch in which the row gets a partner.
    """
    side = sides.of(conjunct)
    if side is not None:
        # Spark evaluates it in the batch of the pair, the slot in that of the row.
        if (part := unstable_part([conjunct])) is not None:
            raise Unsupported(Reason("MP-CONDITION", part))
        return [side, value(side, conjunct)]
    operands = conjunct.children
    if conjunct.kind in ("And", "Or"):
        return [conjunct.kind.lower(), *(compile_condition(operand, sides, value) for operand in operands)]
    if conjunct.kind == "Not":
        return ["not", compile_condition(operands[0], sides, value)]
    comparison = _COMPARISONS.get(conjunct.kind)
    if comparison is None or not _comparable(operands) or any(sides.of(operand) is None for operand in operands):
        raise Unsupported(Reason("MP-CONDITION", conjunct.name))
    return [comparison, *(compile_condition(operand, sides, value) for operand in operands)]


def _comparable(operands: Sequence[Expression]) -> bool:
    left, right = (parse_type(operand.type) for operand in operands)
    return left == right and left.atomic
