"""Reading of a stateful node: columns, calls and hash of one operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.plan.reading.user_functions import USER_AGGREGATE, UserCalls
from millpond.plan.reading.windows import Session, WindowAssignment
from millpond.spec.functions import (
    FUNCTIONS,
    KEY_COLUMNS,
    MAX_KEY_COLUMNS,
    is_distinct,
    key_width,
    unsupported_key,
    unsupported_value,
)
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import GLOBAL_HASH, AggregateCall, EventTime, Field
from millpond.tasks.ddl import quoted

_PATH_LIKE = str.maketrans(".`", "__")


@dataclass(frozen=True)
class InputColumn:
    """An input column of the slot stage, computed by SQL from columns of the child's projection.

    Attributes:
        field: its name and type in the slot stage's input.
        raw: positions in the raw expressions.
        sql: SQL over `{0}`, `{1}`…, the raw columns' names.
    """

    field: Field
    raw: tuple[int, ...]
    sql: str


@dataclass
class Reading:
    """The reading of an `Aggregate` node.

    Attributes:
        raw: expressions over the child's columns, each projected once.
        keys, inputs: the slot stage's input columns.
        calls: the aggregate functions, each computed once.
        aggregates: the expression of each call.
        hash: SQL over the key columns that returns the key hash.
        time: the key by whose time groups are closed.
        assignment: the window assignment of that key, if the operator assigns windows instead of Spark.
        session: the grouping by sessions, if there is one.
        bounds: the slot stage's input columns for it: the start and the end of each row's own window.
        user_calls: user functions, which are called with the rows of each group.
        column_numbers: the node's `column_numbers`, which distinguish columns in the texts of functions.
    """

    raw: list[Expression] = field(default_factory=list)
    keys: list[InputColumn] = field(default_factory=list)
    inputs: list[InputColumn] = field(default_factory=list)
    calls: list[AggregateCall] = field(default_factory=list)
    aggregates: list[Expression] = field(default_factory=list)
    hash: str = f"{GLOBAL_HASH}L"
    time: EventTime | None = None
    assignment: WindowAssignment | None = None
    session: Session | None = None
    bounds: list[InputColumn] = field(default_factory=list)
    user_calls: UserCalls = field(default_factory=UserCalls)
    column_numbers: Mapping[int, int] = field(default_factory=dict)

    @property
    def columns(self) -> list[InputColumn]:
        """The slot stage's input columns."""
        return self.keys + self.bounds + self.inputs

    def function_name(self, number: int) -> str:
        """Return the query's name for a call's function; the last call stands for all user functions."""
        theirs = [aggregate for aggregate in self.aggregates if not calls_user_function(aggregate)]
        if number >= len(theirs):
            return self.user_calls.functions[0].name
        return str(theirs[number].children[0].get("prettyName") or self.calls[number].function)

    def results(self, groupings: list[Expression]) -> list[tuple[str, Expression]]:
        """Return the columns before the calls in the slot stage's output: their names and groupings."""
        names = [key.field.name for key in self.keys]
        if self.session is None:
            return list(zip(names, groupings, strict=True))
        position = self.session.position
        keys = groupings[:position] + groupings[position + 1 :]
        return [*zip(names, keys, strict=True), (self.session.window.name, groupings[position])]

    def spec(self, output_mode: str) -> AggregateSpec | SessionSpec:
        """Return the operator's spec."""
        if self.session is not None:
            before, after = ([column.field for column in columns] for columns in (self.keys, self.inputs))
            return self.session.spec(before, after, self.calls, output_mode)
        keys, time = [key.field for key in self.keys], self.time
        if self.assignment is not None and time is not None:
            keys[time.column] = Field(keys[time.column].name, self.assignment.type)
            # A function of distinct inputs would count an input of two panes twice. For an ordered function, the
            # order of rows of two panes is unknown.
            by_window = any(is_distinct(call) or FUNCTIONS[call.function].ordered for call in self.calls)
            shared = self.assignment.expanded and output_mode == "append" and not by_window
            time = replace(time, windows=replace(self.assignment.windows, shared=shared))
        inputs = tuple(column.field for column in self.inputs)
        return AggregateSpec(tuple(keys), inputs, tuple(self.calls), output_mode, time)

    def set_hash(self, keys: list[str]) -> None:
        """Hash these columns; without columns, all rows have one hash.

        Raises:
            Unsupported: the key has too many columns.
        """
        fields = [column.field for column in self.keys + self.inputs if column.field.name in keys]
        if key_width(fields) > MAX_KEY_COLUMNS:
            raise Unsupported(Reason(KEY_COLUMNS, str(key_width(fields))))
        if keys:
            self.hash = f"xxhash64({', '.join(quoted(key) for key in keys)})"

    def add_raw(self, expression: Expression) -> int:
        """Return the position of an expression among those to project; it is added if new."""
        for index, known in enumerate(self.raw):
            if known.semantic_equals(expression):
                return index
        self.raw.append(expression)
        return len(self.raw) - 1

    def add_input(self, expressions: list[Expression], sql: str = "{0}", type_: str | None = None) -> int:
        """Return the position of an input column; it is added if new."""
        raw = tuple(self.add_raw(expression) for expression in expressions)
        for index, known in enumerate(self.inputs):
            if known.raw == raw and known.sql == sql:
                return index
        taken = {column.field.name.lower() for column in self.columns}
        name = unique_name(f"input{len(self.inputs)}", taken)
        self.inputs.append(InputColumn(Field(name, type_ or expressions[0].type), raw, sql))
        return len(self.inputs) - 1


