"""Functions of the user over whole groups, as a plan holds them: what they are called with, and what comes of it.

A slot knows nothing of them: it gives the rows of each group (the function `rows`), which are kept until the group
closes. So a query may be started again with another function over the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import StructField, StructType

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression
from millpond.plan.catalyst.python import (
    arguments,
    broadcasts,
    kind_of,
    user_function,
    worker_settings,
)
from millpond.plan.catalyst.versions import calls_user_code
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.slot.pipe.user_functions import UserFunction, UserFunctions
from millpond.spec.functions import ROWS, supported
from millpond.spec.operators import AggregateCall, Field

AGGREGATE = "PythonUDAF"
"""Catalyst's class of aggregate functions of the user."""


@dataclass
class UserCalls:
    """The functions of the user that an operator calls.

    Attributes:
        functions: in the order of their use.
        inputs: positions among the operator's inputs of the columns of a group's rows.
        columns: these columns as Spark has them; where groups are mapped to rows, the keys first.
        keys: how many of these are keys.
        order: see `UserFunctions`.
        broadcasts: the JVM's objects of broadcast variables that they use.
    """

    functions: list[UserFunction] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    columns: list[StructField] = field(default_factory=list)
    keys: int = 0
    order: list[int] = field(default_factory=list)
    broadcasts: list[Any] = field(default_factory=list)

    def add(self, catalyst: Catalyst, function: Expression, place: Callable[[Expression], int]) -> None:
        """Take up a function; `place` gives the position of an argument among the operator's inputs.

        Raises:
            Unsupported: it is of a kind that is not known here.
        """
        kind = kind_of(function)
        if not calls_user_code():
            raise Unsupported(Reason("MP-VERSION", f"the user's function {function.get('name')}"))
        if kind is None:
            raise Unsupported(Reason("MP-PYTHON", str(function.get("name"))))
        given = [
            (name, self._column(place(operand), operand, mapped=kind.maps)) for name, operand in arguments(function)
        ]
        if kind.maps:  # as Spark tells its worker: how many numbers follow, how many keys, the keys, the values
            keys = range(self.keys)
            layout = [1 + len(keys) + len(given), len(keys), *keys, *(column for _, column in given)]
            given = [(None, number) for number in layout]
        self.functions.append(user_function(catalyst, function, kind, given))
        self.broadcasts += broadcasts(function)

    def _column(self, position: int, operand: Expression, *, mapped: bool) -> int:
        """Which column of a group's rows an input is, added if new."""
        if position not in self.inputs:
            name = operand.name if mapped else f"_{len(self.inputs)}"
            self.inputs.append(position)
            self.columns.append(StructField(name, operand.data_type))
        return self.keys + self.inputs.index(position)

    def rows(self, inputs: Sequence[Field]) -> AggregateCall:
        """What the slot computes for these functions: each group's rows.

        Raises:
            Unsupported: a column has a type that cannot be kept.
        """
        types = [inputs[position].type for position in self.inputs]
        struct = ",".join(f"c{number}:{type_}" for number, type_ in enumerate(types))
        call = AggregateCall(ROWS, tuple(self.inputs), f"array<struct<{struct}>>")
        reason = supported(call, types)
        if reason is not None:
            raise Unsupported(Reason(reason, f"{self.functions[0].name}({', '.join(types)})"))
        return call

    def called(self, catalyst: Catalyst, title: str, shown: StructType) -> UserFunctions:
        """The functions as they travel to where they are called; `shown` is what comes out."""
        return UserFunctions(
            title,
            tuple(self.functions),
            StructType(list(self.columns)),
            StructType(list(shown.fields)),
            tuple(self.order),
            worker_settings(catalyst),
        )
