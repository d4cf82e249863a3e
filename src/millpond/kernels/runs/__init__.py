"""Runs: search, filters, sort, merge, compression."""
