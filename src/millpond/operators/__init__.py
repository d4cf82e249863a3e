"""Stateful operators: vectorised, over tables of the store, with no input or output of their own."""
