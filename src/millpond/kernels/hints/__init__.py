"""Finding out which keys need no hint."""
