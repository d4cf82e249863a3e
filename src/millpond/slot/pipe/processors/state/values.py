"""What a user gives to state and gets from it, as Spark converts both.

What is given goes through PySpark's own `toInternal`, and then becomes what the JVM makes of it: a value of another
type than the field's silently becomes null, whole numbers lose what does not fit, a string field takes what has a text.
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

from millpond.slot.pipe.processors.state.order import row_bytes
from millpond.slot.pipe.processors.state.refusals import decimal_too_long, null_field, null_in_map_key, wrong_length
from millpond.slot.pipe.processors.state.schemas import spark_type
from millpond.spec.types import DataType, holds_floats

_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_EXACT = Context(prec=76, rounding=ROUND_HALF_UP)
_READ = frozenset(
    [type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, dt.date, dt.timedelta]
)
"""Types whose values Spark's JVM reads as they are."""
_NAMED = object()
"""What it reads of a class or a function, which travels as its name: something of no type of Spark's."""
ZEROS = {"float": 0.0, "double": 0.0, "boolean": False}
ZEROS |= dict.fromkeys([*_BITS, "date", "timestamp", "timestamp_ntz"], 0)
"""What null becomes where it does not fit the type's binary format, in keys of maps and fields that are never null."""
_LONE = re.compile("[\ud800-\udfff]")

Convert = Callable[[Any], Any]


class Refused(Exception):
    """Spark refuses a value; the message says what it says of it."""


