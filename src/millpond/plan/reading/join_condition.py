"""What the condition of a join says beside equal keys: a range of time, one side's predicates, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millpond.plan.catalyst.nodes import Expression
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.spec.types import parse_type

_DAY = 86_400_000_000
_ORDER = {"LessThan": "<", "LessThanOrEqual": "<=", "GreaterThan": ">", "GreaterThanOrEqual": ">="}
_COMPARISONS = {**_ORDER, "EqualTo": "=", "EqualNullSafe": "<=>"}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}

LEFT, RIGHT = "left", "right"


def conjuncts(condition: Expression | None) -> Iterator[Expression]:
    """The parts of a condition that must all hold."""
    if condition is None:
        return
    if condition.kind == "And":
        for child in condition.children:
            yield from conjuncts(child)
    else:
        yield condition


@dataclass(frozen=True)
class Sides:
    """Which columns are of which side of a join (expression ids)."""

    left: frozenset[int]
    right: frozenset[int]

    def of(self, expression: Expression) -> str | None:
        """The side that an expression is about (`left` for constants); None if it is about both."""
        ids = {part.expr_id for part in expression.walk() if part.kind == "AttributeReference"}
        if not expression.deterministic:
            return None
        return LEFT if ids <= self.left else RIGHT if ids <= self.right else None


class _Linear(NamedTuple):
    """left · (left time) + right · (right time) + constant microseconds; a time, unless it is an interval."""

    left: int
    right: int
    constant: int
    interval: bool = False

    def minus(self, other: _Linear, *, interval: bool) -> _Linear:
        return _Linear(self.left - other.left, self.right - other.right, self.constant - other.constant, interval)


class TimeRange:
    """Bounds of the left time minus the right one, in microseconds, as conjuncts tell them.

    Args:
        left, right: expression ids of the sides' times.
        fixed: whether days have 24 hours in the session's time zone.
    """

    def __init__(self, left: int, right: int, *, fixed: bool) -> None:
        self._times = {left: _Linear(1, 0, 0), right: _Linear(0, 1, 0)}
        self._fixed = fixed
        self.earliest: int | None = None
        self.latest: int | None = None

    def take(self, conjunct: Expression) -> bool:
        """Add what a conjunct says; False if it is about something else."""
        order = _ORDER.get(conjunct.kind)
        if order is None:
            return False
        left, right = (self._linear(operand) for operand in conjunct.children)
        if left is None or right is None or left.interval != right.interval:
            return False
        apart = left.minus(right, interval=True)
        if (apart.left, apart.right) == (-1, 1):
            apart = _Linear(1, -1, -apart.constant)
            order = _MIRRORED[order]
        if (apart.left, apart.right) != (1, -1):
            return False
        bound = -apart.constant
        if order in ("<", "<="):
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
            return self._interval(expression)
        if expression.kind == "Cast" and expression.type == expression.children[0].type:
            return self._linear(expression.children[0])
        if expression.kind in ("TimestampAddInterval", "TimeAdd"):
            base, interval = (self._linear(child) for child in expression.children)
            if base is None or interval is None or base.interval or not interval.interval:
                return None
            return base._replace(constant=base.constant + interval.constant)
        if expression.kind == "SubtractTimestamps":
            left, right = (self._linear(child) for child in expression.children)
            if left is None or right is None or left.interval or right.interval or not self._fixed:
                return None
            return left.minus(right, interval=True)
        return None

    def _interval(self, expression: Expression) -> _Linear | None:
        """A constant interval in microseconds; None if its length depends on the calendar."""
        interval = expression.interval
        if interval is None or interval.months or (interval.days and not self._fixed):
            return None
        return _Linear(0, 0, interval.days * _DAY + interval.microseconds, True)


def compiled(conjunct: Expression, sides: Sides, value: Callable[[str, Expression], int]) -> list[Any]:
    """A conjunct about both sides as the slot evaluates it (see `JoinSpec.condition`).

    Args:
        conjunct: the expression. sides: whose columns are whose.
        value: the number of a stored value of a side that is computed below the exchange.

    Raises:
        Unsupported: a part of it is not known.
    """
    side = sides.of(conjunct)
    if side is not None:
        return [side, value(side, conjunct)]
    operands = conjunct.children
    if conjunct.kind in ("And", "Or"):
        return [conjunct.kind.lower(), *(compiled(operand, sides, value) for operand in operands)]
    if conjunct.kind == "Not":
        return ["not", compiled(operands[0], sides, value)]
    comparison = _COMPARISONS.get(conjunct.kind)
    if comparison is None or not _comparable(operands) or any(sides.of(operand) is None for operand in operands):
        raise Unsupported(Reason("MP-CONDITION", conjunct.name))
    return [comparison, *(compiled(operand, sides, value) for operand in operands)]


def _comparable(operands: Sequence[Expression]) -> bool:
    left, right = (parse_type(operand.type) for operand in operands)
    return left == right and left.atomic
