"""Conversion of state values between the user's Python objects and what Spark stores.

A value from the user goes through PySpark's own `toInternal`, and is then converted as the JVM does. There, a value of
another type than the field's silently becomes null. Integers lose bits that do not fit. A string field takes the text
of any value that has one.
"""

from __future__ import annotations

import copyreg
import datetime as dt
import math
import operator
import pickle
import re
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from functools import cache, cached_property
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import Row, StructType, _create_row

from millpond.spec.types import DataType, holds_floats
from millpond.worker.processors.state.order import row_bytes
from millpond.worker.processors.state.refusals import decimal_too_long, null_field, null_in_map_key, wrong_length
from millpond.worker.processors.state.schemas import not_null_fields, spark_type

_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_EXACT = Context(prec=76, rounding=ROUND_HALF_UP)
_JVM_TYPES = frozenset(
    [type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, dt.date, dt.timedelta]
)
"""Types whose values Spark's JVM reads unchanged."""
_PICKLED_BY_NAME = object()
"""Placeholder for a class or function, which is pickled by name: the JVM reads an object of no Spark type."""
ZEROS = {"float": 0.0, "double": 0.0, "boolean": False}
ZEROS |= dict.fromkeys([*_BITS, "date", "timestamp", "timestamp_ntz"], 0)
"""Replacement of null where the binary format has no null: in map keys and non-nullable fields."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

Convert = Callable[[Any], Any]


class Refused(Exception):
    """Spark refuses a value; the message is Spark's."""


