"""User-defined stateful processors, as the planner passes them to Spark's Python workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millpond.spec.kinds.group_state import GroupStateSpec
from millpond.spec.kinds.processor import ProcessorSpec

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


@dataclass(frozen=True)
class InitialColumns:
    """Columns of an initial state.

    Two details differ from Spark. In Spark, a pandas frame of the initial state has all columns, including grouping
    columns that are not data; in the first batch so do the frames of its rows. Spark also counts the rows of a key's
    initial state as part of its first frame. If both together exceed the frame limit
    (`spark.sql.execution.arrow.maxRecordsPerBatch`), Spark calls a processor that sees rows more than once for the key.

    Attributes:
        columns: all columns, as for the input.
        keys: positions of the key columns.
        values: positions of the columns in a pandas frame.
    """

    columns: StructType
    keys: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class UserProcessor:
    """A user processor that is called with the keys that a slot sends.

    Attributes:
        title: the operator's title, for messages.
        command: the function that Spark would call, with its result type, as Spark pickles them; it holds the
            processor.
        pandas: whether the processor receives pandas frames instead of rows.
        columns: columns of the input, including the key.
        values: positions of the columns in a pandas frame.
        output_schema: schema of the output.
        spec: the operator.
        conf: settings of Spark's Python worker.
        initial: columns of the initial state, if there is one.
        in_flight: for an asynchronous processor, how many keys may wait for state at a time; else None.
    """

    title: str
    command: bytes
    pandas: bool
    columns: StructType
    values: tuple[int, ...]
    output_schema: StructType
    spec: ProcessorSpec
    conf: dict[str, str] = field(default_factory=dict)
    initial: InitialColumns | None = None
    in_flight: int | None = None


@dataclass(frozen=True, kw_only=True)
class UserGroups(UserProcessor):
    """A user function over groups with state, called with the keys that a slot sends; `command` holds the function.

    Attributes:
        state: type of the state, as the user declares it.
    """

    spec: GroupStateSpec
    state: StructType
