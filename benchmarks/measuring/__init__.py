"""Measuring a run from outside: its process tree, limits, requests, times, results and tables."""
