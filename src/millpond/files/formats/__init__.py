"""Formats of state files: blocks of rows with checksums."""
