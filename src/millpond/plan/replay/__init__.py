"""Whether a batch that is run again makes the same rows and the same state."""
