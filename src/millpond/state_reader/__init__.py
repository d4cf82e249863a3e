"""Reads of a query's state at a version, without a slot: for people, tools and checks."""
