"""State by access pattern: read-modify-write, ordered, aligned append and unaligned append stores."""
