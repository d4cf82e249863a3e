"""Prefetch sources: stages and source that know keys of operators before their rows (Keyed Prefetching §IV-A)."""
