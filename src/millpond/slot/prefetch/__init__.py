"""Keyed prefetching: keys are announced before their rows arrive, so that a slot reads their state ahead."""
