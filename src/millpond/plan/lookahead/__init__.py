"""Who announces keys of a query's operators ahead of their rows (Keyed Prefetching §IV-A)."""
