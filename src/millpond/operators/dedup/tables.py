"""The tables of the keys that were seen."""

from __future__ import annotations

from millpond.layout import Column
from millpond.operators.tables.keyed import Keyed, keyed
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec


def seen_table(spec: DeduplicateSpec) -> Keyed:
    """Return the layout of a table of keys alone."""
    return keyed(spec.key_fields, [])


def within_table(spec: WithinSpec) -> Keyed:
    """Return the layout of a table of keys with the expiry of each, in milliseconds."""
    return keyed(spec.key_fields, [(Column("expiry", "word"), False)])
