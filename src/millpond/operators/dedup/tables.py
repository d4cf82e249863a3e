"""The tables of keys that were seen."""

from __future__ import annotations

from millpond.layout import Column
from millpond.operators.tables.keyed import Keyed, keyed
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec


def seen_table(spec: DeduplicateSpec) -> Keyed:
    """Keys alone."""
    return keyed(spec.key_fields, [])


def within_table(spec: WithinSpec) -> Keyed:
    """Keys, and when each is forgotten, in milliseconds."""
    return keyed(spec.key_fields, [(Column("expiry", "word"), False)])
