"""Benchmarks: the same rows through Millpond, Spark's RocksDB and Flink, side by side.

`cli` measures one workload on several engines, one after another. Each room imports only rooms that stand below it.
Servers, proxies and clusters come from `tests.servers` and `tests.support`.

- `papers`: runs the commands below, and compares their figures with what the papers say.
- `studies`: single measurements and checks, each started by its name.
- `misa`, `prefetch`: the measurements of two papers.
- `measuring`: measures a run from outside: process tree, limits, requests, times, results, tables.
- `engines`: the processes that are measured, and the S3 server for their state.
- `workloads`: the configuration of a run, its source and its query.
- `nexmark`: NEXMark's generator and queries.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The source tree."""
