"""User processors: their state, and the calls to their code."""
