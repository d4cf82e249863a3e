"""Fewer, larger runs: which to merge, how, and when."""
