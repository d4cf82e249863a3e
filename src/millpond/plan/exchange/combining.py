"""Partial aggregation: Spark combines the rows of an aggregate in its own JVM before the exchange.

Each map task sends one row per group: the key, the state columns of every function, and the number of combined rows.
The slot merges these rows as it merges other partial states.

If a result depends on the set of values alone (DISTINCT inputs, `max` of strings), the map task sends one row per group
and value. The slot handles it as a source row. If calls have several sets of such inputs, Spark copies each row once
per set, and groups by the set's number, too. Partial results of other calls are in the rows of the first set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from millpond.plan.catalyst.buffers import bound, buffer_types
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression
from millpond.plan.decision.decision import Decided
from millpond.plan.reading.aggregate import rewrite_expression
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.reading import Reading, calls_user_function
from millpond.plan.spark_state.buffers import StateColumn, state_columns
from millpond.spec.functions import FUNCTIONS, sketch_words
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import COMBINED_ROWS, VALUE_SET, AggregateCall, Field
from millpond.spec.types import DataType, parse_type
from millpond.tasks.ddl import quoted

_MAX_SKETCH_WORDS = 64
"""Maximum size of a sketch in words: sending a larger one per group and task takes longer than the rows."""

_MAX_SUMMED_DIGITS = 28
"""Maximum digits of decimals whose sum within one map task cannot exceed 38 digits. Spark loses the amount of an
overflow, although rows of another task may compensate for it."""


class Partial(NamedTuple):
    """Spark's partial aggregation of one call.

    Attributes:
        function: Spark's function, over the columns below the operator.
        condition: the function's filter, over the same columns.
        counted: for `count`, the operator's inputs that it counts: they are null where its arguments are. None for
            other functions.
        states: the call's state columns, over the buffers of its function.
        buffers: the types of these buffers, as DDL.
    """

    function: Expression
    condition: Expression | None
    counted: tuple[int, ...] | None
    states: tuple[StateColumn, ...]
    buffers: tuple[str, ...]

    @property
    def operands(self) -> list[Expression]:
        """The operands of the function and of its filter; for a `count`, of its filter only."""
        own = self.function.children if self.counted is None else []
        return [*own, *([] if self.condition is None else [self.condition])]


@dataclass(frozen=True)
class Combination:
    """Plan of the partial aggregation of an operator's rows before the exchange.

    Attributes:
        partials: Spark's partial aggregation of each call that is in no value set.
        columns: expressions that are columns of the operator, each with its position.
        arguments: operands of the functions that are not columns of the operator.
        sets: the inputs by whose values rows are combined (`AggregateSpec.value_sets`), as columns of the operator.
        flags: the columns that are filters of calls in a set: true if at least one combined row passes.
    """

    partials: tuple[Partial, ...]
    columns: tuple[tuple[Expression, int], ...]
    arguments: tuple[Expression, ...]
    sets: tuple[tuple[int, ...], ...] = ()
    flags: tuple[int, ...] = ()

    @property
    def value_columns(self) -> list[int]:
        """The columns that are in a value set."""
        return sorted(set(chain.from_iterable(self.sets)))

    @property
    def fields(self) -> tuple[Field, ...]:
        """The further columns of combined rows; the last is the number of combined rows."""
        states = [
            Field(f"__{number}_{part}", state.type)
            for number, partial in enumerate(self.partials)
            for part, state in enumerate(partial.states)
        ]
        return (*states, *([VALUE_SET] if self.sets else []), COMBINED_ROWS)

    @property
    def buffers(self) -> dict[str, str]:
        """Buffer names and types, in the order of the functions."""
        partials = {
            f"__buffer{number}_{part}": type_
            for number, partial in enumerate(self.partials)
            for part, type_ in enumerate(partial.buffers)
        }
        return (
            partials
            | {_flag(position): "boolean" for position in self.flags}
            | {COMBINED_ROWS.name: COMBINED_ROWS.type}
        )

    def groupings(self, types: Sequence[str]) -> dict[str, str]:
        """Return name → type of the grouping columns besides the key; `types` are those of the operator's columns."""
        if not self.sets:
            return {}
        return {VALUE_SET.name: VALUE_SET.type} | {
            f"__value{position}": types[position] for position in self.value_columns
        }

    @property
    def results(self) -> list[str]:
        """SQL over groupings and `buffers` for each of `fields`."""
        states = [
            state.sql.format(*(quoted(f"__buffer{number}_{part}") for part in range(len(partial.buffers))))
            for number, partial in enumerate(self.partials)
            for state in partial.states
        ]
        return [*states, *([VALUE_SET.name] if self.sets else []), COMBINED_ROWS.name]

    def input_of(self, column: int) -> str:
        """Return SQL over groupings and `buffers` for an operator's column that is not a key."""
        if column in self.flags:  # if it is in a set, too, all combined rows have the same value
            return _flag(column)
        return f"__value{column}" if column in self.value_columns else "null"

    def copies(self, catalyst: Catalyst, columns: Sequence[Expression]) -> list[list[Expression]]:
        """Return the groupings of each copy of a row, with nulls for inputs of other sets.

        Args:
            catalyst: of the session.
            columns: the operator's columns.
        """
        return [
            [
                catalyst.literal(number),
                *(
                    columns[position] if position in set_ else catalyst.null_of_type(columns[position])
                    for position in self.value_columns
                ),
            ]
            for number, set_ in enumerate(self.sets)
        ]

    def functions(
        self, catalyst: Catalyst, columns: Sequence[Expression], keys: int
    ) -> list[tuple[Expression, Expression | None]]:
        """Return the functions with their filters over other columns, in the order of `buffers`.

        Args:
            catalyst: of the session.
            columns: the operator's columns, then the arguments.
            keys: the number of key columns.
        """
        types = {VALUE_SET.name: VALUE_SET.type}
        # Only one copy of a row is counted and folded into partial results; else each row would count once per set.
        (first_copy,) = bound(catalyst, types, [f"{VALUE_SET.name} = 0"]) if len(self.sets) > 1 else [None]
        known = [(expression, columns[position]) for expression, position in self.columns]
        known += list(zip(self.arguments, columns[len(columns) - len(self.arguments) :], strict=True))

        def column_of(expression: Expression) -> Expression | None:
            return next((column for other, column in known if other.semantic_equals(expression)), None)

        functions = []
        for partial in self.partials:
            if partial.counted is not None:
                counted = [columns[keys + position] for position in partial.counted]
                function = catalyst.count(counted or [catalyst.literal(1)])
            else:
                operands = [rewrite_expression(catalyst, operand, column_of) for operand in partial.function.children]
                function = catalyst.with_operands(partial.function, operands) if operands else partial.function
            condition = (
                None if partial.condition is None else rewrite_expression(catalyst, partial.condition, column_of)
            )
            functions.append((function, catalyst.conjunction(first_copy, condition)))
        # The maximum of booleans: true if at least one of the combined rows passes the filter.
        flags = [(catalyst.max_of(columns[position]), None) for position in self.flags]
        return [*functions, *flags, (catalyst.count([catalyst.literal(1)]), first_copy)]


