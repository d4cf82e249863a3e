"""Runs: immutable files of rows in hash order, their search, and their compaction."""
