"""Reads one `Aggregate` node: what to project below the exchange, what the operator computes, what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.ddl import quoted
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import SESSION_WINDOW, WATERMARK_DELAY, Expression, Node
from millpond.plan.reading.functions import read_function
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.plan.reading.user_functions import AGGREGATE, UserCalls
from millpond.plan.reading.windows import Assigned, Session, assigned, constant_gap
from millpond.spec.functions import FUNCTIONS, KEY_COLUMNS, MAX_KEY_COLUMNS, is_distinct, key_supported, key_width
from millpond.spec.kinds.aggregate import PANE_TYPE, AggregateSpec
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import GLOBAL_HASH, AggregateCall, EventTime, Field

_PATH_LIKE = str.maketrans(".`", "__")


@dataclass(frozen=True)
class Derived:
    """A column of the pipe's input, computed by SQL from columns that the child's projection made.

    Attributes:
        field: its name and type in the pipe.
        raw: positions in the raw expressions.
        sql: SQL over `{0}`, `{1}`…, the raw columns' names.
    """

    field: Field
    raw: tuple[int, ...]
    sql: str


@dataclass
class Reading:
    """What was read from an `Aggregate` node.

    Attributes:
        raw: expressions over the child's columns, each projected once.
        keys, inputs: the pipe's input columns.
        calls: the aggregate functions, each computed once.
        aggregates: the expression that each call was read from.
        hash: SQL over the key columns that gives the key hash.
        time: the key by whose time groups are closed.
        assigned: how that key is assigned, if the operator does it instead of Spark.
        session: the grouping by sessions, if there is one.
        bounds: the pipe's input columns for it, the start and the end of each row's own window.
        users: functions of the user, which are called with the rows of each group.
    """

    raw: list[Expression] = field(default_factory=list)
    keys: list[Derived] = field(default_factory=list)
    inputs: list[Derived] = field(default_factory=list)
    calls: list[AggregateCall] = field(default_factory=list)
    aggregates: list[Expression] = field(default_factory=list)
    hash: str = f"{GLOBAL_HASH}L"
    time: EventTime | None = None
    assigned: Assigned | None = None
    session: Session | None = None
    bounds: list[Derived] = field(default_factory=list)
    users: UserCalls = field(default_factory=UserCalls)

    @property
    def columns(self) -> list[Derived]:
        """The pipe's input columns."""
        return self.keys + self.bounds + self.inputs

    def function_name(self, number: int) -> str:
        """What the query calls the function of a call; the user's own are called together, by the last call."""
        theirs = [one for one in self.aggregates if not calls_user(one)]
        if number >= len(theirs):
            return self.users.functions[0].name
        return str(theirs[number].children[0].get("prettyName") or self.calls[number].function)

    def results(self, groupings: list[Expression]) -> list[tuple[str, Expression]]:
        """The columns that stand before the calls in the pipe's output: their names, and which groupings they are."""
        names = [key.field.name for key in self.keys]
        if self.session is None:
            return list(zip(names, groupings, strict=True))
        at = self.session.position
        keys = groupings[:at] + groupings[at + 1 :]
        return [*zip(names, keys, strict=True), (self.session.window.name, groupings[at])]

    def spec(self, output_mode: str) -> AggregateSpec | SessionSpec:
        """The operator's plain description."""
        if self.session is not None:
            before, after = ([column.field for column in columns] for columns in (self.keys, self.inputs))
            return self.session.spec(before, after, self.calls, output_mode)
        keys, time = [key.field for key in self.keys], self.time
        if self.assigned is not None and time is not None:
            keys[time.column] = Field(keys[time.column].name, self.assigned.type)
            # What counts distinct inputs only would count those of two panes twice, and between rows of two panes it
            # is not known which came first.
            by_window = any(is_distinct(call) or FUNCTIONS[call.function].ordered for call in self.calls)
            shared = self.assigned.expanded and output_mode == "append" and not by_window
            time = replace(time, windows=replace(self.assigned.windows, shared=shared))
        inputs = tuple(column.field for column in self.inputs)
        return AggregateSpec(tuple(keys), inputs, tuple(self.calls), output_mode, time)

    def set_hash(self, keys: list[str]) -> None:
        """Hash these columns; without any, all rows belong together.

        Raises:
            Unsupported: the key has too many columns.
        """
        fields = [column.field for column in self.keys + self.inputs if column.field.name in keys]
        if key_width(fields) > MAX_KEY_COLUMNS:
            raise Unsupported(Reason(KEY_COLUMNS, str(key_width(fields))))
        if keys:
            self.hash = f"xxhash64({', '.join(quoted(key) for key in keys)})"

    def add_raw(self, expression: Expression) -> int:
        """The position of an expression among those to project, added if new."""
        for index, known in enumerate(self.raw):
            if known.means(expression):
                return index
        self.raw.append(expression)
        return len(self.raw) - 1

    def add_input(self, expressions: list[Expression], sql: str = "{0}", type_: str | None = None) -> int:
        """The position of an input column, added if new."""
        raw = tuple(self.add_raw(expression) for expression in expressions)
        for index, known in enumerate(self.inputs):
            if known.raw == raw and known.sql == sql:
                return index
        self.inputs.append(Derived(Field(f"input{len(self.inputs)}", type_ or expressions[0].type), raw, sql))
        return len(self.inputs) - 1


