"""Spark's offset log and commit log: reading them, running a batch again, copying them to another checkpoint."""
