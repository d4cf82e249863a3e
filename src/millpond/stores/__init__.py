"""State by access pattern: the read-modify-write store, its hot table, runs and eviction."""