def read_aggregate(catalyst: Catalyst, node: Node, *, closing: bool) -> Reading:
    """Read an `Aggregate`.

    Args:
        catalyst: of the query's session. node: the aggregate.
        closing: whether the watermark closes groups (in complete mode it does not).

    Raises:
        Unsupported: with the reason why it stays on Spark.
    """
    reading = Reading()
    groupings = [(_label(node, grouping), grouping) for grouping in node.list("groupingExpressions")]
    read_groupings(reading, node, groupings, closing=closing)
    for result in node.list("aggregateExpressions"):
        for expression in result.walk():
            if expression.kind == "AggregateExpression" and not any(expression.means(a) for a in reading.aggregates):
                reading.aggregates.append(expression)
                _read_call(catalyst, reading, expression)
    if reading.users.functions:
        reading.calls.append(reading.users.rows([column.field for column in reading.inputs]))
    return reading


def read_groupings(reading: Reading, node: Node, groupings: list[tuple[str, Expression]], *, closing: bool) -> None:
    """Read what a node groups by, each with a name, and hash it.

    Args:
        reading: takes it up. node: right above where windows are assigned.
        groupings: names and expressions. closing: as for `read_aggregate`.

    Raises:
        Unsupported: with the reason why it stays on Spark.
    """
    if closing:
        check_one_time([grouping for _, grouping in groupings if WATERMARK_DELAY in metadata(grouping)])
    names: set[str] = set()
    hashed: list[str] = []
    for position, (label, grouping) in enumerate(groupings):
        check_key(grouping)
        name = unique(label, names)
        if SESSION_WINDOW in metadata(grouping):
            marked = WATERMARK_DELAY in metadata(grouping)
            reading.session = Session(position, Field(name, grouping.type), marked, constant_gap(node, grouping))
            raw = (reading.add_raw(grouping),)
            reading.bounds = [Derived(bound, raw, sql) for bound, sql in reading.session.bounds]
            continue
        if not (closing and WATERMARK_DELAY in metadata(grouping)):
            reading.keys.append(Derived(Field(name, grouping.type), (reading.add_raw(grouping),), "{0}"))
            hashed.append(name)
            continue
        found = assigned(node, grouping)
        reading.time = EventTime(position, None if found is None else found.windows)
        reading.assigned = found
        if found is None:
            reading.keys.append(Derived(Field(name, grouping.type), (reading.add_raw(grouping),), "{0}"))
            hashed.append(name)
            continue
        reading.keys.append(Derived(Field(name, PANE_TYPE), (reading.add_raw(found.time),), found.pane))
        if found.windows.overlap == 1:  # else the rows of all windows of a pane have to meet
            hashed.append(name)
    reading.set_hash(hashed)
    if reading.session is not None and reading.time is not None:
        raise Unsupported(Reason("MP-EVENT-TIME", "sessions beside other event times"))


