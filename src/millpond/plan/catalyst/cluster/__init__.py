"""A cluster as Spark's scheduler knows it: executors and their hosts, and which of them answer."""
