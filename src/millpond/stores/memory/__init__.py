"""Memory of a slot: what may be used, how it is mapped, and what is spooled to disk for a moment."""
