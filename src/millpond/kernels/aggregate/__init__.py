"""Aggregation of values into groups."""
