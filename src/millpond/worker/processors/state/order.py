"""Order of a map's entries in Spark: that of the bytes of their keys in Spark's binary row format (`UnsafeRow`).

A row has a null bit for each field, an 8-byte word for each field, and then the values that do not fit a word, padded
to whole words. Numbers are little-endian, and the row's length comes first. So the order is not one that users expect,
but it is the one that Spark shows.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from typing import Any

from millpond.spec.types import LONG_DECIMAL, DataType

_WORD = struct.Struct("<Q")
_PLACE = struct.Struct("<II")
_EXACT = Context(prec=76)
_NULL_WORD = b"\0" * 8
_FIXED = {
    "boolean": "?",
    "tinyint": "b",
    "smallint": "h",
    "int": "i",
    "date": "i",
    "bigint": "q",
    "timestamp": "q",
    "timestamp_ntz": "q",
    "float": "f",
    "double": "d",
}

Bytes = Callable[[Any], bytes]


def row_bytes(dtype: DataType) -> Bytes:
    """Return a function that encodes a struct's stored values, as tuples, to the bytes that determine their order."""
    row = _row(dtype)

    def made(values: Any) -> bytes:
        encoded = row(values)
        return len(encoded).to_bytes(4, "little") + encoded

    return made


def _row(dtype: DataType) -> Bytes:
    fields = [(_width(inner), _bytes(inner), _reserved(inner)) for _, inner in dtype.fields]
    bits = 8 * math.ceil(len(fields) / 64)
    fixed = bits + 8 * len(fields)

    def made(values: Sequence[Any]) -> bytes:
        nulls = 0
        words, variable, offset = [], [], fixed
        for number, (value, (width, encode, reserved)) in enumerate(zip(values, fields, strict=True)):
            if value is None:
                nulls |= 1 << number
            if width:
                words.append(_NULL_WORD if value is None else encode(value).ljust(8, b"\0"))
            elif value is None and not reserved:
                words.append(_NULL_WORD)
            else:
                encoded = b"" if value is None else encode(value)
                words.append(_PLACE.pack(len(encoded), offset))
                variable.append(_padded(encoded, reserved))
                offset += len(variable[-1])
        return b"".join([nulls.to_bytes(bits, "little"), *words, *variable])

    return made


def _array(dtype: DataType) -> Bytes:
    width, encode = _width(dtype), _bytes(dtype)

    def made(values: Sequence[Any]) -> bytes:
        bits = 8 * math.ceil(len(values) / 64)
        size = width or 8
        nulls = 0
        places, variable = [], []
        offset = 8 + bits + 8 * math.ceil(len(values) * size / 8)
        for number, value in enumerate(values):
            if value is None:
                nulls |= 1 << number
                places.append(b"\0" * size)
            elif width:
                places.append(encode(value))
            else:
                encoded = encode(value)
                places.append(_PLACE.pack(len(encoded), offset))
                variable.append(_padded(encoded, 0))
                offset += len(variable[-1])
        head = _WORD.pack(len(values)) + nulls.to_bytes(bits, "little")
        return head + _padded(b"".join(places), 0) + b"".join(variable)

    return made


def _map(dtype: DataType) -> Bytes:
    keys, values = (_array(inner) for _, inner in dtype.fields)

    def made(pairs: Sequence[tuple[Any, Any]]) -> bytes:
        first = keys([key for key, _ in pairs])
        return _WORD.pack(len(first)) + first + values([value for _, value in pairs])

    return made


def _width(dtype: DataType) -> int:
    """Return the fixed number of bytes of every value of a type; 0 if lengths vary."""
    if dtype.name == "decimal":
        return 8 if dtype.precision <= LONG_DECIMAL else 0
    return struct.calcsize(_FIXED[dtype.name]) if dtype.name in _FIXED else 0


def _reserved(dtype: DataType) -> int:
    """Return the number of bytes that a row reserves for a value of variable length."""
    return 16 if dtype.name == "decimal" and not _width(dtype) else 0


def _bytes(dtype: DataType) -> Bytes:
    if dtype.name == "struct":
        return _row(dtype)
    if dtype.name == "array":
        return _array(dtype.fields[0][1])
    if dtype.name == "map":
        return _map(dtype)
    if dtype.name == "decimal":
        return _decimal(dtype.scale, bool(_width(dtype)))
    if dtype.name == "string":
        return str.encode
    if dtype.name == "binary":
        return bytes
    pack = struct.Struct("<" + _FIXED[dtype.name]).pack
    if dtype.machine == "float":
        return lambda value: pack(math.nan if value != value else value)
    return pack


def _decimal(scale: int, short: bool) -> Bytes:
    def made(value: Decimal) -> bytes:
        unscaled = int(value.scaleb(scale, _EXACT))
        if short:
            return unscaled.to_bytes(8, "little", signed=True)
        return unscaled.to_bytes((unscaled + (unscaled < 0)).bit_length() // 8 + 1, "big", signed=True)

    return made


def _padded(encoded: bytes, least: int) -> bytes:
    return encoded.ljust(max(least, 8 * math.ceil(len(encoded) / 8)), b"\0")
