"""Aggregate functions: the state of each for a group, folding rows into it, and its result."""
