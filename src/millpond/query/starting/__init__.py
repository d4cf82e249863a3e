"""The steps between the user's `start()` and Spark's: checks, recovery, replay."""