def prepared(
    catalyst: Catalyst,
    child: Node,
    raw: Sequence[Expression],
    columns: Sequence[Derived],
    hash_: str,
    more: Sequence[Expression] = (),
) -> DataFrame:
    """Project what an operator needs: Spark evaluates the expressions, then the key hash over their values.

    The columns `__argument0`… of `more` follow the others, and the hash comes last. Spark's optimiser derives
    constraints from a projection's aliases in their order, and each alias doubles those about expressions that came
    before: a hash of 17 columns before them made 2¹⁷ constraints.
    """
    every = [*raw, *(one for one in more if not any(one.means(other) for other in raw))]
    aliases = [catalyst.alias(expression, f"raw{index}") for index, expression in enumerate(every)]
    projected = catalyst.dataframe(catalyst.project(aliases, child))
    at = [next(place for place, other in enumerate(every) if one.means(other)) for one in more]
    named = projected.select(
        *(F.expr(c.sql.format(*(f"raw{r}" for r in c.raw))).alias(c.field.name) for c in columns),
        *(F.col(f"raw{place}").alias(f"__argument{number}") for number, place in enumerate(at)),
    )
    columns_ = [quoted(name) for name in named.columns]
    return named.select(*columns_, F.expr(hash_).alias("__hash"))


def rewrite(
    catalyst: Catalyst, expression: Expression, replace: Callable[[Expression], Expression | None]
) -> Expression:
    """A copy of an expression with every subtree that `replace` knows replaced, outermost first."""
    new = replace(expression)
    if new is not None:
        return new
    if not expression.children:
        return expression
    return catalyst.with_operands(expression, [rewrite(catalyst, child, replace) for child in expression.children])


def unique(name: str, taken: set[str]) -> str:
    """`name`, numbered if taken; case is ignored, as Spark's resolution does by default.

    Dots and backticks go, because `mapInArrow` reads column names as if they were paths.
    """
    name = name.translate(_PATH_LIKE)
    fresh, number = name, 1
    while fresh.lower() in taken or fresh.startswith("__"):
        number += 1
        fresh = f"{name.lstrip('_')}_{number}"
    taken.add(fresh.lower())
    return fresh


def _label(node: Node, grouping: Expression) -> str:
    """The name under which the query shows a grouping expression, else its SQL."""
    for result in node.list("aggregateExpressions"):
        if result.kind == "Alias" and result.children[0].means(grouping):
            return result.name
    return grouping.name


def check_key(expression: Expression) -> None:
    """Refuse a key of a type that operators do not compare."""
    reason = key_supported(expression.type)
    if reason is not None:
        raise Unsupported(Reason(reason, f"{expression.name} ({expression.type})"))


def check_one_time(marked: list[Expression]) -> None:
    """Refuse several columns with a watermark, as Spark does: which of them would close the state?"""
    if len({column.expr_id for column in marked}) > 1:
        names = " and ".join(column.name for column in marked)
        raise Unsupported(Reason("MP-EVENT-TIME", f"{names}, of which Spark takes one only"))


def metadata(expression: Expression) -> dict[str, Any]:
    """The field metadata of a named expression; nothing for others."""
    return expression.metadata if expression.kind in ("AttributeReference", "Alias") else {}


def calls_user(expression: Expression) -> bool:
    """Whether an `AggregateExpression` is of a function of the user."""
    return expression.children[0].kind == AGGREGATE


def _read_call(catalyst: Catalyst, reading: Reading, expression: Expression) -> None:
    """Read one `AggregateExpression`, of Spark's functions or the user's."""
    function = expression.expression("aggregateFunction")
    assert function is not None
    if not calls_user(expression):
        shown = len(reading.keys) + (reading.session is not None)
        reading.users.order.append(shown + len(reading.calls))
        reading.calls.append(read_function(reading, expression))
        return
    if expression.get("isDistinct") or expression.expression("filter") is not None:
        raise Unsupported(Reason("MP-PYTHON", str(function.get("name"))))
    reading.users.order.append(-1 - len(reading.users.functions))
    reading.users.add(catalyst, function, lambda operand: reading.add_input([operand]))
