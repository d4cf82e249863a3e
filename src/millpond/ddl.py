"""Names and types as Spark's SQL reads them."""

from __future__ import annotations

import re

from pyspark.sql.types import ArrayType, DataType, MapType, StructType

PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
"""Names that need no quotes."""


def quoted(name: str) -> str:
    """A column name as SQL."""
    return "`" + name.replace("`", "``") + "`"


def ddl(dtype: DataType) -> str:
    """A type with the names of its fields quoted where they have to be, as Spark's own text of it is not."""
    if isinstance(dtype, StructType):
        names = (f.name if PLAIN_NAME.fullmatch(f.name) else quoted(f.name) for f in dtype.fields)
        return f"struct<{','.join(f'{n}:{ddl(f.dataType)}' for n, f in zip(names, dtype.fields, strict=True))}>"
    if isinstance(dtype, ArrayType):
        return f"array<{ddl(dtype.elementType)}>"
    if isinstance(dtype, MapType):
        return f"map<{ddl(dtype.keyType)},{ddl(dtype.valueType)}>"
    return str(dtype.simpleString())
