"""Processors of the user: their state, and the calls by which they come to see it."""
