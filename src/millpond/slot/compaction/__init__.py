"""Compactions done by workers in other processes: the slot's side, and the worker's (see `checkpoint.compaction`)."""
