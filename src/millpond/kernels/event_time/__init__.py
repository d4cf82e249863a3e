"""Panes, slices and sessions of event time."""
