"""The interface of a kind of operator: how it is opened, and which tables its state has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.protocol import MakeTable, Operator, StateTable
from millpond.spec.protocol import Spec

S = TypeVar("S", bound=Spec)


@dataclass(frozen=True)
class Opening:
    """The partition on which an operator is opened.

    Attributes:
        make_table: opens a table of the partition by name, schema and the words of a fresh row.
        existing: the names of the tables that the state has.
        owns_global: for an aggregate without keys, whether the partition's range holds `spec.GLOBAL_HASH`.
        memory: the partition's even share of the slot's memory, in bytes.
        is_closed: returns whether the partition is being closed, so that a long wait has to end.
    """

    make_table: MakeTable
    existing: Collection[str] = ()
    owns_global: bool = True
    memory: int = 64 << 20
    is_closed: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Kind(Generic[S]):
    """A kind of operator.

    Attributes:
        load: imports the operator's code and returns the function that opens the operator of a spec. A process that
            only reads state does without the code.
        tables: the tables of its state by name, without temporary ones.
        read: decodes rows of a table for a user. Shown tables have the columns of `spec.state_fields`, other tables
            their keys. Yields several batches where a column would exceed Arrow's 32-bit offsets.
        read_whole: decodes all rows of a table together with those of its parts table (`StateTable.parts`); both come
            in hash order.
    """

    load: Callable[[], Callable[[S, Opening], Operator]]
    tables: Callable[[S], Mapping[str, StateTable]]
    read: Callable[[S, str, Rows], Iterator[pa.RecordBatch]]
    read_whole: Callable[[S, str, Iterator[Rows], Iterator[Rows]], Iterator[pa.RecordBatch]] | None = None
