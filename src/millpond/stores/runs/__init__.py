"""Runs: immutable files of rows in hash order, how they are searched, and their compaction."""
