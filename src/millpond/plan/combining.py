"""Whether, and how, Spark combines the rows of an aggregate before the exchange: partial aggregation in its own JVM.

Each map task then sends one row per group: the key, the state columns of every function, and how many rows they stand
for. The slot merges them as it merges partial states elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.ddl import quoted
from millpond.operators.tables.spark_buffers import Carried, carried
from millpond.plan.catalyst.exchange_forms import buffer_types
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.reading.aggregate import Reading, calls_user
from millpond.plan.reading.decision import Decided
from millpond.plan.reading.join import JoinReading
from millpond.spec.functions import FUNCTIONS, is_distinct
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.operators import COMBINED_ROWS, AggregateCall, Field
from millpond.spec.types import DataType, parse_type

_LONGEST_SUMMED = 28
"""Digits of decimals whose sum cannot exceed 38 digits within one map task. Spark forgets by how much a sum exceeds
them, and rows of another task may bring it back."""


@dataclass(frozen=True)
class Combination:
    """How the rows of an aggregate are combined before the exchange.

    Attributes:
        functions: Spark's function and filter of each call.
        states: the state columns of each call, over the buffers of its function.
        buffers: the types of those buffers, as DDL.
    """

    functions: tuple[tuple[Expression, Expression | None], ...]
    states: tuple[tuple[Carried, ...], ...]
    buffers: tuple[tuple[str, ...], ...]

    @property
    def fields(self) -> tuple[Field, ...]:
        """The columns that combined rows have beside their key: states, and last how many rows were combined."""
        states = [
            Field(f"__{number}_{part}", state.type)
            for number, call in enumerate(self.states)
            for part, state in enumerate(call)
        ]
        return (*states, COMBINED_ROWS)

    @property
    def arguments(self) -> list[Expression]:
        """What the functions and filters are computed of, each once."""
        found: list[Expression] = []
        for function, condition in self.functions:
            for one in (*function.children, *([] if condition is None else [condition])):
                if not one.foldable and not any(one.means(other) for other in found):
                    found.append(one)
        return found

    @property
    def buffer_columns(self) -> dict[str, str]:
        """Names and types of all buffers, in the order of the functions."""
        return {
            f"__buffer{number}_{part}": type_
            for number, types in enumerate(self.buffers)
            for part, type_ in enumerate(types)
        }

    @property
    def state_columns(self) -> list[str]:
        """SQL over `buffer_columns` for each of `fields` but the last."""
        return [
            state.sql.format(*(quoted(f"__buffer{number}_{part}") for part in range(len(self.buffers[number]))))
            for number, call in enumerate(self.states)
            for state in call
        ]


class Combinations:
    """How the rows of a query's operators are combined before their exchanges.

    Args:
        root: the decided plan. enabled: whether rows are combined at all.
    """

    def __init__(self, root: Decided, *, enabled: bool = True) -> None:
        self._decided = [one for one in root.walk() if one.operator is not None and one.operator.index is not None]
        self._enabled = enabled
        self._specs: list[OperatorSpec] = []
        self._found: dict[int, Combination] = {}

    def of(self, specs: Sequence[OperatorSpec]) -> dict[int, Combination]:
        """The combinations by operator index, where rows can be combined.

        Args:
            specs: what slots compute, by operator index.
        """
        if self._enabled and self._specs != list(specs):
            self._specs = list(specs)
            found = {}
            for decided in self._decided:
                assert decided.operator is not None
                assert decided.operator.index is not None
                spec = specs[decided.operator.index]
                found[decided.operator.index] = combine(decided.node, spec, decided.operator.reading)
            self._found = {index: one for index, one in found.items() if isinstance(one, Combination)}
        return self._found


def combine(node: Node, spec: OperatorSpec, reading: Reading | JoinReading | None) -> Combination | str:
    """How the rows of an operator are combined, or why they are not.

    Args:
        node: the operator's. spec: what a slot computes. reading: what was read of the node.
    """
    if not isinstance(spec, AggregateSpec) or not isinstance(reading, Reading) or node.kind != "Aggregate":
        return "only groups that are updated in place are combined"
    if spec.keeps_rows or spec.observed:
        return "the state keeps single rows"
    if spec.retracts:
        return "its input is a changelog"
    for field in spec.key_fields:
        if "collate" in field.type:
            return f"Spark does not hash keys of type {field.type}"
    functions: list[tuple[Expression, Expression | None]] = []
    states, buffers = [], []
    for call, aggregate in zip(spec.calls, reading.aggregates, strict=False):
        found = _partial(call, aggregate, [spec.inputs[position].type for position in call.inputs])
        if isinstance(found, str):
            return found
        function, types, columns = found
        functions.append((function, aggregate.expression("filter")))
        states.append(columns)
        buffers.append(types)
    return Combination(tuple(functions), tuple(states), tuple(buffers))


def _partial(
    call: AggregateCall, aggregate: Expression, inputs: Sequence[str]
) -> tuple[Expression, tuple[str, ...], tuple[Carried, ...]] | str:
    """A call's function as Spark computes it, the types of its buffers, and the state columns made of them."""
    if calls_user(aggregate):
        return "functions of the user take single rows"
    if is_distinct(call):
        return f"{call.function}(distinct) depends on single rows"
    types = [parse_type(one) for one in inputs]
    if FUNCTIONS[call.function].ordered or any(_takes_long(call, one) for one in types):
        return f"{call.function} depends on single rows"
    function = aggregate.expression("aggregateFunction")
    while function is not None and (replacement := function.expression("replacement")) is not None:
        function = replacement
    assert function is not None
    names = tuple(buffer_types(function))
    columns = carried(call, types, inputs, names)
    if columns is None or not all(map(_is_mutable, names)):
        return f"partial results of {call.function}({', '.join(inputs)}) cannot be merged"
    return function, names, tuple(columns)


def _takes_long(call: AggregateCall, dtype: DataType) -> bool:
    return call.function in ("sum", "avg") and dtype.name == "decimal" and dtype.precision > _LONGEST_SUMMED


def _is_mutable(type_: str) -> bool:
    """Whether Spark's hash aggregate updates values of a type in place; it sorts rows otherwise."""
    return not any(part in type_ for part in ("string", "binary", "struct", "array", "map"))
