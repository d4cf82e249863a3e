"""Runs: search, filters, sorting, merging, compression."""
