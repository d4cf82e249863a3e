"""Session windows: pieces of a batch, sessions that grow together, and what closes."""
