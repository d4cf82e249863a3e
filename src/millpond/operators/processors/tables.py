"""The tables of a processor's state: one for each variable, and one for timers."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.layout import Column
from millpond.operators.tables.keyed import Keyed, keyed
from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.types import DataType, parse_type


@dataclass(frozen=True)
class Variable:
    """How a variable is stored: its table has the key and, as one byte string, all that the key has of it.

    Attributes:
        keyed: the table. type: of what a key has.
        expires: whether the rows have a second column, which says when something of them is due, in milliseconds.
    """

    keyed: Keyed
    type: DataType
    expires: bool


def variables(spec: ProcessorSpec) -> dict[str, Variable]:
    """The tables of a processor's state by name."""
    return {name: _variable(spec, stored, expires=expires) for name, (stored, expires) in spec.tables.items()}


def _variable(spec: ProcessorSpec, stored: str, *, expires: bool) -> Variable:
    columns = [(Column("value", "bytes"), False)]
    if expires:
        columns.append((Column("expiry", "word"), False))
    return Variable(keyed(spec.key_fields, columns), parse_type(stored), expires)
