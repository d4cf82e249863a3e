"""Checkpoints of queries: where their state is, which one owns it, forks and copies, garbage collection."""
