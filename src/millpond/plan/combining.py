"""Partial aggregation: Spark combines the rows of an aggregate in its own JVM before the exchange.

Each map task then sends one row per group: the key, the state columns of every function, and how many rows they stand
for. The slot merges them as it merges partial states elsewhere.

Where it only matters which values there are (DISTINCT inputs, `max` of strings), it sends one row per group and value,
which the slot takes as it takes a row of the source. If calls have several sets of such inputs, Spark makes a copy of
each row for each set, and groups by the set's number, too. Partial results of other calls come with the first set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from millpond.ddl import quoted
from millpond.operators.tables.spark_buffers import Carried, carried
from millpond.plan.catalyst.buffers import bound, buffer_types
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression
from millpond.plan.reading.aggregate import Reading, calls_user, rewrite
from millpond.plan.reading.decision import Decided
from millpond.plan.reading.join import JoinReading
from millpond.spec.functions import FUNCTIONS, sketch_words
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import COMBINED_ROWS, VALUE_SET, AggregateCall, Field
from millpond.spec.types import DataType, parse_type

_WIDEST = 64
"""Words of a sketch that may travel: a large one for each group of each task takes longer than the rows."""

_LONGEST_SUMMED = 28
"""Digits of decimals whose sum cannot exceed 38 digits within one map task. Spark forgets by how much a sum exceeds
them, and rows of another task may bring it back."""


class Partial(NamedTuple):
    """Spark's partial aggregation of one call.

    Attributes:
        function: Spark's function, over the columns below the operator. condition: its filter, likewise.
        counted: of `count`, which of the operator's inputs it counts: they are null where its arguments are. None of
            other functions.
        states: the state columns of the call, over the buffers of its function.
        buffers: the types of those buffers, as DDL.
    """

    function: Expression
    condition: Expression | None
    counted: tuple[int, ...] | None
    states: tuple[Carried, ...]
    buffers: tuple[str, ...]

    @property
    def operands(self) -> list[Expression]:
        """The operands of the function and of its filter; of a `count`, those of its filter only."""
        own = self.function.children if self.counted is None else []
        return [*own, *([] if self.condition is None else [self.condition])]


@dataclass(frozen=True)
class Combination:
    """How the rows of an aggregate are combined before the exchange.

    Attributes:
        partials: Spark's partial aggregation of each call that is in no set.
        columns: expressions that are columns of the operator, each with its position among them.
        arguments: what is computed for the functions beside the operator's columns.
        sets: the inputs by whose values rows are combined (`AggregateSpec.value_sets`), as columns of the operator.
        flags: the columns that are filters of calls in a set: true if one of the rows passes.
    """

    partials: tuple[Partial, ...]
    columns: tuple[tuple[Expression, int], ...]
    arguments: tuple[Expression, ...]
    sets: tuple[tuple[int, ...], ...] = ()
    flags: tuple[int, ...] = ()

    @property
    def value_columns(self) -> list[int]:
        """The columns that are in a set."""
        return sorted(set(chain.from_iterable(self.sets)))

    @property
    def fields(self) -> tuple[Field, ...]:
        """The columns that combined rows have beside the operator's; last, how many rows were combined."""
        states = [
            Field(f"__{number}_{part}", state.type)
            for number, partial in enumerate(self.partials)
            for part, state in enumerate(partial.states)
        ]
        return (*states, *([VALUE_SET] if self.sets else []), COMBINED_ROWS)

    @property
    def buffers(self) -> dict[str, str]:
        """Names and types of all buffers, in the order of the functions."""
        partials = {
            f"__buffer{number}_{part}": type_
            for number, partial in enumerate(self.partials)
            for part, type_ in enumerate(partial.buffers)
        }
        return partials | {_flag(at): "boolean" for at in self.flags} | {COMBINED_ROWS.name: COMBINED_ROWS.type}

    def groupings(self, types: Sequence[str]) -> dict[str, str]:
        """Names and types of what copies are grouped by beside the key; `types`: of the operator's columns."""
        if not self.sets:
            return {}
        return {VALUE_SET.name: VALUE_SET.type} | {f"__value{at}": types[at] for at in self.value_columns}

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
        """SQL over groupings and `buffers` for a column of the operator's that is no key."""
        if column in self.flags:  # if it is in a set, too, all rows of a group have the same value
            return _flag(column)
        return f"__value{column}" if column in self.value_columns else "null"

    def copies(self, catalyst: Catalyst, columns: Sequence[Expression]) -> list[list[Expression]]:
        """The groupings of each copy of a row: inputs of other sets are null. `columns`: the operator's."""
        return [
            [
                catalyst.literal(number),
                *(columns[at] if at in set_ else catalyst.unknown(columns[at]) for at in self.value_columns),
            ]
            for number, set_ in enumerate(self.sets)
        ]

    def functions(
        self, catalyst: Catalyst, columns: Sequence[Expression], keys: int
    ) -> list[tuple[Expression, Expression | None]]:
        """The functions and their filters over other columns, in the order of `buffers`.

        Args:
            catalyst: of the session. columns: the operator's, then the arguments. keys: how many of them are keys.
        """
        types = {VALUE_SET.name: VALUE_SET.type}
        # Rows are counted, and folded into partial results, in one of their copies.
        (first_copy,) = bound(catalyst, types, [f"{VALUE_SET.name} = 0"]) if len(self.sets) > 1 else [None]
        known = [(expression, columns[position]) for expression, position in self.columns]
        known += list(zip(self.arguments, columns[len(columns) - len(self.arguments) :], strict=True))

        def column_of(expression: Expression) -> Expression | None:
            return next((column for other, column in known if other.means(expression)), None)

        found = []
        for partial in self.partials:
            if partial.counted is not None:
                counted = [columns[keys + position] for position in partial.counted]
                function = catalyst.count(counted or [catalyst.literal(1)])
            else:
                operands = [rewrite(catalyst, one, column_of) for one in partial.function.children]
                function = catalyst.with_operands(partial.function, operands) if operands else partial.function
            condition = None if partial.condition is None else rewrite(catalyst, partial.condition, column_of)
            found.append((function, catalyst.conjunction(first_copy, condition)))
        flags = [(catalyst.max_of(columns[at]), None) for at in self.flags]
        return [*found, *flags, (catalyst.count([catalyst.literal(1)]), first_copy)]


