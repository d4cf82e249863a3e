"""One running query: writer, start, recovery."""
