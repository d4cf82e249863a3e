"""Stateful operators: vectorised, over tables of the store, without input or output of their own."""
