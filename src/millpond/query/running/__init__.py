"""Companions of a running query: its handle, the forms of its exchanges, watches of its commits and runs."""
