"""Changelogs: how an operator's changes reach the operators above, and what may be evaluated between them."""
