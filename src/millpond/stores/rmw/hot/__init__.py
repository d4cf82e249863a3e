"""The rows of a table that are in memory: slab, index and scratch rows."""
