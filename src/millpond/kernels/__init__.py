"""Numba kernels over rows of 8-byte words: index, upsert, aggregation, search, merge, checksums."""
