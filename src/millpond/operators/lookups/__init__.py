"""Lookup joins: join rows by key with an external table."""
