"""Keyed prefetching: hints name keys before their rows arrive, so that a slot reads their state ahead of time."""
