"""Code that runs in Spark's Python worker: the slot stage, the local exchange, and calls of the user's functions."""
