"""Types of state variables as Spark's type objects."""

from __future__ import annotations

from pyspark.sql import types as spark
from pyspark.sql.types import DataType as SparkType

from millpond.spec.types import DataType, not_null_in_ddl

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
        return not_null_in_ddl(schema)
    return [position for position, field in enumerate(schema.fields) if not field.nullable]
