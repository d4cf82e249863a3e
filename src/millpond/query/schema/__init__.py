"""The state schema of a query against that in its checkpoint: matched, compared, evolved."""
