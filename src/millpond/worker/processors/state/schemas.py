"""Types of state variables as Spark's type objects."""

from __future__ import annotations

import re

from pyspark.sql import types as spark
from pyspark.sql.types import DataType as SparkType

from millpond.spec.types import DataType, has_not_null_fields

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
_DDL_PART = re.compile(r"`[^`]*`|'(?:[^'\\]|\\.)*'|.", re.DOTALL)


def spark_type(dtype: DataType) -> SparkType:
    """Return Spark's type object for a type."""
    inner = [spark_type(element) for _, element in dtype.fields]
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


def not_null_fields(schema: spark.StructType | str) -> list[int]:
    """Return the positions of a schema's fields that are declared NOT NULL; the schema is a type or DDL."""
    if isinstance(schema, str):
        nullable = [not has_not_null_fields(field) for field in _ddl_fields(schema)]
    else:
        nullable = [field.nullable for field in schema.fields]
    return [position for position, may_be_null in enumerate(nullable) if not may_be_null]


def _ddl_fields(ddl: str) -> list[str]:
    """Split a list of fields at the commas between them."""
    fields, depth = [""], 0
    for part in _DDL_PART.findall(ddl):
        depth += (part in "<(") - (part in ">)")
        if part == "," and not depth:
            fields.append("")
        else:
            fields[-1] += part
    return fields
