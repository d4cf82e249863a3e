"""The S3 server of the benchmarks, its bucket, and the settings by which Spark finds it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyspark
from tests.servers.seaweedfs import ACCESS_KEY, BUCKET, SECRET_KEY, running, weed


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield the endpoint of an S3 server with an empty bucket, which is removed afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="millpond-s3-") as folder,
        running(weed(), Path(folder), volume_mb=2000) as endpoint,
    ):
        yield endpoint


def bucket(scheme: str, folder: str) -> str:
    """Return the URL of a folder in the server's bucket; the scheme is `s3` for Millpond, `s3a` for Spark."""
    return f"{scheme}://{BUCKET}/{folder}"


def hadoop_settings(endpoint: str) -> Mapping[str, str]:
    """Return the settings by which Spark finds the server, with the jars that it needs."""
    hadoop = next((Path(pyspark.__file__).parent / "jars").glob("hadoop-client-api-*.jar")).stem.rpartition("-")[2]
    return {
        "spark.jars.packages": f"org.apache.hadoop:hadoop-aws:{hadoop}",
        "spark.hadoop.fs.s3a.endpoint": endpoint,
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": ACCESS_KEY,
        "spark.hadoop.fs.s3a.secret.key": SECRET_KEY,
    }
