"""User-defined stateful processors, called in Spark's Python worker over columns of state that a slot sends."""
