"""Reads Spark's plan, decides which operators run on Millpond, and rewrites the plan."""