class ValueCodec:
    """Conversion of a variable's values, which are tuples of a struct's fields.

    The stored form is Spark's: numbers for dates and times, tuples for structs.

    Args:
        dtype: the struct.

    Attributes:
        plain: whether the stored form is also what a user gets, and immutable.
    """

    def __init__(self, dtype: DataType) -> None:
        self.dtype = dtype
        self.plain = all(_shown(inner) is None for _, inner in dtype.fields)
        self._spark: StructType = spark_type(dtype)
        self._shown = [_shown(inner) for _, inner in dtype.fields]
        self._from_user = _from_user(dtype)
        self._normalized = _normalized()
        self._strict: list[tuple[int, str]] = []
        self.is_stored_form = _stored_form_check(dtype)

    def require(self, schema: StructType | str) -> None:
        """Refuse nulls in non-nullable fields of the user's schema."""
        self._strict = [(position, self._spark.names[position]) for position in not_null_fields(schema)]
        if self._strict:
            is_stored_form = self.is_stored_form
            self.is_stored_form = lambda value: is_stored_form(value) and None not in value

    def from_user(self, value: Any) -> tuple[Any, ...]:
        """Convert a value from the user to its stored form.

        Raises:
            Refused: Spark refuses it.
        """
        return self.converted(tuple(map(self._normalized, value)))

    def converted(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        """Convert a value to its stored form without first replacing the scalars of NumPy and pandas in it.

        Raises:
            Refused: Spark refuses it.
        """
        stored: tuple[Any, ...] = self._from_user(self._spark.toInternal(value))
        for position, name in self._strict:
            if stored[position] is None:
                raise Refused(null_field(position, name))
        return stored

    def to_user(self, kept: tuple[Any, ...]) -> tuple[Any, ...]:
        """Convert a stored value to what a user gets, with new objects where they are mutable."""
        return tuple(
            [
                value if show is None or value is None else show(value)
                for value, show in zip(kept, self._shown, strict=True)
            ]
        )

    def row(self, kept: tuple[Any, ...]) -> Row:
        """Convert a stored value to a `Row` with field names."""
        return _create_row(self._spark.names, list(self.to_user(kept)))

    @cached_property
    def arrow(self) -> pa.DataType:
        """Arrow type of a column of stored values."""
        return self.dtype.arrow

    @cached_property
    def identity(self) -> Convert | None:
        """Function that maps equal map keys to equal objects; None if the stored keys themselves are equal."""
        return self.ordering if not self.plain or holds_floats(self.dtype) else None

    @cached_property
    def ordering(self) -> Callable[[Any], bytes]:
        """Function from a stored map key to bytes in the order of a map's entries."""
        return row_bytes(self.dtype)


@cache
def _normalized() -> Convert:
    """Return PySpark's function that replaces scalars of NumPy and pandas by Python values."""
    from pyspark.sql.streaming.stateful_processor_api_client import _load_numpy, _normalize_state_value

    _load_numpy()
    normalize: Convert = _normalize_state_value
    return normalize


# values that are stored unchanged -------------------------------------------------------------------------------


def _stored_form_check(dtype: DataType) -> Convert:
    """Return a fast check whether a value is stored unchanged; it is false where that is uncertain."""
    checks: list[Any] = [_is_certainly_stored(inner) for _, inner in dtype.fields]
    if None in checks:
        return lambda value: False
    count = len(checks)
    if count == 1:
        only = checks[0]
        return lambda value: type(value) is tuple and len(value) == 1 and only(value[0])

    def kept(value: Any) -> bool:
        return type(value) is tuple and len(value) == count and all(map(operator.call, checks, value))

    return kept


def _is_certainly_stored(dtype: DataType) -> Convert | None:
    if dtype.name in _BITS:
        high = 1 << (_BITS[dtype.name] - 1)
        low = -high
        return lambda value: (type(value) is int and low <= value < high) or value is None
    if dtype.name == "string":
        return lambda value: (
            (type(value) is str and (value.isascii() or not _LONE_SURROGATE.search(value))) or value is None
        )
    kind = {"boolean": bool, "double": float}.get(dtype.name)
    return kind and (lambda value: type(value) is kind or value is None)


# conversion as in the JVM -------------------------------------------------------------------------------------


def _read(value: Any) -> Any:
    """Return what the JVM reads when a value is unpickled."""
    kind = type(value)
    if kind in _JVM_TYPES or (kind in (dt.datetime, dt.time) and value.tzinfo is None):
        return value
    if kind is Decimal and (value.is_finite() or str(value) == "NaN"):
        return value if value.is_finite() else math.nan
    pickle.dumps(value, pickle.HIGHEST_PROTOCOL)  # raises for values that cannot be pickled, as in Spark
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return _PICKLED_BY_NAME
    made = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if isinstance(made, str):
        return _PICKLED_BY_NAME
    function, arguments, attributes = (*made, None)[:3]
    plain = function is copyreg.__newobj__ and len(arguments) == 1  # type: ignore[attr-defined]
    if not plain or not isinstance(attributes, dict | None):
        raise Refused(f"{kind.__module__}.{kind.__qualname__} is no value that Spark can read.")
    return {"__class__": f"{kind.__module__}.{kind.__qualname__}"} | (attributes or {})


def _from_user(dtype: DataType) -> Convert:
    make = _make(dtype)

    def from_user(value: Any) -> Any:
        read = _read(value)
        return None if read is None else make(read)

    return from_user


def _make(dtype: DataType) -> Convert:
    name = dtype.name
    if name == "struct":
        return _struct(dtype)
    if name == "array":
        return _array(dtype)
    if name == "map":
        return _map(dtype)
    if name in _BITS:
        return _whole(_BITS[name])
    if name in ("date", "timestamp", "timestamp_ntz"):
        return _whole(32 if name == "date" else 64)
    if name == "boolean":
        return lambda value: value if isinstance(value, bool) else None
    if name == "double":
        return lambda value: float(value) if isinstance(value, float) else None
    if name == "float":
        return lambda value: _short(value) if isinstance(value, float) else None
    if name == "string":
        return _text
    if name == "binary":
        return _binary
    return _decimal(dtype)


def _struct(dtype: DataType) -> Convert:
    fields = [_from_user(inner) for _, inner in dtype.fields]

    def make(value: Any) -> Any:
        if not isinstance(value, tuple):
            return None
        if len(value) != len(fields):
            raise Refused(wrong_length(len(fields), len(value)))
        return tuple([field(item) for field, item in zip(fields, value, strict=True)])

    return make


def _array(dtype: DataType) -> Convert:
    element = _from_user(dtype.fields[0][1])

    def make(value: Any) -> Any:
        if isinstance(value, bytes | bytearray):
            # Java's bytes are signed.
            value = np.frombuffer(value, np.int8).tolist()
        return [element(item) for item in value] if isinstance(value, list | tuple) else None

    return make


def _map(dtype: DataType) -> Convert:
    key, item = (_from_user(inner) for _, inner in dtype.fields)
    zero = ZEROS.get(dtype.fields[0][1].name)

    def make(value: Any) -> Any:
        if not isinstance(value, dict):
            return None
        pairs = [(key(k), item(v)) for k, v in value.items()]
        if zero is not None:
            return [(zero if k is None else k, v) for k, v in pairs]
        if any(k is None for k, _ in pairs):
            raise Refused(null_in_map_key())
        return pairs

    return make


def _whole(bits: int) -> Convert:
    high = 1 << (bits - 1)

    def make(value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 63) <= value < 1 << 63:
            return None
        # Two's complement, as the JVM narrows integers: bits that do not fit are lost.
        return ((int(value) + high) & (2 * high - 1)) - high

    return make


def _short(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _binary(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value).encode()
    return bytes(value) if isinstance(value, bytes | bytearray) else None


def _decimal(dtype: DataType) -> Convert:
    unit = Decimal(1).scaleb(-dtype.scale)

    def make(value: Any) -> Any:
        if not isinstance(value, Decimal):
            return None
        try:
            scaled = value.quantize(unit, context=_EXACT)
        except InvalidOperation:
            raise Refused(decimal_too_long(value, value, dtype.precision, dtype.scale)) from None
        if len(scaled.as_tuple().digits) > dtype.precision:
            raise Refused(decimal_too_long(value, scaled, dtype.precision, dtype.scale))
        return scaled if scaled else abs(scaled)  # Java has no negative zero

    return make


def _text(value: Any) -> str:
    """Return Java's text of a value; refuse values whose text has an address or depends on hash order."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | Decimal):
        return str(value or abs(value))
    if isinstance(value, float):
        return _java_double(value)
    if isinstance(value, dt.timedelta):
        total = f"{value.total_seconds():.6f}".rstrip("0").rstrip(".")
        parts = f"{value.days} days, {value.seconds} seconds, {value.microseconds} microseconds"
        return f"Timedelta: {parts} (total: {total} seconds)"
    if isinstance(value, dt.time):
        parts = f"{value.hour} hours, {value.minute} minutes, {value.second} seconds"
        return f"Time: {parts}, {value.microsecond} microseconds"
    if isinstance(value, list) or (isinstance(value, set | frozenset) and len(value) < 2):
        return f"[{', '.join(_text(_read(item)) for item in value)}]"
    if isinstance(value, dict) and len(value) < 2:
        return "{" + ", ".join(f"{_text(_read(k))}={_text(_read(v))}" for k, v in value.items()) + "}"
    kind = "a class or function" if value is _PICKLED_BY_NAME else type(value).__qualname__
    raise Refused(f"{kind} has no text that a string field could keep.")


def _java_double(value: float) -> str:
    """Format a number like `Double.toString`: shortest unique digits, with an exponent if very large or small."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    sign, numbers, exponent = Decimal(repr(float(value))).as_tuple()
    digits = "".join(map(str, numbers)).rstrip("0") or "0"
    point = len(numbers) + int(exponent)
    text = "-" if sign else ""
    if value == 0:
        return text + "0.0"
    if -3 < point <= 7:
        digits = digits.ljust(point, "0")
        whole, rest = (digits[:point], digits[point:]) if point > 0 else ("0", "0" * -point + digits)
        return f"{text}{whole}.{rest or '0'}"
    return f"{text}{digits[0]}.{digits[1:] or '0'}E{point - 1}"


# values for the user -------------------------------------------------------------------------------------------


def _shown(dtype: DataType) -> Convert | None:
    """Return the conversion from the stored form to what a user gets; None if both are the same."""
    if dtype.name in ("date", "timestamp", "timestamp_ntz"):
        convert: Convert = spark_type(dtype).fromInternal
        return convert
    if dtype.name == "struct":
        return ValueCodec(dtype).row
    if dtype.name == "array":
        show = _null_safe(dtype.fields[0][1])
        return lambda values: list(map(show, values)) if show else list(values)
    if dtype.name == "map":
        key, item = (_null_safe(inner) or (lambda value: value) for _, inner in dtype.fields)
        return lambda pairs: {key(k): item(v) for k, v in pairs}
    return None


def _null_safe(dtype: DataType) -> Convert | None:
    show = _shown(dtype)
    return show and (lambda value: None if value is None else show(value))
