"""Benchmarks: the same rows through Millpond, Spark's RocksDB and Flink, side by side."""