class Combinations:
    """The partial aggregations of a query's operators.

    Args:
        root: the decided plan.
        enabled: returns whether rows are combined at all.
    """

    def __init__(self, root: Decided, enabled: Callable[[], bool]) -> None:
        self._decided = [
            decided for decided in root.walk() if decided.operator is not None and decided.operator.index is not None
        ]
        self._enabled = enabled
        self._specs: list[OperatorSpec] = []
        self._found: dict[int, Combination] = {}

    def of(self, specs: Sequence[OperatorSpec]) -> dict[int, Combination]:
        """Return operator index → combination, for the operators whose rows can be combined.

        Args:
            specs: the specs that slots run, by operator index.
        """
        # Kept for the same specs: an answer takes many calls into the JVM, and a start asks several times.
        if self._specs != list(specs) and self._enabled():
            self._specs = list(specs)
            combinations = {}
            for decided in self._decided:
                assert decided.operator is not None
                assert decided.operator.index is not None
                spec = specs[decided.operator.index]
                combinations[decided.operator.index] = combine(spec, decided.operator.reading)
            self._found = {
                index: combination
                for index, combination in combinations.items()
                if isinstance(combination, Combination)
            }
        return self._found


def combine(spec: OperatorSpec, reading: Reading | JoinReading | None) -> Combination | str:
    """Return the combination of an operator's rows, or the reason why they cannot be combined.

    Args:
        spec: the spec that a slot runs.
        reading: the reading of the operator's node.
    """
    if spec.why_not_combined is not None:
        return spec.why_not_combined
    assert isinstance(reading, Reading)
    partials, flags, keys = [], [], len(spec.key_fields)
    for call, aggregate in zip(spec.calls, reading.aggregates, strict=False):  # all user functions share one call
        if spec.value_set(call):
            flags += [] if call.filter is None else [keys + call.filter]
            continue
        partial = _partial(call, aggregate, [spec.arguments[position].type for position in call.inputs])
        if isinstance(partial, str):
            return partial
        partials.append(partial)
        if spec.value_sets and any(state.type.startswith("array") for state in partial.states):
            return f"partial results of {call.function} would come with each value"
    columns = [
        (reading.raw[column.raw[0]], position) for position, column in enumerate(reading.columns) if column.sql == "{0}"
    ]
    arguments: list[Expression] = []
    for operand in chain.from_iterable(partial.operands for partial in partials):
        if _reads_other_columns(operand, columns) and not any(operand.semantic_equals(other) for other in arguments):
            arguments.append(operand)
    sets = tuple(tuple(keys + position for position in inputs) for inputs in spec.value_sets)
    return Combination(tuple(partials), tuple(columns), tuple(arguments), sets, tuple(dict.fromkeys(flags)))


