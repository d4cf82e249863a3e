"""Reads Spark's plan, decides what runs on Millpond, transplants it."""
