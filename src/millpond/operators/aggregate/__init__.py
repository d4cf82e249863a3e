"""Grouping: running groups, event-time windows, buffered rows, and groups that choose their store at run time."""