def _flag(column: int) -> str:
    return f"__flag{column}"


def _reads_other_columns(expression: Expression, columns: Sequence[tuple[Expression, int]]) -> bool:
    """Whether an expression reads anything that is not a column of the operator."""
    if any(expression.semantic_equals(column) for column, _ in columns):
        return False
    if not expression.children:
        return expression.kind == "AttributeReference"
    return any(_reads_other_columns(child, columns) for child in expression.children)


def _partial(call: AggregateCall, aggregate: Expression, inputs: Sequence[str]) -> Partial | str:
    """Return Spark's partial aggregation of a call, or the reason why it cannot be merged."""
    if calls_user_function(aggregate):
        return "functions of the user take single rows"
    types = [parse_type(ddl) for ddl in inputs]
    if FUNCTIONS[call.function].ordered:
        return f"{call.function} depends on single rows"
    if any(_may_overflow(call, dtype) for dtype in types):
        return f"a partial {call.function} of {inputs[0]} may exceed 38 digits where the whole does not"
    function = aggregate.expression("aggregateFunction")
    # Spark plans the replacement of a function, even of one that is known here (e.g. `count_if`).
    while function is not None and (replacement := function.expression("replacement")) is not None:
        function = replacement
    assert function is not None
    if call.function == "approx_count_distinct" and sketch_words(call.options) > _MAX_SKETCH_WORDS:
        return "partial results of approx_count_distinct are large at this precision"
    buffers = tuple(buffer_types(function))
    states = state_columns(call, types, inputs, buffers)
    if states is None or not all(map(_is_mutable, buffers)):
        name = f"try_{call.function}" if call.options.get("eval_mode") == "try" else call.function
        return f"partial results of {name}({', '.join(inputs)}) cannot be merged"
    counted = call.inputs if call.function == "count" else None
    return Partial(function, aggregate.expression("filter"), counted, tuple(states), buffers)


def _may_overflow(call: AggregateCall, dtype: DataType) -> bool:
    return call.function in ("sum", "avg") and dtype.name == "decimal" and dtype.precision > _MAX_SUMMED_DIGITS


def _is_mutable(type_: str) -> bool:
    """Whether Spark's hash aggregate can update values of a type in place; otherwise it sorts rows."""
    return not any(part in type_ for part in ("string", "binary", "struct", "array", "map"))
