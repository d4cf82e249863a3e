"""The row layout under its first name; `millpond.layout` holds it, since files and checkpoints speak it too."""

from millpond.layout import HASH, INLINE, META, NULLS, Bytes, Column, Kind, RowLayout, Rows, TableSchema, Words

__all__ = ["HASH", "INLINE", "META", "NULLS", "Bytes", "Column", "Kind", "RowLayout", "Rows", "TableSchema", "Words"]
