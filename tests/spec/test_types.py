"""Spark's types and their Arrow forms."""

import pyarrow as pa
import pytest

from millpond.spec.types import parse_type, spark_name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "boolean",
            "tinyint",
            "smallint",
            "int",
            "bigint",
            "float",
            "double",
            "string",
            "binary",
            "date",
            "timestamp",
        ),
        *("timestamp_ntz", "decimal(10,2)", "array<int>", "map<string,array<date>>", "struct<a:bigint,b:decimal(3,1)>"),
    ],
)
def test_arrow_types_have_the_name_that_spark_gives_them(name: str) -> None:
    assert spark_name(parse_type(name).arrow) == name


def test_what_spark_does_not_have_keeps_its_name() -> None:
    assert spark_name(pa.time64("us")) == "time64[us]"
