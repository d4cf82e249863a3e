"""Spark's plan as Catalyst has it; only this package touches JVM objects."""
