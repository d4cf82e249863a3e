"""Lookup joins: rows with what a table outside of Spark has of their keys."""
