"""What each kind of operator offers beside the operator itself: how it is opened, and what its state is."""

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
    """Where an operator is opened: on one partition.

    Attributes:
        make_table: opens a table of the partition by name, schema and the words of a fresh row.
        existing: the names of the tables that the state has.
        owns_global: for an aggregate without keys, whether the partition's range holds `spec.GLOBAL_HASH`.
        memory: bytes of the slot's memory that fall to the partition, if all have as much.
    """

    make_table: MakeTable
    existing: Collection[str] = ()
    owns_global: bool = True
    memory: int = 64 << 20


@dataclass(frozen=True)
class Kind(Generic[S]):
    """A kind of operator.

    Attributes:
        load: imports the operator's code, which who only looks at state does without, and gives what opens the operator
            that a spec describes.
        tables: the tables of its state by name, without those of a moment.
        read: rows of a table as a user reads them: of tables that are shown the columns of `spec.state_fields`, of
            others their keys. Gives one batch, or more where a column would exceed Arrow's 32-bit offsets.
        read_whole: the same of all rows of a table that has parts beside (`StateTable.parts`), with these; both in the
            order of hashes.
    """

    load: Callable[[], Callable[[S, Opening], Operator]]
    tables: Callable[[S], Mapping[str, StateTable]]
    read: Callable[[S, str, Rows], Iterator[pa.RecordBatch]]
    read_whole: Callable[[S, str, Iterator[Rows], Iterator[Rows]], Iterator[pa.RecordBatch]] | None = None
