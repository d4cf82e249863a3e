"""`millpond.read_state`: what it says where there is nothing to read."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import millpond
from millpond.errors import UsageError
from tests.s3 import s3


@pytest.mark.parametrize("location", ["", " ", "no such:place", "nowhere:/place"])
def test_what_is_no_location_is_a_usage_error(spark: SparkSession, location: str) -> None:
    with pytest.raises(UsageError, match="checkpointLocation"):
        millpond.read_state(spark, location)


def test_where_no_query_has_been_is_a_usage_error(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Millpond state here") as raised:
        millpond.read_state(spark, str(tmp_path))
    assert raised.value.file == f"file:{tmp_path}/millpond"


def test_an_object_store_that_spark_has_no_connector_for_is_looked_at(spark: SparkSession) -> None:
    with s3() as bucket, pytest.raises(UsageError, match="no Millpond state here") as raised:
        millpond.read_state(spark, f"{bucket}/nothing")
    assert raised.value.file == f"{bucket}/nothing/millpond"
