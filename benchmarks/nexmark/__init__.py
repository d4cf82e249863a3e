"""Workloads: the NEXMark generator, its Spark source and its queries."""
