"""Conversion of timestamps to local times of the session's time zone, as pandas frames have them.

A processor that receives frames gets its keys' times in this form, from Spark also when a timer calls it.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from millpond.spec.types import DataType, parse_type

_NO_ZONE = "timestamp_ntz"


def zoneless(dtype: DataType) -> DataType:
    """Replace the timestamps of a type, also inside structs, by timestamps without time zone."""
    if dtype.name == "timestamp":
        return parse_type(_NO_ZONE)
    if dtype.name == "struct":
        return msgspec.structs.replace(dtype, fields=tuple((name, zoneless(inner)) for name, inner in dtype.fields))
    return dtype


def to_local_times(array: pa.Array, zone: str) -> pa.Array:
    """Convert a column of timestamps, also inside structs, to local times without time zone.

    Args:
        array: the column.
        zone: the session's time zone.
    """
    kind = array.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pc.local_timestamp(array.cast(pa.timestamp(kind.unit, zone)))
    if pa.types.is_struct(kind) and kind.num_fields:
        parts = [to_local_times(array.field(position), zone) for position in range(kind.num_fields)]
        fields = [pa.field(field.name, part.type) for field, part in zip(kind, parts, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=array.is_null())
    return array
