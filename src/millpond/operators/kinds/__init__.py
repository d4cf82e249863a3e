"""The registry of operator kinds."""
