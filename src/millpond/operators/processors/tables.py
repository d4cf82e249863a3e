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
    """The storage of a variable: a table with the key, and as one byte string the key's state or a part of it.

    Attributes:
        fields: the columns of the key.
        keyed: the table.
        type: the type of the byte string's value.
        expires: whether rows have a second column with the earliest expiry of their content, in milliseconds.
        headed: whether rows have a last column that describes the parts beside them; it is empty if there are none.
    """

    fields: tuple[Field, ...]
    keyed: Keyed
    type: DataType
    expires: bool
    headed: bool = False


def variables(spec: ProcessorSpec) -> dict[str, Variable]:
    """Return the tables of a processor's state by name."""
    headed = {variable.table for variable in spec.variables if variable.parts}
    return {
        name: _variable(spec.key_fields, stored, expires=expires, headed=name in headed)
        for name, (stored, expires) in spec.tables.items()
    }


def parts(spec: ProcessorSpec) -> dict[str, Variable]:
    """Return the tables of parts of variables by name; the last key column is the part's number."""
    fields = (*spec.key_fields, Field("part", "bigint"))
    return {
        variable.parts: _variable(fields, variable.stored, expires=variable.ttl_ms > 0)
        for variable in spec.variables
        if variable.parts
    }


def _variable(fields: tuple[Field, ...], stored: str, *, expires: bool, headed: bool = False) -> Variable:
    columns = [(Column("value", "bytes"), False)]
    if expires:
        columns.append((Column("expiry", "word"), False))
    if headed:
        columns.append((Column("head", "bytes"), False))
    return Variable(fields, keyed(fields, columns), parse_type(stored), expires, headed)
