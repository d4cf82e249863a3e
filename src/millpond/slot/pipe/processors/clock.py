"""Times as pandas has them: without a time zone, as clocks show them in that of the session.

So a processor that sees frames has the times of its keys, and so Spark has them when a timer calls it.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from millpond.spec.types import DataType, parse_type

_NO_ZONE = "timestamp_ntz"


def zoneless(dtype: DataType) -> DataType:
    """A type with times without a time zone in place of moments, in it and in structs in it."""
    if dtype.name == "timestamp":
        return parse_type(_NO_ZONE)
    if dtype.name == "struct":
        return msgspec.structs.replace(dtype, fields=tuple((name, zoneless(inner)) for name, inner in dtype.fields))
    return dtype


def on_the_clock(array: pa.Array, zone: str) -> pa.Array:
    """A column of such a type, from one of moments.

    Args:
        array: the column. zone: the session's time zone.
    """
    kind = array.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pc.local_timestamp(array.cast(pa.timestamp(kind.unit, zone)))
    if pa.types.is_struct(kind) and kind.num_fields:
        parts = [on_the_clock(array.field(at), zone) for at in range(kind.num_fields)]
        fields = [pa.field(one.name, part.type) for one, part in zip(kind, parts, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=array.is_null())
    return array
