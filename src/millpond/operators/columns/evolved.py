"""Nested values of an earlier type as values of the type that it has become (see `spec.types.evolves`)."""

from __future__ import annotations

import pyarrow as pa

from millpond.operators.columns.buffers import bitmap, there
from millpond.spec.types import DataType


def evolved(array: pa.Array, before: DataType, now: DataType) -> pa.Array:
    """Values of one type as values of another: fields are known by their names, and new ones are null.

    Args:
        array: the values, as `nested.unpack` gives them. before: their type. now: the other one.
    """
    if before == now:
        return array
    if now.name == "struct":
        old = {name: (at, inner) for at, (name, inner) in enumerate(before.fields)}
        fields = []
        for name, inner in now.fields:
            if name in old:
                at, was = old[name]
                fields.append(evolved(array.field(at), was, inner))
            else:
                fields.append(pa.nulls(len(array), inner.arrow))
        return pa.Array.from_buffers(now.arrow, len(array), [bitmap(there(array))], children=fields)
    if not now.nested:
        return array.cast(now.arrow, safe=False)
    was, inner = before.fields[-1][1], now.fields[-1][1]
    if now.name == "array":
        parts = [evolved(array.values, was, inner)]
    else:
        entries = pa.struct([now.arrow.key_field, now.arrow.item_field])
        both = [array.keys, evolved(array.items, was, inner)]
        parts = [pa.Array.from_buffers(entries, len(array.keys), [None], children=both)]
    return pa.Array.from_buffers(now.arrow, len(array), array.buffers()[:2], children=parts)
