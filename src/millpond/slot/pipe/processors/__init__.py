"""The user's stateful processors: called in Spark's Python worker, over state that a slot sends in columns."""
