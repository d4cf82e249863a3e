"""Memory of a slot: the budget, the mappings, and temporary data spooled to disk."""
