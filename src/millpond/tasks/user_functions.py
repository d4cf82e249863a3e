"""User functions over whole groups, as the planner passes them to Spark's Python workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class Kind(IntEnum):
    """Kinds of functions, with the numbers of `pyspark.util.PythonEvalType`; older Spark versions lack some."""

    MAP_PANDAS = 201
    AGGREGATE_PANDAS = 202
    MAP_ARROW = 209
    MAP_ARROW_PIECES = 215
    MAP_PANDAS_PIECES = 216
    AGGREGATE_PANDAS_PIECES = 217
    AGGREGATE_ARROW = 252
    AGGREGATE_ARROW_PIECES = 254

    @property
    def maps(self) -> bool:
        """Whether the function returns any number of rows for a group, instead of one value."""
        return self.name.startswith("MAP_")

    @property
    def piecewise(self) -> bool:
        """Whether the function receives a group in pieces; Spark then calls it separately from other functions."""
        return self.name.endswith("_PIECES")


class UserFunction(NamedTuple):
    """A user function.

    Attributes:
        name: its name.
        kind: its kind.
        command: the function and its result type, as Spark pickles them.
        arguments: positions of its arguments among the columns of a group's rows.
        keywords: names and positions of its keyword arguments.
        identity: Spark's number of this use of the function, for its profiler.
    """

    name: str
    kind: Kind
    command: bytes
    arguments: tuple[int, ...]
    keywords: tuple[tuple[str, int], ...] = ()
    identity: int = 0


@dataclass(frozen=True)
class UserFunctions:
    """User functions that are called with the groups that a slot yields.

    Attributes:
        title: the operator's title, for messages.
        functions: the functions: several aggregates, or one that maps groups to rows.
        columns: columns of a group's rows; where groups are mapped, the keys first.
        output_schema: schema of the output. Of aggregates: the first columns of the slot, then the results in `order`.
        order: for each result n, a column of the slot if n ≥ 0, else the result of function −1 − n.
        conf: settings of Spark's Python worker, and the number of rows per piece for functions that receive pieces.
    """

    title: str
    functions: tuple[UserFunction, ...]
    columns: StructType
    output_schema: StructType
    order: tuple[int, ...] = ()
    conf: dict[str, str] = field(default_factory=dict)

    @property
    def maps(self) -> bool:
        """Whether the function returns rows, instead of values beside the groups' keys."""
        return self.functions[0].kind.maps
