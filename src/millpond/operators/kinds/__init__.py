"""The table of the kinds of operators."""
