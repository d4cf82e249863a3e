"""How tables of operators are laid out, and how their rows are made and read."""
