"""Prefetch hints from the rows that the source will give to the next batch."""
