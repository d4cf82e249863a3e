"""Processors whose functions are coroutines: while one key waits for state, other keys are processed."""
