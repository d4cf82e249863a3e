"""Names and types as Spark SQL text."""

from __future__ import annotations

import re

from pyspark.sql.types import ArrayType, DataType, MapType, StructType

PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
"""Names that need no backticks."""


def quoted(name: str) -> str:
    """Return a column name in backticks."""
    return "`" + name.replace("`", "``") + "`"


def ddl(dtype: DataType) -> str:
    """Return a type as DDL, with field names quoted where that is necessary (Spark's `simpleString` never quotes)."""
    if isinstance(dtype, StructType):
        names = (f.name if PLAIN_NAME.fullmatch(f.name) else quoted(f.name) for f in dtype.fields)
        return f"struct<{','.join(f'{n}:{ddl(f.dataType)}' for n, f in zip(names, dtype.fields, strict=True))}>"
    if isinstance(dtype, ArrayType):
        return f"array<{ddl(dtype.elementType)}>"
    if isinstance(dtype, MapType):
        return f"map<{ddl(dtype.keyType)},{ddl(dtype.valueType)}>"
    return str(dtype.simpleString())