class Form:
    """The values of a variable: tuples of a struct's fields.

    What is held of a value is what Spark keeps: numbers for dates and times, tuples for structs.

    Args:
        dtype: the struct.

    Attributes:
        plain: whether what is kept is what a user gets, and nobody can change it.
    """

    def __init__(self, dtype: DataType) -> None:
        self.dtype = dtype
        self.plain = all(_shown(inner) is None for _, inner in dtype.fields)
        self._spark: StructType = spark_type(dtype)
        self._shown = [_shown(inner) for _, inner in dtype.fields]
        self._taken = _taken(dtype)
        self._normalized = _normalized()
        self._strict: list[tuple[int, str]] = []
        self.kept = _kept(dtype)

    def require(self, schema: Any) -> None:
        """Refuse nulls where a schema, as the user gives it, does not allow them."""
        if isinstance(schema, StructType):
            self._strict = [(at, one.name) for at, one in enumerate(schema.fields) if not one.nullable]
        if self._strict:
            self.kept = lambda value: False

    def taken(self, value: Any) -> tuple[Any, ...]:
        """What is kept of a value that a user gives.

        Raises:
            Refused: Spark refuses it.
        """
        return self.converted(tuple(map(self._normalized, value)))

    def converted(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same of a value as it is, with whatever NumPy and pandas have put into it.

        Raises:
            Refused: Spark refuses it.
        """
        made: tuple[Any, ...] = self._taken(self._spark.toInternal(value))
        for at, name in self._strict:
            if made[at] is None:
                raise Refused(null_field(at, name))
        return made

    def shown(self, kept: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a user gets of a value, as a new object where it is one that can be changed."""
        return tuple(
            [
                value if show is None or value is None else show(value)
                for value, show in zip(kept, self._shown, strict=True)
            ]
        )

    def row(self, kept: tuple[Any, ...]) -> Row:
        """The same as a row with names."""
        return _create_row(self._spark.names, list(self.shown(kept)))

    @cached_property
    def arrow(self) -> pa.DataType:
        """The type of a column of values."""
        return self.dtype.arrow

    @cached_property
    def identity(self) -> Convert | None:
        """What makes something of a value that is equal for equal keys of a map; None if the value itself is."""
        return self.ordering if not self.plain or holds_floats(self.dtype) else None

    @cached_property
    def ordering(self) -> Callable[[Any], bytes]:
        """What makes bytes that are in the order of a map's entries."""
        return row_bytes(self.dtype)


@cache
def _normalized() -> Convert:
    """PySpark's own function that takes scalars of NumPy and pandas for what they hold."""
    from pyspark.sql.streaming.stateful_processor_api_client import _load_numpy, _normalize_state_value

    _load_numpy()
    made: Convert = _normalize_state_value
    return made


# what is certainly kept as it is given ------------------------------------------------------------------------


def _kept(dtype: DataType) -> Convert:
    """Whether a value is kept as it is: quickly told, and false where it is not certain."""
    checks: list[Any] = [_certain(inner) for _, inner in dtype.fields]
    if None in checks:
        return lambda value: False
    count = len(checks)
    if count == 1:
        only = checks[0]
        return lambda value: type(value) is tuple and len(value) == 1 and only(value[0])

    def kept(value: Any) -> bool:
        return type(value) is tuple and len(value) == count and all(map(operator.call, checks, value))

    return kept


def _certain(dtype: DataType) -> Convert | None:
    if dtype.name in _BITS:
        high = 1 << (_BITS[dtype.name] - 1)
        low = -high
        return lambda value: (type(value) is int and low <= value < high) or value is None
    if dtype.name == "string":
        return lambda value: (type(value) is str and (value.isascii() or not _LONE.search(value))) or value is None
    kind = {"boolean": bool, "double": float}.get(dtype.name)
    return kind and (lambda value: type(value) is kind or value is None)


# what the JVM makes of what it is given -----------------------------------------------------------------------


def _read(value: Any) -> Any:
    """What the JVM reads of a value."""
    kind = type(value)
    if kind in _READ or (kind in (dt.datetime, dt.time) and value.tzinfo is None):
        return value
    if kind is Decimal and (value.is_finite() or str(value) == "NaN"):
        return value if value.is_finite() else math.nan
    pickle.dumps(value, pickle.HIGHEST_PROTOCOL)  # may be what fails in Spark
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return _NAMED
    made = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if isinstance(made, str):
        return _NAMED
    function, arguments, attributes = (*made, None)[:3]
    plain = function is copyreg.__newobj__ and len(arguments) == 1  # type: ignore[attr-defined]
    if not plain or not isinstance(attributes, dict | None):
        raise Refused(f"{kind.__module__}.{kind.__qualname__} is no value that Spark can read.")
    return {"__class__": f"{kind.__module__}.{kind.__qualname__}"} | (attributes or {})


def _taken(dtype: DataType) -> Convert:
    make = _make(dtype)

    def taken(value: Any) -> Any:
        read = _read(value)
        return None if read is None else make(read)

    return taken


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
    fields = [_taken(inner) for _, inner in dtype.fields]

    def make(value: Any) -> Any:
        if not isinstance(value, tuple):
            return None
        if len(value) != len(fields):
            raise Refused(wrong_length(len(fields), len(value)))
        return tuple([field(one) for field, one in zip(fields, value, strict=True)])

    return make


def _array(dtype: DataType) -> Convert:
    element = _taken(dtype.fields[0][1])

    def make(value: Any) -> Any:
        if isinstance(value, bytes | bytearray):
            value = np.frombuffer(value, np.int8).tolist()
        return [element(one) for one in value] if isinstance(value, list | tuple) else None

    return make


def _map(dtype: DataType) -> Convert:
    key, item = (_taken(inner) for _, inner in dtype.fields)
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
    """Java's text of a value, unless that has an address, or parts in the order of their hashes."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return _LONE.sub("\ufffd", value)
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
        return f"[{', '.join(_text(_read(one)) for one in value)}]"
    if isinstance(value, dict) and len(value) < 2:
        return "{" + ", ".join(f"{_text(_read(k))}={_text(_read(v))}" for k, v in value.items()) + "}"
    kind = "a class or function" if value is _NAMED else type(value).__qualname__
    raise Refused(f"{kind} has no text that a string field could keep.")


def _java_double(value: float) -> str:
    """As `Double.toString` writes a number: the fewest digits that tell it, with an exponent if it is far from 1."""
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


# what a user gets ---------------------------------------------------------------------------------------------


def _shown(dtype: DataType) -> Convert | None:
    """What becomes of a value that is kept when a user gets it; None if it is the same."""
    if dtype.name in ("date", "timestamp", "timestamp_ntz"):
        made: Convert = spark_type(dtype).fromInternal
        return made
    if dtype.name == "struct":
        return Form(dtype).row
    if dtype.name == "array":
        show = _or_nothing(dtype.fields[0][1])
        return lambda values: list(map(show, values)) if show else list(values)
    if dtype.name == "map":
        key, item = (_or_nothing(inner) or (lambda value: value) for _, inner in dtype.fields)
        return lambda pairs: {key(k): item(v) for k, v in pairs}
    return None


def _or_nothing(dtype: DataType) -> Convert | None:
    show = _shown(dtype)
    return show and (lambda value: None if value is None else show(value))
