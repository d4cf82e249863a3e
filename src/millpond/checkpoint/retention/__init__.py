"""Retention: which objects must stay, and garbage collection, by the running query or from outside."""