class LookupReading(Reading):
    """The reading of a lookup join."""

    @classmethod
    def of(cls, node: Node, spec: EnrichSpec) -> LookupReading:
        """Read a lookup join.

        Raises:
            Unsupported: it stays on Spark.
        """
        reading = cls()
        names: set[str] = set()
        for column, attribute in zip(spec.columns, node.children[0].output, strict=True):
            reading.raw.append(attribute)
            field = Field(unique_name(column.name, names), attribute.type)
            reading.inputs.append(InputColumn(field, (len(reading.raw) - 1,), "{0}"))
        for position in spec.keys:
            check_key(reading.raw[position])
        reading.set_hash([reading.inputs[position].field.name for position in spec.keys])
        return reading


def unique_name(name: str, taken: set[str]) -> str:
    """Return `name`, numbered if taken; case is ignored, as by default in Spark's resolution.

    Dots and backticks are replaced, since `mapInArrow` reads column names as paths.
    """
    name = name.translate(_PATH_LIKE)
    fresh, number = name, 1
    while fresh.lower() in taken or fresh.startswith("__"):
        number += 1
        fresh = f"{name.lstrip('_')}_{number}"
    taken.add(fresh.lower())
    return fresh


def check_key(expression: Expression) -> None:
    """Refuse a key of a type that operators cannot compare."""
    reason = unsupported_key(expression.type)
    if reason is not None:
        raise Unsupported(Reason(reason, f"{expression.name} ({expression.type})"))


def check_value(expression: Expression) -> None:
    """Refuse a column of a type that cannot be stored as state."""
    reason = unsupported_value(expression.type)
    if reason is not None:
        raise Unsupported(Reason(reason, f"{expression.name} ({expression.type})"))


def check_one_time(marked: list[Expression]) -> None:
    """Refuse several columns with a watermark, as Spark does: it would be unclear which one closes the state."""
    if len({column.semantic_hash if column.kind == "GetStructField" else column.expr_id for column in marked}) > 1:
        names = " and ".join(column.name for column in marked)
        raise Unsupported(Reason("MP-EVENT-TIME", f"{names}, of which Spark takes one only"))


def calls_user_function(expression: Expression) -> bool:
    """Whether an `AggregateExpression` calls a user function."""
    return expression.children[0].kind == USER_AGGREGATE
