"""User functions over whole groups in a plan: their arguments and results.

A slot does not know these functions. It returns the rows of each group (the function `rows`), which are kept until the
group closes. So a query may be restarted with another function over the same columns.
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
from millpond.spec.functions import ROWS, unsupported_call
from millpond.spec.operators import AggregateCall, Field
from millpond.tasks.user_functions import UserFunction, UserFunctions

USER_AGGREGATE = "PythonUDAF"
"""Catalyst's class of user-defined aggregate functions."""


@dataclass
class UserCalls:
    """The user functions that an operator calls.

    Attributes:
        functions: the functions in the order of their use.
        inputs: positions, among the operator's inputs, of the columns of a group's rows.
        columns: these columns as in Spark; for functions that map groups to rows, after the keys.
        keys: the number of key columns.
        order: see `UserFunctions`.
        broadcasts: the JVM objects of broadcast variables that the functions use.
    """

    functions: list[UserFunction] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    columns: list[StructField] = field(default_factory=list)
    keys: int = 0
    order: list[int] = field(default_factory=list)
    broadcasts: list[Any] = field(default_factory=list)

    def add(self, catalyst: Catalyst, function: Expression, place: Callable[[Expression], int]) -> None:
        """Add a function; `place` returns the position of an argument among the operator's inputs.

        Raises:
            Unsupported: its kind is unknown here, or this Spark version cannot call it.
        """
        kind = kind_of(function)
        if not calls_user_code():
            raise Unsupported(Reason("MP-VERSION", f"the user's function {function.get('name')}"))
        if kind is None:
            raise Unsupported(Reason("MP-PYTHON", str(function.get("name"))))
        places = [
            (name, self._column(place(operand), operand, mapped=kind.maps)) for name, operand in arguments(function)
        ]
        # Spark's layout for its worker: the number of following numbers, the number of keys, the keys, the values
        if kind.maps:
            keys = range(self.keys)
            layout = [1 + len(keys) + len(places), len(keys), *keys, *(column for _, column in places)]
            places = [(None, number) for number in layout]
        self.functions.append(user_function(catalyst, function, kind, places))
        self.broadcasts += broadcasts(function)

    def _column(self, position: int, operand: Expression, *, mapped: bool) -> int:
        """Return the column of a group's rows for an input; it is added if new."""
        if position not in self.inputs:
            name = operand.name if mapped else f"_{len(self.inputs)}"
            self.inputs.append(position)
            self.columns.append(StructField(name, operand.data_type))
        return self.keys + self.inputs.index(position)

    def rows(self, inputs: Sequence[Field]) -> AggregateCall:
        """Return the call that the slot computes for these functions: each group's rows.

        Raises:
            Unsupported: a column has a type that cannot be stored.
        """
        types = [inputs[position].type for position in self.inputs]
        struct = ",".join(f"c{number}:{type_}" for number, type_ in enumerate(types))
        call = AggregateCall(ROWS, tuple(self.inputs), f"array<struct<{struct}>>")
        reason = unsupported_call(call, types)
        if reason is not None:
            raise Unsupported(Reason(reason, f"{self.functions[0].name}({', '.join(types)})"))
        return call

    def for_worker(self, catalyst: Catalyst, title: str, shown: StructType) -> UserFunctions:
        """Return the functions as they are sent to Spark's worker; `output_schema` is the schema of the output."""
        return UserFunctions(
            title,
            tuple(self.functions),
            StructType(list(self.columns)),
            StructType(list(shown.fields)),
            tuple(self.order),
            worker_settings(catalyst),
        )