class Combinations:
    """How the rows of a query's operators are combined before their exchanges.

    Args:
        root: the decided plan. enabled: says whether rows are combined at all.
    """

    def __init__(self, root: Decided, enabled: Callable[[], bool]) -> None:
        self._decided = [one for one in root.walk() if one.operator is not None and one.operator.index is not None]
        self._enabled = enabled
        self._specs: list[OperatorSpec] = []
        self._found: dict[int, Combination] = {}

    def of(self, specs: Sequence[OperatorSpec]) -> dict[int, Combination]:
        """The combinations by operator index, where rows can be combined.

        Args:
            specs: what slots compute, by operator index.
        """
        if self._specs != list(specs) and self._enabled():
            self._specs = list(specs)
            found = {}
            for decided in self._decided:
                assert decided.operator is not None
                assert decided.operator.index is not None
                spec = specs[decided.operator.index]
                found[decided.operator.index] = combine(spec, decided.operator.reading)
            self._found = {index: one for index, one in found.items() if isinstance(one, Combination)}
        return self._found


def combine(spec: OperatorSpec, reading: Reading | JoinReading | None) -> Combination | str:
    """How the rows of an operator are combined, or why they are not.

    Args:
        spec: what a slot computes. reading: what was read of its node.
    """
    if spec.uncombined is not None:
        return spec.uncombined
    assert isinstance(reading, Reading)
    partials, flags, keys = [], [], len(spec.key_fields)
    for call, aggregate in zip(spec.calls, reading.aggregates, strict=False):  # functions of the user share one call
        if spec.value_set(call):
            flags += [] if call.filter is None else [keys + call.filter]
            continue
        found = _partial(call, aggregate, [spec.arguments[position].type for position in call.inputs])
        if isinstance(found, str):
            return found
        partials.append(found)
        if spec.value_sets and any(state.type.startswith("array") for state in found.states):
            return f"partial results of {call.function} would come with each value"
    columns = [(reading.raw[one.raw[0]], at) for at, one in enumerate(reading.columns) if one.sql == "{0}"]
    arguments: list[Expression] = []
    for one in chain.from_iterable(partial.operands for partial in partials):
        if _asks_for_more(one, columns) and not any(one.means(other) for other in arguments):
            arguments.append(one)
    sets = tuple(tuple(keys + position for position in inputs) for inputs in spec.value_sets)
    return Combination(tuple(partials), tuple(columns), tuple(arguments), sets, tuple(dict.fromkeys(flags)))


def _flag(column: int) -> str:
    return f"__flag{column}"


def _asks_for_more(expression: Expression, columns: Sequence[tuple[Expression, int]]) -> bool:
    """Whether an expression reads something that is no column of the operator."""
    if any(expression.means(one) for one, _ in columns):
        return False
    if not expression.children:
        return expression.kind == "AttributeReference"
    return any(_asks_for_more(one, columns) for one in expression.children)


def _partial(call: AggregateCall, aggregate: Expression, inputs: Sequence[str]) -> Partial | str:
    """Spark's partial aggregation of a call, or why there is none that can be merged."""
    if calls_user(aggregate):
        return "functions of the user take single rows"
    types = [parse_type(one) for one in inputs]
    if FUNCTIONS[call.function].ordered:
        return f"{call.function} depends on single rows"
    if any(_may_exceed(call, one) for one in types):
        return f"a partial {call.function} of {inputs[0]} may exceed 38 digits where the whole does not"
    function = aggregate.expression("aggregateFunction")
    # Spark plans what replaces a function, also where the function itself is known here (`count_if`, say).
    while function is not None and (replacement := function.expression("replacement")) is not None:
        function = replacement
    assert function is not None
    if call.function == "approx_count_distinct" and sketch_words(call.options) > _WIDEST:
        return "partial results of approx_count_distinct are large at this precision"
    buffers = tuple(buffer_types(function))
    states = carried(call, types, inputs, buffers)
    if states is None or not all(map(_is_mutable, buffers)):
        name = f"try_{call.function}" if call.options.get("eval_mode") == "try" else call.function
        return f"partial results of {name}({', '.join(inputs)}) cannot be merged"
    counted = call.inputs if call.function == "count" else None
    return Partial(function, aggregate.expression("filter"), counted, tuple(states), buffers)


def _may_exceed(call: AggregateCall, dtype: DataType) -> bool:
    return call.function in ("sum", "avg") and dtype.name == "decimal" and dtype.precision > _LONGEST_SUMMED


def _is_mutable(type_: str) -> bool:
    """Whether Spark's hash aggregate updates values of a type in place; it sorts rows otherwise."""
    return not any(part in type_ for part in ("string", "binary", "struct", "array", "map"))
