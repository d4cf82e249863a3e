"""Spark's column types as Millpond uses them: read from DDL, without Spark.

A `DataType` knows its Arrow type, as in Spark's own Arrow conversion, and its machine form: the representation of its
values in kernels (`int`, `float`, `wide` or `bytes`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import msgspec
import pyarrow as pa

from millpond.errors import UsageError
from millpond.layout import Kind

Machine = Literal["int", "float", "wide", "bytes"]
"""A value in kernels: int64, float64, 128-bit integer in two words, or a byte string."""

LONG_DECIMAL = 18
"""Maximum number of digits of a decimal that fits one word."""

_ALIASES = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "dec": "decimal",
    "numeric": "decimal",
    "timestamp_ltz": "timestamp",
    "char": "string",
    "varchar": "string",
}
_MACHINE: dict[str, Machine] = {
    "boolean": "int",
    "tinyint": "int",
    "smallint": "int",
    "int": "int",
    "bigint": "int",
    "date": "int",
    "timestamp": "int",
    "timestamp_ntz": "int",
    "float": "float",
    "double": "float",
    "string": "bytes",
    "binary": "bytes",
}
_ARROW = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "void": pa.null(),
}


class DataType(msgspec.Struct, frozen=True):
    """A Spark type.

    Attributes:
        name: Spark's canonical name (`bigint`, `decimal`, `struct`, `array`, …); unknown names are kept.
        precision, scale: of a decimal.
        fields: the fields of a struct; the single `element` of an array; `key` and `value` of a map; for `versions`, a
            type whose values evolve in the state, all types they have had, the newest last.
        collation: of a string that is not compared by its bytes.
    """

    name: str
    precision: int = 0
    scale: int = 0
    fields: tuple[tuple[str, DataType], ...] = ()
    collation: str = ""

    @property
    def machine(self) -> Machine | None:
        """The machine form of an atomic type; None for nested and unknown types."""
        if self.name == "decimal":
            return "int" if self.precision <= LONG_DECIMAL else "wide"
        return _MACHINE.get(self.name)

    @property
    def nested(self) -> bool:
        """Whether values contain other values; a state column stores them as byte strings (`columns.nested`)."""
        return self.name in ("struct", "array", "map", "versions")

    @property
    def kind(self) -> Kind:
        """The kind of state column that holds a value of this type."""
        machine = self.machine
        return "wide" if machine == "wide" else "bytes" if machine == "bytes" or self.nested else "word"

    @property
    def atomic(self) -> bool:
        """Whether values are single machine values compared by their bytes (no collation)."""
        return self.machine is not None and not self.collation

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type that Spark uses for this type."""
        if self.name == "decimal":
            return pa.decimal128(self.precision, self.scale)
        if self.name == "struct":
            if has_duplicate_fields(self):
                raise UsageError("Spark hands no struct with two fields of one name to Python.", action="Rename one.")
            return pa.struct([pa.field(name, inner.arrow) for name, inner in self.fields])
        if self.name == "array":
            return pa.list_(pa.field("element", self.fields[0][1].arrow))
        if self.name == "map":
            return pa.map_(self.fields[0][1].arrow, self.fields[1][1].arrow)
        if self.name == "versions":
            return self.fields[-1][1].arrow
        if self.name not in _ARROW:
            raise UsageError(f"The type {self.name!r} has no Arrow form here.", action="Leave this operator on Spark.")
        return _ARROW[self.name]


_NAMES = {arrow: name for name, arrow in _ARROW.items()}


def spark_name(arrow: pa.DataType) -> str:
    """Return Spark's name of an Arrow type, as users write it; Arrow's own name if Spark has none."""
    if pa.types.is_decimal(arrow):
        return f"decimal({arrow.precision},{arrow.scale})"
    if pa.types.is_struct(arrow):
        return f"struct<{','.join(f'{field.name}:{spark_name(field.type)}' for field in arrow)}>"
    if pa.types.is_map(arrow):
        return f"map<{spark_name(arrow.key_type)},{spark_name(arrow.item_type)}>"
    if pa.types.is_list(arrow):
        return f"array<{spark_name(arrow.value_type)}>"
    return _NAMES.get(arrow, str(arrow))


def leaves(dtype: DataType) -> Iterator[DataType]:
    """Yield the stored columns of a key of this type.

    A struct yields a null flag and its fields' leaves; any other type, also an array or a map, is one column.
    """
    if dtype.name == "struct":
        yield DataType("boolean")
        for _, inner in dtype.fields:
            yield from leaves(inner)
    else:
        yield dtype


def holds_floats(dtype: DataType) -> bool:
    """Whether values of this type may contain floats: different floats may be equal as keys."""
    return dtype.machine == "float" or any(holds_floats(inner) for _, inner in dtype.fields)


def has_duplicate_fields(dtype: DataType) -> bool:
    """Whether a struct in this type has two fields of one name, which Spark's Arrow conversion refuses."""
    names = [name for name, _ in dtype.fields]
    return len(set(names)) < len(names) or any(has_duplicate_fields(inner) for _, inner in dtype.fields)


