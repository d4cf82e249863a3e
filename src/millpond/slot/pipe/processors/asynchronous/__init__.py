"""Processors whose functions are coroutines: while one key waits for state, others are worked on."""
