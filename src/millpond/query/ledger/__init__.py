"""Spark's ledger beside the state: which batches are done, whose state it is, and what may go."""
