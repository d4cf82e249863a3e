"""Conversion between Arrow columns and words of rows."""
