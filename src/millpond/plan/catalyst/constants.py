"""What aggregate functions are called with beside the columns of rows: constants, evaluated by the JVM."""

from __future__ import annotations

import struct
from typing import Any

from millpond.plan.catalyst.nodes import Expression


def count_min_options(aggregate: Expression) -> dict[str, Any]:
    """The length of a row of counters in a `CountMinSketchAgg`, and what integers are hashed with in each row."""
    empty = bytes(aggregate.java.eval(aggregate.java.createAggregationBuffer()))
    depth, width = struct.unpack_from(">ii", empty, 12)
    return {"width": width, "multipliers": list(struct.unpack_from(f">{depth}q", empty, 20))}


def bytes_of(constant: Expression) -> bytes:
    """The bytes of a constant text or binary value; none of a null."""
    value = constant.constant
    if value is None:
        return b""
    return bytes(value) if isinstance(value, bytes | bytearray) else bytes(value.getBytes())
