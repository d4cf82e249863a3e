"""The layouts of operators' tables, and encoding and decoding of their rows."""
