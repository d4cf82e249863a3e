from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

DDL = (
    "k int, s string, v bigint, d double, b boolean, dec decimal(38,10), ts timestamp, st struct<a:int,b:string>, "
    "arr array<int>, m map<string,int>"
)


@pytest.fixture(scope="session")
def stream(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    folder: Path = tmp_path_factory.mktemp("empty")
    df = spark.readStream.schema(DDL).parquet(str(folder))
    df.createOrReplaceTempView("events")
    return df
