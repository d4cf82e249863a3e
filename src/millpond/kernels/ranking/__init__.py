"""Rows packed into one value by key: ranks, frames and comparisons."""
