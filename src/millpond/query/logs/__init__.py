"""Spark's offset log and commit log beside the state: progress, ownership, forks and garbage collection."""
