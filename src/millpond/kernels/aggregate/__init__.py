"""Folding values into groups."""
