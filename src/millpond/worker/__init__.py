"""Code that runs in Spark's Python worker: the slot client and the slot stage, between Spark's rows and slots."""
