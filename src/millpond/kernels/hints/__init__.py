"""Detection of keys that need no prefetch hint."""
