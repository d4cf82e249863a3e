"""Nested values of an earlier type, converted to its current type (see `spec.types.evolves`)."""

from __future__ import annotations

import pyarrow as pa

from millpond.operators.columns.buffers import bitmap, validity_bytes
from millpond.spec.types import DataType


def evolve_values(array: pa.Array, before: DataType, now: DataType) -> pa.Array:
    """Convert values from one type to another: fields match by name, and new fields are null.

    Args:
        array: the values, as `nested.unpack` returns them.
        before: their type.
        now: the type to convert to.
    """
    if before == now:
        return array
    if now.name == "struct":
        old = {name: (position, inner) for position, (name, inner) in enumerate(before.fields)}
        fields = []
        for name, inner in now.fields:
            if name in old:
                position, type_before = old[name]
                fields.append(evolve_values(array.field(position), type_before, inner))
            else:
                fields.append(pa.nulls(len(array), inner.arrow))
        return pa.Array.from_buffers(now.arrow, len(array), [bitmap(validity_bytes(array))], children=fields)
    if not now.nested:
        # Numbers only get wider, but not every bigint is a double: a safe cast would refuse it.
        return array.cast(now.arrow, safe=False)
    type_before, inner = before.fields[-1][1], now.fields[-1][1]
    if now.name == "array":
        parts = [evolve_values(array.values, type_before, inner)]
    else:
        entries = pa.struct([now.arrow.key_field, now.arrow.item_field])
        both = [array.keys, evolve_values(array.items, type_before, inner)]
        parts = [pa.Array.from_buffers(entries, len(array.keys), [None], children=both)]
    return pa.Array.from_buffers(now.arrow, len(array), array.buffers()[:2], children=parts)
