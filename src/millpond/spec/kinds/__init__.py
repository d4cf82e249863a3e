"""One kind of operator each: what it computes, as plain data, and what can be told from that."""
