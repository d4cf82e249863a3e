"""What happens between the user's `start()` and Spark's."""
