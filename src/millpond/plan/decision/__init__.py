"""The decision about each operator of a query: its parts, and the reading of whole nodes."""
