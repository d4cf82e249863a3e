"""Deduplication, by keys and within the watermark."""
