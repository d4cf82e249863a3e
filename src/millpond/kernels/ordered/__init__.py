"""Rows in the order of hash and time: sorting, merging, walking one through another."""
