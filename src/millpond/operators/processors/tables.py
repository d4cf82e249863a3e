"""The tables of a processor's state: one for each variable, one for timers, and those of parts of variables."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.layout import Column
from millpond.operators.tables.keyed import Keyed, keyed
from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.operators import Field
from millpond.spec.types import DataType, parse_type


@dataclass(frozen=True)
class Variable:
    """How a variable is stored: its table has the key and, as one byte string, all that the key has of it, or a part.

    Attributes:
        fields: the columns of the key. keyed: the table. type: of what a key has.
        expires: whether the rows have a second column, which says when something of them is due, in milliseconds.
        headed: whether the rows have a last column, which says what parts there are beside; no bytes if there are none.
    """

    fields: tuple[Field, ...]
    keyed: Keyed
    type: DataType
    expires: bool
    headed: bool = False


def variables(spec: ProcessorSpec) -> dict[str, Variable]:
    """The tables of a processor's state by name."""
    headed = {one.table for one in spec.variables if one.parts}
    return {
        name: _variable(spec.key_fields, stored, expires=expires, headed=name in headed)
        for name, (stored, expires) in spec.tables.items()
    }


def parts(spec: ProcessorSpec) -> dict[str, Variable]:
    """The tables of parts of variables by name: the last column of their key is the part's number."""
    fields = (*spec.key_fields, Field("part", "bigint"))
    return {one.parts: _variable(fields, one.stored, expires=one.ttl_ms > 0) for one in spec.variables if one.parts}


def _variable(fields: tuple[Field, ...], stored: str, *, expires: bool, headed: bool = False) -> Variable:
    columns = [(Column("value", "bytes"), False)]
    if expires:
        columns.append((Column("expiry", "word"), False))
    if headed:
        columns.append((Column("head", "bytes"), False))
    return Variable(fields, keyed(fields, columns), parse_type(stored), expires, headed)
