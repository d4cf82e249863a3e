"""The shared session, with Delta Lake in it where the environment has Delta (`make smoke-4.2`)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.servers.jars import Artifact, beside_spark

DELTA = Artifact(
    "io.delta", "delta-spark_4.2_2.13", "4.4.0", "a4ada9e5b372270346703e5d40d5dffcf74848b8e19ea52f80281f2c05d8078e"
)
"""What `configure_spark_with_delta_pip` of delta-spark 4.4.0 downloads on Spark 4.2."""


@pytest.fixture(scope="session", autouse=True)
def delta() -> Iterator[bool]:
    """Whether Delta Lake is here; it is given to the session before that starts."""
    if find_spec("delta") is None:
        yield False
        return
    settings = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",  # 50 tasks for each look at a table, by default
    }
    conf = " ".join(f"--conf {name}={value}" for name, value in settings.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_SUBMIT_ARGS", f"--jars {beside_spark(DELTA)} {conf} pyspark-shell")
        yield True
