"""The long-lived process that owns state partitions, and the pipe that leads to it from Spark's worker."""
