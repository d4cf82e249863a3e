"""Rows ordered by (hash, time): sort, merge, and join with probes."""
