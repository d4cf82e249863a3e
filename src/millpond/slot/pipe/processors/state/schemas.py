"""Types of state variables, as Spark's objects and as text."""

from __future__ import annotations

import re

from pyspark.sql import types as spark
from pyspark.sql.types import DataType as SparkType

from millpond.spec.types import DataType

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_ATOMIC: dict[str, SparkType] = {
    "boolean": spark.BooleanType(),
    "tinyint": spark.ByteType(),
    "smallint": spark.ShortType(),
    "int": spark.IntegerType(),
    "bigint": spark.LongType(),
    "date": spark.DateType(),
    "timestamp": spark.TimestampType(),
    "timestamp_ntz": spark.TimestampNTZType(),
    "float": spark.FloatType(),
    "double": spark.DoubleType(),
    "string": spark.StringType(),
    "binary": spark.BinaryType(),
}


def spark_type(dtype: DataType) -> SparkType:
    """Spark's object for a type."""
    inner = [spark_type(one) for _, one in dtype.fields]
    if dtype.name == "struct":
        names = (name for name, _ in dtype.fields)
        return spark.StructType([spark.StructField(*field) for field in zip(names, inner, strict=True)])
    if dtype.name == "array":
        return spark.ArrayType(inner[0])
    if dtype.name == "map":
        return spark.MapType(*inner)
    if dtype.name == "decimal":
        return spark.DecimalType(dtype.precision, dtype.scale)
    return _ATOMIC[dtype.name]


def text(dtype: SparkType) -> str:
    """A type as DDL, with the names of its fields quoted where they have to be, as Spark's own text is not."""
    if isinstance(dtype, spark.StructType):
        return f"struct<{','.join(f'{_quoted(one.name)}:{text(one.dataType)}' for one in dtype.fields)}>"
    if isinstance(dtype, spark.ArrayType):
        return f"array<{text(dtype.elementType)}>"
    if isinstance(dtype, spark.MapType):
        return f"map<{text(dtype.keyType)},{text(dtype.valueType)}>"
    return str(dtype.simpleString())


def _quoted(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else "`" + name.replace("`", "``") + "`"
