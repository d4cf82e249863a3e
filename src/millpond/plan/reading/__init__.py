"""Reads one kind of Catalyst's nodes each: what goes below the exchange, is computed, and comes back."""
