"""NEXMark: the generator, its Spark source, and its queries."""
