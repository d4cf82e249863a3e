"""What runs in Spark's Python worker: a thin proxy between Spark's rows and the slot that owns the partition."""
