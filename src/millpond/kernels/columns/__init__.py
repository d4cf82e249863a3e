"""Conversion of Arrow columns to words and back, and hashes of rows."""
