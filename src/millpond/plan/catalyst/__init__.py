"""Spark's plan as Catalyst has it: the one room that touches objects of the JVM."""
