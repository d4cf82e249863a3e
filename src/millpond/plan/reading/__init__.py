"""Readers for each kind of Catalyst node: what to project below the exchange, what to compute, what comes back."""
