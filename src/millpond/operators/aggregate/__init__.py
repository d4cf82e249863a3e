"""Grouping: running groups, windows of event time, buffered rows, and groups that choose while they run."""
