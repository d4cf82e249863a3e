"""The hot table: find, insert, evict and expire rows of words."""
