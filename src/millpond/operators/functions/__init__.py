"""Aggregate functions: what each keeps for a group, how rows are folded into it, and its result."""
