"""Rows of a key packed into one value: ranks, frames and comparisons."""
