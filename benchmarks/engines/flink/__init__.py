"""Flink: its process, the workloads in its SQL, and functions in Java that make the same rows as Spark."""
