"""Tools that make pages from the code, and check pages and code."""