def evolves(before: DataType, now: DataType) -> bool:
    """Whether values of type `before` can be read as `now`, by Spark's rules for state encoded as Avro.

    Struct fields are matched by name: they may be added, removed and moved. Numbers may be widened.
    """
    if before == now:
        return True
    if before.name != now.name:
        widths = [_WIDER.index(dtype.name) if dtype.name in _WIDER else -1 for dtype in (before, now)]
        return 0 <= widths[0] < widths[1]
    if now.name == "struct":
        old = dict(before.fields)
        return all(evolves(old[name], inner) for name, inner in now.fields if name in old)
    same_keys = before.fields[:-1] == now.fields[:-1]
    return now.nested and same_keys and evolves(before.fields[-1][1], now.fields[-1][1])


_WIDER = ("tinyint", "smallint", "int", "bigint", "float", "double")

_TOKEN = re.compile(r"""\s*(?:`(?:[^`]|``)*`|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[A-Za-z_0-9.]+|\S)""")


def not_null_in_ddl(fields: str) -> list[int]:
    """Return the positions of the fields of a DDL list (`a int, b string not null`) that are declared NOT NULL."""
    positions: list[int] = []
    position = depth = 0
    before = ""
    for match in _TOKEN.finditer(fields):
        token = match.group(0).strip().lower()
        depth += (token in "<(") - (token in ">)")
        if not depth and token == ",":
            position += 1
        elif not depth and (before, token) == ("not", "null"):
            positions.append(position)
        before = token
    return positions


@lru_cache(maxsize=4096)
def parse_type(ddl: str) -> DataType:
    """Parse a type from DDL (`bigint`, `decimal(10,2)`, `struct<a:int,b:array<string>>`).

    Raises:
        UsageError: the text is not a type.
    """
    tokens = [m.group(0).strip() for m in _TOKEN.finditer(ddl) if m.group(0).strip()]
    parser = _Parser(ddl, tokens)
    dtype = parser.type()
    if parser.position != len(tokens):
        raise parser.error()
    return dtype


class _Parser:
    """Recursive descent over the tokens of one DDL type."""

    def __init__(self, ddl: str, tokens: list[str]) -> None:
        self.ddl = ddl
        self.tokens = tokens
        self.position = 0

    def error(self) -> UsageError:
        return UsageError(f"Not a type: {self.ddl!r}.", action="Give a Spark type as DDL, e.g. decimal(10,2).")

    def peek(self) -> str:
        return self.tokens[self.position].lower() if self.position < len(self.tokens) else ""

    def next(self) -> str:
        if self.position >= len(self.tokens):
            raise self.error()
        self.position += 1
        return self.tokens[self.position - 1]

    def expect(self, token: str) -> None:
        if self.next().lower() != token:
            raise self.error()

    def type(self) -> DataType:
        name = self.next().lower()
        name = _ALIASES.get(name, name)
        if not re.fullmatch(r"[a-z_][a-z_0-9]*", name):
            raise self.error()
        if name == "struct":
            return DataType("struct", fields=self.fields())
        if name in ("array", "map"):
            self.expect("<")
            fields = [("element" if name == "array" else "key", self.type())]
            if name == "map":
                self.expect(",")
                fields.append(("value", self.type()))
            self.expect(">")
            return DataType(name, fields=tuple(fields))
        if name == "versions":
            return DataType(name, fields=tuple((str(number), dtype) for number, dtype in enumerate(self.types())))
        numbers = self.numbers()
        if name == "decimal":
            # Spark's default is decimal(10,0).
            precision, scale = (*numbers, 0)[:2] if numbers else (10, 0)
            if not 1 <= precision <= 38 or scale > precision:
                raise self.error()
            return DataType("decimal", precision, scale)
        if name == "string" and self.peek() == "collate":
            self.next()
            collation = self.next()
            return DataType("string", collation="" if collation.upper() == "UTF8_BINARY" else collation)
        if name == "interval":  # the units, e.g. `interval day to second`, are part of the type's name
            return DataType(" ".join([name, *self.words()]))
        return DataType(name)

    def types(self) -> Iterator[DataType]:
        self.expect("<")
        yield self.type()
        while self.peek() == ",":
            self.next()
            yield self.type()
        self.expect(">")

    def words(self) -> Iterator[str]:
        while re.fullmatch(r"[a-z]+", self.peek()):
            yield self.next().lower()

    def numbers(self) -> tuple[int, ...]:
        if self.peek() != "(":
            return ()
        self.next()
        numbers = []
        while True:
            token = self.next()
            if not token.isdigit():
                raise self.error()
            numbers.append(int(token))
            separator = self.next()
            if separator == ")":
                return tuple(numbers)
            if separator != ",":
                raise self.error()

    def fields(self) -> tuple[tuple[str, DataType], ...]:
        self.expect("<")
        fields: list[tuple[str, DataType]] = []
        while self.peek() != ">":
            if fields:
                self.expect(",")
            name = self.next()
            if name.startswith("`"):
                name = name[1:-1].replace("``", "`")
            if self.peek() == ":":
                self.next()
            fields.append((name, self.type()))
            if self.peek() == "not":
                self.next()
                self.expect("null")
            if self.peek() == "comment":
                self.next()
                self.next()
        self.expect(">")
        return tuple(fields)
