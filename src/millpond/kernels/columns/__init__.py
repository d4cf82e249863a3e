"""Columns of Arrow to words, words to columns, and hashes of rows."""
