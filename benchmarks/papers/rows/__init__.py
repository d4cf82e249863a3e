"""The rows of the report, paper by paper."""

from benchmarks.papers.rows import apsys, flink, flowkv, misa, prefetching

ROWS = {row.name: row for paper in (flink, prefetching, flowkv, apsys, misa) for row in paper.ROWS}
"""All rows by name, in the order of the report."""
