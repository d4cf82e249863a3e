"""Spark's own tests of streams, of the installed version, with Millpond in the place of Spark's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pyspark.sql import SparkSession

from millpond.plan.catalyst.versions import calls_user_code
from tests.spark_suite.on_millpond import OnMillpond, Suite, modules, on_millpond

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.oracle]

if not calls_user_code():
    pytest.skip("Millpond runs processors on Spark 4.3 and later", allow_module_level=True)


def _only(*names: str) -> Callable[[str], bool]:
    return lambda name: name in names


def _all_but(*names: str) -> Callable[[str], bool]:
    return lambda name: name not in ("test_assert_classic_mode", *names)


_STORE = "reads Spark's own state store (`statestore`, `state-metadata`)"
_PROGRESS = "expects operators of Spark's own in the progress"
_BATCH = "no stream: Spark runs a processor over a table"
_PANDAS = "does nothing in the API of rows"
_STORED = {
    "test_transform_with_list_state_metadata": _STORE,
    "test_transform_with_value_state_metadata": _STORE,
    "test_transform_with_state_restart_with_multiple_rows_init_state": _STORE,
    "test_transform_with_state_with_timers_single_partition": _STORE,
}
_PROCESSED = {
    "test_transform_with_state_query_restarts": _PROGRESS,
    "test_transform_with_state_batch_query": _BATCH,
    "test_transform_with_state_batch_query_initial_state": _BATCH,
}
_ROWS = dict.fromkeys(
    (
        "test_transform_with_state_int_to_decimal_coercion",
        "test_transform_with_state_with_bytes_limit",
        "test_transform_with_state_with_records_limit",
    ),
    _PANDAS,
)

SUITES = [
    Suite("streaming.test_streaming", "StreamingTests", _only("test_streaming_drop_duplicate_within_watermark")),
    Suite(
        "streaming.test_streaming_foreach",
        "StreamingTestsForeach",
        _only(),
        {"test_streaming_foreach_with_process_throwing_error": "wants tasks that are tried once"},
    ),
    Suite("streaming.test_streaming_foreach_batch", "StreamingTestsForeachBatch", _only()),
    Suite(
        "streaming.test_streaming_listener",
        "StreamingListenerTests",
        _only(),
        {"test_listener_events": _PROGRESS, "test_streaming_progress": _PROGRESS},
    ),
    Suite("pandas.test_pandas_grouped_map_with_state", "GroupedApplyInPandasWithStateTests", _all_but()),
    Suite(
        "pandas.streaming.test_pandas_transform_with_state",
        "TransformWithStateInPandasTests",
        _all_but("test_not_nullable_fails"),
        _PROCESSED | {"test_transform_with_state_int_to_decimal_coercion": _BATCH},
    ),
    Suite(
        "pandas.streaming.test_transform_with_state",
        "TransformWithStateInPySparkTests",
        _all_but("test_not_nullable_fails"),
        _PROCESSED | _ROWS,
    ),
    Suite(
        "pandas.streaming.test_pandas_transform_with_state_state_variable",
        "TransformWithStateInPandasStateVariableTests",
        _all_but(),
        _STORED,
    ),
    Suite(
        "pandas.streaming.test_transform_with_state_state_variable",
        "TransformWithStateInPySparkStateVariableTests",
        _all_but(),
        _STORED,
    ),
]

NOT_RUN = {
    "streaming.test_streaming_kafka_rtm": "real-time mode, which stays on Spark; needs a Kafka server in Docker",
    "streaming.test_streaming_offline_state_repartition": "rewrites Spark's own state store",
    "pandas.streaming.test_pandas_transform_with_state_checkpoint_v2": "repeated with another format of Spark's store",
    "pandas.streaming.test_pandas_transform_with_state_state_variable_checkpoint_v2": "repeated, as above",
    "pandas.streaming.test_transform_with_state_checkpoint_v2": "repeated, as above",
    "pandas.streaming.test_transform_with_state_state_variable_checkpoint_v2": "repeated, as above",
    "pandas.streaming.test_tws_tester": "of PySpark's own tester, which runs no query",
    "test_python_streaming_datasource": "of sources and sinks, without state",
}
"""Modules that are left out, and why; beside those of Spark Connect, on which Millpond does not run."""

for _suite in SUITES:
    globals()[_suite.name] = on_millpond(_suite)


@pytest.fixture(scope="module", autouse=True)
def _application(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the tests run in the shared application, and find files by paths that they have in Spark's repository."""
    OnMillpond.application = spark
    OnMillpond.folder = tmp_path_factory.mktemp("spark_suite")
    texts = OnMillpond.folder / "python/test_support/sql/streaming"
    (texts / "time").mkdir(parents=True)
    (texts / "lines.txt").write_text("hello\nthis\n")
    (texts / "time/times.txt").write_text("".join(f"2024-01-01 00:00:{at:02};{at % 7}\n" for at in range(9)))
    hadoop = spark._jvm.org.apache.hadoop.fs
    files = hadoop.FileSystem.getLocal(spark._jsc.hadoopConfiguration())
    before = files.getWorkingDirectory()
    files.setWorkingDirectory(hadoop.Path(str(OnMillpond.folder)))
    yield
    files.setWorkingDirectory(before)


def test_every_module_is_run_or_left_out() -> None:
    """A version of Spark that has more of them does not go unnoticed."""
    found = {name for name in modules() if not name.startswith("connect.")}
    assert found == {suite.module for suite in SUITES} | set(NOT_RUN)
